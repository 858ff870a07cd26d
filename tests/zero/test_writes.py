"""A step that writes into its parameters in place gives the unsharded numbers, or an error that names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases

PARAMS = {"w": torch.arange(1.0, 4.0), "b": torch.ones(2)}
X = torch.linspace(-1, 1, 12).reshape(4, 3)
OPT = optim.sgd(0.1)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (params["w"] * x).square().mean() + params["b"].square().sum()


def foreach(ps: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
    torch._foreach_add_(ps, gs, alpha=-0.1)


def write_each(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., None]:
    def write_all(ps: list[torch.Tensor], gs: list[torch.Tensor]) -> None:
        for p, g in zip(ps, gs, strict=True):
            write(p, 0.1 * g)

    return write_all


def give_other_memory(p: torch.Tensor, d: torch.Tensor) -> None:
    p.data = p - d


WRITES = {
    "sub_": write_each(lambda p, d: p.sub_(d)),
    "copy_": write_each(lambda p, d: p.copy_(p - d)),
    "a view": write_each(lambda p, d: p.view(-1)[:].sub_(d)),
    "detached": write_each(lambda p, d: p.detach().sub_(d)),
    "out=": write_each(lambda p, d: torch.sub(p, d, out=p)),
    "foreach": foreach,
    "through .data": write_each(lambda p, d: p.data.sub_(d)),
    "other .data": write_each(give_other_memory),
}
UNDER_VMAP = ("sub_", "copy_", "a view", "detached")  # torch.vmap refuses the others itself


def writing(write: str, gradients: int = 1) -> Callable[..., Any]:
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        value = torch.zeros(())
        for _ in range(gradients):
            value, grads = fzero.value_and_grad(loss)(params, x)
            with torch.no_grad():
                WRITES[write](tree.tensors(params), tree.tensors(grads))
        return params, opt_state, value

    return train_step


def mesh_of(simulate: str) -> fzero.ranks.Mesh:
    return fzero.mesh(dp=2, simulate=simulate)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize(
    "write,simulate", [*[(w, "vmap") for w in UNDER_VMAP], *[(w, "lockstep") for w in WRITES if w != "through .data"]]
)
def test_a_step_that_writes_parameters_in_place_equals_unsharded(write, simulate, stage):
    """The second gradient of a step is that of what the first has written, and so is the next step's."""
    train_step, mesh = writing(write, gradients=2), mesh_of(simulate)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    expected, state = (tree.map(torch.clone, PARAMS), ()), step.init(PARAMS, OPT)
    for _ in range(2):
        *expected, value = train_step(*expected, X)
        *state, got = step(*state, mesh.split(X))
        torch.testing.assert_close(got, value)
    assert_trees_close(step.gather(state[0]), expected[0])


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_uncounted_writes_give_unsharded_numbers_or_raise(stage):
    train_step, mesh = writing("through .data"), mesh_of("lockstep")
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init(PARAMS, OPT)
    if stage in (1, 2):
        with pytest.raises(RuntimeError, match=r"Shard\('w', .*was written through \.data"):
            step(*state, mesh.split(X))
    else:
        got = step(*state, mesh.split(X))[0]
        assert_trees_close(step.gather(got), train_step(tree.map(torch.clone, PARAMS), (), X)[0])


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("write", list(WRITES))
def test_jit_refuses_in_place_writes_at_every_stage(write, stage):
    """One rank of a world refuses them too; torch.vmap refuses some by itself."""
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(writing(write), stage=stage, mesh=mesh)
    arguments = (*step.init(PARAMS, OPT), mesh.split(X))
    what = f"argument 0, {'leaf' if stage == 0 else 'unit'} 'w'"
    did = r"assigns to a tensor's \.data at .*test_writes" if write == "other .data" else f"writes into {what}"
    with pytest.raises(RuntimeError, match=f"fzero.jit: the step {did}"):
        fzero.plan(step, *arguments, world_size=2)
    if write in UNDER_VMAP:
        with pytest.raises(RuntimeError, match=f"fzero.jit: the step {did}"):
            fzero.jit(step, backend="fx")(*arguments)


@pytest.mark.slow
def test_a_step_under_torch_compile_may_write_in_place():
    torch.compiler.reset()
    train_step, mesh = writing("sub_"), fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=1, mesh=mesh)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*step.init(PARAMS, OPT), mesh.split(X))[0]
    assert_trees_close(step.gather(got), train_step(tree.map(torch.clone, PARAMS), (), X)[0])


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_unchanged_parameters_cause_no_collective(stage):
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(lambda p, s, x: (p, s, fzero.collectives.pmean(x.mean())), stage=stage, mesh=mesh)
    state = step.init(PARAMS, OPT)
    with fzero.collectives.record() as log:
        params, _, _ = step(*state, mesh.split(X))
    assert [e.kind for e in log.events] == ["all_reduce"]
    assert_trees_close(step.gather(params), PARAMS, rtol=0)
