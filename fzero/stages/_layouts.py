"""The stages of ZeRO: four rows, each a choice of layouts for parameters, gradients and optimizer state."""

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


STAGES = (
    StageLayouts(params="replicated", grads="replicated", opt_state="replicated"),
    StageLayouts(params="replicated", grads="once", opt_state="sharded"),
    StageLayouts(params="replicated", grads="each", opt_state="sharded"),
    StageLayouts(params="sharded", grads="each", opt_state="sharded"),
)
