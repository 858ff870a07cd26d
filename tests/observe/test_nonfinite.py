"""nonfinite: the rank, the leaf, the operation and the line of what is planted are found, and nothing else is named."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import fzero
from fzero import optim, tree
from fzero.observe import nonfinite
from tests.helpers import ALL_STAGES, LEAST, cases, examples
from tests.observe.helpers import (
    OPT,
    Loss,
    batch,
    line_of,
    log_of_negative,
    overflow,
    params,
    root_of_zero,
    train_step_of,
)


def zero_by_zero(params: Any, x: torch.Tensor) -> torch.Tensor:
    flag = x[:, -1].min() < -0.5
    ratio = flag.logical_not().float() / flag.logical_not().float()  # HERE
    return (x[:, :-1] @ params["w"]).sum() * params["n"].sum() * ratio


# what is planted: the operation, what it makes, whether in the backward pass
PLANTED: dict[Loss, tuple[str, str, bool]] = {
    log_of_negative: ("log", "nan", False),
    zero_by_zero: ("div", "nan", False),
    overflow: ("exp", "inf", False),
    root_of_zero: ("div", "nan", True),
}


@given(
    loss=st.sampled_from(list(PLANTED)),
    stage=st.integers(0, 3),
    ranks=st.integers(1, 4),
    rank=st.integers(0, 3),
    micro_batches=st.sampled_from([1, 2]),
    lockstep=st.booleans(),
)
@examples(4, 24)
def test_nonfinite_finds_planted_values(loss, stage, ranks, rank, micro_batches, lockstep):
    rank %= ranks
    mesh = fzero.mesh(dp=ranks, simulate="lockstep" if lockstep else "vmap")
    step = fzero.shard(train_step_of(loss, micro_batches), stage, mesh)
    state, x = step.init(params(), OPT), batch(ranks)
    before = [y.clone() for y in tree.tensors(state)]
    result = nonfinite(step)(*state, mesh.split(x))
    assert result.finite and not result and result.cause is None and str(result) == "train_step: all results are finite"

    x[2 * rank + 1, -1] = -2 if loss is log_of_negative else -1
    result = nonfinite(step)(*state, mesh.split(x))
    operation, value, backward = PLANTED[loss]
    assert result and result.cause is not None and result.rank == rank, result
    assert result.cause.ranks == (rank,) and result.cause.leaf == ""
    assert (result.cause.operation, result.cause.value) == (operation, value), result
    assert result.cause.line == line_of(loss) and "HERE" in result.cause.code, result
    assert bool(result.cause.backward) == backward
    assert result.cause.line in str(result)
    assert (f"on rank {rank} of {ranks}" in str(result)) == (ranks > 1)
    for y, z in zip(before, tree.tensors(state), strict=True):
        assert torch.equal(y, z)


@given(stage=st.integers(0, 3), ranks=st.integers(1, 4), at=st.integers(0, 9), leaf=st.sampled_from(["w", "n"]))
@examples(4, 8)
def test_a_leaf_of_the_parameters_is_named(stage, ranks, at, leaf):
    mesh = fzero.mesh(dp=ranks)
    step = fzero.shard(train_step_of(log_of_negative), stage, mesh, units=lambda path, x: "all")
    start = params()
    start[leaf].view(-1)[at % start[leaf].numel()] = math.nan
    result = nonfinite(step)(*step.init(start, OPT), mesh.split(batch(ranks)))
    assert result.cause is not None and result.cause.leaf == f"argument 0, leaf {leaf!r}", result
    assert result.cause.ranks == tuple(range(ranks)) if stage < 3 else len(result.cause.ranks) == 1


@given(stage=st.integers(0, 3), ranks=st.integers(1, 4), rank=st.integers(0, 3))
@examples(4, 8)
def test_a_leaf_of_the_batch_is_named(stage, ranks, rank):
    rank %= ranks
    mesh = fzero.mesh(dp=ranks)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return log_of_negative(params, batch["inputs"]["x"])

    step = fzero.shard(train_step_of(loss), stage, mesh)
    x = batch(ranks)
    x[2 * rank, 0] = math.nan
    result = nonfinite(step)(*step.init(params(), OPT), mesh.split({"inputs": {"x": x}}))
    assert result.cause is not None and result.cause.leaf == "argument 2, leaf 'inputs.x'", result
    assert result.cause.ranks == (rank,) and "result 2" in result.results


def test_nonfinite_does_not_blame_an_unused_argument():
    result = nonfinite(lambda x, y: x + 1)(torch.ones(2), torch.tensor(math.nan))
    assert result.finite


def attention(params: Any, x: torch.Tensor, rows: int = 0) -> torch.Tensor:
    scores = x @ x.T
    mask = torch.ones(len(x), len(x)).triu(1).bool()
    mask[:rows] = True
    weights = scores.masked_fill(mask, -math.inf).softmax(-1)  # HERE
    additive = torch.full((len(x), len(x)), -math.inf).triu(1)
    more = functional.scaled_dot_product_attention(x[None], x[None], x[None], additive)
    return (weights @ x[:, :-1] @ params["w"]).sum() * params["n"].sum() + more.sum() * 0


@pytest.mark.parametrize("stage", [0, 3])
def test_nonfinite_does_not_blame_an_attention_mask(stage):
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step_of(attention), stage, mesh)
    state = step.init(params(), OPT)
    assert nonfinite(step)(*state, mesh.split(batch(2, 3))).finite

    def bad(params: Any, x: torch.Tensor) -> torch.Tensor:  # another nan in the same step
        return attention(params, x) + (x[:, -1].min() - 1).sqrt() * params["n"].sum()

    x = batch(2, 3)
    x[4, -1] = 0
    result = nonfinite(fzero.shard(train_step_of(bad), stage, mesh))(*state, mesh.split(x))
    assert result.cause is not None and result.cause.operation == "sqrt" and result.rank == 1, result


def test_nonfinite_names_the_softmax_of_a_fully_masked_row():
    result = nonfinite(lambda p, x: attention(p, x, rows=1))(params(), batch(1, 3))
    assert result.cause is not None and result.cause.operation == "softmax", result
    assert result.cause.line == line_of(attention) and result.nan_cause is None


def test_a_nonfinite_report_has_the_lines_of_an_infinity_and_of_the_nan_it_becomes():
    def f(x: torch.Tensor) -> torch.Tensor:
        grown = (x * 1000).half().exp()
        return (grown - grown).sum()

    result = nonfinite(f)(torch.ones(3))
    assert result.cause is not None and (result.cause.operation, result.cause.value) == ("exp", "inf"), result
    assert result.nan_cause is not None and (result.nan_cause.operation, result.nan_cause.value) == ("sub", "nan")
    assert "and then nan made by sub" in str(result)


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_nonfinite_finds_a_hand_written_update(stage):
    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: (g - g) / (g - g), grads), state  # HERE

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(log_of_negative)(params, x)
        updates, opt_state = update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    mesh = fzero.mesh(dp=3)
    step = fzero.shard(train_step, stage, mesh)
    result = nonfinite(step)(*step.init(params(), OPT), mesh.split(batch(3)))
    assert result.cause is not None and (result.cause.operation, result.cause.line) == ("div", line_of(update)), result
    assert "result 2" not in result.results and result.cause.ranks == (0, 1, 2)


def test_nonfinite_does_not_blame_padding():
    """An update of a user's own may make the padding of a shard nan, which lies in no leaf."""

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(log_of_negative)(params, x)
        return tree.map(lambda p, g: p + g / g.abs(), params, grads), opt_state, value

    mesh = fzero.mesh(dp=4)
    step = fzero.shard(train_step, 3, mesh)
    state = step.init(params(), OPT)
    assert not step(*state, mesh.split(batch(4)))[0]["w"].data.isfinite().all()
    assert nonfinite(step)(*state, mesh.split(batch(4))).finite


