"""What an axis name is bound to while a rank program runs: processes, a vmap, or threads in lockstep."""
