"""Attention across ranks is attention of the whole sequences: values, derivatives, bytes, and refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import collectives, random
from fzero.parallel import context
from tests.helpers import examples
from tests.parallel.context.model import attend_by_definition

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def values_of(
    seed: int, heads: int, groups: int, length: int, lead: tuple[int, ...] = (2,), dtype=torch.float64
) -> list:
    """q, k, v and the weights of the result in a loss."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(*lead, h, length, 4) for h in (heads, heads // groups, heads // groups, heads)]
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def documents_of(seed: int, lead: tuple[int, ...], length: int) -> torch.Tensor:
    """Boundaries anywhere, and a number that comes back: it is the same document again."""
    return torch.randint(0, 3, (*lead, length), generator=torch.Generator().manual_seed(seed))


def on_ranks(mesh: fzero.ranks.Mesh, f: Any, values: list[torch.Tensor], documents: Any) -> Any:
    """Run `f(documents, *values)` on the ranks' tokens; return its tree of results, each rank's tokens."""
    boxes = [context.split(mesh, x, dims=x.ndim - 2, batch_axis=()) for x in values]
    if documents is not None:
        documents = context.split(mesh, documents, dims=documents.ndim - 1, batch_axis=())
    return mesh.spmd(lambda documents, *xs: fzero.PerRank(f(documents, *xs)))(documents, *boxes).value


def assert_near(actual: Any, expected: Any) -> None:
    """Assert that values agree to 1e-12 of numbers near 1; a gradient may be exactly 0."""
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def parts(mesh: fzero.ranks.Mesh, tree: Any) -> Any:
    return [context.split(mesh, x, dims=x.ndim - 2, batch_axis=()).value for x in tree]


