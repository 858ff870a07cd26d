"""Models with rotary angles of type "longrope", as Phi-3.5 and Phi-4-mini, train as by torch alone.

Their forward pass chooses one of two sets of frequencies by the length of its sequences, and writes it into a buffer.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero
from fzero import optim
from fzero.nn import functional_in_place, put_back
from fzero.nn.split._split_module import split_module
from fzero.parallel import context
from fzero.parallel import tensor as tp
from tests.helpers import LEAST, cases, train_step_for
from tests.nn.helpers import run

transformers = pytest.importorskip("transformers")
VOCAB, SHORT, RATE = 50, 12, 0.1  # sequences of more than SHORT tokens have the long set
LENGTHS = (8, 16, 16, 8)
OPT = optim.sgd(RATE)


def longrope() -> Any:
    torch.manual_seed(0)
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0], "original_max_position_embeddings": SHORT}
    config = transformers.Phi3Config(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24},
        **{"vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False, "num_key_value_heads": 2},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        original_max_position_embeddings=SHORT,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    return transformers.Phi3ForCausalLM(config).double()


def batch_of(seed: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCAB, (4, length), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": context.shift_labels(tokens)}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def step_for(apply: Any, buffers: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        logits = apply(params, buffers, input_ids=batch["tokens"])[0].logits
        return loss_of(logits, batch["labels"]), (batch["labels"] != -100).sum()

    return train_step_for(loss_fn, OPT, reduce="weighted")


def train_by_hand(lengths: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model, losses = longrope(), []
    opt = torch.optim.SGD(model.parameters(), RATE)
    for i, length in enumerate(lengths):
        batch = batch_of(i, length)
        loss = loss_of(model(input_ids=batch["tokens"]).logits, batch["labels"]) / (batch["labels"] != -100).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "backend,remat",
    cases([(None, True), ("fx", False)], [(None, False), ("fx", True), ("inductor", False)]),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_longrope_trains_as_by_torch_at_changing_lengths(backend, remat, caplog):
    """They agree to 1e-6: norms and angles are computed in float32."""
    model, lengths = longrope(), LENGTHS if backend is None else (16, 16)
    apply, params, buffers = fzero.nn.functional(model, remat=remat)
    before = {name: x.clone() for name, x in buffers.items()}
    step = fzero.shard(step_for(apply, buffers), stage=3, mesh=fzero.mesh(dp=2))
    call = step if backend is None else fzero.jit(step, backend=backend, **(LEAST if backend == "fx" else {}))
    state, (losses, trained) = step.init(params, OPT), train_by_hand(lengths)
    for i, length in enumerate(lengths):
        *state, loss = call(*state, step.mesh.split(batch_of(i, length)))
        torch.testing.assert_close(loss, losses[i], rtol=1e-6, atol=0)
    for path, x in step.gather(state[0]).items():
        torch.testing.assert_close(x, trained[path], rtol=0, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")
    assert all(torch.equal(x, before[name]) for name, x in buffers.items())
    assert "long_inv_freq" not in caplog.text


def test_a_call_returns_the_frequencies_of_longrope_as_they_were():
    apply, params, buffers = fzero.nn.functional(longrope())
    assert apply.scratch_names == {"model.rotary_emb.inv_freq"} and not apply.mutable_names
    long, returned = apply(params, buffers, input_ids=batch_of(0, 16)["tokens"])
    assert returned["model.rotary_emb.inv_freq"] is buffers["model.rotary_emb.inv_freq"]
    expected = longrope()(input_ids=batch_of(0, 16)["tokens"]).logits
    torch.testing.assert_close(long.logits, expected, rtol=0, atol=1e-12)


def test_a_model_taken_apart_in_place_has_longrope():
    model, tokens = longrope(), batch_of(0, 16)["tokens"]
    expected = copy.deepcopy(model)(input_ids=tokens).logits
    apply, params, buffers = functional_in_place(model, torch.device("cpu"))
    actual = apply(params, buffers, input_ids=tokens)[0].logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    put_back(apply, {**params, **buffers})
    torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend,length", cases([(None, 16)], [("fx", 16), (None, 12)]))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_split_sequences_choose_frequencies_by_the_longest_position_of_all_ranks(backend, length):
    """Of 16 positions on two ranks one has 4 to 11 alone, which by themselves would have the short set."""
    apply, params, buffers = fzero.nn.functional(longrope(), context="cp")
    step = fzero.shard(step_for(apply, buffers), stage=3, mesh=fzero.mesh(dp=2, cp=2))
    call = step if backend is None else fzero.jit(step, backend=backend, **LEAST)
    state, (losses, trained) = step.init(params, OPT), train_by_hand((length,) * 2)
    for i in range(2):
        *state, loss = call(*state, context.split(step.mesh, batch_of(i, length)))
        torch.testing.assert_close(loss, losses[i], rtol=1e-6, atol=0)
    for path, x in step.gather(state[0]).items():
        torch.testing.assert_close(x, trained[path], rtol=0, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 16])
def test_longrope_split_into_blocks_equals_the_whole(length):
    """`fzero.nn.pipeline` splits it so: the angles are computed once a batch, beside the blocks."""
    model, tokens = longrope().eval(), batch_of(0, length)["tokens"]
    expected = model(input_ids=tokens).logits
    assert run(*split_module(model), {"input_ids": tokens}).logits.equal(expected)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_longrope_with_split_layers_equals_the_whole(sequence):
    model = longrope()
    layers = tp.layers(model, {"lm_head": "colwise"}, sequence=sequence)
    apply, params, buffers = fzero.nn.functional(model, tp=layers)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        logits = apply(params, buffers, input_ids=batch["tokens"])[0].logits
        return tp.cross_entropy(logits, batch["labels"])

    mesh = fzero.mesh(dp=2, tp=2)
    step = fzero.shard(train_step_for(loss_fn, OPT), stage=3, mesh=mesh, axis="dp", split=layers.split)
    batch = batch_of(0, 16)
    *_, loss = step(*step.init(params, OPT), mesh.split(batch, "dp"))
    expected = train_by_hand((16,))[0][0]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
