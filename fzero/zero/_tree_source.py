"""The interface of a source of leaves: a tree that exists, or one that a traced function computes."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from fzero.ranks import Mesh

__all__ = ["SourceLeaf", "TreeSource"]


class SourceLeaf(NamedTuple):
    """A leaf as a source passes it on.

    Attributes:
        positions: the leaf's positions in the tree: several of a tied leaf.
        tensor: the leaf.
        owns_memory: whether the result may keep the leaf's memory. Else it must be copied.
    """

    positions: list[int]
    tensor: torch.Tensor
    owns_memory: bool


class TreeSource(Protocol):
    """A source of a tree's leaves, which passes them on one after the other."""

    @property
    def leaves(self) -> list[Any]:
        """Meta tensors like the leaves; tied leaves are one object. Values that are not tensors are unchanged."""
        ...

    @property
    def devices(self) -> list[Any]:
        """The device of each leaf; None for a value that is not a tensor."""
        ...

    @property
    def structure(self) -> Any:
        """The tree's structure, in which a `PerRank` value is a leaf."""
        ...

    @property
    def needs_checksums(self) -> bool:
        """Whether the leaves' values are compared between ranks only after `iter_leaves` has computed them."""
        ...

    def check_before(self, label: str, mesh: Mesh) -> None:
        """Compare the tree between ranks as far as it exists before the first leaf is passed on.

        Raises:
            ValueError: on all ranks, if it differs. The message names the leaf.
        """
        ...

    def iter_leaves(self) -> Iterator[SourceLeaf]:
        """Pass on each leaf once, and drop it."""
        ...
