"""The stages of ZeRO: four rows, each a choice of layouts for parameters, gradients and optimizer state.

A sharded step reads nothing else of a stage. So another way to shard is another row, if its fields go together.
"""

import operator
from typing import Any, Literal, NamedTuple

from fzero._arguments import check_choice
from fzero.sharding import ReduceGrads

__all__ = ["STAGES", "StageLayouts", "check_stage", "stage_layouts"]


class StageLayouts(NamedTuple):
    """The layout of each tree at a stage: "replicated" on every rank, or "sharded" over the ranks.

    Attributes:
        params: the layout of the parameters between steps.
        grads: when gradients are reduced: "replicated" (full gradients, never sharded), "once" (full gradients until
            the last micro-batch, then a reduce-scatter), or "each" (a reduce-scatter for each micro-batch).
        opt_state: the layout of the optimizer's state.
    """

    params: Literal["replicated", "sharded"]
    grads: ReduceGrads
    opt_state: Literal["replicated", "sharded"]

    @property
    def shards_params(self) -> bool:
        """Whether a rank holds only its shards of the parameters between steps."""
        return self.params == "sharded"

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds the optimizer's state of its shards only."""
        return self.opt_state == "sharded"

    @property
    def shards_within_step(self) -> bool:
        """Whether a step partitions full parameters, updates shards, and gathers them again (stages 1 and 2)."""
        return self.shards_state and not self.shards_params


# The layouts of parameters, and those of the optimizer's state, that a step can hold beside each layout of gradients:
# a full gradient updates full parameters, and the shard of a gradient updates the state of this shard.
_ALLOWED_WITH_GRADS: dict[str, dict[str, tuple[str, ...]]] = {
    "replicated": {"params": ("replicated",), "opt_state": ("replicated",)},
    "once": {"params": ("replicated", "sharded"), "opt_state": ("sharded",)},
    "each": {"params": ("replicated", "sharded"), "opt_state": ("sharded",)},
}


def _stage_table(*rows: StageLayouts) -> tuple[StageLayouts, ...]:
    """Return rows as the table of stages.

    Raises:
        ValueError: if the fields of a row do not go together, or two rows are equal. The message names the row, the
            field, its value and the values that it may have.
    """
    for stage, row in enumerate(rows):
        check_choice(f"stage {stage}, {row}: grads", row.grads, tuple(_ALLOWED_WITH_GRADS))
        for field, choices in _ALLOWED_WITH_GRADS[row.grads].items():
            check_choice(f"stage {stage}, {row}: beside grads={row.grads!r}, {field}", getattr(row, field), choices)
        if (twin := rows.index(row)) < stage:
            raise ValueError(f"stage {stage}, {row}: stage {twin} is this row; a further stage differs in a field")
    return rows


STAGES = _stage_table(
    StageLayouts(params="replicated", grads="replicated", opt_state="replicated"),
    StageLayouts(params="replicated", grads="once", opt_state="sharded"),
    StageLayouts(params="replicated", grads="each", opt_state="sharded"),
    StageLayouts(params="sharded", grads="each", opt_state="sharded"),
)


def stage_layouts(stage: int) -> StageLayouts:
    """Return the layouts of a stage."""
    return STAGES[stage]


def check_stage(stage: Any) -> int:
    """Return the number of a stage as an int. Integers of numpy are valid, and bools are not.

    Raises:
        ValueError: if no row of `STAGES` has this number.
    """
    try:
        number = -1 if isinstance(stage, bool) else operator.index(stage)
    except TypeError:
        number = -1
    if number not in range(len(STAGES)):
        raise ValueError(f"stage={stage!r}: expected a stage of ZeRO, 0 to {len(STAGES) - 1}")
    return number
