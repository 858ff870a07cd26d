"""remat: a block saves only its inputs for the backward pass, and runs again there."""
