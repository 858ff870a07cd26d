"""remat: a block keeps only its inputs for the backward pass, and runs again there."""
