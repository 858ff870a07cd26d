"""Who holds which tokens: `split`, `positions` and `shift_labels` agree, on any mesh and for any length."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.parallel import context
from fzero.parallel.context._layout import from_rank_order, to_rank_order
from tests.helpers import LEAST, examples


@examples(20, 100)
@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 3), st.sampled_from([1, 2]), st.booleans())
def test_each_rank_holds_the_tokens_of_its_positions(dp, n, half, dim, first):
    """Each token lies on one rank; an axis "tp" shares its tokens; cp may stand before dp or after it."""
    mesh = fzero.mesh(**({"cp": n, "dp": dp} if first else {"dp": dp, "cp": n}), tp=2)
    shape = [2 * dp, 5, 5]
    shape[dim] = length = 2 * n * half
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    box = context.split(mesh, {"x": x}, dims={"x": dim}, batch_axis="dp")
    tokens = length // n

    def f(batch):
        return fzero.PerRank((batch["x"], context.positions(tokens), fzero.axes.axis_index("dp")))

    own, positions, sample = mesh.spmd(f)(box).value
    assert torch.equal(own[0::2], own[1::2])  # tp, the fastest axis
    for part, where, i in zip(own, positions, sample, strict=True):
        assert torch.equal(part, x[2 * i : 2 * i + 2].index_select(dim, where))
    assert sorted(positions.flatten().tolist()) == sorted(2 * dp * list(range(length)))


@examples(12, 60)
@given(st.integers(1, 8), st.integers(0, 3), st.sampled_from([1, 2, -1]), st.sampled_from(["vmap", "lockstep"]))
def test_gathered_tokens_are_the_whole_sequence(n, half, dim, simulate):
    """They are so on every rank; the gradient of a rank's tokens is the sum over the ranks, as all_gather has it."""
    mesh = fzero.mesh(cp=n, simulate=simulate)
    shape = [2, 3, 3]
    shape[dim] = 2 * n * half
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    own = context.split(mesh, x, dims=dim % 3, batch_axis=())
    assert torch.equal(mesh.spmd(lambda x: context.all_gather(x, dim=dim))(own), x)
    grads = mesh.spmd(
        lambda y: fzero.PerRank(torch.func.grad(lambda y: context.all_gather(y, dim=dim).square().sum())(y))
    )(own)
    assert torch.equal(grads.value, 2 * n * own.value)


def test_context_all_gather_refuses_values_that_are_not_split_by_tokens():
    mesh = fzero.mesh(cp=2)
    with pytest.raises(ValueError, match=r"x is \[1, 3\]: expected an even number of tokens in dimension 1"):
        mesh.spmd(context.all_gather)(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="dim=2"):
        mesh.spmd(lambda x: context.all_gather(x, dim=2))(torch.zeros(1, 4))
    assert torch.equal(context.all_gather(torch.ones(1, 3)), torch.ones(1, 3))  # outside any mesh


@examples(10, 40)
@given(st.integers(1, 8), st.integers(1, 3), st.sampled_from([0, 1, -1]))
def test_the_orders_of_tokens_are_inverse_permutations(n, half, dim):
    shape = [2 * n * half] * 2
    x = torch.arange(shape[0] * shape[1]).view(shape)
    assert torch.equal(from_rank_order(to_rank_order(x, n, dim), n, dim), x)


def test_every_rank_has_the_same_work_in_causal_attention():
    for n in (1, 2, 3, 8):
        work = fzero.mesh(cp=n).spmd(lambda: fzero.PerRank((context.positions(6) + 1).sum()))().value
        assert work.unique().numel() == 1


def test_without_the_axis_a_rank_holds_all_tokens():
    assert context.positions(5).tolist() == [0, 1, 2, 3, 4]


def test_labels_are_shifted_within_documents():
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert context.shift_labels(tokens).tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    documents = torch.tensor([[0, 0, 0, 5], [3, 3, 1, 1]])
    assert context.shift_labels(tokens, documents, ignore_index=-1).tolist() == [[2, 3, -1, -1], [6, -1, 8, -1]]
    with pytest.raises(ValueError, match="documents have the shape"):
        context.shift_labels(tokens, documents[0])


def test_leaves_without_tokens_are_shared():
    mesh = fzero.mesh(dp=2, cp=2)
    batch = {"tokens": torch.arange(16).view(2, 8), "weight": torch.tensor([1.0, 2.0]), "one": torch.tensor(3.0)}
    box = context.split(mesh, batch, dims={"weight": None, "one": None})
    assert box.value["one"].tolist() == [3.0] * 4
    assert box.value["weight"].tolist() == [[1.0], [1.0], [2.0], [2.0]]


def test_one_rank_holds_sequences_of_any_length():
    x = torch.arange(10).view(2, 5)
    assert torch.equal(context.split(fzero.mesh(dp=2, cp=1), x).value.flatten(0, 1), x)


