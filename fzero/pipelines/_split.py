"""The rule by which a pipeline's parameters are cut: blocks are split along its axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero import tree
from fzero.axes.rules import SplitRule, Stacked
from fzero.axes.scope import axis_names, axis_size
from fzero.pipelines._placement import Placement

__all__ = ["PipelineSplit"]


@dataclass(frozen=True)
class PipelineSplit:
    """A rule for `fzero.shard(..., split=)`, of a `Pipeline`.

    Attributes:
        axis: the pipeline's.
        blocks: the key of the blocks among the parameters.
        placed: says where blocks lie, given the ranks along the axis and how many slots each has.
        rule: how leaves are split along further axes, by their paths without a mesh.
    """

    axis: str
    blocks: str
    placed: Callable[[int, int], Placement]
    rule: SplitRule | None = None

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks have work of their own, and no data of their own."""
        return (self.axis,)

    def __call__(self, path: str, leaf: torch.Tensor) -> Mapping[str, int] | None:
        """Say how a leaf is split: stacked blocks along the pipeline's axis, dimension 0.

        Raises:
            ValueError: if a leaf of a block is not stacked.
        """
        stacked = self._is_of_a_block(path) and self.axis in axis_names()  # else blocks are not stacked
        if stacked and (not leaf.ndim or leaf.shape[0] != axis_size(self.axis)):
            raise ValueError(
                f"fzero.pipeline: leaf {path!r} is {tree.show(leaf)}, and blocks are stacked by rank, "
                f"[{axis_size(self.axis)}, ...]: give loss.stack(params, mesh)"
            )
        further = {} if self.rule is None else dict(self.rule(path, leaf[0] if stacked else leaf) or {})
        if not stacked:
            return further or None
        return {self.axis: 0, **{axis: dim + 1 if dim >= 0 else dim for axis, dim in further.items()}}

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> Mapping[str, Stacked]:
        """Say which block each rank has in each place of the stacked list.

        Args:
            paths: of the leaves of a tree of parameters.
            sizes: the ranks along each axis.

        Raises:
            ValueError: if the list has more or fewer places than blocks take on so many ranks.
        """
        depth = len(self.blocks.split("."))
        places = {path.split(".")[depth] for path in paths if self._is_of_a_block(path)}
        if not places or self.axis not in sizes:
            return {}
        by_rank = self.placed(sizes[self.axis], len(places)).blocks
        return {self.axis: Stacked(self.blocks, tuple(zip(*by_rank, strict=True)))}

    def _is_of_a_block(self, path: str) -> bool:
        return path.startswith(f"{self.blocks}.")
