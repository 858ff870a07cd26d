"""The whole step as one scheduled graph: `fzero.jit` and `fzero.plan`."""
