"""An axis of ranks, as a running rank program knows it: its constants, and the token that tells its vmap from others.

An axis is bound to a *token*, its rank index. In a vmap simulation the token is `arange(n)`, mapped by the axis's own
vmap. The token is batched there and nowhere else, so a collective that is handed it can tell that vmap from a user's.
In a distributed run, and in lockstep, the token is a constant and the axis has a group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["PLANNED", "Axis", "AxisName", "Binding", "joined"]

PLANNED = "fzero.plan/"  # the groups of ranks that are not at hand are named so

AxisName = str | tuple[str, ...] | None


class Binding(NamedTuple):
    """How an axis is bound: constants, which a traced collective can carry.

    Attributes:
        axis: its name; "" for one that is not recorded.
        group: the key of its process group or of its ranks in lockstep; "" under vmap.
        size: the number of its ranks.
        rank: this process's, or this thread's, place among them; 0 under vmap.
        mapped: the ranks of other simulated axes that a collective is mapped over.
    """

    axis: str
    group: str
    size: int
    rank: int
    mapped: int = 1


class Axis(NamedTuple):
    """A bound axis: its name, size, group ("" under vmap), this process's rank on it, and token.

    An axis may stand for several, such as "dp,ep"; one without a name is not recorded.
    """

    name: str
    size: int
    group: str
    rank: int
    token: torch.Tensor

    @property
    def binding(self) -> Binding:
        """Everything but the token."""
        return Binding(self.name, self.group, self.size, self.rank)

    @staticmethod
    def of(binding: Binding, token: torch.Tensor) -> "Axis":
        """Put an axis together again."""
        return Axis(binding.axis, binding.size, binding.group, binding.rank, token)


def joined(axes: Sequence[Axis], groups: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return the axes that a collective over `axes` runs over, the slowest first.

    One, if `groups` holds one that stands for their product; else one after the other, and the first stands for all in
    records.
    """
    if len(axes) < 2:
        return tuple(axes)
    name = ",".join([a.name for a in axes])
    for a in groups:
        if a.name == name:
            return (a,)
    return (axes[0]._replace(name=name), *[a._replace(name="") for a in axes[1:]])
