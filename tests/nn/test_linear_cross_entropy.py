"""Laws of linear_cross_entropy: it is the cross entropy of the whole logits, which never exist as a whole."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import PerRank, optim
from fzero.nn import linear_cross_entropy
from fzero.testing import assert_equivalent
from tests.helpers import LEAST, cases, either, examples, train_step_for

CLASSES, WIDTH = 11, 5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT, BIAS = normal(CLASSES, WIDTH, seed=1), normal(CLASSES, seed=2)


def whole(
    hidden: Any, weight: Any, labels: Any, bias: Any, *, softcap: Any = None, z_loss: float = 0.0, **options: Any
) -> Any:
    """The same loss from all logits, as torch computes it."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    reduction, ignored = options.pop("reduction", "mean"), options.get("ignore_index", -100)
    nll = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", **options).view(labels.shape)
    nll = nll + z_loss * torch.where(labels == ignored, 0.0, logits.logsumexp(-1).square())
    if reduction == "none":
        return nll
    return nll.sum() if reduction == "sum" else nll.sum() / (labels != ignored).sum()


OPTIONS = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 0.01]),
        "softcap": st.sampled_from([None, 3.0]),
        "ignore_index": st.sampled_from([-100, 6]),
    }
)
LABELS = st.lists(st.sampled_from([-100, 0, 3, 6, 10]), min_size=4, max_size=4)


def labels_of(values: list[int], ignored: int) -> torch.Tensor:
    labels = torch.tensor(values).view(2, 2)
    return torch.where(labels == -100, ignored, labels)


@examples(13, 25)
@given(OPTIONS, LABELS, st.sampled_from([2, 4, 10, 11, 50]), st.sampled_from([1.0, 1e3]), st.booleans())
def test_linear_cross_entropy_equals_the_loss_of_whole_logits(options, values, chunk, scale, has_bias):
    """Exponentials of logits may overflow, and all labels may be ignored."""
    labels, hidden = labels_of(values, options["ignore_index"]), normal(2, 2, WIDTH) * scale
    bias = BIAS if has_bias else None
    argnums = (0, 1, 3) if has_bias else (0, 1)

    def run(f: Any, **more: Any) -> Any:
        value, vjp = torch.func.vjp(
            lambda *xs: f(*xs[:2], labels, *xs[2:], **options, **more), *(hidden, WEIGHT, bias)[: len(argnums)]
        )
        return value, vjp(torch.ones_like(value))

    (value, grads), (expected, expected_grads) = run(linear_cross_entropy, chunk=chunk), run(with_bias(whole))
    torch.testing.assert_close(value, expected, equal_nan=True)
    torch.testing.assert_close(grads, expected_grads, equal_nan=True)


def with_bias(f: Any) -> Any:
    return lambda hidden, weight, labels, bias=None, **options: f(hidden, weight, labels, bias, **options)


def test_second_derivatives_of_linear_cross_entropy_equal_those_of_whole_logits():
    labels, hidden = torch.tensor([1, -100, 10]), normal(3, WIDTH)

    def hvp(f: Any, **more: Any) -> Any:
        grad = torch.func.grad(lambda h, w: f(h, w, labels, None, z_loss=0.1, **more), argnums=(0, 1))
        return torch.func.jvp(grad, (hidden, WEIGHT), (hidden.flip(0), WEIGHT.flip(0)))[1]

    torch.testing.assert_close(hvp(linear_cross_entropy, chunk=4), hvp(whole))


