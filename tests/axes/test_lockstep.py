"""Ranks in lockstep: any Python, one at a time, deterministic; and ranks that do not meet are found at once."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import PerRank, optim
from fzero.testing import assert_trees_close
from tests.distributed.launch import python
from tests.helpers import ALL_STAGES, cases, examples, mlp_batch, mlp_loss, mlp_params, train_step_for


def lockstep(**axes: int) -> fzero.ranks.Mesh:
    return fzero.mesh(simulate="lockstep", **axes)


def test_a_lockstep_mesh_shows_its_simulation():
    assert repr(lockstep(dp=2)) == "Mesh(dp=2, simulated in lockstep)"
    with pytest.raises(ValueError, match='simulate=\'threads\': expected "vmap", "lockstep", True, False or None'):
        fzero.mesh(dp=2, simulate="threads")


def test_ranks_run_in_order_from_one_meeting_to_the_next():
    records = []

    def program(x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            records.append((i, int(fzero.axes.axis_index())))
            x = fzero.collectives.psum(x)
        return x

    out = lockstep(dp=3).spmd(program)(torch.ones(()))
    assert records == [(i, r) for i in range(3) for r in range(3)] and out.item() == 27


def test_ranks_in_lockstep_may_branch_on_values():
    """Data-dependent branches and sizes, item(), nonzero, in-place writes into buffers."""
    mesh = lockstep(dp=3)

    def program(x: torch.Tensor) -> Any:
        positive = x[x > 0]
        n = len(positive) if positive.sum().item() > 0 else -1
        buffer = torch.zeros(5)
        buffer[: len(positive)] = positive
        return fzero.collectives.psum(buffer), PerRank(torch.tensor(n)), PerRank(x.nonzero().sum())

    x = torch.tensor([[1.0, -1.0], [0.0, -3.0], [2.0, 5.0]])
    total, counts, _ = mesh.spmd(program)(mesh.local(x))
    assert total.tolist() == [3.0, 5.0, 0, 0, 0] and counts.value.tolist() == [1, -1, 2]
    with pytest.raises(RuntimeError) as caught:
        fzero.mesh(dp=3).spmd(program)(mesh.local(x))
    assert 'fzero.mesh(..., simulate="lockstep")' in "".join(caught.value.__notes__)


def test_an_expert_that_only_one_rank_uses_is_reduced_on_all_ranks():
    """Units used on some ranks, or none, are reduced on all, in one order."""
    mesh = lockstep(dp=3)
    params = {"experts": [{"w": torch.full((5,), float(i + 1))} for i in range(4)], "shared": torch.ones(3)}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        i = int(x.sum().item())
        return params["experts"][i]["w"].square().sum() + params["shared"].sum()

    opt = optim.sgd(0.3)
    for stage in ALL_STAGES:
        step = fzero.shard(train_step_for(loss, opt), stage=stage, mesh=mesh)
        state = step.init(params, opt)
        new, _, _ = step(*state, mesh.local(torch.tensor([[2.0], [0.0], [2.0]])))
        got = [e["w"][0].item() for e in step.gather(new)["experts"]]
        assert got == pytest.approx([1 - 0.3 * 2 / 3, 2, 3 - 0.3 * 2 * 6 / 3, 4])


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_dropout_is_the_same_at_every_run(stage):
    apply, params, buffers = fzero.nn.functional(
        torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Dropout(0.5), torch.nn.Linear(9, 3)).double()
    )

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return (apply(params, buffers, batch["x"])[0] - batch["y"]).square().mean()

    opt, mesh = optim.adam(1e-2), lockstep(dp=3)
    step = fzero.shard(train_step_for(loss, opt), stage=stage, mesh=mesh)

    def run(seed: int) -> Any:
        torch.manual_seed(seed)
        state = step.init(params, opt)
        for i in range(2):
            *state, value = step(*state, mesh.split(mlp_batch(6, seed=i)))
        return step.gather(state[0]), value

    assert_trees_close(run(0), run(0), rtol=0)
    assert not torch.equal(run(0)[1], run(1)[1])


def test_ranks_draw_different_numbers():
    out = lockstep(dp=4).spmd(lambda: PerRank(torch.rand(())))().value
    assert len(set(out.tolist())) == 4


def test_a_module_whose_forward_calls_a_collective_is_copied_for_each_rank():
    """functional_call writes a rank's parameters into the module; the others run meanwhile."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fzero.collectives.psum(x * self.w) * self.w

    apply, _, buffers = fzero.nn.functional(Layer())
    mesh = lockstep(dp=3)

    def program(w: torch.Tensor, x: torch.Tensor) -> Any:
        return PerRank(apply({"w": w}, buffers, x)[0])

    w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    got = mesh.spmd(program)(mesh.local(w), torch.ones(2)).value
    torch.testing.assert_close(got, w.sum(0) * w)
    layer = Layer()  # passed as an argument it is copied too
    with_module = lambda m, w, x: PerRank(torch.func.functional_call(m, {"w": w}, (x,)))  # noqa: E731
    torch.testing.assert_close(mesh.spmd(with_module)(layer, mesh.local(w), torch.ones(2)).value, got)
    assert layer.w.tolist() == [1, 1]


