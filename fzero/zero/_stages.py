"""The stages of ZeRO: four rows, each a choice of layouts for parameters, gradients and optimizer state.

A row says all that the code of a step asks of a stage. So another way to shard is another row.
"""

from typing import NamedTuple

__all__ = ["STAGES", "StageLayouts"]


class StageLayouts(NamedTuple):
    """What a stage does with each tree: "replicated" on every rank, or "sharded" over them.

    Attributes:
        params: the parameters, between steps.
        grads: when gradients are reduced: "replicated" (never cut), "once" (in full until the last micro-batch,
            then into shards), or "each" (each micro-batch into shards).
        opt_state: the optimizer's state.
    """

    params: str
    grads: str
    opt_state: str

    @property
    def shards_params(self) -> bool:
        """Whether a rank holds its shards of the parameters between steps."""
        return self.params == "sharded"

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds the optimizer's state of its shards alone."""
        return self.opt_state == "sharded"

    @property
    def shards_within_step(self) -> bool:
        """Whether a step partitions whole parameters, updates its shards, and gathers them again (stages 1 and 2)."""
        return self.shards_state and not self.shards_params


STAGES = (
    StageLayouts(params="replicated", grads="replicated", opt_state="replicated"),
    StageLayouts(params="replicated", grads="once", opt_state="sharded"),
    StageLayouts(params="replicated", grads="each", opt_state="sharded"),
    StageLayouts(params="sharded", grads="each", opt_state="sharded"),
)