def test_sequences_are_padded_by_leaf():
    mesh = fzero.mesh(dp=1, cp=2)
    batch = {"tokens": torch.ones(1, 5, dtype=torch.int64), "labels": torch.ones(1, 5, dtype=torch.int64)}
    box = context.split(mesh, batch, pad={"tokens": 0, "labels": -100})
    assert box.value["labels"].tolist() == [[[1, 1, -100, -100]], [[1, 1, 1, -100]]]
    assert box.value["tokens"].sum() == 5


def assert_refused(match: str, batch: Any = None, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        context.split(fzero.mesh(dp=2, cp=2), torch.zeros(2, 8) if batch is None else batch, **options)


def test_wrong_batches_are_refused_by_leaf():
    assert_refused(
        r"batch leaf 'x' is \[2, 6\]: its 6 tokens \(dimension 1\) do not divide into 4 parts", {"x": torch.zeros(2, 6)}
    )
    assert_refused(r"pass pad=\{'x': value\}", {"x": torch.zeros(2, 6), "y": torch.zeros(2, 8)}, pad={"y": 0})
    assert_refused(r"batch leaf 'w' is \[2\].*dims=\{'w': None\}", {"w": torch.zeros(2)})
    assert_refused(r"dimension 0 must be divisible by the 2 parts", torch.zeros(3, 8))
    assert_refused("'tp' is not an axis", axis="tp")
    assert_refused("expected one axis for tokens", batch_axis=("dp", "cp"))
    assert_refused(
        r"dims=\{'y': 1\}: 'y' is not a leaf of the batch, which are \['x'\]",
        {"x": torch.zeros(2, 8)},
        dims={"y": 1},
    )
    assert_refused("expected a tensor", {"x": "text"}, TypeError)
    uneven = {"tokens": torch.zeros(2, 6), "labels": torch.zeros(2, 6), "even": torch.zeros(2, 8)}
    assert_refused(r"pad=0 is one value for 2 leaves.* pad=\{'tokens': 0, 'labels': -100\}", uneven, pad=0)
    assert_refused("its dimension of tokens is dims=0: expected 1, or dims=", dims=0)
    with pytest.raises(ValueError, match="tokens=3: expected an even int"):
        fzero.mesh(cp=2).spmd(lambda: context.positions(3))()


@examples(15, 60)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.data())
def test_tokens_of_loaded_samples_are_split_as_those_of_a_global_batch(dp, n, half, first, draw):
    """`fzero.data.batches` loads such samples; a simulated mesh and each rank in lockstep split them, with padding."""
    mesh = fzero.mesh(**({"cp": n, "dp": dp} if first else {"dp": dp, "cp": n}))
    length = 2 * n * half - draw.draw(st.integers(0, 1))
    x = torch.arange(2 * dp * length * 3).view(2 * dp, length, 3)
    batch, pad = {"x": x, "weight": x[:, 0, 0]}, {"x": -1}
    dims = {"x": 1, "weight": None}
    loaded = fzero.data.batches(
        [{"x": a, "weight": a[0, 0]} for a in x], mesh, global_batch=2 * dp, shuffle=False, axis="dp"
    )[0]
    own = context.split(mesh, loaded, dims=dims, pad=pad)
    expected = context.split(mesh, batch, dims=dims, pad=pad)
    assert own.axes == expected.axes
    for a, b in zip(fzero.tree.tensors(own), fzero.tree.tensors(expected), strict=True):
        assert torch.equal(a, b)


def test_a_loaded_batch_that_cannot_be_split_is_refused():
    mesh = fzero.mesh(dp=2, cp=2)
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"expected samples that are equal on the ranks of 'cp'"):
        context.split(mesh, mesh.split(x))
    with pytest.raises(ValueError, match=r"batch_axis='dp': expected .* no batch_axis, which the box knows"):
        context.split(mesh, mesh.split(x, "dp"), batch_axis="dp")
    with pytest.raises(ValueError, match="batch leaf 'w' has no dimension of samples"):
        context.split(mesh, mesh.local({"w": torch.zeros(2)}, "dp"))


USES = {
    "attention": lambda x: context.attention(*[x.view(1, 1, -1, 1)] * 3),
    "positions": lambda x: context.positions(2) + x.sum(),
    "halo": lambda x: context.halo(x, 1),
    "all_gather": lambda x: context.all_gather(x),
}


def split_by_axis(mesh: fzero.ranks.Mesh) -> dict[str, fzero.PerRank]:
    """A batch split into samples over cp: by the mesh, and as a loader of each simulated rank and process boxes it."""
    samples = fzero.data.batches(list(torch.rand(8, 2)), mesh, global_batch=4)
    return {"mesh.split": mesh.split(torch.rand(4, 2)), "data": samples[0]}


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("use", USES)
def test_a_batch_split_into_samples_over_the_axis_of_tokens_is_refused(use, simulate):
    mesh = fzero.mesh(dp=2, cp=2, simulate=simulate)
    run = mesh.spmd(lambda x, *rest: fzero.PerRank(USES[use](x)))
    for batch in split_by_axis(mesh).values():
        with pytest.raises(ValueError, match="axis='cp': the batch was split into samples over it"):
            run(batch)
        run(batch, mesh.split(torch.rand(2, 4), "dp"))  # the program may take its tokens of the other argument
    run(context.split(mesh, torch.rand(2, 4)), mesh.split(torch.rand(4)))  # a random number for each rank
    run(mesh.local(torch.rand(4, 1, 2)))  # nothing is known of it
    with pytest.raises(ValueError, match="2 ranks were given a batch whose tokens are split over 4 ranks of 'cp'"):
        run(context.split(fzero.mesh(dp=1, cp=4), torch.rand(1, 8)))


