"""Parameters that require grad are values: a step keeps no graph of them, and can be differentiated all the same."""

import gc
import weakref
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases, train_step_for

OPT = optim.adam(0.1, eps=1e-3)
X = torch.linspace(-1, 1, 12).double().reshape(4, 3)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["weight"].T + params["bias"]).square().mean()


def parameters() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(torch.nn.Linear(3, 2, dtype=torch.float64).named_parameters())


SOME = [(0, "lockstep"), (1, "vmap"), (3, "lockstep")]
REST = [(stage, s) for stage in ALL_STAGES for s in ("vmap", "lockstep") if (stage, s) not in SOME]


@pytest.mark.parametrize("stage,simulate", [*SOME, *[pytest.param(*x, marks=pytest.mark.slow) for x in REST]])
def test_a_step_keeps_nothing_of_the_steps_before(stage, simulate):
    mesh = fzero.mesh(dp=2, simulate=simulate)
    step = fzero.shard(train_step_for(loss, OPT, micro_batches=2), stage=stage, mesh=mesh)
    params, plain = parameters(), tree.map(lambda x: x.detach().clone(), parameters())
    state, expected = step.init(params, OPT), step.init(plain, OPT)
    if stage < 3:
        state = (params, state[1])  # as a user may give them, without init
    old: list[weakref.ref[torch.Tensor]] = []
    gc.freeze()  # what was there before is not a step's
    for _ in range(3):
        *state, value = step(*state, mesh.split(X))
        *expected, wanted = step(*expected, mesh.split(X))
        assert all(x.grad_fn is None and not x.requires_grad for x in tree.tensors((state, value)))
        assert torch.equal(value, wanted)
        gc.collect()
        assert all(ref() is None for ref in old)
        old = [weakref.ref(x) for x in tree.tensors(state)]
    assert_trees_close(state, expected, rtol=0)


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_torch_func_differentiates_through_the_world(stage):
    mesh, opt = fzero.mesh(dp=2), optim.sgd(0.1)
    train_step = train_step_for(loss, opt)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)

    def run_twice(run: Any, params: Any, state: Any, x: Any) -> torch.Tensor:
        for _ in range(2):
            params, state, value = run(params, state, x)
        return value

    params = {name: p.detach() for name, p in parameters().items()}
    boxes, state = step.init(params, opt)
    got = torch.func.grad(lambda p: run_twice(step, p, state, mesh.split(X)))(boxes)
    expected = torch.func.grad(lambda p: run_twice(train_step, p, opt.init(p), X))(params)
    assert_trees_close(step.gather(got), expected, rtol=1e-10)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_another_argument_may_require_grad(stage):
    """The gradient of a learning rate, through two steps that start from a module's parameters."""

    def train_step(params: Any, x: torch.Tensor, rate: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(params, x)
        return tree.map(lambda p, g: p - rate * g, params, grads), value

    def gradient(run: Any, params: Any, x: Any) -> torch.Tensor:
        rate = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        for _ in range(3):
            params, value = run(params, x, rate)
        return torch.autograd.grad(value, rate)[0]

    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    expected = gradient(train_step, tree.map(torch.detach, parameters()), X)
    got = gradient(step, step.init(parameters(), optim.sgd(0.1))[0], mesh.split(X))
    torch.testing.assert_close(got, expected)
