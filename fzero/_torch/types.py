"""Names of types that many packages use."""

import os
from collections.abc import Sequence

import torch

__all__ = ["NamedTensors", "StrPath", "Tensors"]

Tensors = Sequence[torch.Tensor]
NamedTensors = dict[str, torch.Tensor]  # a module's parameters or buffers, by their names
StrPath = str | os.PathLike[str]
