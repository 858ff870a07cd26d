"""Two trees of parameters in one step, such as parameters and their moving average."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases

OPT = optim.adamw(0.1)
PARAMS = {"w": torch.arange(24.0).view(8, 3) / 10, "b": torch.ones(3)}
X = torch.arange(64.0).view(8, 8) / 64


def average_params(params: Any, state: Any, average: Any, x: torch.Tensor) -> Any:
    def loss(p: Any, average: Any, x: torch.Tensor) -> torch.Tensor:
        distance = (x @ p["w"] + p["b"]) - (x @ average["w"] + average["b"])
        return (x @ p["w"] + p["b"]).square().mean() + distance.square().mean()

    value, grads = fzero.value_and_grad(loss, micro_batches=2, batch_argnums=2)(params, average, x)
    updates, state = OPT.update(grads, state, params)
    params = optim.apply_updates(params, updates)
    return params, state, fzero.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), value


@pytest.mark.parametrize("way", ["vmap", "lockstep", "jit"])
@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_moving_average_as_a_second_parameter_tree_equals_unsharded(stage, way, tmp_path):
    mesh = fzero.mesh(dp=2, simulate="lockstep" if way == "lockstep" else "vmap")
    step = fzero.shard(average_params, stage, mesh, param_argnums=(0, 2))
    run = fzero.jit(step, backend="fx", **LEAST) if way == "jit" else step
    state = (*step.init(PARAMS, OPT), step.init(PARAMS, OPT)[0])
    expected: Any = (PARAMS, OPT.init(PARAMS), PARAMS)
    for _ in range(3):
        *state, loss = run(*state, mesh.split(X))
        *expected, value = average_params(*expected, X)  # pyright: ignore[reportCallIssue]
        assert_trees_close(loss, value)
    assert_trees_close(step.gather(state[2]), expected[2])
    fzero.save(tmp_path, {"params": state[0], "average": state[2]}, mesh)
    loaded = fzero.load(tmp_path, like={"params": state[0], "average": state[2]}, mesh=mesh)
    assert_trees_close(step.gather(loaded["average"]), expected[2])


@pytest.mark.parametrize("stage", [1, 2])
def test_a_second_parameter_tree_without_param_argnums_is_refused_with_its_position(stage):
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(average_params, stage, mesh)
    with pytest.raises(ValueError, match=r"moving average, needs its position too: .*param_argnums=\(0, 2\)"):
        step(*step.init(PARAMS, OPT), step.init(PARAMS, OPT)[0], mesh.split(X))
