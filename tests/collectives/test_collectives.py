"""Laws of the collectives: what they compute, their transposes, and how they meet torch.func's transforms."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import PerRank
from tests.collectives.helpers import COLLECTIVES, draw_stacked, simulations
from tests.helpers import examples


def on_ranks(n: int, f: Callable[..., torch.Tensor], *xs: torch.Tensor, simulate: str = "vmap") -> torch.Tensor:
    """Run a rank program on stacked inputs; returns every rank's result, stacked."""
    mesh = fzero.mesh(dp=n, simulate=simulate)
    return mesh.spmd(lambda *xs: PerRank(f(*xs)))(*[PerRank(x) for x in xs]).value


# hypothesis tries the first first, so that a law with one example meets ranks whose results differ
RANKS = st.sampled_from([3, 2, 5, 1, 4, 8, 6, 7])
FEW_RANKS = st.sampled_from([3, 2, 4, 1])
each_collective = pytest.mark.parametrize("name", sorted(COLLECTIVES))


@each_collective
@examples(5, 10)
@given(n=RANKS, seed=st.integers(0, 9), simulate=simulations)
def test_a_collective_equals_its_formula_on_stacked_inputs(name, n, seed, simulate):
    f, shape, expected = COLLECTIVES[name]
    X = draw_stacked(n, *shape(n), seed=seed)
    torch.testing.assert_close(on_ranks(n, f, X, simulate=simulate), expected(X).contiguous())


@each_collective
@examples(1, 4)
@given(n=FEW_RANKS)
def test_a_collective_in_lockstep_equals_vmap_bit_for_bit(name, n):
    """The collective, its gradient, second gradient, jvp, per-sample gradient and inner vmap."""
    f, shape, _ = COLLECTIVES[name]
    X = draw_stacked(n, 3, *shape(n))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (torch.sin(f(x)) ** 2).sum()

    for program in (
        lambda x: torch.func.grad(loss)(x[0]),
        lambda x: torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum())(x[0]),
        lambda x: torch.func.jvp(f, (x[0],), (x[1],))[1],
        lambda x: torch.vmap(torch.func.grad(loss))(x),
        lambda x: torch.vmap(f, in_dims=-1)(x.movedim(0, -1)),
    ):
        got, expected = (on_ranks(n, program, X, simulate=s) for s in ("lockstep", "vmap"))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@each_collective
@examples(3, 10)
@given(n=RANKS, seed=st.integers(0, 9))
def test_the_transpose_of_a_collective_passes_the_dot_product_test(name, n, seed):
    """<A x, y> = <x, A^T y>, where A^T y is what torch.func.vjp gives inside the rank program."""
    f, shape, _ = COLLECTIVES[name]
    X = draw_stacked(n, *shape(n), seed=seed)
    Y = torch.randn_like(on_ranks(n, f, X))
    transposed = on_ranks(n, lambda x, y: torch.func.vjp(f, x)[1](y)[0], X, Y)
    left, right = (on_ranks(n, f, X) * Y).sum(), (X * transposed).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@each_collective
@examples(3, 6)
@given(n=RANKS)
def test_a_gradient_inside_a_rank_program_equals_the_gradient_of_the_simulation(name, n):
    """grad inside is d(sum over ranks of the loss) / d(own input): what differentiating the simulation gives."""
    f, shape, _ = COLLECTIVES[name]
    X = draw_stacked(n, *shape(n))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(f(torch.cos(x))).sum()

    inside = on_ranks(n, torch.func.grad(loss), X)
    outside = torch.func.grad(lambda X: on_ranks(n, loss, X).sum())(X)
    torch.testing.assert_close(inside, outside, rtol=1e-12, atol=1e-12)