def test_a_rank_may_write_into_its_arguments():
    """Each has its own copy, and the caller keeps his; what is one object stays one."""

    def program(x: torch.Tensor, pair: Any, mine: torch.Tensor) -> Any:
        x.add_(1)
        pair[0].add_(1)
        mine.add_(1)
        return fzero.collectives.psum(x), PerRank(pair[1] + mine)

    x, y, own = torch.zeros(2), torch.zeros(()), torch.arange(3.0)
    total, rest = lockstep(dp=3).spmd(program)(x, (y, y), PerRank(own))
    assert total.tolist() == [3, 3] and rest.value.tolist() == [2, 3, 4]
    assert x.tolist() == [0, 0] and y.item() == 0 and own.tolist() == [0, 1, 2]


def test_a_lockstep_world_ends():
    x = torch.ones(2, requires_grad=True)
    out = lockstep(dp=2).spmd(lambda x: PerRank(fzero.collectives.psum(x)))(x).value
    with pytest.raises(RuntimeError, match="the ranks in lockstep have ended: differentiate inside"):
        out.sum().backward()


def test_nan_is_equal_to_nan():
    assert lockstep(dp=2).spmd(lambda: (torch.tensor(float("nan")), float("nan")))()[1] != 0


def test_a_rank_may_write_into_its_results():
    def program(x: torch.Tensor) -> Any:
        y = fzero.collectives.psum(x)
        y += fzero.axes.axis_index()
        fzero.collectives.psum(x)  # the others write meanwhile
        return PerRank(y)

    assert lockstep(dp=3).spmd(program)(torch.ones(())).value.tolist() == [3, 4, 5]


def test_the_thread_local_state_of_a_rank_is_that_of_its_caller():
    program = lambda: PerRank(  # noqa: E731
        torch.tensor([torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")])
    )
    mesh = lockstep(dp=2)
    assert mesh.spmd(program)().value.tolist() == [[True, False, False]] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert mesh.spmd(program)().value.tolist() == [[False, False, True]] * 2
        assert mesh.spmd(lambda x: x @ x)(torch.ones(2, 2)).dtype == torch.bfloat16
    with torch.inference_mode():
        assert mesh.spmd(program)().value.tolist() == [[False, True, False]] * 2
    with torch.device("meta"):
        assert mesh.spmd(lambda: torch.ones(2).device.type == "meta")()


def test_threads_are_pooled():
    mesh = lockstep(dp=4)
    mesh.spmd(fzero.collectives.psum)(torch.ones(()))
    before = threading.active_count()
    for _ in range(20):
        mesh.spmd(fzero.collectives.psum)(torch.ones(()))
    assert threading.active_count() == before


def test_a_rank_may_run_a_world_of_its_own():
    def program(x: torch.Tensor) -> torch.Tensor:
        inner = lockstep(tp=2).spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index("tp") + 1, "tp"))()
        return fzero.collectives.psum(x * inner)

    assert lockstep(dp=2).spmd(program)(torch.ones(())).item() == 6


def test_assume_replicated_takes_the_first_ranks():
    mesh = lockstep(dp=3)
    assert mesh.spmd(lambda x: fzero.axes.assume_replicated(x))(mesh.local(torch.tensor([5.0, 6.0, 7.0]))).item() == 5


def test_jit_runs_eagerly_in_lockstep(caplog):
    opt, mesh = optim.adam(1e-2), lockstep(dp=2)
    step = fzero.shard(train_step_for(mlp_loss, opt), stage=3, mesh=mesh)
    state, batch = step.init(mlp_params(), opt), mesh.split(mlp_batch(4))
    assert_trees_close(step.gather(fzero.jit(step)(*state, batch)[0]), step.gather(step(*state, batch)[0]), rtol=0)
    double = fzero.jit(lambda x: fzero.collectives.psum(2 * x), backend="fx")
    assert mesh.spmd(double)(torch.ones(())).item() == 4