def test_a_sum_over_ranks_that_overflows_is_of_all_ranks():
    mesh = fzero.mesh(dp=2)
    f = mesh.spmd(lambda x: fzero.collectives.psum(x.sum()))  # HERE
    result = nonfinite(f)(mesh.split(torch.tensor([40000.0, 40000.0]).half()))
    assert result.cause is not None and result.cause.ranks == (0, 1), result
    assert "in a collective" in result.cause.operation and result.cause.line.startswith(__file__)


def test_a_recomputed_layer_and_a_backward_of_the_users_own_are_found():
    @fzero.remat
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = x * w
        ones = torch.empty_like(h)  # were h kept alive for it, remat would refuse
        ones[::2], ones[1::2] = 1, 1
        return (h * ones).log()  # HERE

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(params["n"].sum(), x[:, -1]).sum() + params["w"].sum() * 0

    x = batch(2)
    x[3, -1] = -1
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step_of(loss), 3, mesh)
    result = nonfinite(step)(*step.init(params(), OPT), mesh.split(x))
    assert result.cause is not None and result.cause.operation == "log" and result.rank == 1, result
    assert "# HERE" in result.cause.code

    class Own(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad / (grad - grad)  # THERE

    result = nonfinite(torch.func.grad(lambda x: Own.apply(x).sum()))(torch.ones(3))
    assert result.cause is not None and result.cause.code.endswith("# THERE"), result
    assert result.cause.backward == "OwnGeneratedBackward"


def test_nonfinite_names_a_captured_tensor():
    hidden = torch.tensor([1.0, math.nan])
    result = nonfinite(lambda x: x * hidden)(torch.ones(2))  # HERE
    assert result.cause is not None and "captured" in result.cause.leaf and result.cause.operation == "mul", result


def test_nonfinite_runs_a_jitted_step_eagerly_and_donates_nothing():
    mesh = fzero.mesh(dp=2)
    step = fzero.jit(fzero.shard(train_step_of(log_of_negative), 2, mesh), backend="fx", **LEAST)
    state = step.init(params(), OPT)
    x = batch(2)
    x[3, -1] = -2
    result = nonfinite(step)(*state, mesh.split(x))
    assert result.rank == 1 and result.cause is not None and result.cause.operation == "log"
    assert not torch.is_anomaly_enabled() and step.traces == 0
    step(*state, mesh.split(x))  # nothing was donated


def test_nonfinite_forgets_memory_that_is_overwritten():
    def finite_between(x: torch.Tensor) -> torch.Tensor:
        y = x.log()
        y.zero_()
        return y.div_(y)  # HERE

    def at_once(x: torch.Tensor) -> torch.Tensor:
        y = x.log()
        return y.copy_((x - x) / (x - x))  # HERE

    for f in (finite_between, at_once):
        result = nonfinite(f)(torch.tensor([-1.0, 1.0]))
        assert result.cause is not None and result.cause.operation.startswith("div"), result
        assert result.cause.line == line_of(f)


def test_nonfinite_names_the_first_of_several_causes():
    def f(x: torch.Tensor) -> torch.Tensor:
        first = x.log()  # HERE
        return (x.sqrt() + first) / (x - x)

    result = nonfinite(f)(torch.tensor([-1.0]))
    assert result.cause is not None and (result.cause.operation, result.cause.line) == ("log", line_of(f)), result


def test_nonfinite_refuses_steps_that_it_cannot_run():
    with pytest.raises(TypeError, match="expected a function"):
        nonfinite(3)  # pyright: ignore[reportArgumentType]


def test_the_inputs_in_a_nonfinite_report_show_infinities_beside_the_range():
    x = torch.tensor([1.0, -2.0, math.inf])
    result = fzero.observe.nonfinite(lambda x: (x - x.max()).sum())(x)
    assert result.nan_cause is not None and "float32 [3] of -2 to 1 and inf" in result.nan_cause.inputs
    assert "float32 [] of inf" in result.nan_cause.inputs
