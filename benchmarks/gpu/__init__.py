"""Ten minutes on one to eight GPUs: what is right, what it takes and how long it lasts. `make gpu` runs it."""