@pytest.mark.parametrize("jit", [False, True])
def test_a_step_that_splits_samples_over_the_axis_of_tokens_is_refused(jit):
    """The step may be traced, and the batch cast before."""

    opt = fzero.optim.sgd(0.1)

    def train_step(params, opt_state, batch):
        def loss_fn(params, batch):
            x = (batch.unsqueeze(-1) * params["w"]).unsqueeze(1)
            return context.attention(x, x, x, causal=True).square().mean()

        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    full = {"w": torch.rand(3)}
    step = fzero.shard(train_step, stage=1, mesh=fzero.mesh(dp=2, cp=2))
    params, opt_state = step.init(full, opt)
    step = fzero.jit(step, backend="fx", **LEAST) if jit else step
    x = torch.rand(4, 8)
    wrong = fzero.tree.map(lambda x: 2 * x, step.mesh.split(torch.rand(8, 4)))  # of the same shapes on each rank
    with pytest.raises(ValueError, match="axis='cp': the batch was split into samples over it"):
        step(params, opt_state, wrong)
    new_params, new_state, loss = step(params, opt_state, context.split(step.mesh, x))
    assert torch.allclose(loss, train_step(full, opt.init(full), x)[2])
    for _ in range(2):
        with pytest.raises(ValueError, match="axis='cp': the batch was split into samples over it"):
            step(new_params, new_state, wrong)
    loaded = step.mesh.local(context.split(step.mesh, x).value)
    assert torch.allclose(step(new_params, new_state, loaded)[2], loss, atol=0.1)
    assert not jit or step.traces == 1  # a batch that the step accepts runs by the same graph


WHOLE = {
    "attention": lambda x, t: context.attention(*[x[:, :t].view(1, 1, t, 1).double()] * 3),
    "positions": lambda x, t: context.positions(t) + x.sum(),
    "halo": lambda x, t: context.halo(x[:, :t], 1),
    "all_gather": lambda x, t: context.all_gather(x[:, :t]),
}


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("use", WHOLE)
def test_whole_sequences_on_each_rank_are_refused(use, simulate):
    """They pass if the program takes its tokens of them: then they have as many as all ranks together."""
    mesh = fzero.mesh(dp=2, cp=2, simulate=simulate)
    whole = mesh.split(torch.arange(16).view(2, 8), "dp")
    with pytest.raises(ValueError, match=r"axis='cp': its 2 ranks hold the same 8 tokens.*positions\(8 // 2\)"):
        mesh.spmd(lambda x: fzero.PerRank(WHOLE[use](x, 8)))(whole)
    parts_of_whole = mesh.spmd(lambda x: fzero.PerRank(WHOLE["positions"](x[:, context.positions(4)], 4)))(whole)
    assert parts_of_whole.value.shape == (4, 4)
    with pytest.raises(ValueError, match=r"axis='cp': its 2 ranks hold the same 8 tokens"):  # a batch without a box
        mesh.spmd(lambda x: fzero.PerRank(WHOLE[use](x, 8)))(torch.arange(8).view(1, 8))
    if use == "positions":  # a length that only floats have is the size of something else
        mesh.spmd(lambda x: fzero.PerRank(context.positions(8) + x.sum()))(mesh.split(torch.rand(2, 8), "dp"))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("use", WHOLE)
def test_tokens_that_are_split_over_another_axis_are_refused(use, bound):
    """The axis of the call may be unbound, where each rank would pass for one that holds all tokens."""
    mesh = fzero.mesh(dp=2, sp=2, **({"cp": 2} if bound else {}))
    own = context.split(mesh, torch.arange(16).view(2, 8), axis="sp", batch_axis="dp")
    with pytest.raises(ValueError, match="axis='cp': the batch's tokens are split over 'sp': pass axis='sp'"):
        mesh.spmd(lambda x: fzero.PerRank(WHOLE[use](x, 4)))(own)


def test_labels_of_split_tokens_are_not_shifted():
    mesh, tokens = fzero.mesh(dp=1, cp=2), torch.arange(8).view(1, 8)
    with pytest.raises(ValueError, match="shift_labels: the batch's tokens are split over 'cp'"):
        mesh.spmd(lambda x: fzero.PerRank(context.shift_labels(x)))(context.split(mesh, tokens))
    whole = mesh.spmd(lambda x: context.shift_labels(x))(mesh.split(tokens, ()))
    assert torch.equal(whole, context.shift_labels(tokens))
