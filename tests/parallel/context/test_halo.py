"""Edges of neighbours are those of the whole sequence; a causal convolution of split tokens is that of whole ones."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import collectives
from fzero.parallel import context
from tests.helpers import examples

SIMULATIONS = st.sampled_from(["vmap", "lockstep"])


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near(actual: Any, expected: Any) -> None:
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def on_ranks(mesh: Any, f: Any, *values: torch.Tensor) -> Any:
    """Run `f` on the ranks' tokens, the last dimension of each value; return its results for each rank."""
    boxes = [context.split(mesh, x, dims=x.ndim - 1, batch_axis=()) for x in values]
    return mesh.spmd(lambda *xs: fzero.PerRank(f(*xs)))(*boxes).value


def parts_of(mesh: Any, xs: Any) -> Any:
    return [context.split(mesh, x, dims=x.ndim - 1, batch_axis=()).value for x in xs]


@examples(20, 200)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 4), st.integers(0, 4), st.sampled_from([1, 2]), SIMULATIONS)
def test_a_halo_has_the_tokens_around_each_part(n, half, before, after, dim, simulate):
    before, after = min(before, half), min(after, half)
    shape = [2, 3, 3]
    shape[dim] = length = 2 * n * half
    x = normal(0, *shape)
    mesh = fzero.mesh(cp=n, simulate=simulate)
    own = context.split(mesh, x, dims=dim, batch_axis=())
    actual = mesh.spmd(lambda x: fzero.PerRank(context.halo(x, before, after, dim=dim)))(own).value
    padded = F.pad(x.movedim(dim, 2), [before, after]).movedim(2, dim)
    for r in range(n):
        starts = [0] if n == 1 else [r * half, (2 * n - 1 - r) * half]
        size = length if n == 1 else half
        assert len(actual) == len(starts)
        for part, start in zip(actual, starts, strict=True):
            assert torch.equal(part[r], padded.narrow(dim, start, before + size + after))


@pytest.mark.slow
@examples(12, 120)
@given(
    *[st.integers(1, 8), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 2])],
    SIMULATIONS,
    st.integers(0, 9),
)
def test_neighbours_of_a_token_are_those_of_its_document(n, half, before, after, dim, simulate, seed):
    """They are so at every distance, wherever documents begin, and where a number comes back; with gradients."""
    before, after = min(before, half), min(after, half)
    shape = [2, 3, 3]
    shape[dim] = length = 2 * n * half
    x, weights = normal(seed, *shape), normal(1, before + 1 + after, *shape)
    documents = torch.randint(0, 3, (2, length), generator=torch.Generator().manual_seed(seed))
    mesh = fzero.mesh(cp=n, simulate=simulate)
    own = context.split(mesh, x, dims=dim, batch_axis=())
    own_weights = context.split(mesh, weights, dims=dim + 1, batch_axis=())
    numbers = context.split(mesh, documents, batch_axis=())

    def run(x: Any, documents: Any, weights: Any) -> Any:
        def loss(x: Any) -> Any:
            actual = context.neighbours(x, before, after, documents=documents, dim=dim)
            return sum((w * y).sum() for w, y in zip(weights, actual, strict=True)), torch.stack(actual)

        return fzero.PerRank(torch.func.grad(loss, has_aux=True)(x))

    expected, grad = torch.zeros_like(weights), torch.zeros_like(x)
    for i, b, t in itertools.product(range(len(weights)), range(2), range(length)):
        other = t + i - before
        if 0 <= other < length and documents[b, other] == documents[b, t]:
            expected[i, b].select(dim - 1, t).copy_(x[b].select(dim - 1, other))
            grad[b].select(dim - 1, other).add_(weights[i, b].select(dim - 1, t))
    to_x, actual = mesh.spmd(run)(own, numbers, own_weights).value
    assert torch.equal(actual, context.split(mesh, expected, dims=dim + 1, batch_axis=()).value)
    assert_near([to_x], [context.split(mesh, grad, dims=dim, batch_axis=()).value])


