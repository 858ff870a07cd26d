"""The rule that splits a pipeline's stacked blocks along its axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero import tree
from fzero.axes import SplitRule, StackedList, axis_names, axis_size
from fzero.parallel.pipeline._block_placement import BlockPlacement

__all__ = ["PipelineSplit"]


@dataclass(frozen=True)
class PipelineSplit:
    """The rule of a `Pipeline` for `fzero.shard(..., split=)`.

    Attributes:
        axis: the pipeline's axis.
        blocks: the key of the blocks among the parameters.
        placement: a function from the number of ranks, and of slots per rank, to the placement of blocks.
        rule: the rule for leaves that are split along other axes too, by their paths without a mesh.
    """

    axis: str
    blocks: str
    placement: Callable[[int, int], BlockPlacement]
    rule: SplitRule | None = None

    @property
    def pipeline_axes(self) -> tuple[str, ...]:
        """The axes along which ranks share one batch, and do different work."""
        return (self.axis,)

    def __call__(self, path: str, leaf: torch.Tensor) -> Mapping[str, int] | None:
        """Return how a leaf is split: stacked blocks along the pipeline's axis, at dimension 0.

        Raises:
            ValueError: if a leaf of a block is not stacked.
        """
        is_stacked = self._is_block_leaf(path) and self.axis in axis_names()  # blocks are stacked on such a mesh only
        if is_stacked and (not leaf.ndim or leaf.shape[0] != axis_size(self.axis)):
            raise ValueError(
                f"fzero.pipeline: leaf {path!r} is {tree.show(leaf)}, but blocks are stacked by rank, "
                f"[{axis_size(self.axis)}, ...]: pass loss.stack(params, mesh)"
            )
        other_axes: dict[str, int] = {}
        if self.rule is not None:
            other_axes.update(self.rule(path, leaf[0] if is_stacked else leaf) or {})
        if not is_stacked:
            return other_axes or None
        return {self.axis: 0, **{axis: dim + 1 if dim >= 0 else dim for axis, dim in other_axes.items()}}

    def stacked(self, paths: Sequence[str], sizes: Mapping[str, int]) -> Mapping[str, StackedList]:
        """Return which block each rank holds in each of its slots.

        Args:
            paths: the paths of the leaves of a tree of parameters.
            sizes: the number of ranks along each axis.

        Raises:
            ValueError: if the list has more or fewer slots than the blocks take on these ranks.
        """
        depth = len(self.blocks.split("."))
        block_slots = {path.split(".")[depth] for path in paths if self._is_block_leaf(path)}
        if not block_slots or self.axis not in sizes:
            return {}
        by_rank = self.placement(sizes[self.axis], len(block_slots)).blocks
        return {self.axis: StackedList(self.blocks, tuple(zip(*by_rank, strict=True)))}

    def _is_block_leaf(self, path: str) -> bool:
        return path.startswith(f"{self.blocks}.")
