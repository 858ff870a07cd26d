"""remat: the numbers of the plain block in every world, with less memory."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import fzero
from fzero import tree
from fzero.testing import assert_trees_close
from tests.helpers import cases
from tests.transforms.helpers import SAVES, block, inputs, loss_of, ops


def over_rows(f: Any) -> Any:
    return lambda p, x: vmap(f, (None, 0))(p, x[:, None])


DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: grad(f, argnums=(0, 1)),
    "grad of grad": lambda f: grad(lambda p, x: sum(g.square().sum() for g in grad(f)(p, x).values()), (0, 1)),
    "hessian": hessian,
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, argnums=1)),
    "jacfwd": lambda f: jacfwd(f, argnums=1),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "per-sample gradients": lambda f: over_rows(grad(f)),
    "gradient of a vmap": lambda f: grad(lambda p, x: over_rows(f)(p, x).square().sum()),
    "per-sample hessian": lambda f: over_rows(hessian(f)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("save", SAVES)
def test_derivatives_of_a_block_under_remat_equal_the_plain_ones(save, derivative):
    p, x = inputs(2)
    assert_trees_close(derivative(loss_of(fzero.remat(block, save)))(p, x), derivative(loss_of(block))(p, x))


@pytest.mark.parametrize("name", DERIVATIVES)
def test_activations_offloaded_to_the_host_have_all_derivatives(name):
    """It was computed, so it moves; a second derivative is one of the copy, too."""

    def after(f: Any) -> Any:
        return DERIVATIVES[name](lambda p, x: loss_of(f)(p, (x * p["w"][:, 0]).tanh()))

    p, x = inputs(2)
    f = after(fzero.remat(block, "host"))
    assert_trees_close(f(p, x), after(block)(p, x))
    assert ("fzero::to_host" in ops(f, p, x)) == (name not in ("value", "jacfwd", "jacfwd of jacfwd"))


def test_plain_autograd_differentiates_offloaded_activations_twice():
    p, x = inputs()

    def twice(f: Any) -> Any:
        own = {k: v.clone().requires_grad_() for k, v in p.items()}
        (g,) = torch.autograd.grad(loss_of(f)(own, (x * own["w"][:, 0]).tanh()), own["w"], create_graph=True)
        return torch.autograd.grad(g.square().sum(), own["w"])

    assert_trees_close(twice(fzero.remat(block, "host")), twice(block))


def test_parameters_and_python_numbers_are_not_offloaded():
    p, x = inputs()
    assert "fzero::to_host" not in ops(grad(loss_of(fzero.remat(block, "host"))), p, x)
    f = fzero.remat(lambda p, x, scale: torch.tanh(x @ p["w"]) * scale, "host")
    assert "fzero::to_host" not in ops(grad(lambda p: f(p, x, p["w"].sum()).sum()), p)

    def run_boxed(p: Any) -> Any:
        return loss_of(fzero.remat(block, "host"))(fzero.partition(tree.map(lambda w: w * 1, p)), x)

    program = fzero.mesh(dp=1).spmd(lambda p: fzero.PerRank(grad(run_boxed)(p)))
    assert "fzero::to_host" not in ops(program, p)


@pytest.mark.parametrize("save", SAVES)
def test_tangents_of_a_block_under_remat_equal_the_plain_ones(save):
    p, x = inputs()
    ys = [jvp(lambda p, x, f=f: f(p, x)["y"], (p, x), (p, x)) for f in (fzero.remat(block, save), block)]
    assert_trees_close(*ys)


def test_results_of_a_block_under_remat_keep_their_structure():
    p, x = inputs()
    y = fzero.remat(lambda p, x: {**block(p, x), "twice": (x, x), "index": x.argmax()})(p, x)
    assert y["layers"] == 1 and y["none"] is None and y["twice"][0] is y["twice"][1] and y["index"] == x.argmax()


@pytest.mark.parametrize("save", SAVES)
def test_remat_has_the_gradients_of_plain_autograd(save):
    p, x = inputs()
    expected = grad(loss_of(block))(p, x)
    own = {k: v.clone().requires_grad_() for k, v in p.items()}
    loss_of(fzero.remat(block, save))(own, x).backward()
    assert_trees_close({k: v.grad for k, v in own.items()}, expected)
    (g,) = torch.autograd.grad(loss_of(fzero.remat(block, save))(own, x), own["w"], create_graph=True)
    twice = grad(lambda p: grad(loss_of(block))(p, x)["w"].square().sum())(p)["w"]
    assert_trees_close(torch.autograd.grad(g.square().sum(), own["w"])[0], twice)


@pytest.mark.parametrize(
    "outer,inner", cases(zip(SAVES, reversed(SAVES), strict=True), itertools.product(SAVES, SAVES))
)
def test_nested_remat_has_the_gradient_of_the_plain_function(outer, inner):
    def two(f):
        return lambda p, x, scale: f(p, f(p, x, scale)["y"], scale)

    p, x = inputs()
    recomputed, plain = loss_of(fzero.remat(two(fzero.remat(block, inner)), outer)), loss_of(two(block))
    assert_trees_close(grad(recomputed)(p, x), grad(plain)(p, x))


def test_tied_parameters_of_a_block_under_remat_stay_tied():
    def tied(p, x):
        assert p["w"] is p["again"] and p["w"] is not p["b"]
        return torch.tanh(x @ p["w"]) @ p["again"].T

    p, x = inputs()

    def loss(f):
        return lambda p, x: f({"w": p["w"], "again": p["w"], "b": p["b"]}, x).square().sum()

    assert_trees_close(grad(loss(fzero.remat(tied)))(p, x), grad(loss(tied))(p, x))


def test_a_block_under_remat_reruns_under_the_calls_autocast():
    p, x = inputs()
    p, x = {k: v.float() for k, v in p.items()}, x.float()

    def loss(f):
        def inside(p, x):
            with torch.autocast("cpu", torch.bfloat16):
                return f(p, x)["y"].float().square().sum()

        return inside

    assert_trees_close(grad(loss(fzero.remat(block)))(p, x), grad(loss(block))(p, x), rtol=0)


CORNERS = {
    "an input as it is": lambda w, x: (w, x * w),
    "a view": lambda w, x: w.T * x,
    "an unused input": lambda w, x: w * 2,
    "an unused output": lambda w, x: (w * x, x),
    "integers": lambda w, x: (torch.eye(2, dtype=w.dtype)[(x > 0).long()[0]] @ w[:2], x.argmax()),
    "a gradient inside": lambda w, x: grad(lambda x: torch.tanh(x @ w).sum())(x),
    "products that fold": lambda w, x: torch.tanh(x[None].transpose(1, 2) @ w),
    "a convolution": lambda w, x: F.conv2d(x[None, None], w[None, None, :2, :2]),
    "attention": lambda w, x: F.scaled_dot_product_attention((x @ w)[None], x[None], w[None], is_causal=True),
    "statistics of the batch": lambda w, x: F.batch_norm(x @ w, None, None, training=True),
    "complex numbers": lambda w, x: torch.complex(w, x).square().abs(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch 2.15, of any vmap of attention
@pytest.mark.parametrize("f", CORNERS.values(), ids=CORNERS)
def test_blocks_with_unusual_arguments_and_results_have_the_same_gradients(f):
    p, x = inputs(4)

    def loss(f):
        return lambda w, x: sum([y.pow(3).sum() for y in fzero.tree.tensors(f(w, x))])

    for save in SAVES:
        plain, again = loss(f), loss(fzero.remat(f, save))
        assert_trees_close(grad(again, (0, 1))(p["w"], x), grad(plain, (0, 1))(p["w"], x))
        xs = torch.stack([x, x + 1])
        assert_trees_close(vmap(grad(again), (None, 0))(p["w"], xs), vmap(grad(plain), (None, 0))(p["w"], xs))


def test_the_backward_pass_of_a_block_under_remat_may_run_twice():
    w = inputs()[0]["w"].requires_grad_()
    y = fzero.remat(lambda w: F.dropout(w.sin(), 0.5), "matmuls")(w).sum()
    first, second = [torch.autograd.grad(y, w, retain_graph=True)[0] for _ in range(2)]
    assert first.equal(second)


def test_a_block_under_remat_computes_no_gradient_that_is_not_needed():
    p, x = inputs()
    f = fzero.remat(lambda w, v, x: torch.tanh(x @ w) @ v)

    def loss(w, v):
        return f(w, v, x).sum()

    assert ops(grad(loss, (0, 1)), p["w"], p["w"] + 1)["mm"] == 2 + 2 + 3
    assert ops(grad(loss, 1), p["w"], p["w"] + 1)["mm"] == 2 + 2 + 1
    wanted = p["w"].clone().requires_grad_()
    assert ops(lambda: loss(p["w"], wanted).backward())["mm"] == 2 + 2 + 1


def test_saved_results_are_not_computed_again():
    p, x = inputs()
    counts = {save: ops(grad(loss_of(fzero.remat(block, save))), p, x) for save in SAVES}
    none, matmuls, host, tanhs = counts.values()
    assert (none["mm"], matmuls["mm"], host["mm"], tanhs["mm"]) == (3, 2, 3, 3)
    assert (none["tanh"], matmuls["tanh"], host["tanh"], tanhs["tanh"]) == (2, 2, 2, 1)


def test_a_saved_result_may_be_written_into():
    def writes(p, x):
        y = x @ p["w"]
        y.add_(p["b"]).mul_(2)
        return torch.tanh(y)

    p, x = inputs()
    for save in SAVES:
        assert_trees_close(*[grad(lambda p, f=f: f(p, x).pow(3).sum())(p) for f in (fzero.remat(writes, save), writes)])


def test_wrong_values_of_remats_save_option_are_refused():
    with pytest.raises(ValueError, match="save='all': expected None"):
        fzero.remat(block, "all")
    with pytest.raises(ValueError, match="save=3: expected None"):
        fzero.remat(block, 3)  # pyright: ignore[reportArgumentType]


def test_a_compiled_step_with_remat_equals_the_eager_one():
    p, x = inputs()
    step = torch.compile(lambda p, x: grad(loss_of(fzero.remat(block)))(p, x), fullgraph=True, backend="aot_eager")
    assert_trees_close(step(p, x), grad(loss_of(block))(p, x))


@pytest.mark.slow
def test_nested_blocks_under_remat_run_no_garbage_collection(monkeypatch):
    """An outer block holds what an inner one has computed; a collection takes a second where there are many objects."""
    monkeypatch.setattr("gc.collect", None)
    p, x = inputs()
    inner = fzero.remat(block)
    outer = fzero.remat(lambda p, x, scale: inner(p, inner(p, x, scale)["y"], scale), "matmuls")
    assert grad(loss_of(outer))(p, x)["w"].abs().sum() > 0


def test_writing_into_a_result_does_not_reach_an_argument():
    def gradient(f: Any) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            y, z = f(torch.tensor(3.0), x)
            return (y.add_(x) * z).sum() + x.sum()

        return grad(loss)(torch.ones(2))

    plain = gradient(lambda p, x: (x.clone(), x * p))
    assert torch.equal(gradient(fzero.remat(lambda p, x: (x, x * p))), plain)
    assert torch.equal(gradient(fzero.remat(lambda p, x: (x.view(2), x * p))), plain)


def attention(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Attend with a bias that is a parameter, as T5 does."""
    q, k, v = [(x @ p[name]).unflatten(-1, (2, -1)).transpose(-2, -3) for name in "qkv"]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=p["bias"]).transpose(-2, -3).flatten(-2)


@pytest.mark.parametrize("save", [None, "matmuls"])
def test_attention_under_remat_with_a_trained_mask_equals_the_plain_one(save):
    """Torch chooses another kernel where the mask needs a gradient, as in the second run."""
    torch.manual_seed(0)
    params = {name: torch.randn(8, 8) for name in "qkv"} | {"bias": torch.randn(1, 2, 5, 5)}
    x = torch.randn(3, 5, 8)

    def check(f: Any) -> None:
        plain = grad(lambda p: attention(p, x).square().sum())(params)
        assert_trees_close(grad(lambda p: f(p, x).square().sum())(params), plain)
        wanted = {name: p.clone().requires_grad_() for name, p in params.items()}
        f(wanted, x).square().sum().backward()
        assert_trees_close({name: p.grad for name, p in wanted.items()}, plain)

    counted = ops(check, fzero.remat(attention, save))
    assert ("_scaled_dot_product_flash_attention_for_cpu" in counted) == (save is None) and counted["bmm"]
