"""Laws of float8 products: how large the error is, which formula their gradients follow, what is exact."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.nn import float8_linear
from tests.helpers import cases, examples

vjp: Any = torch.func.vjp
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = st.sampled_from(["tensorwise", "rowwise"])
ROWS = st.sampled_from([1, 3, 16, 40])
SIZES = st.sampled_from([16, 48, 64])
SEEDS = st.integers(0, 99)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def spread(shape: Any, seed: int, dtype: torch.dtype = torch.float32, decades: int = 2) -> torch.Tensor:
    """Numbers of very different magnitudes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 10 ** (decades * (torch.rand(shape, generator=g) - 0.5))
    return x.to(dtype)


def scale_of(x: torch.Tensor, dtype: torch.dtype, rowwise: bool) -> torch.Tensor:
    """The least power of two that brings all magnitudes within the codes, by Python's own logarithm."""
    largest = x.double().abs()
    largest = largest.amax(-1, keepdim=True) if rowwise else largest.amax()
    powers = [2.0 ** math.ceil(math.log2(v / torch.finfo(dtype).max)) if v else 1.0 for v in largest.flatten().tolist()]
    return torch.tensor(powers, dtype=torch.float64).view(largest.shape)


def rounded(x: torch.Tensor, dtype: torch.dtype, rowwise: bool) -> torch.Tensor:
    """The numbers that the codes of x stand for."""
    scale = scale_of(x, dtype, rowwise)
    return (x.double() / scale).float().to(dtype).double() * scale


def error_bound(x: torch.Tensor, dtype: torch.dtype, rowwise: bool) -> torch.Tensor:
    """The largest error of a code: half of its last bit."""
    info = torch.finfo(dtype)
    return torch.maximum(x.double().abs() * info.eps / 2, scale_of(x, dtype, rowwise) * info.smallest_normal * info.eps)


@examples(30, 300)
@given(m=ROWS, k=SIZES, n=SIZES, dtype=DTYPES, scaling=SCALINGS, seed=SEEDS)
def test_the_error_of_a_float8_product_is_within_the_bound_of_its_codes(m, k, n, dtype, scaling, seed):
    x, w = spread((m, k), seed, dtype), spread((n, k), seed + 1, dtype)
    y, exact = float8_linear(x, w, scaling=scaling).double(), x.double() @ w.double().mT
    ex, ew = (error_bound(z, E4M3, scaling == "rowwise") for z in (x, w))
    bound = ex @ w.double().abs().mT + x.double().abs() @ ew.mT + ex @ ew.mT
    assert ((y - exact).abs() <= bound + exact.abs() * torch.finfo(dtype).eps + bound * 1e-3).all()


@examples(30, 300)
@given(m=ROWS, k=SIZES, n=SIZES, scaling=SCALINGS, seed=SEEDS)
def test_a_float8_product_and_its_gradients_follow_the_formula(m, k, n, scaling, seed):
    x, w, g = spread((m, k), seed), spread((n, k), seed + 1), spread((m, n), seed + 2, decades=4)
    rowwise, gradient = scaling == "rowwise", E4M3 if scaling == "rowwise" else E5M2

    def product(a: torch.Tensor, a_kind: torch.dtype, b: torch.Tensor, b_kind: torch.dtype) -> torch.Tensor:
        return rounded(a, a_kind, rowwise) @ rounded(b, b_kind, rowwise).mT

    y, back = vjp(lambda x, w: float8_linear(x, w, scaling=scaling), x, w)
    expected = (
        product(x, E4M3, w, E4M3),
        product(g, gradient, w.mT, E4M3),
        product(g.mT, gradient, x.mT, E4M3),
    )
    for actual, want in zip((y, *back(g)), expected, strict=True):
        assert (actual.double() - want).norm() <= 1e-5 * want.norm()


@examples(20, 100)
@given(dtype=DTYPES, scaling=SCALINGS, seed=SEEDS, lead=st.sampled_from([(), (5,), (2, 3)]))
def test_float8_linear_takes_leading_dimensions_and_a_bias(dtype, scaling, seed, lead):
    x, w, b = spread((*lead, 32), seed, dtype), spread((16, 32), 1, dtype), spread((16,), 2, dtype)
    y = float8_linear(x, w, b, scaling=scaling)
    assert (y.shape, y.dtype) == (F.linear(x, w, b).shape, dtype)
    assert torch.equal(y, (float8_linear(x.reshape(-1, 32), w, scaling=scaling) + b).view(y.shape))
    of_bias = torch.func.grad(lambda b: float8_linear(x, w, b, scaling=scaling).float().sum())(b)
    assert torch.equal(of_bias, torch.full_like(b, math.prod(lead)))


