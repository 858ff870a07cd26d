"""Silent corruption is found: a flipped bit in memory at the next call, a mistake within a step when it runs twice."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.errors import CorruptionError
from fzero.testing import optimizers, stages, trees, world_sizes
from fzero.zero import Rerun
from tests.distributed.launch import world
from tests.helpers import LEAST, cases, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.zero.helpers import loss_of_tree

OPT = optim.adamw(0.1)


def flip(x: torch.Tensor, bit: int) -> None:
    """Flip a bit of a tensor's memory, behind torch's back."""
    x.detach().numpy().reshape(-1).view("uint8")[bit // 8] ^= 1 << bit % 8


@pytest.mark.slow
@examples(5, 100)
@given(
    params=trees(),
    opt=optimizers(),
    stage=stages(),
    n=world_sizes(4),
    every=st.integers(1, 3),
    swaps=st.booleans(),
    jitted=st.booleans(),
)
def test_a_step_that_looks_for_corruption_computes_the_same_bits(params, opt, stage, n, every, swaps, jitted):
    swaps = swaps and n == 2 and not jitted
    mesh = fzero.mesh(dp=n, simulate="lockstep" if swaps else "vmap")
    check = Rerun(every, "dp" if swaps else None)
    states = []
    for choice in ("first", check):
        step = fzero.shard(train_step_for(loss_of_tree, opt), stage=stage, mesh=mesh, check=choice)
        state: Any = step.init(tree.map(lambda x: x.double(), params), opt)
        run = fzero.jit(step, backend="fx", **LEAST) if jitted else step
        for i in range(3):
            *state, _ = run(*state, mesh.split({"x": torch.linspace(-1, 1 + i, 2 * n, dtype=torch.float64)}))
        states.append([x.clone() for x in tree.tensors(state)])
    assert all(torch.equal(x, y) or x.isnan().any() for x, y in zip(*states, strict=True))


@examples(8, 200)
@given(
    data=st.data(),
    stage=stages(),
    n=world_sizes(4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    jitted=st.booleans(),
)
def test_any_flipped_bit_of_the_state_is_found_at_the_next_call(data, stage, n, dtype, jitted):
    mesh = fzero.mesh(dp=n)
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=stage, mesh=mesh, check=Rerun(every=1000))
    state: Any = step.init(mlp_params(dtype), OPT)
    run, batch = fzero.jit(step, backend="fx", **LEAST) if jitted else step, mesh.split(mlp_batch(2 * n, dtype=dtype))
    for _ in range(2):
        *state, _ = run(*state, batch)
    leaves = [x for x in tree.tensors(state) if x.numel() and x.dtype != torch.bfloat16]
    if not leaves:
        return
    x = data.draw(st.sampled_from(leaves))
    flip(x, data.draw(st.integers(0, 8 * x.nbytes - 1)))
    with pytest.raises(CorruptionError, match=r"argument [01], leaf .* has other bits than the last call returned"):
        run(*state, batch)


def test_rerun_does_not_report_state_that_the_user_changed():
    """The user changed it in place, or gave new tensors, such as those of a checkpoint."""
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=0, mesh=fzero.mesh(dp=2), check=Rerun(every=2))
    params, opt_state = step.init(mlp_params(), OPT)
    batch = step.mesh.split(mlp_batch(4))
    for _ in range(3):
        params, opt_state, _ = step(params, opt_state, batch)
        tree.tensors(params)[0].mul_(0.5)
        opt_state = tree.map(lambda x: x * 1 if isinstance(x, torch.Tensor) else x, opt_state)


def make_mistaken(calls: Any, wrong: Any, rank: int = 1) -> Any:
    """A train step that flips a bit of a gradient on one rank, in the runs whose number `wrong` has."""

    def plant(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1).view(torch.int64)[:1] ^= 1 << 50
        return x

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(mlp_loss)(params, batch)
        mine = int(fzero.axes.axis_index())
        calls[mine] += 1
        grads = tree.map(plant, grads) if mine == rank and calls[mine] in wrong else grads
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step


@pytest.mark.parametrize("stage", cases((3,), [2]))
@pytest.mark.parametrize("run,found_in", [(1, 1), (2, 1), (3, None), (4, 3), (5, 3)])
def test_rerun_finds_a_wrong_result_in_calls_that_run_twice(stage, run, found_in):
    """Runs 1 and 2 are call 1, run 3 is call 2, and runs 4 and 5 are call 3."""
    calls = [0, 0]
    mesh = fzero.mesh(dp=2, simulate="lockstep")
    step = fzero.shard(make_mistaken(calls, {run}), stage=stage, mesh=mesh, check=Rerun(every=2))
    state: Any = step.init(mlp_params(), OPT)
    count = None
    for i in range(4):
        try:
            *state, _ = step(*state, mesh.split(mlp_batch(4, i)))
        except CorruptionError as error:
            assert "than in a second run of call" in str(error)
            count = i + 1
            break
    assert count == found_in


@pytest.mark.parametrize("swap,is_found", [("dp", True), (None, False)])
def test_a_rank_that_always_makes_the_same_mistake_is_found_if_ranks_swap_their_batches(swap, is_found):
    mesh = fzero.mesh(dp=2, simulate="lockstep")

    def loss(params: Any, batch: Any) -> torch.Tensor:
        wrong = torch.where(fzero.axes.axis_index() == 1, 1.001, 1.0)  # the loss of rank 1 is too large
        return mlp_loss(params, batch) * wrong

    step = fzero.shard(train_step_for(loss, OPT), stage=3, mesh=mesh, check=Rerun(every=2, swap=swap))
    state, batch = step.init(mlp_params(), OPT), mesh.split(mlp_batch(4))
    if not is_found:
        step(*state, batch)
        return
    text = "in which ranks swapped their batches along 'dp': a device, .* unless the step depends on its rank"
    with pytest.raises(CorruptionError, match=text):
        step(*state, batch)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("axes", [{"replica": 2, "shard": 3}, {"shard": 2, "replica": 2}])
def test_rerun_swaps_batches_of_replicas_with_any_number_of_shards(axes, stage):
    mesh = fzero.mesh(**axes, simulate="lockstep")
    check = Rerun(every=1, swap="replica")
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage, mesh, axis=("replica", "shard"), over="shard", check=check)
    state: Any = step.init(mlp_params(), OPT)
    for i in range(3):
        *state, _ = step(*state, mesh.split(mlp_batch(12, i)))


def test_rerun_swaps_back_results_that_differ_by_rank():
    mesh = fzero.mesh(dp=2, simulate="lockstep")
    step = fzero.shard(lambda p, x: (p, fzero.PerRank(x * 2)), stage=0, mesh=mesh, check=Rerun(1, "dp"))
    assert torch.equal(step(torch.ones(2), mesh.split(torch.arange(4)))[1].value, torch.arange(4).view(2, 2) * 2)


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"other": 2}])
def test_rerun_swaps_along_an_axis_of_two_ranks_only(mesh):
    text = re.escape("check=Rerun(swap='dp'): expected an axis of 2 ranks, and the mesh has {")
    with pytest.raises(ValueError, match=text):
        fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=fzero.mesh(**mesh), check=Rerun(swap="dp"))
    with pytest.raises(ValueError, match="every=0: expected"):
        Rerun(every=0)


@pytest.mark.parametrize(
    "options", [{"stage": 0, "over": "shard"}, {"stage": 3}, {"stage": 1, "over": ("shard", "dp")}]
)
def test_ranks_do_not_swap_where_more_than_two_are_summed_at_once(options):
    mesh = fzero.mesh(dp=2, shard=3, simulate="lockstep")
    with pytest.raises(ValueError, match="gradients of 6 ranks are summed at once"):
        fzero.shard(train_step_for(mlp_loss, OPT), mesh=mesh, axis=("dp", "shard"), check=Rerun(swap="dp"), **options)


def test_ranks_simulated_as_a_batch_do_not_swap():
    """In a product over the rows of all ranks, a rank's place may change its bits."""
    with pytest.raises(ValueError, match=re.escape("Rerun(swap='dp'): the mesh simulates its ranks as a batch")):
        fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=fzero.mesh(dp=2), check=Rerun(swap="dp"))


@pytest.mark.parametrize(
    "what,text",
    [
        ("once", r"result 0, leaf 'w.0' has other bits on ranks? .* than in a second run of call 3"),
        pytest.param("always", r"result 0, leaf 'w.0' has other bits .* run of call 1", marks=pytest.mark.slow),
        ("memory", r"argument 0, leaf 'w.0' has other bits than the last call returned"),
    ],
)
def test_a_corrupted_rank_ends_all_ranks(what, text):
    """Either each raises the error, or it names the rank that did."""
    done = world(2, "tests/zero/rerun_on_ranks.py", what)
    assert "done" not in done.stdout and "rank 0 ended with 1" in done.stderr and "rank 1 ended" in done.stderr, done
    assert re.search(text, done.stderr), done
    assert what == "memory" or done.stderr.count("CorruptionError: result 0") == 2, done  # on both