def test_breakpoint_stops_one_rank():
    """pdb in rank 1, whose frame sees its own values; then all go on."""
    script = """
import torch, fzero

def program(x):
    x = fzero.collectives.psum(x)
    mine = fzero.axes.axis_index().item()
    if mine == 1:
        breakpoint()
    return fzero.collectives.psum(x)

print("sum", fzero.mesh(dp=3, simulate="lockstep").spmd(program)(torch.ones(())).item())
"""
    commands = "p 'mine', mine\np 'x', x.item()\nc\n"
    done = python("-c", script, read=commands)
    assert "('mine', 1)" in done.stdout and "('x', 3.0)" in done.stdout and "sum 9.0" in done.stdout, done


def test_results_that_differ_are_compared():
    mesh = lockstep(dp=3)
    x = mesh.local(torch.tensor([1.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"result 1 differs by rank: ranks 0 and 2 have 1\.0 and 2\.0, and a plain"):
        mesh.spmd(lambda x: (fzero.collectives.psum(x), x))(x)
    with pytest.raises(ValueError, match="result 0 differs by rank"):
        mesh.spmd(lambda x: (int(x.item()), x.sum() * 0))(x)
    two = lockstep(a=2, b=2)
    with pytest.raises(ValueError, match="its box says that it differs along a only"):
        two.spmd(lambda x: PerRank(x, "a"))(two.local(torch.arange(4.0)))
    with pytest.raises(ValueError, match="has another shape on each rank"):
        mesh.spmd(lambda: PerRank(torch.zeros(int(fzero.axes.axis_index()) + 1)))()
    nan = mesh.spmd(lambda: torch.tensor([float("nan"), 1.0]))()
    assert nan.isnan().tolist() == [True, False]


def test_an_error_names_its_rank_and_where_the_other_ranks_wait():
    def program(x: torch.Tensor) -> torch.Tensor:
        if fzero.axes.axis_index().item() == 1:
            raise KeyError("mine")
        return fzero.collectives.psum(x)

    with pytest.raises(KeyError, match="mine") as caught:
        lockstep(dp=3).spmd(program)(torch.ones(2))
    note, _ = caught.value.__notes__
    assert note == "fzero: rank 1 of 3 raised this; waiting: rank 0 in psum over 'dp' of float32 [2]"


def test_a_handler_cannot_hold_a_rank_back():
    """When one rank fails the others end, whatever they catch; and the next run is a new world."""
    records = []

    def program(x: torch.Tensor) -> torch.Tensor:
        if fzero.axes.axis_index().item() == 2:
            raise KeyError("mine")
        try:
            return fzero.collectives.psum(x)
        except Exception:
            records.append("caught")
            return x
        finally:
            records.append("left")

    mesh = lockstep(dp=3)
    with pytest.raises(KeyError, match="mine"):
        mesh.spmd(program)(torch.ones(2))
    assert records == ["left", "left"]
    assert mesh.spmd(fzero.collectives.psum)(torch.ones(())).item() == 3


@pytest.mark.parametrize("other", ["diverges", "raises"])
def test_an_abandoned_rank_meets_nobody(other):
    """Whatever it does in a `finally` or a bare `except`, it ends."""

    def program(x: torch.Tensor) -> torch.Tensor:
        if fzero.axes.axis_index().item() == 0:
            try:
                fzero.collectives.psum(x)
            except BaseException:
                fzero.collectives.psum(x)
            finally:
                fzero.collectives.psum(x.sum())
        elif other == "raises":
            raise KeyError("mine")
        return fzero.collectives.psum(x[0])

    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(_outcome(2, program)), daemon=True)
    thread.start()
    thread.join(30)
    assert isinstance(outcome[0], KeyError if other == "raises" else fzero.errors.DivergedError)


def test_a_divergence_names_ranks_collectives_shapes_and_lines():
    def program(x: torch.Tensor) -> torch.Tensor:
        if fzero.axes.axis_index().item() == 2:
            return fzero.collectives.all_gather(x, dim=0)
        return fzero.collectives.psum(x)

    with pytest.raises(fzero.errors.DivergedError) as caught:
        lockstep(dp=4).spmd(program)(torch.ones(2, 3))
    line = program.__code__.co_firstlineno
    assert str(caught.value) == (
        f"ranks diverged: rank 2 waits in all_gather(0) over 'dp' of float32 [2, 3] ({__file__}:{line + 2}), and "
        f"ranks 0, 1, 3 wait in psum over 'dp' of float32 [2, 3] ({__file__}:{line + 3}). All ranks of an axis call "
        "the same collectives in the same order, with the same shapes and dtypes; see docs/trouble.md#a-hang"
    )


def test_ranks_that_return_other_structures_diverge():
    with pytest.raises(fzero.errors.DivergedError, match="rank 1 returned"):
        lockstep(dp=2).spmd(lambda: [torch.ones(())] * (1 + int(fzero.axes.axis_index())))()


def test_lockstep_refuses_transforms_around_it():
    mesh = lockstep(dp=2)
    x = mesh.local(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="transform inside the rank program"):
        torch.func.grad(lambda x: mesh.spmd(lambda x: fzero.collectives.psum(x.sum()))(PerRank(x)))(x.value)
    with pytest.raises(RuntimeError, match="lockstep"):
        torch.compile(lambda x: mesh.spmd(fzero.collectives.psum)(x), backend="eager", fullgraph=True)(torch.ones(2))


# a program is a list of operations; each rank runs it, but for one, whose list has a fault
OPERATIONS: dict[str, Any] = {
    "psum": lambda x: fzero.collectives.psum(x) / fzero.axes.axis_size(),
    "pmean": fzero.collectives.pmean,
    "gather": lambda x: fzero.collectives.psum_scatter(fzero.collectives.all_gather(x)) / fzero.axes.axis_size(),
    "all_to_all": lambda x: fzero.collectives.all_to_all(x.repeat(fzero.axes.axis_size()))[: len(x)],
    "broadcast": fzero.collectives.broadcast,
    "grad": lambda x: torch.func.grad(lambda x: (fzero.collectives.psum(x) ** 2).sum())(x),
    "partition": lambda x: fzero.gather(fzero.partition({"w": x}))["w"] + 0 * fzero.collectives.psum(x),
}
FAULTS = ["order", "shape", "dtype", "missing", "return", "exception", "other", "extra"]


@st.composite
def faulty_programs(draw: Any) -> Any:
    n = draw(st.integers(3, 6))
    program = draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=5))
    return (
        n,
        draw(st.integers(0, n - 1)),
        draw(st.integers(0, len(program) - 1)),
        draw(st.sampled_from(FAULTS)),
        program,
    )


