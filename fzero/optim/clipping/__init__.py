"""Links that clip gradients: by value, by the norm of a tree or of each expert, by the size of each leaf."""

from fzero.optim.clipping._clip import clip, clip_by_block_rms, clip_by_global_norm
from fzero.optim.clipping._clip_by_expert import clip_by_expert

__all__ = ["clip", "clip_by_block_rms", "clip_by_expert", "clip_by_global_norm"]