@examples(10, 50)
@given(scaling=SCALINGS, seed=SEEDS, in_dims=st.sampled_from([(0, None), (None, 0), (0, 0), (1, 2)]))
def test_vmap_of_a_float8_product_equals_a_loop_bit_for_bit(scaling, seed, in_dims):
    sizes = [(5, 32), (16, 32)]
    args = [
        spread(s if d is None else (*s[:d], 3, *s[d:]), seed + i)
        for i, (s, d) in enumerate(zip(sizes, in_dims, strict=True))
    ]
    take = torch.func.grad(lambda x, w: float8_linear(x, w, scaling=scaling).tanh().sum(), (0, 1))
    mapped = torch.vmap(take, in_dims)(*args)
    for i in range(3):
        sample = [x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)]
        assert all(torch.equal(x[i], y) for x, y in zip(mapped, take(*sample), strict=True))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("m", [40, 48])
def test_second_derivatives_of_a_float8_product_are_near_the_exact_ones(scaling, m):
    x, w = spread((m, 64), 0, decades=0), spread((48, 64), 1, decades=0) / 8

    def penalty(f: Any) -> Any:
        grads = torch.func.grad(lambda x, w: f(x, w).tanh().sum(), (0, 1))
        return torch.func.grad(lambda x, w: sum(g.square().sum() for g in grads(x, w)), (0, 1))(x, w)

    for actual, exact in zip(
        penalty(lambda x, w: float8_linear(x, w, scaling=scaling)), penalty(F.linear), strict=True
    ):
        assert (actual - exact).norm() < 0.15 * exact.norm()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_products_of_zeros_are_zero_and_empty_ones_empty(scaling):
    w = spread((16, 32), 0)
    take = vjp(lambda x, w: float8_linear(x, w, scaling=scaling), torch.zeros(3, 32), w)
    assert not take[0].any()
    of_x, of_w = take[1](torch.zeros(3, 16))
    assert not of_x.any() and not of_w.any()
    y, back = vjp(lambda x, w: float8_linear(x, w, scaling=scaling), torch.zeros(2, 0, 32), w)
    assert y.shape == (2, 0, 16)
    of_x, of_w = back(y)
    assert of_x.shape == (2, 0, 32) and of_w.shape == w.shape and not of_w.any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_nonfinite_number_makes_all_numbers_of_its_scale_nan(value, scaling):
    """A loss scale then finds it. A cast alone would make infinity the largest code."""
    x, w = spread((3, 32), 0), spread((16, 32), 1)
    x[1, 5] = value
    y = float8_linear(x, w, scaling=scaling)
    assert y[1].isnan().all() and (scaling == "rowwise" or y.isnan().all())
    assert scaling == "tensorwise" or y[::2].isfinite().all()
    of_x, of_w = vjp(lambda x, w: float8_linear(x, w, scaling=scaling), spread((3, 32), 0), w)[1](
        torch.full((3, 16), value)
    )
    assert of_x.isnan().all() and of_w.isnan().all()


@examples(20, 100)
@given(power=st.integers(-100, 60), scaling=SCALINGS)
def test_scaling_an_operand_by_a_power_of_two_scales_the_float8_product(power, scaling):
    """Scales are powers of two: what is multiplied by one has the same codes."""
    x, w = spread((5, 32), 0), spread((16, 32), 1)
    y = float8_linear(x * 2.0**power, w, scaling=scaling)
    assert torch.equal(y, float8_linear(x, w, scaling=scaling) * 2.0**power)


@pytest.mark.parametrize("shape", [(24, 32), (32, 24)])
def test_the_error_of_float8_linear_names_sizes_that_16_does_not_divide(shape):
    with pytest.raises(ValueError, match=re.escape(f"weight is {list(shape)}: expected multiples of 16")):
        float8_linear(torch.ones(2, shape[1]), torch.ones(shape))