@examples(38, 150)
@given(faulty_programs())
def test_no_planted_fault_hangs_a_lockstep_world_and_each_error_names_the_culprit(case):
    n, culprit, at, fault, program = case

    def rank(x: torch.Tensor) -> Any:
        mine, x = list(program), x + fzero.axes.axis_index()
        for i, name in enumerate(mine):
            if fzero.axes.axis_index().item() == culprit and i == at:
                if fault == "order":
                    x = fzero.collectives.all_gather(fzero.collectives.psum(x))[:4]
                if fault == "shape":
                    x = torch.cat([x, x])
                if fault == "dtype":
                    x = x.float()
                if fault == "missing":
                    continue
                if fault == "return":
                    return PerRank(x)
                if fault == "exception":
                    raise KeyError("planted")
                if fault == "other":
                    x = fzero.collectives.psum_scatter(x.repeat(n))
                if fault == "extra":
                    x = fzero.collectives.pmean(fzero.collectives.psum(x))
            x = OPERATIONS[name](x)
        fzero.collectives.all_gather(x)  # all meet once more
        fzero.collectives.broadcast(x.sum(), source=1)
        return PerRank(x)

    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(_outcome(n, rank)), daemon=True)
    thread.start()
    thread.join(60)
    assert result, "hangs"
    (error,) = result
    if fault == "exception":
        assert isinstance(error, KeyError) and f"rank {culprit} of {n} raised this" in error.__notes__[0]
        return
    assert isinstance(error, fzero.errors.DivergedError), error
    assert str(error).startswith(f"ranks diverged: rank {culprit} "), error


def _outcome(n: int, rank: Any) -> Any:
    try:
        return lockstep(dp=n).spmd(rank)(torch.ones(4, dtype=torch.float64))
    except Exception as error:
        return error
