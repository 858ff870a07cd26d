"""fzero.shard refuses axes and positions that it cannot use, and init gives a state memory of its own."""

from typing import Any

import pytest

import fzero
import fzero.testing
from fzero import optim, tree
from tests.helpers import ALL_STAGES, LEAST, cases, mlp_batch, mlp_loss, mlp_params, train_step_for


def nothing(params: Any, opt_state: Any, batch: Any) -> Any:
    return params, opt_state


@pytest.mark.parametrize("over", ["tp", lambda path, leaf: "tp"], ids=["name", "rule"])
def test_units_are_sharded_over_axes_of_the_step_only(over):
    """Over another axis nothing would be sharded, without a word."""
    step = fzero.shard(nothing, stage=3, mesh=fzero.mesh(dp=2, tp=2), axis="dp", over=over)
    with pytest.raises(
        ValueError, match=r"over: leaf .* is to be sharded over 'tp', which is none of the axes \('dp',\)"
    ):
        step.init(mlp_params(), optim.sgd(0.1))


@pytest.mark.parametrize("argnums", [True, "0", [], (0, 0), -1, (0, 1.5)])
def test_positions_of_parameters_are_different_ints(argnums):
    with pytest.raises(ValueError, match="expected distinct positions of arguments"):
        fzero.shard(nothing, stage=0, mesh=fzero.mesh(dp=2), param_argnums=argnums)


class Lookahead:
    """An optimizer whose state starts as the parameters."""

    exact_on_shards = True

    def init(self, params: Any) -> Any:
        return {"slow": params}

    def update(self, grads: Any, state: Any, params: Any) -> Any:
        slow = tree.map(lambda s, p: 0.5 * s + 0.5 * p, state["slow"], params)
        return tree.map(lambda s, p, g: s - p - 0.1 * g, slow, params, grads), {"slow": slow}


@pytest.mark.parametrize("stage", cases((0,), ALL_STAGES))
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_starts_as_the_parameters_has_memory_of_its_own(stage, donate):
    mesh, opt = fzero.mesh(dp=2), Lookahead()
    train_step = train_step_for(mlp_loss, opt)
    expected = mlp_params(), opt.init(mlp_params())
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init(mlp_params(), opt, donate=donate)
    jitted = fzero.jit(step, backend="fx", **LEAST)
    for i in range(2):
        *state, _ = jitted(*state, mesh.split(mlp_batch(8, i)))
        *expected, _ = train_step(*expected, mlp_batch(8, i))
    fzero.testing.assert_trees_close(step.gather(state[0]), expected[0])
    fzero.testing.assert_trees_close(step.gather(state[1]), expected[1])
