"""Names of types that many packages use."""

from collections.abc import Sequence

import torch

__all__ = ["NamedTensors", "Tensors"]

Tensors = Sequence[torch.Tensor]
NamedTensors = dict[str, torch.Tensor]  # a module's parameters or buffers, by their names