def test_neighbours_stay_within_a_document():
    mesh, x = fzero.mesh(cp=2), torch.arange(1, 9)
    own = fzero.PerRank(torch.tensor([[1, 2, 7, 8], [3, 4, 5, 6]]))
    assert mesh.spmd(lambda x: fzero.PerRank(context.neighbours(x, 1, dim=0)[0]))(own).value.tolist() == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]
    within = context.neighbours(x, 0, 1, documents=x // 4, dim=0)[1]  # outside any mesh
    assert within.tolist() == [2, 3, 0, 5, 6, 7, 0, 0]


def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """A convolution of whole sequences by windows of its tokens, not by fzero's code or a kernel."""
    edge = w.shape[1] - 1
    windows = F.pad(x, [edge, 0]).unfold(2, edge + 1, 1)  # [b, channels, t, width]
    if documents is not None:
        numbers = F.pad(documents, [edge, 0], value=-1).unfold(1, edge + 1, 1)
        windows = windows * (numbers == documents.unsqueeze(-1)).unsqueeze(1)
    return (windows * w.unsqueeze(1)).sum(-1) + b.unsqueeze(-1)


@pytest.mark.slow
@examples(2, 60)
@given(st.integers(1, 8), st.integers(3, 4), st.booleans(), SIMULATIONS, st.integers(0, 9))
def test_a_causal_convolution_across_ranks_equals_that_of_whole_sequences(n, half, has_documents, simulate, seed):
    """Of width 4, as Mamba's: its value, its gradients, and those of a function of the gradients."""
    length = 2 * n * half
    x, w, b, v = normal(seed, 2, 3, length), normal(1, 3, 4), normal(2, 3), normal(3, 2, 3, length)
    generator = torch.Generator().manual_seed(seed)
    documents = torch.randint(0, 3, (2, length), generator=generator) if has_documents else None
    mesh = fzero.mesh(cp=n, simulate=simulate)

    def results(f: Any, x: Any, v: Any) -> Any:
        """Those of tokens, and the gradients of the weights, of which each rank has its tokens' share."""

        def loss(x: Any, v: Any, w: Any, b: Any) -> Any:
            return (f(x, w, b) * v).tanh().sum()

        def squares(x: Any, v: Any) -> Any:
            return sum((g.square() * g.cos()).sum() for g in torch.func.grad(loss, (0, 1))(x, v, w, b))

        to_x, to_v, to_w, to_b = torch.func.grad(loss, (0, 1, 2, 3))(x, v, w, b)
        tangents = x.cos(), v.sin()
        forward = torch.func.jvp(lambda x: f(x, w, b), (x,), tangents[:1])[1]
        second = torch.func.grad(squares, (0, 1))(x, v)
        over = torch.func.jvp(torch.func.grad(squares), (x, v), tangents)[1]
        mapped = torch.func.vmap(f, (0, None, None))(torch.stack([x, 2 * x]), w, b)[1]
        return [f(x, w, b), to_x, to_v, forward, *second, over, mapped], [to_w, to_b]

    def run(x: Any, v: Any, *documents: Any) -> Any:
        own = documents[0] if documents else None
        tokens, weights = results(lambda *p: context.causal_conv1d(*p, documents=own), x, v)
        return tokens, collectives.psum(weights)

    tokens, weights = on_ranks(mesh, run, x, v, *[] if documents is None else [documents])
    wanted, of_weights = results(lambda *p: convolve(*p, documents), x, v)
    assert_near(tokens, parts_of(mesh, wanted))
    assert_near([w[0] for w in weights], of_weights)


@pytest.mark.parametrize("before,after,elements", [(3, 0, 6), (0, 1, 2), (2, 1, 6), (0, 0, 0)])
def test_a_halo_sends_one_message_to_each_neighbour(before, after, elements):
    """One message to each neighbour: the edges of both parts, for each of two sequences."""
    mesh, x = fzero.mesh(cp=4), normal(0, 2, 32)
    with collectives.record() as log:
        on_ranks(mesh, lambda x: context.halo(x, before, after), x)
    assert len(log.events) == 2 * bool(elements)
    assert sum(call.elements for call in log.events) == 2 * elements


def test_a_halo_serves_any_dtype_and_no_tokens():
    mesh = fzero.mesh(cp=2)
    early, late = on_ranks(mesh, lambda x: context.halo(x, 1), torch.arange(1, 9).view(1, 8))
    assert early.tolist() == [[[0, 1, 2]], [[2, 3, 4]]]
    assert late.tolist() == [[[6, 7, 8]], [[4, 5, 6]]]
    empty = mesh.spmd(lambda x: fzero.PerRank(context.causal_conv1d(x, x.new_ones(3, 1))))(
        fzero.PerRank(torch.zeros(2, 2, 3, 0))
    )
    assert empty.value.shape == (2, 2, 3, 0)
    assert context.halo(torch.ones(1, 3), 1)[0].tolist() == [[0, 1, 1, 1]]  # outside any mesh; odd


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_jitted_step_with_a_convolution_trains_as_on_whole_sequences(backend, has_documents):
    """Two steps at stage 3 have the parameters of whole sequences."""
    from fzero import optim
    from tests.helpers import train_step_for

    opt = optim.adamw(1e-2)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = batch["x"] @ params["in"]
        y = context.causal_conv1d(x.mT, params["conv"], params["bias"], documents=batch.get("documents")).mT
        return (torch.tanh(y) @ params["out"] - batch["x"]).square().mean()

    params = {"in": normal(0, 4, 6), "conv": normal(1, 6, 4), "bias": normal(2, 6), "out": normal(3, 6, 4)}
    train_step = train_step_for(loss_fn, opt)
    step = fzero.jit(fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2, cp=2)), backend=backend)
    state, expected = step.init(params, opt), (params, opt.init(params))
    for i in range(2):
        batch = {"x": normal(4 + i, 4, 12, 4)}
        if has_documents:
            batch["documents"] = (torch.arange(12) // 5).expand(4, 12)
        *state, loss = step(*state, context.split(step.mesh, batch))
        *expected, wanted = train_step(*expected, batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    for name, x in step.gather(state[0]).items():
        torch.testing.assert_close(x, expected[0][name], rtol=1e-11, atol=1e-12)


def assert_refused(match: str, f: Any, shape: Any = (2, 3, 4)) -> None:
    with pytest.raises(ValueError, match=match):
        fzero.mesh(cp=2).spmd(lambda x: fzero.PerRank(f(x)))(fzero.PerRank(torch.zeros(2, *shape)))


def test_a_halo_with_wrong_arguments_is_refused():
    assert_refused(
        r"before=3: expected an int of at least 0 and at most 2, the tokens of a part",
        lambda x: context.halo(x, 3, dim=2),
    )
    assert_refused("after=-1: expected an int", lambda x: context.halo(x, 1, -1, dim=2))
    assert_refused("expected an even number of tokens in dimension 1", lambda x: context.halo(x, 1))
    assert_refused("dim=3 is not a dimension", lambda x: context.halo(x, 1, dim=3))
    assert_refused(
        r"expected \[batch, channels, tokens\] and \[channels, width\]",
        lambda x: context.causal_conv1d(x, x.new_ones(2, 4)),
    )
    assert_refused(
        r"has 2 tokens on each of 2 ranks, and weight \[3, 4\] reads 3 tokens before each",
        lambda x: context.causal_conv1d(x, x.new_ones(3, 4)),
    )
    assert_refused(
        r"documents have the shape \[2, 4, 3\]: expected \[2, 3\], one number for each token of x, which is \[2, 3",
        lambda x: context.neighbours(x, 1, documents=x.mT),
    )
    assert_refused("documents have the shape", lambda x: context.causal_conv1d(x, x.new_ones(3, 2), documents=x[0]))
