"""Hugging Face: folders of safetensors are read into any layout, and written from any, by ranges of bytes."""

from fzero.checkpoint.hf._read import read
from fzero.checkpoint.hf._write import write

__all__ = ["read", "write"]
