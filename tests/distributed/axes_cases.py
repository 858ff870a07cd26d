"""Cases on a mesh of several axes that every rank of a torchrun world of 4 runs; see test_gloo.py."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

import fzero
from fzero import PerRank, optim, tree
from fzero.sharding import Shard
from fzero.sharding._boxes import is_box
from fzero.testing import assert_trees_close
from tests.collectives.helpers import draw_stacked
from tests.distributed.harness import Cases, into, run
from tests.helpers import either, train_step_for
from tests.zero.helpers import ARRANGEMENTS, along, parallel_loss, parallel_params

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)
SMALL = {name: x for name, x in ARRANGEMENTS.items() if torch.tensor(list(x[0].values())).prod() == 4}
STAGES = [(0, 1), (1, 2), (3, 1), (2, 2)]  # and micro-batches


def batch_of(size: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, 5, generator=g, dtype=torch.float64) for name in "xy"}


@case
def collectives_over_some_axes_equal_lockstep(_: fzero.ranks.Mesh) -> None:
    """Value, gradient and second gradient; bitwise over one axis of two ranks."""
    square, line = {"a": 2, "b": 2}, {"a": 4, "b": 1}
    few = ((square, (("b", "a"),)),)
    many = ((square, (("a",), ("b",), ("a", "b"), ("b", "a"))), (line, (("b",), ("b", "a"))))
    for shape, tuples in either(few, many):
        mesh, simulated = fzero.mesh(**shape), fzero.mesh(simulate="lockstep", **shape)
        for names in tuples:
            n = fzero.mesh(simulate=True, **{name: shape[name] for name in names}).size
            for f in along(names).values():
                X = draw_stacked(4, 2, 2 * n)

                def loss(x: torch.Tensor, f: Any = f) -> torch.Tensor:
                    return (torch.sin(f(x)) ** 2).sum()

                for program in (
                    f,
                    torch.func.grad(loss),
                    torch.func.grad(lambda x, loss=loss: torch.func.grad(loss)(x).square().sum()),
                ):
                    boxed = lambda x, program=program: PerRank(program(x))  # noqa: E731
                    expected = simulated.spmd(boxed)(PerRank(X)).value[mesh.rank]
                    got = mesh.spmd(boxed)(mesh.local(X[mesh.rank])).value
                    tolerance = 0 if n <= 2 else 1e-12
                    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@case
def every_arrangement_equals_unsharded_training(_: fzero.ranks.Mesh) -> None:
    """It also sends and holds what the simulations do."""
    arrangements = [*SMALL.values()]
    few = [(x, STAGES[i % 4]) for i, x in enumerate(arrangements[::4])]
    few.append((SMALL["the hosts gathered first"], (3, 2)))
    check_arrangements(either(few, [(x, STAGES[(i + j) % 4]) for i, x in enumerate(arrangements) for j in (0, 2)]))


@slow_case
def every_arrangement_equals_unsharded_training_at_every_stage(_: fzero.ranks.Mesh) -> None:
    check_arrangements(itertools.product(SMALL.values(), STAGES))


def check_arrangements(arrangements: Iterable[tuple[Any, tuple[int, int]]]) -> None:
    opt = optim.chain(optim.clip_by_global_norm(0.1), optim.lamb(1e-2, eps=1e-3))
    for (axes, options), (stage, k) in arrangements:
        train_step = train_step_for(parallel_loss, opt, micro_batches=k)
        mesh, simulated = fzero.mesh(**axes), fzero.mesh(simulate="lockstep", **axes)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=True, **options)
        twin = fzero.shard(train_step, stage=stage, mesh=simulated, **options)
        state, other = step.init(parallel_params, opt), twin.init(parallel_params, opt)
        ref = (parallel_params(), opt.init(parallel_params()))
        for i in range(2):
            batch = batch_of(8 * k, i)
            with fzero.collectives.record() as mine:
                *state, loss = step(*state, mesh.split(batch, step.data_axes))
            with fzero.collectives.record() as theirs:
                *other, _loss = twin(*other, simulated.split(batch, step.data_axes))
            *ref, expected = train_step(*ref, batch)
            assert_trees_close(loss, expected)
            assert sorted(map(str, mine.events)) == sorted(map(str, theirs.events))
        assert_trees_close(step.gather(list(state)), list(ref))
        assert step.state_bytes(*state) == twin.state_bytes(*other)


@slow_case
def jitted_steps_equal_eager_ones(_: fzero.ranks.Mesh) -> None:
    opt = optim.chain(optim.clip_by_global_norm(0.1), optim.adam(1e-2, eps=1e-3))
    names = ("hybrid", "tensor parallel", "experts over dp, the rest over both")
    for name, stage in itertools.product(names, (0, 1, 3)):
        axes, options = ARRANGEMENTS[name]
        mesh = fzero.mesh(**axes)
        step = fzero.shard(train_step_for(parallel_loss, opt), stage=stage, mesh=mesh, **options)
        jitted = fzero.jit(step, backend="fx")
        state, other = step.init(parallel_params(), opt), step.init(parallel_params(), opt)
        for i in range(2):
            batch = mesh.split(batch_of(8, i), step.data_axes)
            *state, expected = step(*state, batch)
            *other, got = jitted(*other, batch)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert_trees_close(step.gather(other[0]), step.gather(state[0]))  # gloo sums four buffers in its own order


@case
def replicas_that_differ_are_found(_: fzero.ranks.Mesh) -> None:
    """A shard must be equal on all ranks of the axes that it is replicated along."""
    mesh = fzero.mesh(replica=2, shard=2)
    opt = optim.sgd(0.1)
    step = fzero.shard(lambda p, s: (p, s), stage=3, mesh=mesh, over="shard", check=True)
    params, state = step.init({"w": torch.ones(6)}, opt)
    step(params, state)

    def spoil(x: Any) -> Any:
        return Shard(x.data + mesh.index("replica"), x.spec_id) if isinstance(x, Shard) else x

    params = tree.map(spoil, params, is_leaf=is_box)
    try:
        step(params, state)
    except ValueError as error:
        assert "argument 0, leaf 'w.0' differs between rank 0 and rank 2, but its box says" in str(error), error
    else:
        raise AssertionError("not refused")
    step.gather(params)  # all ranks are still in step


@case
def init_functions_that_draw_other_numbers_are_refused(mesh: fzero.ranks.Mesh) -> None:
    """At stage 3 no rank ever has the whole; functions that draw none, or alike, are accepted."""
    step = fzero.shard(lambda p, s: (p, s), stage=3, mesh=mesh)
    init = lambda: {"a": torch.ones(5), "b": {"w": torch.randn(7)}}  # noqa: E731
    torch.manual_seed(mesh.rank // 2)
    try:
        step.init(init, optim.sgd(0.1))
    except ValueError as error:
        assert "params leaf 'b.w' differs between rank 0 and rank 2" in str(error), error
    else:
        raise AssertionError("not refused")
    torch.manual_seed(1)
    params, _ = step.init(init, optim.sgd(0.1))
    torch.manual_seed(1)
    assert_trees_close(step.gather(params), init(), rtol=0)


@case
def a_broadcast_comes_from_the_rank_along_its_axis(_: fzero.ranks.Mesh) -> None:
    mesh = fzero.mesh(a=2, b=2)
    for names in (("a",), ("b",), ("a", "b")):
        for source in range(2 ** len(names)):
            got = mesh.spmd(
                lambda x, names=names, source=source: PerRank(
                    fzero.collectives.broadcast(fzero.axes.axis_index(names) + 0 * x, names, source=source)
                )
            )(mesh.local(torch.ones((), dtype=torch.int64)))
            assert got.value.item() == source


@case
def a_mesh_is_the_world_whatever_its_axes(_: fzero.ranks.Mesh) -> None:
    assert fzero.mesh(dp=-1, tp=2).shape == (("dp", 2), ("tp", 2))
    for axes in ({"dp": 2, "tp": 4}, {"dp": 2}, {"dp": -1, "tp": 3}):
        try:
            fzero.mesh(**axes)
        except ValueError as error:
            assert "but the world has 4 processes" in str(error)
        else:
            raise AssertionError("not refused")


if __name__ == "__main__":
    run(CASES)
