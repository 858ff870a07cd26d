"""Waiting: what a rematerialised block keeps for its backward pass lies in host memory, if that is asked."""

from collections.abc import Collection, Mapping, Sequence

import torch

from fzero.collectives.moves import to_device, to_host

__all__ = ["brought_up", "taken_down"]

Up = dict[int, torch.device]
"""The places of tensors that wait on the host, and the devices that they belong to."""


def taken_down(tensors: Sequence[torch.Tensor], places: Collection[int]) -> tuple[list[torch.Tensor], Up]:
    """Copy those tensors to the host that were computed; others, such as parameters, stay alive in any case.

    The copies are tracked, since a second derivative is one of what they hold.

    Args:
        tensors: what is kept.
        places: those that may wait on the host.

    Returns:
        What is kept, and what is to be brought up.
    """
    up = {i: tensors[i].device for i in places if tensors[i].dim() and not tensors[i].is_leaf}
    with torch.enable_grad():
        return [to_host(x) if i in up else x for i, x in enumerate(tensors)], up


def brought_up(tensors: Sequence[torch.Tensor], up: Mapping[int, torch.device]) -> list[torch.Tensor]:
    """Copy what waits on the host back to its device."""
    return [to_device(x, up[i]) if i in up else x for i, x in enumerate(tensors)]
