"""An axis of ranks in a running rank program: its constants, and the token that identifies its vmap.

An axis is bound to a *token*, its rank index. In a vmap simulation the token is `arange(n)`, mapped by the axis's own
vmap. The token is batched only there, so a collective that takes it can distinguish this vmap from a user's. In a
distributed run, and in lockstep, the token is a constant and the axis has a group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["PLANNED", "Axis", "AxisName", "Binding", "joined"]

PLANNED = "fzero.plan/"  # prefix of the names of groups whose ranks do not exist here

AxisName = str | tuple[str, ...] | None


class Binding(NamedTuple):
    """The constants of a bound axis, which a traced collective can carry.

    Attributes:
        axis: the name of the axis; "" for an axis that is not recorded.
        group: the key of its process group or of its ranks in lockstep; "" under vmap.
        size: the number of ranks.
        rank: the index of this process, or of this thread in lockstep; 0 under vmap.
        mapped: the number of ranks of other simulated axes that a collective is mapped over.
    """

    axis: str
    group: str
    size: int
    rank: int
    mapped: int = 1


class Axis(NamedTuple):
    """A bound axis: its name, size, group ("" under vmap), this process's rank on it, and token.

    An axis may stand for several, such as "dp,ep". An axis with the name "" is not recorded.
    """

    name: str
    size: int
    group: str
    rank: int
    token: torch.Tensor

    @property
    def binding(self) -> Binding:
        """The constants of the axis: everything but the token."""
        return Binding(self.name, self.group, self.size, self.rank)

    @staticmethod
    def of(binding: Binding, token: torch.Tensor) -> "Axis":
        """Return the axis that has this binding and this token."""
        return Axis(binding.axis, binding.size, binding.group, binding.rank, token)


def joined(axes: Sequence[Axis], products: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the axes that a collective over `axes` runs over, the slowest first.

    If `products` holds an axis that stands for their product, it is this axis alone. Else the collective runs over one
    axis after the other, and the first one is recorded for all.
    """
    if len(axes) < 2:
        return tuple(axes)
    name = ",".join([a.name for a in axes])
    for a in products:
        if a.name == name:
            return (a,)
    return (axes[0]._replace(name=name), *[a._replace(name="") for a in axes[1:]])
