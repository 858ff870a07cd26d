"""Gradients in the layout of the parameters."""
