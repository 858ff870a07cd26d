"""The law of laws: training with split sequences on any mesh, at any stage, is training with whole ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import nn
from fzero.parallel import context
from tests.helpers import LEAST, examples, train_step_for
from tests.parallel.context.model import OPT, assert_trains_as_whole, batch_of, logits_of, loss_for, params_of

MESHES = st.sampled_from(
    [
        fzero.mesh(dp=2, cp=2),
        fzero.mesh(cp=2, dp=2),
        fzero.mesh(dp=1, cp=4),
        fzero.mesh(cp=8),
        fzero.mesh(dp=2, cp=2, simulate="lockstep"),
    ]
)


@examples(3, 40)
@given(
    MESHES,
    st.integers(0, 3),
    st.sampled_from(["ring", None]),
    st.booleans(),
    st.sampled_from([None, 5]),
    st.sampled_from([None, "fx"]),
)
def test_training_with_split_sequences_is_training_with_whole_ones(mesh, stage, method, documents, window, backend):
    params = params_of()
    batches = [batch_of(i, documents) for i in range(2)]
    train_step = train_step_for(loss_for(causal=True, method=method, window=window), OPT)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    step = step if backend is None else fzero.jit(step, backend=backend)
    assert_trains_as_whole(train_step, params, step, batches)


@pytest.mark.slow
@examples(3, 12)
@given(MESHES, st.integers(0, 3), st.integers(1, 2), st.booleans())
def test_ranks_may_have_different_numbers_of_labels(mesh, stage, micro_batches, has_documents):
    """Padded ends and the last tokens of documents have none: "weighted" is the mean over all labels."""
    params, batches = params_of(length=64), []
    for i in range(2):
        batch = batch_of(i, has_documents, samples=2 * micro_batches, length=13)
        batches.append(batch | {"labels": context.shift_labels(batch["tokens"], batch.get("documents"))})
    loss_fn = loss_for(weighted=True, causal=True)
    train_step = train_step_for(loss_fn, OPT, reduce="weighted", micro_batches=micro_batches)
    pad = {"tokens": 0, "labels": -100, "documents": -1}
    assert_trains_as_whole(train_step, params, fzero.shard(train_step, stage=stage, mesh=mesh), batches, pad=pad)


@pytest.mark.slow
def test_split_sequences_train_with_offload_tiles_and_a_chunked_loss():
    """Offloaded inputs of blocks, an MLP in tiles and a loss in chunks, as docs/_plan_long_llama.py plans them."""
    params = {name: params_of()[name] for name in ("embed", "blocks")}

    def mlp(x: torch.Tensor, block: Any) -> torch.Tensor:
        return x + torch.tanh(x @ block["up"]) @ block["down"]

    def run_block(x: torch.Tensor, block: Any) -> torch.Tensor:
        q, k, v = (x @ block["qkv"]).unflatten(-1, (8, -1)).transpose(1, 2).split([4, 2, 2], 1)
        y = context.attention(q, k, v, causal=True)
        return nn.tiled(mlp, 2)(x + y.transpose(1, 2).flatten(2) @ block["out"], block)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["tokens"]]
        for block in params["blocks"]:
            x = fzero.remat(run_block, save="host")(x, block)
        total = nn.linear_cross_entropy(x, params["embed"], batch["labels"], chunk=5, reduction="sum")
        return total, (batch["labels"] != -100).sum()

    batches = [batch_of(i) for i in range(2)]
    batches = [batch | {"labels": context.shift_labels(batch["tokens"])} for batch in batches]
    train_step = train_step_for(loss_fn, OPT, reduce="weighted")
    step = fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=1, cp=2))
    for run_step in (step, fzero.jit(step, backend="fx", **LEAST)):
        assert_trains_as_whole(train_step, params, run_step, batches)


def test_an_evaluation_counts_the_tokens_of_all_parts():
    """The last batch may not be full: its rows are examples, and not parts of them."""
    mesh, params, batch = fzero.mesh(dp=2, cp=2), params_of(), batch_of(0, samples=8)
    step = fzero.shard(train_step_for(loss_for(causal=True), OPT), stage=3, mesh=mesh)

    def sums(params: Any, batch: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, documents: Any) -> Any:
            return context.attention(q, k, v, causal=True)

        losses = F.cross_entropy(logits_of(params, batch, attend).mT, batch["labels"], reduction="none")
        return losses.sum(1), torch.full((len(losses),), losses.shape[1])

    program = fzero.evaluate(step, sums, weighted=True, axis="dp")
    for rows in (8, 5):
        total, weight = program(step.init(params, OPT)[0], context.split(mesh, batch), rows)
        whole = sums(params, {name: x[:rows] for name, x in batch.items()})
        torch.testing.assert_close((total, weight), (whole[0].sum(), whole[1].sum().float()))
    with pytest.raises(ValueError, match="'tp' is not an axis"):
        fzero.evaluate(step, sums, axis="tp")


@pytest.mark.parametrize("mesh", [fzero.mesh(dp=2, cp=2), fzero.mesh(cp=4, dp=2, simulate="lockstep")], ids=repr)
@pytest.mark.parametrize("backend", [None, "fx"])
def test_predictions_are_of_whole_sequences(mesh, backend):
    """They are in the order of the batch, with padded tokens at their end."""
    params, batch = params_of(), batch_of(0, samples=8, length=13)
    step = fzero.shard(train_step_for(loss_for(causal=True), OPT), stage=3, mesh=mesh)

    def outputs(params: Any, batch: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, documents: Any) -> Any:
            return context.attention(q, k, v, causal=True)

        return context.all_gather(logits_of(params, batch, attend))

    program = fzero.predict(step, outputs, axis="dp")
    program = program if backend is None else fzero.jit(program, backend=backend)
    result = program(step.init(params, OPT)[0], context.split(mesh, batch, pad={"tokens": 0, "labels": -100}))
    torch.testing.assert_close(result[:, :13], outputs(params, batch), rtol=1e-12, atol=1e-12)
    assert result.shape == (8, 16, 13)
    with pytest.raises(ValueError, match="'tp' is not an axis"):
        fzero.predict(step, outputs, axis="tp")


def test_a_step_averages_over_the_axis_of_tokens():
    """Its ranks would otherwise keep the gradients of their own tokens."""
    mesh, params = fzero.mesh(dp=1, cp=2), params_of()
    step = fzero.shard(train_step_for(loss_for(causal=True), OPT), stage=3, mesh=mesh, axis="dp")
    with pytest.raises(ValueError, match=r"axis='cp'.*does not average over it.*add 'cp'"):
        step(*step.init(params, OPT), context.split(mesh, batch_of(0)))


@pytest.mark.slow
def test_the_default_backend_trains_as_whole_sequences_do():
    """Inductor, with the ring and documents."""
    params, batches = params_of(), [batch_of(i, True) for i in range(2)]
    train_step = train_step_for(loss_for(causal=True, method="ring"), OPT)
    step = fzero.jit(fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=1, cp=2)))
    assert_trains_as_whole(train_step, params, step, batches)
