"""Laws of `functional(model, chunked_loss=True)`: the loss is the model's own, and its logits never exist whole."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.nn import functional
from fzero.nn._lazy_logits import _LazyLogits
from fzero.parallel import context
from fzero.parallel import tensor as tp
from tests.helpers import LEAST, cases, examples, train_step_for

transformers = pytest.importorskip("transformers")
CLASSES = 9001  # two full chunks of classes, and a part of one
SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    **{"intermediate_size": 24, "vocab_size": CLASSES, "max_position_embeddings": 32, "use_cache": False},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": CLASSES, "n_positions": 32, "use_cache": False}
GPT2 |= dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
BERT = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SIZES),  # its head is not tied
    "Qwen3ForCausalLM": ("Qwen3Config", SIZES | {"tie_word_embeddings": True}),
    "Gemma2ForCausalLM": ("Gemma2Config", SIZES | {"final_logit_softcapping": 3.0}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "CohereForCausalLM": ("CohereConfig", {name: x for name, x in SIZES.items() if name != "head_dim"}),  # a scale
    "MixtralForCausalLM": ("MixtralConfig", SIZES | {"num_local_experts": 4, "output_router_logits": True}),
    "BertForMaskedLM": ("BertConfig", BERT | {"vocab_size": CLASSES}),  # a bias, and a loss written out
    "T5ForConditionalGeneration": ("T5Config", T5 | {"vocab_size": CLASSES, "use_cache": False}),
}
OPT = optim.adamw(1e-2)


def model_of(name: str, **changed: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config, sizes = MODELS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**sizes | changed)).double().eval()


def batch_of(seed: int, samples: int = 4) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, CLASSES, (samples, 6), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[:, 2] = -100
    return {"input_ids": tokens, "labels": labels}


def step_for(apply: Any, buffers: Any) -> Any:
    return train_step_for(lambda params, batch: apply(params, buffers, **batch)[0].loss, OPT)


@pytest.fixture
def in_float64(monkeypatch):
    """Models compute in float64 where they ask for float32, and so may be compared to its digits."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "name,stage", cases([("Gemma2ForCausalLM", 3)], [(name, s) for name in list(MODELS)[:4] for s in (0, 3)])
)
def test_a_jitted_step_with_a_chunked_loss_trains_as_with_the_models_own(name, stage):
    model = model_of(name)
    plain, params, buffers = functional(model)
    apply = functional(model, chunked_loss=True).apply
    step = fzero.shard(step_for(apply, buffers), stage=stage, mesh=fzero.mesh(dp=2))
    run, state, expected = fzero.jit(step, backend="fx", **LEAST), step.init(params, OPT), (params, OPT.init(params))
    for i in range(2):
        *state, loss = run(*state, step.mesh.split(batch_of(i)))
        *expected, wanted = step_for(plain, buffers)(*expected, batch_of(i))
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(step.gather(state[0]), expected[0], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", cases(["Qwen3ForCausalLM", "BertForMaskedLM"], MODELS))
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 7}], ids=["mean", "sum over a count"])
def test_a_chunked_loss_has_the_value_and_gradients_of_the_models_own(name, options):
    """Its shift, ignored labels and count; a scale, a cap and a bias of its head; other terms of its loss."""
    model, batch = model_of(name), batch_of(0, 2) | (options if name.endswith(("CausalLM", "LMHeadModel")) else {})
    plain, params, buffers = functional(model)
    apply = functional(model, chunked_loss=True).apply
    grads, loss = torch.func.grad_and_value(lambda p: apply(p, buffers, **batch)[0].loss)(params)
    expected, wanted = torch.func.grad_and_value(lambda p: plain(p, buffers, **batch)[0].loss)(params)
    torch.testing.assert_close((loss, grads), (wanted, expected), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["LlamaForCausalLM"], list(MODELS)[:4]))
def test_a_plan_of_a_chunked_loss_holds_a_few_chunks_of_logits(name):
    vocab = "vocab_size", 16_384
    model = model_of(name, **{vocab[0]: vocab[1], "num_hidden_layers": 1}).float()
    tokens = torch.zeros(2, 32, dtype=torch.long).repeat(8, 1)

    def peak(**options: Any) -> int:
        apply, params, buffers = functional(model, **options)
        step = fzero.shard(step_for(apply, buffers), stage=3, mesh=fzero.mesh(dp=1, device="cpu"))
        batch = step.mesh.split({"input_ids": tokens, "labels": tokens})
        plan = fzero.jit(step, backend="fx", **LEAST).plan(*step.init(params, OPT), batch)
        return plan.peak_bytes - plan.argument_bytes

    logits, head = 4 * tokens.numel() * vocab[1], 4 * 16 * vocab[1]
    assert peak() > 1.9 * logits
    assert peak(chunked_loss=True) < 4.5 * logits * 4096 / vocab[1] + 4 * head


