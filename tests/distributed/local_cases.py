"""Cases of replicas that train apart, on a torchrun world of 4: two replicas of two ranks; see test_gloo.py."""

import itertools
import pathlib
import tempfile
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.local_sgd import LocalSteps, local_steps
from fzero.ranks import all_gather_numbers, gather_texts
from tests.distributed.harness import Cases, into, run
from tests.helpers import LEAST, either
from tests.local_sgd.helpers import batches_of, start, train_step_of

CASES: Cases = {}
case = into(CASES)


def make(stage: int, simulate: bool, jit: bool = False, **options: Any) -> LocalSteps:
    mesh = fzero.mesh(replica=2, dp=2, simulate=True if simulate else None)
    sharded: Any = fzero.shard(train_step_of(optim.adam(0.1)), stage=stage, mesh=mesh)
    return local_steps(fzero.jit(sharded, backend="fx", **LEAST) if jit else sharded, **options)


def train(step: LocalSteps, batches: list[torch.Tensor]) -> tuple[Any, Any, Any, list[Any]]:
    params, state = step.init(start(), optim.adam(0.1))
    losses = []
    for x in batches:
        params, state, value = step(params, state, step.mesh.split(x))
        losses.append(value.value)
    return params, state, step.gather(state.anchor), losses


def gather(step: LocalSteps, params: Any) -> Any:
    """The full parameters of one replica."""
    inner: Any = step.step
    return inner.gather(params)


@case
def local_steps_equal_simulated_ones(_: fzero.ranks.Mesh) -> None:
    batches = batches_of(7, 4)
    few: list[tuple[int, bool, dict[str, Any]]] = [(2, True, {"every": 3, "parts": 2, "delay": 1, "mix": 0.5})]
    many = [*few, (0, False, {"every": 2}), (3, False, {"every": 3, "delay": 2}), (3, True, {"every": 2, "parts": 2})]
    for stage, jit, options in either(few, many):
        step = make(stage, False, jit, **options)
        number = step.mesh.index("replica")
        params, _, anchor, losses = train(step, batches)
        expected, _, expected_anchor, expected_losses = train(make(stage, True, **options), batches)
        torch.testing.assert_close(anchor, expected_anchor, rtol=1e-12, atol=1e-12)
        theirs = torch.stack([x[number] for x in expected_losses])
        torch.testing.assert_close(torch.stack(losses), theirs, rtol=1e-12, atol=1e-12)
        full = gather(make(stage, True, **options), expected.trees[number])
        mine = gather(step, params.trees[0])
        torch.testing.assert_close(mine, full, rtol=1e-12, atol=1e-12)


@case
def replicas_are_saved_and_loaded(mesh: fzero.ranks.Mesh) -> None:
    """A save of processes goes on in processes and in a simulation."""
    folders: list[Any] = [tempfile.mkdtemp() if mesh.rank == 0 else None]
    torch.distributed.broadcast_object_list(folders)
    folder, batches = pathlib.Path(folders[0]), batches_of(5, 4)
    options: dict[str, Any] = {"every": 3, "parts": 2, "delay": 2}
    step = make(2, False, **options)
    params, state = step.init(start(), optim.adam(0.1))
    for x in batches[:3]:
        params, state, _ = step(params, state, step.mesh.split(x))
    step.save(folder, params, state)
    torch.distributed.barrier()
    expected = train(make(2, True, **options), batches)[2]
    for simulate in either((False,), (False, True)):
        again = make(2, simulate, **options)
        loaded, loaded_state = again.load(folder, *again.init(start(), optim.adam(0.1)))
        for x in itertools.islice(batches, 3, None):
            loaded, loaded_state, _ = again(loaded, loaded_state, again.mesh.split(x))
        torch.testing.assert_close(again.gather(loaded_state.anchor), expected, rtol=1e-12, atol=1e-12)


@case
def parts_of_a_mesh_talk_by_themselves(_: fzero.ranks.Mesh) -> None:
    """Texts and numbers of a part of a mesh are those of its own ranks."""
    mesh = fzero.mesh(replica=2, node=2, dp=1)
    for names in ("node", "replica", ("replica", "dp")):
        part, number = mesh[names], torch.tensor([mesh.rank])
        rest = [name for name in mesh.axis_names if name not in part.axis_names]
        mine = [r for r in range(4) if mesh.index(tuple(rest), r) == mesh.index(tuple(rest))]
        assert gather_texts(str(mesh.rank), part, "local") == [str(r) for r in mine]
        assert all_gather_numbers(number, part) == [[r] for r in mine]


@case
def replicas_that_start_apart_are_refused(mesh: fzero.ranks.Mesh) -> None:
    step = make(3, False, every=2)
    params = {name: x + step.mesh.index("replica") for name, x in start().items()}
    try:
        step.init(params, optim.adam(0.1))
    except fzero.errors.DiffersByRankError as error:
        assert "params" in str(error), error
    else:
        raise AssertionError("replicas with different parameters were accepted")


if __name__ == "__main__":
    run(CASES)