@pytest.mark.slow
@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@examples(4, 8)
@given(st.sampled_from([1, 2, 4]), OPTIONS, LABELS, st.sampled_from([2, 3, 9]), st.booleans())
def test_the_classes_of_linear_cross_entropy_may_be_split_over_an_axis(simulate, n, options, values, chunk, has_bias):
    classes = 12
    weight, bias = normal(classes, WIDTH, seed=3), normal(classes, seed=4) if has_bias else None
    labels, hidden = labels_of(values, options["ignore_index"]), normal(2, 2, WIDTH)

    def parts(x: torch.Tensor) -> PerRank:
        return PerRank(torch.stack(x.chunk(n)))

    def program(weight: Any, bias: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            return linear_cross_entropy(h, w, labels, bias, chunk=chunk, axis="tp", **options)

        grads = torch.func.grad(lambda h, w: loss(h, w).sum(), argnums=(0, 1))(hidden, weight)
        return loss(hidden, weight), grads[0], PerRank(grads[1])

    mesh = fzero.mesh(tp=n, simulate=simulate)
    value, of_hidden, of_weight = mesh.spmd(program)(parts(weight), None if bias is None else parts(bias))
    expected = whole(hidden, weight, labels, bias, **options)
    grads = torch.func.grad(lambda h, w: whole(h, w, labels, bias, **options).sum(), argnums=(0, 1))(hidden, weight)
    torch.testing.assert_close((value, of_hidden), (expected, grads[0]), equal_nan=True)
    torch.testing.assert_close(of_weight.value, parts(grads[1]).value, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_hidden_states_is_as_exact_in_many_chunks_as_in_one(dtype):
    """Each chunk's part of it is rounded, and their sum is not: 63 chunks took 0.016 of its norm in bfloat16."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(32, 64, generator=g).to(dtype), (torch.randn(2016, 64, generator=g) / 8).to(dtype)
    labels = torch.randint(2016, (32,), generator=g)
    exact = torch.func.grad(lambda x: F.cross_entropy(x @ weight.double().mT, labels))(hidden.double())

    def error(f: Any) -> float:
        grad = f(lambda x, chunk: linear_cross_entropy(x, weight, labels, chunk=chunk))
        assert grad.dtype == dtype
        return float((grad.double() - exact).norm() / exact.norm())

    one = error(lambda f: torch.func.grad(lambda x: f(x, 2016))(hidden))
    assert error(lambda f: torch.func.grad(lambda x: f(x, 32))(hidden)) < 1.7 * one
    forward = torch.func.jvp(lambda x: linear_cross_entropy(x, weight, labels, chunk=32), (hidden,), (hidden,))[1]
    torch.testing.assert_close(forward.double(), (exact * hidden.double()).sum(), rtol=2e-2, atol=1e-2)


def test_linear_cross_entropy_of_half_precision_sums_in_float32():
    hidden, weight = normal(6, WIDTH).bfloat16(), WEIGHT.bfloat16()
    labels = torch.arange(6)
    value = linear_cross_entropy(hidden, weight, labels, chunk=3)
    expected = F.cross_entropy((hidden @ weight.mT).float(), labels)
    assert value.dtype is torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    hidden = torch.tanh(params["embed"][batch["x"]])
    return linear_cross_entropy(hidden, params["embed"], batch["y"], chunk=4)


def batch_of(size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(CLASSES, (size, 3), generator=generator) for name in ("x", "y")}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sharded_training_with_a_tied_head_is_exact(micro_batches):
    opt = optim.adamw(1e-2)
    step = train_step_for(loss_fn, opt, micro_batches=micro_batches)
    assert_equivalent(step, {"embed": WEIGHT}, opt, [batch_of(8, i) for i in range(3)], either((3,), range(4)))


TOKENS, MANY, CHUNK = 64, 4096, 256


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), [0]))
def test_a_jitted_step_holds_a_few_chunks_of_logits(stage):
    """The parts of softmax and its gradient are a chunk each. All logits would be 16 of them, in each pass."""
    opt = optim.sgd(0.1)
    params = {"head": torch.zeros(MANY, 4), "hidden": torch.zeros(TOKENS, 4)}
    labels = torch.zeros(TOKENS, dtype=torch.long)

    def peak(**options: Any) -> int:
        def loss(params: Any, labels: Any) -> torch.Tensor:
            if not options:
                return F.cross_entropy(F.linear(params["hidden"], params["head"]), labels)
            return linear_cross_entropy(params["hidden"], params["head"], labels, **options)

        mesh = fzero.mesh(dp=1, device="cpu")
        step = fzero.shard(train_step_for(loss, opt), stage=stage, mesh=mesh)
        plan = fzero.jit(step, backend="fx", **LEAST).plan(*step.init(params, opt), mesh.split(labels))
        return plan.peak_bytes - plan.argument_bytes

    logits = 4 * TOKENS * MANY
    head = 4 * 4 * MANY
    assert peak() > 1.9 * logits
    assert peak(chunk=CHUNK) < 4.5 * logits * CHUNK / MANY + 3 * head


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "labels of next tokens": ({"labels": torch.zeros(3).long()}, "one label for each row of hidden"),
    "a weight transposed": ({"weight": WEIGHT.mT}, "expected [.., d] and [v, d]"),
    "a bias of the width": ({"bias": torch.zeros(WIDTH)}, f"expected [{CLASSES}], one number for each class"),
    "a chunk of 0": ({"chunk": 0}, "chunk=0: expected an int, at least 1"),
    "smoothing of 2": ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
    "a cap of 0": ({"softcap": 0.0}, "softcap=0.0: expected a positive number, or None"),
    "an unknown reduction": ({"reduction": "max"}, 'expected "mean", "sum" or "none"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_of_linear_cross_entropy_are_refused(name):
    changed, message = REFUSED[name]
    arguments: dict[str, Any] = {"hidden": normal(4, WIDTH), "weight": WEIGHT, "labels": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_cross_entropy(**{**arguments, **changed})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16])
def test_labels_that_are_no_integers_are_named(dtype):
    with pytest.raises(TypeError, match=re.escape(f"labels are {dtype}: expected int64")):
        linear_cross_entropy(normal(4, WIDTH), WEIGHT, torch.zeros(4, dtype=dtype))


def test_a_label_that_is_no_class_gives_nan():
    value = linear_cross_entropy(normal(2, WIDTH), WEIGHT, torch.tensor([0, CLASSES]), reduction="none", chunk=4)
    assert value[0].isfinite() and math.isnan(value[1])
