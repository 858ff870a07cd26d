"""torch.distributed.checkpoint (DCP): its checkpoints are written from any layout, and read into any, by ranges."""

from fzero.checkpoint.dcp._save_load import load, save

__all__ = ["load", "save"]
