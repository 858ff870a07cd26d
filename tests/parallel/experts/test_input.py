"""Bad input to fzero.parallel.experts: each mistake names what was given and says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero.parallel import experts as moe
from tests.helpers import train_step_for
from tests.parallel.experts.model import OPT, batch_of, experts_params, ffn, loss_for, params_of

L, X = torch.zeros(2, 3, 4), torch.ones(2, 3, 6, dtype=torch.float64)
R = moe.route(L.double(), 2)
POSITIONS = moe.assign_positions(R.experts, 4)
P = experts_params(4)
KEY = fzero.random.key(0)
OFFSETS = torch.tensor([1, 2])


def on_ranks(f: Callable[[], Any], **axes: int) -> Callable[[], Any]:
    return lambda: fzero.mesh(**axes).spmd(lambda: fzero.PerRank(f()))()


def train(split: Any, **axes: int) -> Any:
    mesh = fzero.mesh(**axes)
    step = fzero.shard(train_step_for(loss_for(), OPT), stage=3, mesh=mesh, split=split)
    return step(*step.init(params_of(), OPT), mesh.split(batch_of(12)))


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "k above the experts": (lambda: moe.route(L, 5), ValueError, r"k=5: expected .* experts, an int from 1 to 4"),
    "k of 0": (lambda: moe.route(L, 0), ValueError, r"k=0: expected .* from 1 to 4"),
    "k above the groups": (lambda: moe.route(L, 3, groups=(2, 1)), ValueError, r"k=3: expected .* from 1 to 2"),
    "integer logits": (lambda: moe.route(L.long(), 1), TypeError, r"logits is int64 \[2, 3, 4\]: expected a fl"),
    "score": (lambda: moe.route(L, 1, score="relu"), ValueError, r"score='relu': expected \"softmax\""),  # pyright: ignore
    "bias": (lambda: moe.route(L, 1, bias=torch.zeros(3)), ValueError, r"bias has the shape \[3\]: expected \[4\]"),
    "a bias that is a number": (
        lambda: moe.route(L, 1, bias=0.1),  # pyright: ignore
        TypeError,
        r"bias=0.1: expected a floating-point tensor \[4\], one number per expert",
    ),
    "a bias of integers": (
        lambda: moe.route(L, 1, bias=OFFSETS),
        TypeError,
        r"bias is int64 \[2\]: expected a fl",
    ),
    "groups that are a number": (
        lambda: moe.route(L, 1, groups=2),  # pyright: ignore
        ValueError,
        r"groups=2: expected \(n, most\)",
    ),
    "groups of fractions": (
        lambda: moe.route(L, 1, groups=(2.0, 1)),  # pyright: ignore
        ValueError,
        r"groups=\(2.0, 1\): expected",
    ),
    "a scale that is not a number": (
        lambda: moe.route(L, 1, scale="2"),  # pyright: ignore
        TypeError,
        r"scale='2': expected a number",
    ),
    "no end of capacity": (
        lambda: moe.assign_positions(R.experts, 4, float("inf")),
        ValueError,
        r"capacity=inf: expected a number above 0.* or None",
    ),
    "no experts to position": (
        lambda: moe.assign_positions(R.experts, 0),
        ValueError,
        r"count=0: expected the number of experts",
    ),
    "a name for a count": (
        lambda: moe.sort_rows(X, R.experts, "4"),  # pyright: ignore
        ValueError,
        r"count='4': expected the number of experts",
    ),
    "logits for a routing": (
        lambda: moe.layer(ffn, P, X, L),  # pyright: ignore
        TypeError,
        r"routing is float32 \[2, 3, 4\]: expected the result of fzero.parallel.experts.route",
    ),
    "a balance of logits": (
        lambda: moe.balance_loss(L),
        TypeError,
        r"routing is float32 .*: expected the result",
    ),  # pyright: ignore
    "a z loss of logits": (lambda: moe.z_loss(L), TypeError, r"routing is float32 .*: expected the result"),  # pyright: ignore
    "statistics of nothing": (
        lambda: moe.stats(None),
        TypeError,
        r"routing is None: expected the result of fzero.parallel.experts.route",
    ),  # pyright: ignore
    "a list of tokens": (lambda: moe.layer(ffn, P, [1.0], R), TypeError, r"x is \[1.0\]: expected a floating-point"),  # pyright: ignore
    "experts that return nothing": (
        lambda: moe.layer(lambda *_: None, P, X, R, capacity=1.0),  # pyright: ignore
        TypeError,
        r"y is None: expected a floating-point tensor .* what the experts return",
    ),
    "and without positions": (
        lambda: moe.layer(lambda *_: None, P, X, R),  # pyright: ignore
        TypeError,
        r"y is None: expected a floating-point tensor .* what the experts return",
    ),
    "gates of one choice": (
        lambda: moe.layer(ffn, P, X, R._replace(gates=R.gates[..., :1]), capacity=1.0),
        ValueError,
        r"gates has the shape \[2, 3, 1\]: expected \[2, 3, 2\]",
    ),
    "a load that is a number": (
        lambda: moe.balance_bias(torch.zeros(4), 0.5),  # pyright: ignore
        TypeError,
        r"load is 0.5: expected a tensor",
    ),
    "names with a dot": (
        lambda: moe.split_rule("layer.experts"),
        ValueError,
        r"names=\('layer.experts',\): expected parts of the paths .* without a dot",
    ),
    "a rule of no axis": (
        lambda: moe.split_rule("experts", axis=None),  # pyright: ignore
        TypeError,
        r"axis=None: expected the name of the axis",
    ),
    "groups": (lambda: moe.route(L, 1, groups=(3, 1)), ValueError, r"groups=\(3, 1\): .* n divides the 4 experts"),
    "capacity of 0": (
        lambda: moe.assign_positions(R.experts, 4, 0),
        ValueError,
        r"capacity=0: expected a number above 0",
    ),
    "negative capacity": (
        lambda: moe.layer(ffn, P, X, R, capacity=-1.0),
        ValueError,
        r"capacity=-1.0: expected a number above 0, such as 1.25",
    ),
    "capacity that is nan": (lambda: moe.stats(R, float("nan")), ValueError, r"capacity=nan"),
    "float choices": (
        lambda: moe.assign_positions(R.gates, 4),
        TypeError,
        r"experts is torch.float64: expected an int64",
    ),
    "positions of no sequences": (
        lambda: moe.assign_positions(R.experts[0], 4),
        ValueError,
        r"\[3, 2\]: expected \[sequences",
    ),
    "integer tokens": (
        lambda: moe.layer(ffn, P, X.long(), R),
        TypeError,
        r"x is int64 \[2, 3, 6\]: expected a floating",
    ),
    "tokens of another routing": (
        lambda: moe.layer(ffn, P, X[:, :2], R),
        ValueError,
        r"x has the shape \[2, 2, 6\]: expected \[2, 3, width\]",
    ),
    "tokens without positions": (
        lambda: moe.dispatch(X[:1], POSITIONS),
        ValueError,
        r"\[1, 3, 6\]: expected \[2, 3, width",
    ),
    "rows of others": (
        lambda: moe.combine(X, POSITIONS, R.gates),
        ValueError,
        r"y has the shape \[2, 3, 6\]: expected \[4, 6, width\]",
    ),
    "sorted rows of others": (
        lambda: moe.unsort_rows(X[0], moe.sort_rows(X, R.experts, 4)[1], R.gates),
        ValueError,
        r"y has the shape \[3, 6\]: expected \[12, width\]",
    ),
    "gates of others": (
        lambda: (lambda rows, order: moe.unsort_rows(rows, order, R.gates[:1]))(*moe.sort_rows(X, R.experts, 4)),
        ValueError,
        r"gates has the shape \[1, 3, 2\]: expected a gate for each of 12 choices",
    ),
    "an axis that does not divide the experts": (
        on_ranks(lambda: moe.layer(ffn, P, X, R), ep=3),
        ValueError,
        r"axis='ep' has 3 ranks, and the 4 experts do not divide by 3",
    ),
    "experts that are not split": (
        lambda: train(None, ep=2),
        ValueError,
        r"experts leaf '\w+' has the shape \[4, .*it is not split, .*fzero.parallel.experts.split_rule\('experts', "
        r"axis='ep'\)",
    ),
    "experts that are not gathered": (
        on_ranks(lambda: moe.layer(ffn, fzero.partition(P), X, R), dp=2),
        ValueError,
        r"experts leaf '\w+' is Shard\(.*: gather it first",
    ),
    "other experts than the router's": (
        lambda: moe.layer(ffn, experts_params(3), X, R),
        ValueError,
        r"experts leaf '\w+' has the shape \[3.*expected 4 experts along dimension 0.* 1 rank, since no axis is bound",
    ),
    "other experts than the router's, without the axis": (
        on_ranks(lambda: moe.layer(ffn, experts_params(3), X, R), dp=2),
        ValueError,
        r"expected 4 experts along dimension 0.* on 1 rank, since 'ep' is none of the bound axes, 'dp'; give the",
    ),
    "experts in a list": (
        on_ranks(lambda: moe.split_rule("experts")("experts.0.up", P["up"]), ep=2),
        ValueError,
        r"leaf 'experts.0.up' belongs to one expert in a list, .*: stack them",
    ),
    "no name": (lambda: moe.split_rule(), ValueError, r"names=\(\): expected parts of the paths"),
    "an axis that is not a name": (
        lambda: moe.layer(ffn, P, X, R, axis=("dp", "ep")),  # pyright: ignore
        TypeError,
        r"axis=\('dp', 'ep'\): expected the name of the axis",
    ),
    "a balance over nothing": (
        lambda: moe.balance_loss(R, "token"),  # pyright: ignore
        ValueError,
        r"over='token': expected \"batch\" or \"sequence\"",
    ),
    "a balance of no sequences": (
        lambda: moe.expert_load(moe.route(L[0], 1)),
        ValueError,
        r"routing is of tokens \[3\]: expected \[sequences, tokens\]",
    ),
    "load of other experts": (
        lambda: moe.balance_bias(torch.zeros(4), torch.zeros(3)),
        ValueError,
        r"bias has the shape \[4\], and load \[3\]",
    ),
    "jitter of more than all": (lambda: moe.jitter(X, KEY, 1.5), ValueError, r"amount=1.5: expected a number between"),
    "jitter of integers": (
        lambda: moe.jitter(X.long(), KEY),
        TypeError,
        r"x is int64 \[2, 3, 6\]: expected a fl",
    ),
    "jitter without a key": (lambda: moe.jitter(X, torch.ones(2)), TypeError, r"expected an int64 tensor of shape"),
    "grouped matrices": (
        lambda: moe.grouped_mm(torch.ones(2, 3), torch.ones(2, 4, 5), OFFSETS),
        ValueError,
        r"weights has the shape \[2, 4, 5\]: expected \[2, 3, columns\]",
    ),
    "grouped dtypes": (
        lambda: moe.grouped_mm(torch.ones(2, 3), torch.ones(2, 3, 5).double(), OFFSETS),
        TypeError,
        r"weights is torch.float64, and the rows are torch.float32",
    ),
    "grouped integers": (lambda: moe.grouped_mm(OFFSETS[None], P["up"], OFFSETS), TypeError, r"rows is torch.int64"),
    "float offsets": (lambda: moe.grouped_mm(X[0], P["up"], OFFSETS.float()), TypeError, r"offsets is torch.float32"),
    "no offsets": (lambda: moe.grouped_mm(X[0], P["up"], OFFSETS[:0]), ValueError, r"offsets has the shape \[0\]"),
    "three dimensions": (
        lambda: moe.grouped_outer(X, X, OFFSETS),
        ValueError,
        r"x has the shape \[2, 3, 6\]: expected",
    ),
    "outer rows": (
        lambda: moe.grouped_outer(X[0], X[0, :2], OFFSETS),
        ValueError,
        r"y has the shape \[2, 6\]: .*\[3, co",
    ),
}


LINEAR: dict[str, tuple[torch.Tensor, torch.Tensor | None, type[Exception], str]] = {
    "one matrix for all": (P["up"][:1], None, ValueError, r"weight has the shape \[1, 6, 10\]: expected \[4, 6, col"),
    "a width of one": (P["up"][:, :1], None, ValueError, r"weight has the shape \[4, 1, 10\]: expected \[4, 6, col"),
    "matrices of others": (P["down"], None, ValueError, r"weight has the shape \[4, 10, 6\]: expected \[4, 6, col"),
    "a matrix": (P["up"][0], None, ValueError, r"weight has the shape \[6, 10\]: expected \[4, 6, columns\]"),
    "a bias for all": (P["up"], P["bias"][:1], ValueError, r"bias has the shape \[1, 10\]: expected \[4, 10\]"),
    "a bias of one": (P["up"], P["bias"][:, :1], ValueError, r"bias has the shape \[4, 1\]: expected \[4, 10\]"),
    "half matrices": (P["up"].bfloat16(), None, TypeError, r"weight is torch.bfloat16, and the rows are torch.float64"),
    "half biases": (P["up"], P["bias"].half(), TypeError, r"bias is torch.float16, and the rows are torch.float64"),
}


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("name", LINEAR)
def test_a_matrix_that_does_not_fit_is_refused_with_positions_and_without(name, capacity):
    """Einsum would take one for all experts, and a sum over one for a product."""
    weight, bias, error, message = LINEAR[name]
    with pytest.raises(error, match=message):
        moe.layer(lambda p, rows, linear: linear(rows, weight, bias), P, X, R, capacity=capacity)


@pytest.mark.parametrize("name", MISTAKES)
def test_wrong_arguments_of_moe_functions_are_refused(name):
    action, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        action()


def test_shard_refuses_experts_that_the_axis_does_not_divide():
    with pytest.raises(ValueError, match=r"layer\.experts\.\w+.*4.*3"):
        train(moe.split_rule("experts"), ep=3)


def test_a_split_rule_of_an_unknown_axis_splits_nothing():
    assert moe.split_rule("experts")("experts.up", P["up"]) is None
    rules = fzero.mesh(ep=2).spmd(
        lambda: [moe.split_rule("a", "b")(p, P["up"]) for p in ("x.a.w", "b", "shared_a.w", "c")]
    )()
    assert rules == [{"ep": 0}, {"ep": 0}, None, None]
