"""One table of linear maps over ranks, each with its transpose, and the functions that apply them."""
