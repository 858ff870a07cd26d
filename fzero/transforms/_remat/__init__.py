"""Blocks that run again in the backward pass."""
