"""Every model that fzero names, trained in the default backend: `make sweep`."""
