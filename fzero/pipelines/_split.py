"""The rule by which a pipeline's parameters are cut: blocks are split along its axis."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fzero.axes.rules import SplitRule
from fzero.axes.scope import axis_names

__all__ = ["PipelineSplit"]


@dataclass(frozen=True)
class PipelineSplit:
    """A rule for `fzero.shard(..., split=)`, of a `Pipeline`.

    Attributes:
        axis: the pipeline's.
        blocks: the key of the blocks among the parameters.
        rule: how leaves are split along further axes, by their paths without a mesh.
    """

    axis: str
    blocks: str
    rule: SplitRule | None = None

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which ranks have work of their own, and no data of their own."""
        return (self.axis,)

    def __call__(self, path: str, leaf: torch.Tensor) -> Mapping[str, int] | None:
        """Say how a leaf is split: stacked blocks along the pipeline's axis, dimension 0."""
        stacked = path.startswith(f"{self.blocks}.") and self.axis in axis_names()  # else blocks are not stacked
        further = {} if self.rule is None else dict(self.rule(path, leaf[0] if stacked else leaf) or {})
        if not stacked:
            return further or None
        return {self.axis: 0, **{axis: dim + 1 if dim >= 0 else dim for axis, dim in further.items()}}