@each_collective
@examples(3, 6)
@given(n=RANKS)
def test_the_jvp_of_a_collective_is_the_collective_of_the_tangent(name, n):
    f, shape, _ = COLLECTIVES[name]
    X, T = draw_stacked(n, *shape(n)), draw_stacked(n, *shape(n), seed=1)
    torch.testing.assert_close(on_ranks(n, lambda x, t: torch.func.jvp(f, (x,), (t,))[1], X, T), on_ranks(n, f, T))


@each_collective
@examples(2, 4)
@given(n=RANKS, b=st.sampled_from([2, 1, 3]))
def test_an_inner_vmap_is_not_taken_for_the_axis(name, n, b):
    """vmap(f) inside a rank program equals f on each sample, also when the sizes are equal."""
    f, shape, _ = COLLECTIVES[name]
    for size in {b, n}:
        X = draw_stacked(n, size, *shape(n))
        got = on_ranks(n, torch.vmap(f), X)
        one_by_one = [on_ranks(n, f, X[:, i]) for i in range(size)]
        torch.testing.assert_close(got, torch.stack(one_by_one, 1))
        moved = on_ranks(n, torch.vmap(f, in_dims=-1, out_dims=0), X.movedim(1, -1))
        torch.testing.assert_close(moved, got)


@each_collective
@examples(1, 3)
@given(n=FEW_RANKS)
def test_vmap_gives_the_gradient_of_each_sample(name, n):
    f, shape, _ = COLLECTIVES[name]
    X = draw_stacked(n, 3, *shape(n))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(f(x)).sum()

    got = on_ranks(n, torch.vmap(torch.func.grad(loss)), X)
    one_by_one = [on_ranks(n, torch.func.grad(loss), X[:, i]) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(one_by_one, 1))


@each_collective
@examples(1, 3)
@given(n=FEW_RANKS)
def test_a_gradient_of_a_gradient_is_that_of_stacked_ranks(name, n):
    f, shape, _ = COLLECTIVES[name]
    X = draw_stacked(n, *shape(n))

    def norm_of_gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (f(x) ** 3).sum())(x).square().sum()

    inside = on_ranks(n, torch.func.grad(norm_of_gradient), X)
    outside = torch.func.grad(lambda X: on_ranks(n, norm_of_gradient, X).sum())(X)
    torch.testing.assert_close(inside, outside, rtol=1e-10, atol=1e-10)


@each_collective
@examples(1, 2)
@given(n=FEW_RANKS)
def test_make_fx_traces_a_collective_and_its_gradient(name, n):
    f, shape, _ = COLLECTIVES[name]

    def g(X: torch.Tensor) -> torch.Tensor:
        return on_ranks(n, torch.func.grad(lambda x: torch.sin(f(x)).sum()), X)

    X = draw_stacked(n, *shape(n))
    graph = make_fx(g)(torch.zeros_like(X))
    torch.testing.assert_close(graph(X), g(X), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8])
@each_collective
def test_a_collective_keeps_the_dtype(name, dtype):
    f, shape, _ = COLLECTIVES[name]
    assert on_ranks(3, f, torch.ones(3, *shape(3)).to(dtype)).dtype == dtype


# public functions that no row of COLLECTIVES has: laws of their own say what they compute
OTHERS = {
    name: getattr(fzero.collectives, name) for name in ("psum_invariant", "pvary", "all_gather_invariant", "to_host")
}
OTHERS |= {
    "to_device": lambda x: fzero.collectives.to_device(x, "cpu"),
    "send": lambda x: fzero.collectives.send(x, 0, "dp"),
    "receive": lambda x: fzero.collectives.receive(x, 0, "dp"),
    "receive, the ticket": lambda x: fzero.collectives.receive(
        torch.ones(()), 1 - int(fzero.axes.axis_index()), "dp", ticket=x
    ),
}