@examples(14, 400)
@given(
    st.integers(0, 9),
    SIZES,
    st.sampled_from(["vmap", "lockstep"]),
    st.sampled_from(["ring", "all_to_all", None]),
    st.sampled_from([(4, 1), (4, 2), (8, 8), (8, 1), (3, 1)]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([None, 1, 3, 7]),
    st.booleans(),
    st.sampled_from([None, 0.3]),
    st.sampled_from([None, None, 0.7]),
    st.booleans(),
)
def test_attention_across_ranks_is_attention_of_the_sequence(
    seed, n, simulate, method, heads, half, causal, window, has_documents, scale, softcap, has_sinks
):
    """It has grouped queries, windows, documents, caps and sinks, on any number of ranks: to 1e-12, with gradients."""
    if method == "all_to_all" and heads[0] % n:
        method = None
    length = 2 * n * half
    values = values_of(seed, heads[0], heads[1], length)
    documents = documents_of(seed, (2,), length) if has_documents else None
    mesh = fzero.mesh(cp=n, simulate=simulate)
    options: Any = {"causal": causal, "window": window, "scale": scale, "softcap": softcap}
    sinks = torch.linspace(-2, 2, heads[0], dtype=torch.float64)

    def loss_for(attend: Any, documents: Any) -> Any:
        def loss(sinks: Any, q: Any, k: Any, v: Any, w: Any) -> Any:
            y = attend(q, k, v, documents=documents, sinks=sinks if has_sinks else None, **options)
            return (y * w).sum(), y

        return torch.func.grad(loss, (0, 1, 2, 3), has_aux=True)

    def gradients(documents: Any, *values: torch.Tensor) -> Any:
        (to_sinks, *grads), y = loss_for(partial(context.attention, method=method), documents)(sinks, *values)
        return to_sinks, [*grads, y]

    (to_sinks, *grads), y = loss_for(attend_by_definition, documents)(sinks, *values)
    own, actual = on_ranks(mesh, gradients, values, documents)
    assert_near(actual, parts(mesh, [*grads, y]))
    assert_near([own.sum(0)], [to_sinks])  # a rank has the gradient of its queries' sinks, or of its heads'


@examples(2, 24)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["vmap", "lockstep"]),
    *[st.booleans()] * 3,
    st.sampled_from([None, 0.7]),
)
def test_second_derivatives_of_attention_equal_those_of_whole_sequences(
    n, simulate, causal, has_documents, has_sinks, softcap
):
    """Reverse over reverse, forward, forward over reverse, and a vmap of the user; torch's kernels have none."""
    length = 4 * n
    values = values_of(n, 4, 2, length, (1,))
    documents = documents_of(0, (1,), length) if has_documents else torch.zeros(1, length, dtype=torch.int64)

    sinks = torch.linspace(-2, 2, 4, dtype=torch.float64)

    def derivatives(attend: Any, documents: Any) -> Any:
        def f(sinks: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
            own = sinks if has_sinks else None
            return attend(q, k, v, causal=causal, documents=documents, sinks=own, softcap=softcap)

        def squares(sinks: Any, q: Any, k: Any, v: Any, w: Any) -> torch.Tensor:
            of_sinks, *grads = torch.func.grad(lambda *xs: (f(*xs) * w).sum(), (0, 1, 2, 3))(sinks, q, k, v)
            total = sum((g.square() * g.cos()).sum() for g in grads)
            return total + (of_sinks * sinks.cos()).sum()  # linear, since a rank has a part of it

        def run(q: Any, k: Any, v: Any, w: Any) -> Any:
            tangents = sinks.cos(), q.cos(), k.sin(), v.cos()
            to_sinks, *second = torch.func.grad(squares, (0, 1, 2, 3, 4))(sinks, q, k, v, w)
            forward = torch.func.jvp(f, (sinks, q, k, v), tangents)[1]
            first = torch.func.grad(squares, (1, 0))
            over = torch.func.jvp(first, (sinks, q, k, v, w), (*tangents, w.sin()))[1]
            mapped = torch.func.vmap(f, (None, 0, None, 0))(sinks, torch.stack([q, 2 * q]), k, torch.stack([v, v + 1]))
            return [to_sinks, over[1]], [*second, forward, over[0], mapped[0], mapped[1]]

        return run

    def across(documents: Any, *values: torch.Tensor) -> Any:
        return derivatives(partial(context.attention, method="ring"), documents)(*values)

    mesh = fzero.mesh(cp=n, simulate=simulate)
    of_sinks, whole = derivatives(partial(attend_by_definition, window=None), documents)(*values)
    own, actual = on_ranks(mesh, across, values, documents)
    assert_near(actual, parts(mesh, whole))
    assert_near([x.sum(0) for x in own], of_sinks)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_half_precision_is_as_exact_as_torchs_own(method):
    values = values_of(0, 4, 2, 32, dtype=torch.bfloat16)
    exact = attend_by_definition(*(x.double() for x in values[:3]), causal=True, window=None, documents=None)
    mesh = fzero.mesh(cp=4)

    def f(documents: Any, q: Any, k: Any, v: Any, w: Any) -> Any:
        return [context.attention(q, k, v, causal=True, method=method)]

    (actual,) = on_ranks(mesh, f, values, None)
    assert actual.dtype == torch.bfloat16
    error = (actual.double() - parts(mesh, [exact])[0]).abs().max()
    q, k, v = values[:3]
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert error <= 2 * (own.double() - exact).abs().max(), error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_attention_sends_the_bytes_of_the_formulas(n, causal, has_documents):
    """The formulas of docs/context.md, in elements of one rank."""
    samples, heads, groups, length, width = 2, 4, 2, 4 * n, 4
    values = values_of(0, heads, groups, length)
    documents = documents_of(0, (2,), length) if has_documents else None
    queries, keys = samples * heads * length * width // n, 2 * samples * heads // groups * length * width // n
    numbers = samples * length // n if has_documents else 0
    rounds = 2 * (keys + numbers), keys  # of the forward and the backward pass; the latter sends gradients as well
    wanted = {
        "ring": {"ppermute": (n - 1) * sum(rounds)},
        "all_to_all": {"all_to_all": 2 * (2 * queries + max(keys, keys * n * groups // heads))},
    }
    if has_documents:
        wanted["all_to_all"]["all_gather"] = numbers * n

    for method in wanted:

        def gradients(documents: Any, *values: torch.Tensor, method: Any = method) -> Any:
            def loss(q: Any, k: Any, v: Any, w: Any) -> Any:
                return (context.attention(q, k, v, causal=causal, documents=documents, method=method) * w).sum()

            return torch.func.grad(loss, (0, 1, 2))(*values)

        with collectives.record() as log:
            on_ranks(fzero.mesh(cp=n), gradients, values, documents)
        results: dict[str, int] = {}
        for call in log.events:
            results[call.kind] = results.get(call.kind, 0) + call.elements
        assert results == wanted[method], method


@examples(6, 40)
@given(SIZES, st.sampled_from(["vmap", "lockstep"]), st.booleans(), st.booleans())
def test_a_key_drops_the_same_weights_on_any_number_of_ranks(n, simulate, causal, has_documents):
    """Those that `fzero.random.dropout` drops of the weights of whole sequences; with gradients."""
    length, key = 4 * n, random.key(3)
    values = values_of(n, 4, 2, length)
    documents = documents_of(0, (2,), length) if has_documents else None
    options: Any = {"causal": causal, "window": None, "documents": documents}

    def expected(q: Any, k: Any, v: Any, w: Any) -> Any:
        weights = attend_by_definition(q, k, torch.eye(length, dtype=v.dtype).expand(2, 2, length, length), **options)
        y = random.dropout(key, weights, 0.4) @ v.repeat_interleave(2, -3)
        return (y * w).sum(), y

    def actual(documents: Any, *values: torch.Tensor) -> Any:
        def loss(q: Any, k: Any, v: Any, w: Any) -> Any:
            y = context.attention(q, k, v, causal=causal, documents=documents, dropout=0.4, key=key)
            return (y * w).sum(), y

        grads, y = torch.func.grad(loss, (0, 1, 2), has_aux=True)(*values)
        return [*grads, y]

    mesh = fzero.mesh(cp=n, simulate=simulate)
    grads, y = torch.func.grad(expected, (0, 1, 2), has_aux=True)(*values)
    assert_near(on_ranks(mesh, actual, values, documents), parts(mesh, [*grads, y]))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("window", [None, 2])
def test_empty_sequences_and_batches_have_empty_results_and_gradients(n, window):
    for lead, length in ((2,), 0), ((0,), 4):
        values = values_of(0, 4, 2, length, lead)

        def f(documents: Any, q: Any, k: Any, v: Any, w: Any) -> Any:
            def loss(q: Any) -> Any:
                return (context.attention(q, k, v, causal=True, window=window, method="ring") * w).sum()

            return [context.attention(q, k, v, causal=True, window=window), torch.func.grad(loss)(q)]

        for x in on_ranks(fzero.mesh(cp=n), f, values, None):
            assert x.shape == (n, *lead, 4, length // n, 4)


def test_padding_has_no_effect_on_attention_across_ranks():
    """Of causal attention at the end, and of any attention with the padding as a document of its own."""
    length, n = 13, 2
    values = values_of(0, 4, 2, length)
    documents = documents_of(0, (2,), length)
    mesh = fzero.mesh(cp=n)
    boxes = [context.split(mesh, x, dims=2, pad=9.0) for x in values[:3]]
    numbers = context.split(mesh, documents, pad=-1)
    options: Any = ((True, None), (False, documents))
    for causal, own in options:

        def f(q: Any, k: Any, v: Any, d: Any, causal: bool = causal, own: Any = own) -> Any:
            y = context.attention(q, k, v, causal=causal, documents=None if own is None else d)
            return fzero.PerRank((y, context.positions(q.shape[-2])))

        y, positions = mesh.spmd(f)(*boxes, numbers).value
        whole = torch.cat(list(y), -2)[..., torch.cat(list(positions)).argsort(), :]
        expected = attend_by_definition(*values[:3], causal=causal, window=None, documents=own)
        assert_near(whole[..., :length, :], expected)


def assert_refused(match: str, error: type[Exception] = ValueError, n: int = 1, **changes: Any) -> None:
    x = torch.zeros(1, 4, 4, 2)
    arguments = {"q": x, "k": x, "v": x, **changes}
    with pytest.raises(error, match=match):
        if n == 1:
            context.attention(**arguments)
        else:
            mesh = fzero.mesh(cp=n)
            boxed = {k: mesh.local(lambda _, x=x: x) if k in "qkv" else x for k, x in arguments.items()}
            mesh.spmd(lambda arguments: context.attention(**arguments))(boxed)


def test_the_error_of_context_attention_names_its_wrong_argument():
    x = torch.zeros(1, 4, 4, 2)
    assert_refused("window=0", window=0)
    assert_refused("window=2.5", window=2.5)
    assert_refused("softcap=0: expected a finite number above 0", softcap=0)
    assert_refused(r"sinks have the shape \[2\]: expected \[4\], one for each head of q", sinks=torch.zeros(2))
    assert_refused("sinks are torch.int64: expected floating point", TypeError, sinks=torch.zeros(4, dtype=torch.int64))
    assert_refused("scale='a'", scale="a")
    assert_refused("scale=0.0: expected a finite number other than 0", scale=0.0)
    assert_refused("method='ulysses'", method="ulysses")
    assert_refused("4 heads of q do not divide by the 3 heads of k", k=x[:, :3], v=x[:, :3])
    assert_refused("as many heads and tokens of k as of v", k=x[:, :2])
    assert_refused("as many tokens of q as of k", q=x[:, :, :2])
    assert_refused("expected .*heads, tokens, width", q=x[0, 0], k=x[0, 0], v=x[0, 0])
    assert_refused(
        r"documents have the shape \[1, 3\]: expected \[1, 4\]", documents=torch.zeros(1, 3, dtype=torch.int64)
    )
    assert_refused("expected ints", TypeError, documents=torch.zeros(1, 4))
    assert_refused("expected the name of the axis", TypeError, axis=None)
    assert_refused("dropout=0.1 needs key=", TypeError, dropout=0.1)
    assert_refused("a probability of dropout is between 0 and 1", dropout=2.0, key=random.key(0))
    odd = x[:, :, :3]
    assert_refused("3 tokens are odd", n=2, q=odd, k=odd, v=odd)
    with pytest.raises(ValueError, match="axis='cp': its ranks hold the same q"):
        fzero.mesh(cp=2).spmd(lambda: context.attention(x, x, x))()
    assert_refused('method="all_to_all": 4 heads do not divide by the 3 ranks', n=3, method="all_to_all")
