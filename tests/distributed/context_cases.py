"""Context parallelism on processes: training with split sequences is training with whole ones; see test_gloo.py."""

from typing import Any

import fzero
from tests.distributed.harness import Cases, into, run
from tests.helpers import either, train_step_for
from tests.parallel.context.model import OPT, assert_trains_as_whole, batch_of, loss_for, params_of

CASES: Cases = {}
case = into(CASES)


@case
def training_with_split_sequences_is_training_with_whole_ones(_: fzero.ranks.Mesh) -> None:
    """By a ring and by heads, with documents and a window; eager and jitted."""
    few: tuple[tuple[int, Any, bool, Any], ...] = ((3, "ring", True, None),)
    many = (*few, (2, None, False, 5), (0, "ring", False, None), (1, "ring", True, 3), (3, None, True, None))
    for stage, method, documents, window in either(few, many):
        batches = [batch_of(i, documents) for i in range(2)]
        train_step = train_step_for(loss_for(causal=True, method=method, window=window), OPT)
        for axes in either(({"dp": 1, "cp": -1},), ({"dp": 1, "cp": -1}, {"dp": 2, "cp": -1})):
            step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(**axes), check=True)
            for run_step in (step, fzero.jit(step, backend="fx")) if stage == 3 else (step,):
                assert_trains_as_whole(train_step, params_of(), run_step, batches)


if __name__ == "__main__":
    run(CASES)
