"""Laws of grouped products: they are a loop over experts, and each other's gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.parallel import experts as moe
from tests.helpers import examples

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


@st.composite
def problems(draw):
    """Rows, matrices, offsets: experts without rows, rows behind the last end, no row at all."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=4))
    behind, d, f = draw(st.sampled_from([0, 3])), draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 8, 16]))
    dtype = draw(DTYPES)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    n = sum(counts) + behind
    return normal(n, d), normal(len(counts), d, f), normal(n, f), torch.tensor(counts).cumsum(0)


def multiply_by_loop(x, w, offsets):
    y = x.new_zeros(len(x), w.shape[2])
    for e, (start, end) in enumerate(zip([0, *offsets.tolist()[:-1]], offsets.tolist(), strict=True)):
        y[start:end] = x[start:end] @ w[e]
    return y


def outer_by_loop(x, y, offsets):
    parts = zip([0, *offsets.tolist()[:-1]], offsets.tolist(), strict=True)
    return torch.stack([x[start:end].mT @ y[start:end] for start, end in parts])


def close(a, b):
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[a.dtype]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item() if len(b) else 1))


@examples(40, 80)
@given(problems())
def test_grouped_products_are_loops_over_experts(problem):
    x, w, y, offsets = problem
    close(moe.grouped_mm(x, w, offsets), multiply_by_loop(x, w, offsets))
    close(moe.grouped_mm(y, w.mT, offsets), multiply_by_loop(y, w.mT, offsets))
    close(moe.grouped_outer(x, y, offsets), outer_by_loop(x, y, offsets))


@examples(15, 30)
@given(problems())
def test_the_gradients_of_grouped_products_are_grouped_products(problem):
    x, w, y, offsets = [v.double() if v.is_floating_point() else v for v in problem]

    def dot(f, *args):
        return torch.func.grad(lambda *args: (torch.sin(f(*args, offsets)) * 0.5).sum(), tuple(range(len(args))))(*args)

    for f, loop, args in ((moe.grouped_mm, multiply_by_loop, (x, w)), (moe.grouped_outer, outer_by_loop, (x, y))):
        plain = [a.clone().requires_grad_() for a in args]
        expected = torch.autograd.grad((torch.sin(loop(*plain, offsets)) * 0.5).sum(), plain)
        for mine, theirs in zip(dot(f, *args), expected, strict=True):
            close(mine, theirs)
        tangents = tuple([torch.cos(a) for a in args])
        got = torch.func.jvp(lambda *args, f=f: f(*args, offsets), args, tangents)[1]
        close(
            got,
            torch.func.jvp(lambda *args, loop=loop: add_products(loop, *args, offsets=offsets), args, tangents)[1],
        )


def add_products(loop, x, y, offsets):
    """The loop without writes, which forward mode needs."""
    if loop is outer_by_loop:
        return outer_by_loop(x, y, offsets)
    starts = zip([0, *offsets.tolist()[:-1]], offsets.tolist(), strict=True)
    behind = x[int(offsets[-1]) :] @ torch.zeros_like(y[0])
    return torch.cat([x[start:end] @ y[e] for e, (start, end) in enumerate(starts)] + [behind])


@pytest.mark.parametrize("f", [moe.grouped_mm, moe.grouped_outer])
def test_gradients_of_gradients_pass_gradgradcheck(f):
    g = torch.Generator().manual_seed(0)
    offsets = torch.tensor([2, 2, 5])
    x = torch.randn(6, 2, generator=g, dtype=torch.float64, requires_grad=True)
    y = torch.randn(*((3, 2, 3) if f is moe.grouped_mm else (6, 3)), generator=g, dtype=torch.float64)
    y.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: f(x, y, offsets), (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: f(x, y, offsets), (x, y))


def test_under_vmap_each_sample_of_a_grouped_product_has_its_own_offsets():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 6, 2, generator=g), torch.randn(2, 2, 4, generator=g)
    offsets = torch.tensor([[0, 6], [2, 4], [6, 6]])
    got = torch.vmap(moe.grouped_mm, in_dims=(0, None, 0))(x, w, offsets)
    for i in range(3):
        torch.testing.assert_close(got[i], multiply_by_loop(x[i], w, offsets[i]))


def test_a_plan_counts_the_flops_of_grouped_products():
    """The rows are those that even routing gives, not the room for all."""
    graph = make_fx(lambda x, w, offsets: moe.grouped_mm(x, w, offsets, expected_rows=10), tracing_mode="fake")(
        torch.ones(40, 8), torch.ones(4, 8, 16), torch.tensor([1, 2, 3, 4])
    ).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [torch.ops.fzero.grouped_mm.default]
    step = fzero.jit(lambda x, w, offsets: (moe.grouped_mm(x, w, offsets, 10), moe.grouped_outer(x, x, offsets)))
    plan = step.plan(torch.ones(40, 8), torch.ones(4, 8, 16), torch.tensor([1, 2, 3, 4]))
    assert sorted(o.flops for o in plan.operations if o.flops) == [2 * 10 * 8 * 16, 2 * 40 * 8 * 8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_after_the_last_offset_of_a_grouped_product_are_zero(dtype):
    """Whatever they hold, a nan too."""
    x, w, offsets = torch.ones(6, 8, dtype=dtype), torch.ones(2, 8, 16, dtype=dtype), torch.tensor([1, 4])
    x[4:] = torch.nan
    y = moe.grouped_mm(x, w, offsets)
    assert not y[4:].any() and (y[:4] == 8).all()
    assert torch.equal(
        moe.grouped_outer(x, y, offsets), torch.stack([torch.full((8, 16), 8 * n, dtype=dtype) for n in (1, 3)])
    )


def test_grouped_products_take_unaligned_weights():
    buffer = torch.randn(1 + 2 * 8 * 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, offsets = torch.ones(3, 8).bfloat16(), torch.tensor([1, 3])
    w = buffer[1:].view(2, 8, 8)
    for weights in (w, w.mT):
        close(moe.grouped_mm(x, weights, offsets), multiply_by_loop(x, weights, offsets))


def test_offsets_of_a_grouped_product_may_lie_in_host_memory():
    """On a GPU one copy serves all products of a layer, and no check of memories refuses it."""
    rows, weights = torch.ones(3, 1), torch.tensor([[[10.0]], [[20.0]]])

    def loss(weights, rows, offsets):
        return moe.grouped_mm(rows, weights, fzero.collectives.to_host(offsets)).sum()

    step = fzero.jit(torch.func.grad(loss), backend="fx")
    assert step(weights, rows, torch.tensor([1, 3])).flatten().tolist() == [1, 2]