@pytest.mark.parametrize("value", [1.0, {"a": 1.0}, "box"], ids=["float", "dict", "box"])
@pytest.mark.parametrize("name", sorted([*COLLECTIVES, *OTHERS]))
def test_a_collective_refuses_all_but_tensors(name, value):
    """It does so within a mesh, and outside of any, where most collectives are the identity."""
    mesh = fzero.mesh(dp=2, simulate="lockstep")
    f = COLLECTIVES[name][0] if name in COLLECTIVES else OTHERS[name]
    if value == "box":
        value = fzero.shard(lambda *state: state, stage=3, mesh=mesh).init({"w": torch.ones(4)}, fzero.optim.sgd(0.1))[
            0
        ]["w"]
    message = "takes one tensor, but was given|a collective takes tensors, but|would add different parts of the tree"
    with pytest.raises(TypeError, match=message):
        mesh.spmd(lambda: f(value))()
    if name not in ("send", *[n for n in OTHERS if n.startswith("receive")]):  # these need an axis
        with pytest.raises(TypeError, match=message):
            f(value)


def test_bool_sums_as_int64():
    out = on_ranks(3, fzero.collectives.psum, torch.tensor([True, False, True]))
    assert out.tolist() == [2, 2, 2] and out.dtype == torch.int64


def test_means_of_bools_are_bools():
    """`fzero.collectives.pmean(buffers)` thus keeps the masks among them."""
    for x in ([True, False, True], [True, True, True]):
        out = on_ranks(3, fzero.collectives.pmean, torch.tensor(x))
        assert out.tolist() == [all(x)] * 3 and out.dtype == torch.bool


@settings(max_examples=8)
@given(RANKS)
def test_constants_and_replicated_values_count_once_for_each_rank(n):
    """A value that no rank made different still counts once for each rank."""
    mesh = fzero.mesh(dp=n)
    assert mesh.spmd(lambda: fzero.collectives.psum(torch.tensor(2)))().item() == 2 * n
    assert mesh.spmd(fzero.collectives.all_gather)(torch.ones(3)).shape == (3 * n,)
    assert mesh.spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index()))().item() == n * (n - 1) // 2
    assert mesh.spmd(lambda: torch.tensor(fzero.axes.axis_size()))().item() == n


def test_a_collective_takes_trees_and_keeps_none():
    out = fzero.mesh(dp=2).spmd(fzero.collectives.psum)({"a": torch.ones(2), "b": [None, torch.tensor(3)]})
    assert out["a"].tolist() == [2, 2] and out["b"][0] is None and out["b"][1].item() == 6


def test_outside_any_mesh_collectives_are_the_identity():
    x = torch.arange(4.0)
    for f in (
        fzero.collectives.psum,
        fzero.collectives.pmean,
        fzero.collectives.all_gather,
        fzero.collectives.psum_scatter,
        fzero.collectives.all_to_all,
        fzero.collectives.broadcast,
        fzero.collectives.pvary,
        fzero.collectives.psum_invariant,
        fzero.collectives.all_gather_invariant,
        lambda x: fzero.collectives.ppermute(x, perm=[(0, 0)]),
    ):
        assert torch.equal(f(x), x)
    assert fzero.axes.axis_size() == 1 and fzero.axes.axis_index().item() == 0


def test_a_tuple_of_axis_names_is_an_axis():
    mesh = fzero.mesh(dp=3)
    assert mesh.spmd(lambda x: fzero.collectives.psum(x, ("dp",)))(torch.ones(())).item() == 3
    assert mesh.spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index(("dp",)), ("dp",)))().item() == 3


def test_an_axis_is_unbound_after_an_error():
    mesh = fzero.mesh(dp=2)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mesh.spmd(fails)(torch.ones(2))
    with pytest.raises(ValueError, match="no rank program is running"):
        fzero.collectives.psum(torch.ones(2), "dp")


def test_assume_replicated_marks_a_tensor_as_equal_on_all_ranks():
    mesh = fzero.mesh(dp=2)
    x = mesh.split(torch.zeros(4))
    assert mesh.spmd(lambda x: fzero.axes.assume_replicated({"a": x.new_ones(())}))(x)["a"].item() == 1
