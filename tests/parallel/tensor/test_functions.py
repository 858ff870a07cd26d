"""Laws of the parts of layers: cross entropy of parts of the logits, embeddings, cut and join, and bad input."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import PerRank, optim
from fzero.parallel import tensor as tp
from tests.helpers import examples, train_step_for
from tests.parallel.tensor.model import DIMS, batch_of, loss_for, params_of, plain_loss

SIMULATIONS = st.sampled_from(["vmap", "lockstep"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRIX, ROWS, FIRST = normal(3, 4), normal(2, 3), torch.zeros(2).long()


def parts(x: torch.Tensor, n: int, dim: int) -> PerRank:
    return PerRank(torch.stack(x.chunk(n, dim)))


@examples(20, 40)
@given(
    st.sampled_from([1, 2, 4]),
    SIMULATIONS,
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.lists(st.sampled_from([-100, 0, 3, 6, 7]), min_size=4, max_size=4),
    st.sampled_from([1.0, 1e3, 1e200]),
    st.sampled_from([-100, 6]),
)
def test_cross_entropy_of_split_logits_equals_that_of_whole_logits(
    n, simulate, reduction, smoothing, targets, scale, ignored
):
    """Values and gradients; also of logits whose exponentials overflow, and where all targets are ignored."""
    logits, target = normal(2, 2, 8) * scale, torch.tensor(targets).view(2, 2)
    options: Any = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
    target = torch.where(target == -100, ignored, target)
    if scale > 1e3 and smoothing:
        smoothing = options["label_smoothing"] = 0.0

    def whole(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.flatten(0, 1), target.flatten(), **options).view(
            target.shape if reduction == "none" else ()
        )

    def program(x: torch.Tensor) -> Any:
        value = tp.cross_entropy(x, target, **options)
        return value, PerRank(torch.func.grad(lambda x: tp.cross_entropy(x, target, **options).sum())(x))

    value, grads = fzero.mesh(tp=n, simulate=simulate).spmd(program)(parts(logits, n, -1))
    torch.testing.assert_close(value, whole(logits), equal_nan=True)
    expected = torch.func.grad(lambda x: whole(x).sum())(logits)
    torch.testing.assert_close(torch.cat(list(grads.value), -1), expected, equal_nan=True)
    torch.testing.assert_close(tp.cross_entropy(logits, target, **options), whole(logits), equal_nan=True)


def test_cross_entropy_sends_three_numbers_for_each_token():
    logits, targets = parts(normal(5, 8), 2, -1), torch.arange(5)
    with fzero.collectives.record() as log:
        fzero.mesh(tp=2).spmd(tp.cross_entropy)(logits, targets)
    assert [(e.kind, e.elements) for e in log.other_events] == [("all_gather", 10), ("all_reduce", 20)]


def test_cross_entropy_of_half_precision_is_taken_in_float32():
    logits, targets = normal(5, 8).bfloat16(), torch.arange(5)
    value = fzero.mesh(tp=2).spmd(tp.cross_entropy)(parts(logits, 2, -1), targets)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, F.cross_entropy(logits.float(), targets))


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("wrong", [-1, 8, 100])
def test_numbers_outside_the_vocabulary_are_not_trained_on(wrong, simulate):
    """Each rank would find that it has none of them, and the sum would be zero without a word."""
    mesh, numbers = fzero.mesh(tp=2, simulate=simulate), torch.tensor([0, wrong, 7])
    table = normal(8, 3)
    rows = mesh.spmd(tp.embed)(numbers, parts(table, 2, 0))
    assert rows.isnan().any(-1).tolist() == [False, True, False]
    torch.testing.assert_close(rows[[0, 2]], table[[0, 7]])
    losses = mesh.spmd(lambda x: tp.cross_entropy(x, numbers, reduction="none"))(parts(normal(3, 8), 2, -1))
    assert losses.isnan().tolist() == [False, True, False]


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 3]), SIMULATIONS, st.sampled_from([0, 1, -1, -2]))
def test_join_after_cut_is_the_identity_and_they_are_transposes(n, simulate, dim):
    mesh, x, y = fzero.mesh(tp=n, simulate=simulate), normal(6, 6, 6), normal(6, 6, 6, seed=1)
    torch.testing.assert_close(mesh.spmd(lambda x: tp.all_gather(tp.scatter(x, dim=dim), dim=dim))(x), x)

    def pull_back_scatter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(lambda x: tp.scatter(x, dim=dim), x)[1](tp.scatter(y, dim=dim))[0]

    torch.testing.assert_close(mesh.spmd(pull_back_scatter)(x, y), y)  # all parts of the gradient, joined

    def pull_back_gather(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return tp.all_gather(
            torch.func.vjp(lambda x: tp.all_gather(x, dim=dim), tp.scatter(x, dim=dim))[1](y)[0], dim=dim
        )

    torch.testing.assert_close(mesh.spmd(pull_back_gather)(x, y), y)


def test_without_its_axis_tensor_parallel_functions_are_the_plain_ones():
    x, w = normal(2, 4), normal(4, 4)
    assert all(f(x) is x or torch.equal(f(x), x) for f in (tp.enter, tp.leave, tp.scatter, tp.all_gather))
    torch.testing.assert_close(tp.row(tp.column(x, w, axis="model"), w), x @ w @ w)
    torch.testing.assert_close(fzero.mesh(dp=2).spmd(lambda x: tp.column(x, w))(x), x @ w)
    with pytest.raises(IndexError):
        tp.embed(torch.tensor([4]), w)
    assert tp.split_rule({"w": 0})("w", w) is None


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_functions_take_an_axis_of_any_name(sequence):
    params, batch = params_of(), batch_of()
    rule, loss = tp.split_rule(DIMS, "m"), loss_for(sequence, axis="m")

    def program(params: Any) -> torch.Tensor:
        return fzero.value_and_grad(loss, axis=())(fzero.partition(params, (), split=rule), batch)[0]

    value = fzero.mesh(m=4).spmd(program)(params)
    torch.testing.assert_close(value, plain_loss(params, batch))


def test_the_split_rule_with_the_longest_matching_name_counts():
    rule = tp.split_rule({"w": 0, "up.w": -1, "mlp.up.w": 1}, axis="tp")
    result = fzero.mesh(tp=2).spmd(
        lambda: [rule(p, torch.ones(2, 2)) for p in ("a.w", "0.up.w", "b.mlp.up.w", "up", "w")]
    )()
    assert result == [{"tp": 0}, {"tp": -1}, {"tp": 1}, None, {"tp": 0}]


WORD: Any = "column"


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_that_averages_over_the_tensor_parallel_axis_is_refused(simulate, sequence):
    """Its ranks have one batch, and gradients of parts would be divided by their number, and summed over none."""
    mesh, opt = fzero.mesh(tp=2, simulate=simulate), optim.sgd(0.1)
    step = fzero.shard(train_step_for(loss_for(sequence), opt), stage=0, mesh=mesh, split=tp.split_rule(DIMS))
    with pytest.raises(
        ValueError,
        match=r"step averages over it, .*: name only .*, axis='dp' of fzero.mesh\(dp=1, tp=2\)",
    ):
        step(*step.init(params_of(), opt), batch_of())


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "names": (lambda: tp.split_rule([WORD]), TypeError, r"dims=\['column'\]: expected a dict from names of leaves"),
    "dimensions": (lambda: tp.split_rule({"up": WORD}), TypeError, "'up': 'column', expected a name"),
    "axis": (lambda: tp.split_rule({}, axis=("tp",)), TypeError, "expected the name of the axis"),
    "reduction": (lambda: tp.cross_entropy(ROWS, FIRST, reduction=WORD), ValueError, "reduction='column'"),
    "smoothing": (
        lambda: tp.cross_entropy(ROWS, FIRST, label_smoothing=2),
        ValueError,
        "expected a number from 0 to 1",
    ),
    "targets": (lambda: tp.cross_entropy(MATRIX, FIRST), ValueError, r"the shape \[2\], and logits \[3, 4\]"),
    "a whole matrix": (
        lambda: fzero.mesh(tp=2).spmd(lambda x: PerRank(tp.column(x, MATRIX)))(ROWS),
        ValueError,
        r"fzero.parallel.tensor.column: the weight \[3, 4\] is equal on the 2 ranks along 'tp'",
    ),
    "a whole table": (
        lambda: fzero.mesh(tp=2).spmd(lambda x: tp.embed(x, MATRIX))(FIRST),
        ValueError,
        "fzero.parallel.tensor.embed: the weight",
    ),
    "an odd sequence": (
        lambda: fzero.mesh(tp=2).spmd(lambda x: PerRank(tp.leave(x, sequence=True)))(PerRank(normal(2, 3, 4))),
        ValueError,
        r"dimension 0 of a tensor \[3, 4\] is split into 2 equal parts along 'tp'",
    ),
    "an odd cut": (lambda: fzero.mesh(tp=2).spmd(tp.scatter)(normal(3, 4)), ValueError, "pad the sequences"),
    "packed": (lambda: tp.packed(0), ValueError, "count=0: expected the number of matrices"),
    "divided": (lambda: tp.divided(), ValueError, "expected names of attributes"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_tensor_parallel_functions_are_refused(name):
    run, kind, said = BAD[name]
    with pytest.raises(kind, match=said):
        run()
