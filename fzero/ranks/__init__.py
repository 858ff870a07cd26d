"""Where ranks are, and how a program runs on them."""
