"""Experts on real processes: training on a mesh of ranks is dense training; see test_gloo.py."""

import fzero
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.helpers import LEAST, either, train_step_for
from tests.parallel.experts.model import OPT, batch_of, loss_for, params_of

CASES: Cases = {}
case = into(CASES)


@case
def training_with_experts_is_dense_training(_: fzero.ranks.Mesh) -> None:
    """Tokens go by seats with drops, and by sorting; eager and jitted; and starved experts do not hang."""
    mesh = fzero.mesh(dp=-1, ep=2)
    batches = [batch_of(seed=i) for i in range(2)]
    few = ((0.5, 2, 2),)
    for capacity, k, stage in either(few, (*few, (None, 1, 3), (None, 2, 0), (1.0, 4, 3))):
        train_step = train_step_for(loss_for(k, capacity), OPT)
        expected = [(params_of(), OPT.init(params_of()), None)]
        for batch in batches:
            expected.append(train_step(*expected[-1][:2], batch))
        step = fzero.shard(train_step, stage=stage, mesh=mesh, split=moe.split_rule("experts"), check=True)
        for run_step in (step, fzero.jit(step, backend="fx", **LEAST)):
            state = step.init(params_of(), OPT)
            for i, batch in enumerate(batches):
                *state, loss = run_step(*state, mesh.split(batch))
                assert_trees_close(loss, expected[i + 1][2])
            assert_trees_close(step.gather(tuple(state)), expected[-1][:2])


if __name__ == "__main__":
    run(CASES)