@pytest.mark.parametrize(
    "changed,error,message",
    [
        ({"scaling": "blockwise"}, ValueError, "scaling='blockwise': expected 'tensorwise' or 'rowwise'"),
        ({"x": torch.ones(2, 16)}, ValueError, "x is [2, 16], and weight [16, 32]: expected [.., k] and [n, k]"),
        ({"bias": torch.ones(3)}, ValueError, "bias is [3]: expected [16]"),
        ({"x": torch.ones(2, 32, dtype=torch.bfloat16)}, TypeError, "x is torch.bfloat16, and weight torch.float32"),
        ({"x": torch.ones(2, 32).double(), "weight": torch.ones(16, 32).double()}, TypeError, "x is torch.float64"),
        ({"bias": torch.ones(16).double()}, TypeError, "x is torch.float32, and bias torch.float64"),
    ],
)
def test_wrong_arguments_of_float8_linear_are_refused(changed, error, message):
    arguments: Any = {"x": torch.ones(2, 32), "weight": torch.ones(16, 32), **changed}
    with pytest.raises(error, match=re.escape(message)):
        float8_linear(**arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where it loads its decompositions
def test_forward_mode_through_a_float8_product_is_refused():
    x, w = torch.ones(2, 32), torch.ones(16, 32)
    with pytest.raises(NotImplementedError, match="float8 products have no forward-mode derivative"):
        torch.func.jvp(lambda x: float8_linear(x, w), (x,), (x,))


NO_ROWS = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 has no rowwise product on a CPU")


@pytest.mark.parametrize("scaling", ["tensorwise", pytest.param("rowwise", marks=NO_ROWS)])
@pytest.mark.parametrize("m", [5, 16])
def test_every_product_has_a_form_that_cards_multiply(scaling, m):
    """Row-major times column-major, sizes of 16, at most one factor in e5m2; also in derivatives of gradients.

    Only products of the forward pass add in fewer bits.
    """

    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        y, back = vjp(lambda x, w: float8_linear(x, w, scaling=scaling), x, w)
        return y, back(y.tanh())

    second = torch.func.grad(lambda x, w: sum(g.square().sum() for g in gradients(x, w)[1]), (0, 1))
    args = spread((m, 32), 0), spread((48, 32), 1)
    graph = make_fx(lambda x, w: (gradients(x, w), second(x, w)), tracing_mode="fake")(*args).graph
    products = [n for n in graph.nodes if n.target is torch.ops.aten._scaled_mm.default]
    assert len(products) > 9
    for i, node in enumerate(products):
        a, b, scale_a, scale_b = [n.meta["val"] for n in node.args[:4]]
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert not any(size % 16 for size in (a.shape[1], *b.shape))
        assert {a.dtype, b.dtype} != {E5M2} and (scaling == "tensorwise" or {a.dtype, b.dtype} == {E4M3})
        sizes = (torch.Size(()),) * 2 if scaling == "tensorwise" else ((a.shape[0], 1), (1, b.shape[1]))
        assert (scale_a.shape, scale_b.shape) == sizes and scale_a.is_contiguous() and scale_b.is_contiguous()
        if i < 3:
            assert len(node.args) == (8 if i == 0 else 7)  # the eighth argument is `use_fast_accum`


def test_a_gradient_that_nobody_asks_for_is_not_computed():
    """A frozen weight, as LoRA has, or an input that is data."""
    x, w, g = spread((16, 32), 0), spread((48, 32), 1), spread((16, 48), 2)
    for f in (
        lambda x, w, g: vjp(lambda x: float8_linear(x, w), x)[1](g),
        lambda x, w, g: vjp(lambda w: float8_linear(x, w), w)[1](g),
    ):
        graph = make_fx(f, tracing_mode="fake")(x, w, g).graph
        assert sum(n.target is torch.ops.aten._scaled_mm.default for n in graph.nodes) == 2


def test_a_traced_step_keeps_the_codes_of_the_input_and_not_the_input():
    """The backward pass reads a byte for each number of x. It reads the weight, which may be gathered again."""
    graph = make_fx(lambda x, w, g: vjp(float8_linear, x, w)[1](g))(
        spread((16, 32), 0), spread((48, 32), 1), spread((16, 48), 2)
    ).graph
    nodes = list(graph.nodes)
    x, w, _ = nodes[:3]
    first = next(i for i, n in enumerate(nodes) if n.target is torch.ops.aten._scaled_mm.default)

    def late(node: Any) -> list[Any]:
        views, users = [node], []
        while views:
            for user in views.pop().users:
                is_view = getattr(user.target, "is_view", False)
                (views if is_view else users).append(user)
        return [u for u in users if nodes.index(u) > first]

    assert not late(x) and late(w)


def layer_loss(params: Any, x: torch.Tensor, scaling: str) -> torch.Tensor:
    """Two layers and a tanh."""
    return float8_linear(
        torch.tanh(float8_linear(x, params["up"], scaling=scaling)), params["down"], scaling=scaling
    ).mean()


PARAMS = {"up": spread((48, 32), 3), "down": spread((16, 48), 4)}


@examples(16, 64)
@given(n=st.integers(1, 8), scaling=SCALINGS, seed=SEEDS)
def test_a_gathered_weights_product_does_not_depend_on_the_number_of_ranks(n, scaling, seed):
    """A shard may begin anywhere in the weight; the scale is the whole weight's."""
    x, w = spread((5, 32), seed), spread((48, 32), seed + 1)
    mesh = fzero.mesh(dp=n)
    y = mesh.spmd(lambda w: float8_linear(x, fzero.gather(fzero.partition({"w": w}))["w"], scaling=scaling))(w)
    assert torch.equal(y, float8_linear(x, w, scaling=scaling))


@examples(10, 50)
@given(n=st.integers(1, 8), block=st.sampled_from([16, 100, 256]), seed=SEEDS, scaling=SCALINGS)
def test_a_weight_that_is_sent_in_float8_is_rounded_once(n, block, seed, scaling):
    """The codec's scales are powers of two, as the product's: what it sends, the product does not round again.

    So training with `Precision(gather=float8())` beside float8 products has the numbers of these products alone. A
    weight that is far smaller than its block's largest is rounded more coarsely.
    """
    w = spread((48, 32), seed, decades=1)
    coarse = w.abs() < w.abs().max() / 8192
    coded = torch.where(coarse, w, fzero.codecs.float8(block=block).round(w))
    x, mesh = spread((5, 32), seed + 1), fzero.mesh(dp=n)
    y = mesh.spmd(lambda w: float8_linear(x, fzero.gather(fzero.partition({"w": w}))["w"], scaling=scaling))(coded)
    assert torch.equal(y, float8_linear(x, w, scaling=scaling))


STAGES = cases([(0, 2), (1, 3), (2, 4), (3, 5), (3, 8)], [(s, n) for s in range(4) for n in range(1, 9)])


@pytest.mark.parametrize("stage,n", STAGES)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_training_at_every_stage_equals_unsharded(stage, n, scaling):
    """All ranks have the same examples, so all scales are those of the unsharded step.

    A rank's gradient is divided by the number of ranks before it is rounded, so the unsharded step divides it, too.
    """
    opt = fzero.optim.sgd(1e-2)

    def make(parts: int) -> Any:
        def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
            loss, grads = fzero.value_and_grad(lambda p, x: layer_loss(p, x, scaling) / parts)(params, x)
            grads = fzero.tree.map(lambda g: g * parts, grads)
            updates, opt_state = opt.update(grads, opt_state, params)
            return fzero.optim.apply_updates(params, updates), opt_state, loss * parts

        return train_step

    step, x = fzero.shard(make(1), stage=stage, mesh=fzero.mesh(dp=n)), spread((5, 32), n)
    params, _, loss = step(*step.init(PARAMS, opt), step.mesh.split(x.repeat(n, 1)))
    expected, _, expected_loss = make(n)(PARAMS, opt.init(PARAMS), x)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-7)
    for name, p in step.gather(params).items():
        torch.testing.assert_close(p - PARAMS[name], expected[name] - PARAMS[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage,backend", [(3, "fx"), pytest.param(1, "inductor", marks=pytest.mark.slow)])
def test_a_jitted_float8_step_equals_the_eager_one(stage, backend):
    opt = fzero.optim.sgd(1e-2)

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: layer_loss(p, x, "tensorwise"), micro_batches=2)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(dp=2))
    jitted = fzero.jit(step, backend=backend)
    x = step.mesh.split(spread((8, 32), 0))
    want, actual = step(*step.init(PARAMS, opt), x), jitted(*step.init(PARAMS, opt), x)
    torch.testing.assert_close(step.gather(actual[0]), step.gather(want[0]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual[2], want[2], rtol=1e-5, atol=1e-6)