def test_the_classes_of_the_head_may_be_split_over_an_axis():
    """They agree to 1e-6: the norms and the model's own loss are in float32."""
    model = model_of("LlamaForCausalLM", vocab_size=9000)
    plain, params, buffers = functional(model)
    layers = tp.layers(model)
    apply = functional(model, tp=layers, chunked_loss=True).apply
    mesh = fzero.mesh(dp=2, tp=2)
    step = fzero.shard(step_for(apply, buffers), stage=3, mesh=mesh, axis="dp", split=layers.split)
    batch = {name: x % 9000 if name == "input_ids" else x.clamp(max=8999) for name, x in batch_of(0).items()}
    state = step.init(params, OPT)
    *state, loss = step(*state, mesh.split(batch, "dp"))
    expected, _, wanted = step_for(plain, buffers)(params, OPT.init(params), batch)
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(step.gather(state[0]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_chunked_loss_works_with_split_sequences_and_remat(simulate):
    """The sum of the loss is then the program's, over logits that are not computed either."""
    model = model_of("LlamaForCausalLM")
    plain, params, buffers = functional(model)
    apply = functional(model, True, context="cp", chunked_loss=True).apply

    def step_of(apply: Any, **options: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Any:
            logits, labels = apply(params, buffers, input_ids=batch["tokens"])[0].logits, batch["labels"]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

        return train_step_for(loss_fn, OPT, reduce="weighted", **options)

    tokens = torch.randint(1, CLASSES, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = {"tokens": tokens, "labels": context.shift_labels(tokens)}
    mesh = fzero.mesh(dp=2, cp=2, simulate=simulate)
    step = fzero.shard(step_of(apply, gather=False), stage=3, mesh=mesh)
    state = step.init(params, OPT)
    *state, loss = step(*state, context.split(mesh, batch))
    expected, _, wanted = step_of(plain)(params, OPT.init(params), batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=0)
    torch.testing.assert_close(step.gather(state[0]), expected, rtol=0, atol=1e-6)


def lazy(*shape: int) -> tuple[_LazyLogits, torch.Tensor]:
    """Logits of a head, not computed and computed."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((*shape, 3), (5, 3)))
    return _LazyLogits("Model", hidden, weight, None, None, 5, torch.float64), hidden @ weight.mT


CHANGES: dict[str, Any] = {
    "drop the last token": lambda x: x[..., :-1, :],
    "drop the first token": lambda x: x[:, 1:],
    "the last sample": lambda x: x[-1:],
    "scale": lambda x: 0.5 * x,
    "divide": lambda x: x / 3,
    "cap": lambda x: 2 * torch.tanh(x / 2),
    "float": lambda x: x.float().contiguous().to(x.device),
    "view": lambda x: x.contiguous().view(-1, x.size(-1)).view(*x.shape),
}


@examples(20, 40)
@example(["drop the last token", "view"])
@given(st.lists(st.sampled_from(list(CHANGES)), max_size=4))
def test_operations_on_chunked_logits_are_applied_in_order(names):
    xs, labels = lazy(2, 6), torch.arange(60).view(2, 30)[:, :6] % 5

    def loss(x: Any) -> torch.Tensor:
        for name in names:
            x = CHANGES[name](x)
        assert x.shape[-1] == 5 and x.dim() == 3
        count = x.shape[0] * x.shape[1]
        return F.cross_entropy(x.reshape(-1, 5), labels.flatten()[:count], reduction="none", label_smoothing=0.1)

    torch.testing.assert_close(*map(loss, xs), check_dtype=False, rtol=1e-5, atol=1e-5)


NEEDS_LOGITS: dict[str, Any] = {
    "argmax": lambda x: x.argmax(-1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "cross_entropy(weight=)": lambda x: F.cross_entropy(x[0], torch.zeros(6).long(), weight=torch.ones(5)),
    "cross_entropy of [2, 6, 5]": lambda x: F.cross_entropy(x, torch.zeros(2, 5).long()),
    "* Tensor": lambda x: x * torch.ones(5),
    "pow": lambda x: torch.pow(x, 2),
    "[(slice(None, None, None), slice(None, None, None), 0)]": lambda x: x[:, :, 0],
    "view(-1, 2)": lambda x: x.view(-1, 2),
    "flatten(0, -1)": lambda x: x.flatten(),
    "to(meta)": lambda x: x.to("meta"),
    "to(meta, torch.float16)": lambda x: x.to("meta", torch.float16),
    "[True]": lambda x: x[True],
}


def test_chunked_logits_take_a_dtype_however_it_is_given():
    x, half = lazy(2, 6)[0], torch.float16
    for y in (x.to(half), x.to("cpu", half), x.to(dtype=half, device="cpu"), x.to(torch.ones(1, dtype=half))):
        assert y.dtype == half
    assert x.to("cpu").dtype == x.to(torch.device("cpu")).dtype == torch.float64


@pytest.mark.parametrize("what", NEEDS_LOGITS)
def test_operations_that_need_all_logits_are_refused_by_name(what):
    with pytest.raises((TypeError, AttributeError), match=re.escape(what) + ".*the logits of Model"):
        NEEDS_LOGITS[what](lazy(2, 6)[0])


def test_a_model_whose_head_is_not_found_is_named():
    with pytest.raises(TypeError, match=r"Linear is not a model of transformers.*fzero.nn.linear_cross_entropy"):
        functional(torch.nn.Linear(2, 2), chunked_loss=True)
    with pytest.raises(ValueError, match=r"LlamaModel has no output embedding.*fzero.nn.linear_cross_entropy"):
        functional(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), chunked_loss=True)
    model = model_of("LlamaForCausalLM")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a Sequential as its output embedding"):
        functional(model, chunked_loss=True)


class WithoutCall(transformers.LlamaForCausalLM):
    """A model that multiplies by its head's weight itself."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.model(input_ids)[0]
        return transformers.modeling_outputs.CausalLMOutput(logits=hidden @ self.lm_head.weight.mT)


def test_a_model_that_does_not_call_its_head_is_named():
    apply, params, buffers = functional(WithoutCall(transformers.LlamaConfig(**SIZES)), chunked_loss=True)
    with pytest.raises(ValueError, match="WithoutCall returned CausalLMOutput without the logits"):
        apply(params, buffers, torch.zeros(1, 3, dtype=torch.long))
