"""Models of transformers with split sequences compute what they compute with whole ones, or are refused by name."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fzero
from fzero import optim
from fzero._notice import warn_once
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from tests.helpers import LEAST, cases, train_step_for

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"vocab_size": 50, "max_position_embeddings": 64, "use_cache": False},
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64, "use_cache": False}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "conv_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED | {"sliding_window": 5}),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED | {"head_dim": 8}),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED | {"sliding_window": 5}),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        GROUPED | {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        GROUPED | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 0.2},
    ),
    "GptOssForCausalLM": ("GptOssConfig", GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 5}),
    "PhimoeForCausalLM": ("PhimoeConfig", GROUPED | EXPERTS | {"sliding_window": 5}),
    "MoshiForCausalLM": ("MoshiConfig", GROUPED | {"sliding_window": 5}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", GROUPED),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES),
    "GPT2LMHeadModel": ("GPT2Config", GPT2 | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "OlmoeForCausalLM": ("OlmoeConfig", GROUPED | EXPERTS),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED | EXPERTS),
    "Lfm2ForCausalLM": ("Lfm2Config", GROUPED | CONVOLUTIONS),
    "Lfm2MoeForCausalLM": ("Lfm2MoeConfig", GROUPED | CONVOLUTIONS | EXPERTS | {"moe_intermediate_size": 16}),
    "Lfm3ForCausalLM": ("Lfm3Config", GROUPED | CONVOLUTIONS | {"conv_L_cache": 4}),
    "BertForMaskedLM": ("BertConfig", SIZES | NO_DROPOUT),
    "ModernBertForMaskedLM": (
        "ModernBertConfig",
        SIZES | {"local_attention": 8} | dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0),
    ),
}
OPT = optim.sgd(0.1)


def model_of(name: str, config: str = "", **sizes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config, own = MODELS.get(name, (config, {}))
    return getattr(transformers, name)(getattr(transformers, config)(**own, **sizes)).double()


def step_for(apply: Any, buffers: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> Any:
        options = {"documents": batch["documents"]} if "documents" in batch else {}
        logits, labels = apply(params, buffers, input_ids=batch["tokens"], **options)[0].logits, batch["labels"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

    return train_step_for(loss_fn, OPT, reduce="weighted")


def batch_of(seed: int, shift: bool = True) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 50, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": context.shift_labels(tokens) if shift else tokens}


@pytest.mark.parametrize(
    "name,backend",
    cases(
        [
            ("LlamaForCausalLM", "fx"),
            ("MistralForCausalLM", None),
            ("ModernBertForMaskedLM", None),
            ("Lfm2ForCausalLM", None),
            ("Gemma2ForCausalLM", None),
            ("GptOssForCausalLM", None),
            ("PhimoeForCausalLM", None),
        ],
        [*[(name, None) for name in MODELS], ("LlamaForCausalLM", "auto"), ("GPT2LMHeadModel", "auto")],
    ),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_trains_on_split_sequences_as_on_whole_ones(name, backend):
    """They agree to 1e-6: most of them compute positions and norms in float32."""
    model = model_of(name).eval()  # the router of Phi-3.5-MoE draws in training
    plain, params, buffers = fzero.nn.functional(model)
    apply = fzero.nn.functional(model, context="cp").apply
    mesh = fzero.mesh(dp=2, cp=2)
    step = fzero.shard(step_for(apply, buffers), stage=3, mesh=mesh)
    run = step if backend is None else fzero.jit(step, backend=backend, **(LEAST if backend == "fx" else {}))
    state, expected = step.init(params, OPT), (params, OPT.init(params))
    for i in range(2):
        batch = batch_of(i, not name.endswith("MaskedLM"))
        *state, loss = run(*state, context.split(mesh, batch))
        *expected, wanted = step_for(plain, buffers)(*expected, batch)
        torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=0)
    for path, x in step.gather(state[0]).items():
        torch.testing.assert_close(x, expected[0][path], rtol=0, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Lfm2ForCausalLM"])
def test_document_numbers_replace_the_attention_mask(name):
    """Two documents in one sequence have the logits of two sequences, but for positions: these are not relative."""
    model = model_of(name)
    apply, params, buffers = fzero.nn.functional(model, context="cp")
    tokens = batch_of(0)["tokens"][:1]
    documents = (torch.arange(16) >= 7).long().unsqueeze(0)
    mesh = fzero.mesh(cp=2)

    def logits(tokens: Any, documents: Any) -> Any:
        return fzero.PerRank(apply(params, buffers, input_ids=tokens, documents=documents)[0].logits)

    actual = mesh.spmd(logits)(context.split(mesh, tokens), context.split(mesh, documents)).value
    alone = [apply(params, buffers, input_ids=x)[0].logits for x in (tokens[:, :7], tokens[:, 7:])]
    expected = context.split(mesh, torch.cat(alone, 1)).value
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # rotary positions are relative


def test_labels_are_shifted_before_they_are_split():
    model = model_of("LlamaForCausalLM")
    apply, params, buffers = fzero.nn.functional(model, context="cp")
    mesh, tokens = fzero.mesh(cp=2), batch_of(0)["tokens"]
    labels = context.shift_labels(tokens)
    whole = fzero.nn.functional(model).apply(params, buffers, input_ids=tokens, labels=tokens)[0].loss

    def loss(tokens: Any, labels: Any) -> Any:
        return fzero.PerRank(apply(params, buffers, input_ids=tokens, shift_labels=labels)[0].loss)

    losses = mesh.spmd(loss)(context.split(mesh, tokens), context.split(mesh, labels)).value
    counts = (context.split(mesh, labels).value != -100).sum((1, 2))
    torch.testing.assert_close((losses * counts).sum() / counts.sum(), whole)

    with pytest.raises(ValueError, match=r"LlamaForCausalLM shifts them.*shift_labels="):
        mesh.spmd(lambda x: apply(params, buffers, input_ids=x, labels=x)[0].loss)(context.split(mesh, tokens))
    with pytest.raises(ValueError, match="attention_mask of whole sequences has no meaning"):
        apply(params, buffers, input_ids=tokens, attention_mask=torch.ones_like(tokens))


def test_dropout_of_attention_across_ranks_draws_by_key():
    """It draws as any seeded function does, by a key for each rank: so it depends on the number of ranks."""
    model = model_of("LlamaForCausalLM", attention_dropout=0.3).train()
    apply, params, buffers = fzero.nn.functional(model, context="cp")
    mesh, tokens = fzero.mesh(cp=2), batch_of(0)["tokens"]

    def logits(key: Any, tokens: Any) -> Any:
        return fzero.random.seeded(lambda x: apply(params, buffers, input_ids=x)[0].logits)(key, tokens)

    def run(seed: int) -> Any:
        box = context.split(mesh, tokens)
        return mesh.spmd(lambda key, x: fzero.PerRank(logits(key, x)))(fzero.random.key(seed), box).value

    assert torch.equal(run(1), run(1))
    assert (run(1) - run(2)).abs().mean() > 1e-3


AXES = itertools.product(
    ["LlamaForCausalLM", "MixtralForCausalLM"],
    [{"dp": 1, "cp": 2, "tp": 2}, {"cp": 2, "tp": 2, "dp": 2}],
    [False, True],
    [2, 3],
    ["vmap", "lockstep"],
)
FEW_AXES = [("LlamaForCausalLM", {"dp": 1, "cp": 2, "tp": 2}, True, 3, "vmap")]


@pytest.mark.parametrize("name,axes,sequence,stage,simulate", cases(FEW_AXES, AXES))
def test_tensor_parallel_layers_attend_across_ranks_of_tokens(name, axes, sequence, stage, simulate):
    """Heads over `tp`, tokens over `cp`, and Mixtral's experts over `ep`; norms of a part of the rank's tokens."""
    plain, params, buffers = fzero.nn.functional(model_of(name))
    model, options = model_of(name), {"lm_head": "colwise"}
    if name.startswith("Mixtral"):
        moe.transformers.register()
        model.set_experts_implementation("fzero")  # type: ignore[operator]
        options |= dict.fromkeys(["*.experts", "*.experts.gate_up_proj", "*.experts.down_proj"])
        axes = axes | {"ep": 2}
    layers = tp.layers(model, options, sequence=sequence)
    rules = [layers.split, *([moe.transformers.split_rule(model)] if "ep" in axes else [])]
    apply, split_params, _ = fzero.nn.functional(model, tp=layers, context="cp")

    def loss_fn(params: Any, batch: Any) -> Any:
        logits, labels = apply(params, buffers, input_ids=batch["tokens"])[0].logits, batch["labels"]
        return tp.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    train_step, data = train_step_for(loss_fn, OPT, reduce="weighted"), tuple([a for a in axes if a != "tp"])
    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(**axes, simulate=simulate), axis=data, split=rules)
    batch = {name: torch.cat([x, x.flip(0)]) for name, x in batch_of(0).items()}
    own = context.split(step.mesh, batch, batch_axis=tuple([a for a in data if a != "cp"]))
    *state, loss = step(*step.init(split_params, OPT), own)
    *expected, wanted = step_for(plain, buffers)(params, OPT.init(params), batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=0)
    for path, x in layers.pack(step.gather(state[0])).items():
        torch.testing.assert_close(x, expected[0][path], rtol=0, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    "name,config,sizes,message",
    [
        ("MambaForCausalLM", "MambaConfig", SMALL, "is a Mamba.*which combines tokens without attention"),
        ("Llama4ForCausalLM", "Llama4TextConfig", GROUPED | {"head_dim": 8, **EXPERTS}, "layers of type 'chunked_att"),
        ("RobertaForMaskedLM", "RobertaConfig", SIZES, "numbers tokens by the padding before them"),
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type='dynamic', which reads the longest sequence in Python",
        ),
        ("BertModel", "BertConfig", SIZES, "BertModel pools some tokens"),
        ("BertForSequenceClassification", "BertConfig", SIZES, "reads the results of some tokens"),
        ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "num_layers": 1, "vocab_size": 50}, "to an encoder"),
        ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 1, "n_head": 4}, "has attention of its own"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_that_combine_tokens_outside_of_attention_are_refused(name, config, sizes, message):
    with pytest.raises(ValueError, match=message):
        fzero.nn.functional(model_of(name, config, **sizes), context="cp")


def test_attention_with_unknown_arguments_is_refused():
    model = model_of("LlamaForCausalLM", attention_dropout=0.1)
    apply, params, buffers = fzero.nn.functional(model.train(), context="cp")
    with pytest.raises(ValueError, match=r"drops attention weights, p=0\.1"):
        apply(params, buffers, input_ids=batch_of(0)["tokens"])
    apply, params, buffers = fzero.nn.functional(model_of("LlamaForCausalLM"), context="cp")
    with pytest.raises(ValueError, match="LlamaAttention attends with head_mask, which attention of split sequences"):
        apply(params, buffers, input_ids=batch_of(0)["tokens"], head_mask=torch.ones(4))


def test_a_model_that_gets_whole_sequences_is_refused():
    """It is refused even if no box tells how they were split."""
    model = model_of("LlamaForCausalLM")
    apply, params, buffers = fzero.nn.functional(model, context="cp")
    mesh, tokens = fzero.mesh(dp=1, cp=2), batch_of(0)["tokens"]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: the ranks of 'cp' got the same tokens \[2, 16\]"):
        mesh.spmd(lambda x: apply(params, buffers, input_ids=x)[0].logits)(tokens)
    own = mesh.spmd(lambda x: fzero.PerRank(apply(params, buffers, input_ids=x[:, context.positions(8)])[0].logits))(
        tokens
    )
    expected = context.split(mesh, apply(params, buffers, input_ids=tokens)[0].logits)
    torch.testing.assert_close(own.value, expected.value, rtol=0, atol=1e-6)


def test_a_model_that_attends_within_parts_gets_a_notice(caplog):
    """It may be an encoder of whole sequences, so it is not an error."""
    model = model_of("LlamaForCausalLM")
    mesh, tokens = fzero.mesh(dp=1, cp=2), batch_of(0)["tokens"]
    for options in ({"context": "cp"}, {}):
        warn_once.cache_clear()
        caplog.clear()
        apply, params, buffers = fzero.nn.functional(model, **options)
        run = mesh.spmd(lambda x, f=apply, p=params, b=buffers: fzero.PerRank(f(p, b, input_ids=x)[0].logits))
        run(context.split(mesh, tokens))
        assert ("attends within each rank's tokens: pass context='cp'" in caplog.text) == (not options)


class Shifted(torch.nn.Module):
    """A layer that mixes something of other tokens into each."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x)


MIXES: dict[str, tuple[str, Any]] = {
    "a shift by F.pad": ("slice|constant_pad_nd", lambda x: F.pad(x, [0, 0, 1, -1])),
    "a shift by slices": ("slice", lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)),
    "roll": ("roll", lambda x: x.roll(1, 1)),
    "a sum of earlier tokens": ("cumsum", lambda x: x.cumsum(1)),
    "a mean of tokens": ("mean", lambda x: x.mean(1, keepdim=True)),
    "one token": ("select", lambda x: x[:, 0].unsqueeze(1)),
    "softmax": ("_softmax", lambda x: x.softmax(-2)),
    "attention of its own": ("bmm", lambda x: (x @ x.mT) @ x),
    "a convolution": ("convolution", lambda x: F.conv1d(x.mT, x.new_ones(32, 1, 3), padding=1, groups=32).mT),
    "an index": ("flip|index", lambda x: x[:, torch.arange(x.shape[1], device=x.device).flip(0)]),
    "a Fourier transform": ("_fft", lambda x: torch.fft.fft(x, dim=1).real),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_model_that_looks_across_tokens_is_refused_by_its_line(mix):
    operation, f = MIXES[mix]
    model = model_of("LlamaForCausalLM")
    model.model.layers[1].mlp = Shifted(f)
    message = rf"LlamaForCausalLM: ({operation}).* of a tensor .* along its 53 tokens, at .*test_transformers\.py:\d+"
    with pytest.raises(ValueError, match=message):
        fzero.nn.functional(model, context="cp")


def test_operations_on_single_tokens_are_not_refused():
    """A size may be 1 or a factor of others: a slice, sum or norm of a token's own elements."""
    model = model_of("LlamaForCausalLM")
    own = Shifted(lambda x: F.conv1d(x.mT, x.new_ones(32, 1, 1), groups=32).mT.softmax(-1)[..., :1] + x.roll(1, -1))
    model.model.layers[1].mlp = own
    fzero.nn.functional(model, context="cp")


def test_a_model_that_passes_on_no_documents_trains_without_documents():
    model = model_of("StableLmForCausalLM", "StableLmConfig", **GROUPED)
    plain, params, buffers = fzero.nn.functional(model)
    apply = fzero.nn.functional(model, context="cp", remat=True).apply
    mesh, tokens = fzero.mesh(cp=2), batch_of(0)["tokens"]

    def grads(tokens: Any, **options: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return apply(params, buffers, input_ids=tokens, **options)[0].logits.square().sum()

        return fzero.collectives.psum(torch.func.grad(loss_fn)(params))

    actual = mesh.spmd(grads)(context.split(mesh, tokens))
    expected = torch.func.grad(lambda p: plain(p, buffers, input_ids=tokens)[0].logits.square().sum())(params)
    for path, x in actual.items():
        torch.testing.assert_close(x, expected[path], rtol=0, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")
    with pytest.raises(ValueError, match=r"StableLmForCausalLM does not hand keyword arguments on .* documents do not"):
        mesh.spmd(lambda x: grads(x, documents=torch.zeros_like(x)))(context.split(mesh, tokens))


PIPELINES = itertools.product(
    ("LlamaForCausalLM", "MistralForCausalLM"), (("1f1b", 3), ("gpipe", 0)), ("vmap", "lockstep")
)
FEW = [("LlamaForCausalLM", "1f1b", 3, "vmap"), ("MistralForCausalLM", "gpipe", 0, "lockstep")]


@pytest.mark.parametrize("name,schedule,stage,simulate", cases(FEW, [(x, *y, z) for x, y, z in PIPELINES]))
def test_a_pipeline_of_split_sequences_trains_as_the_whole(name, schedule, stage, simulate):
    """It has documents, and two pipeline stages on each half of the tokens."""
    model = model_of(name)
    plain, params, buffers = fzero.nn.functional(model, context="cp")

    def loss(output: Any, batch: Any) -> Any:
        logits, labels = output.logits, batch["labels"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()

    def inputs(batch: Any) -> Any:
        return {"input_ids": batch["tokens"], "documents": batch["documents"]}

    options: Any = {"micro_batches": 2, "schedule": schedule, "inputs": inputs, "context": "cp"}
    pipelined, split_params, join = fzero.nn.pipeline(model, loss, **options)
    mesh = fzero.mesh(dp=1, cp=2, pp=2, simulate=simulate)
    train_step = train_step_for(pipelined, OPT, reduce="weighted")
    step = fzero.shard(train_step, stage=stage, mesh=mesh, split=pipelined.split)
    state, expected = step.init(pipelined.stack(split_params, mesh), OPT), (params, OPT.init(params))
    for i in range(2):
        tokens = batch_of(i)["tokens"]
        documents = (torch.arange(16) >= 7).long().expand(2, 16)
        batch = {"tokens": tokens, "documents": documents, "labels": context.shift_labels(tokens, documents)}
        *state, value = step(*state, context.split(mesh, batch, batch_axis="dp"))
        *expected, wanted = step_for(plain, buffers)(*expected, batch)
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=0)
    for path, x in join(pipelined.unstack(step.gather(state[0]), mesh)).items():
        torch.testing.assert_close(x, expected[0][path], rtol=0, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


def test_experts_that_read_numbers_run_in_lockstep(caplog):
    """JetMoE reads the number of each expert's tokens in Python, which a simulation by vmap cannot."""
    sizes = {**{k: x for k, x in GROUPED.items() if k != "num_attention_heads"}, "kv_channels": 8}
    model = model_of("JetMoeForCausalLM", "JetMoeConfig", **sizes, num_local_experts=4, num_experts_per_tok=2)
    plain, params, buffers = fzero.nn.functional(model)
    warn_once.cache_clear()
    apply, tokens = fzero.nn.functional(model, context="cp").apply, batch_of(0)["tokens"]
    assert "JetMoeForCausalLM does not run on tensors without numbers" in caplog.text

    def logits(tokens: Any) -> Any:
        return fzero.PerRank(apply(params, buffers, input_ids=tokens)[0].logits)

    mesh = fzero.mesh(cp=2, simulate="lockstep")
    expected = context.split(mesh, plain(params, buffers, input_ids=tokens)[0].logits)
    torch.testing.assert_close(mesh.spmd(logits)(context.split(mesh, tokens)).value, expected.value, rtol=0, atol=1e-6)
    mesh = fzero.mesh(cp=2)
    with pytest.raises(RuntimeError) as raised:
        mesh.spmd(logits)(context.split(mesh, tokens))
    assert 'simulate="lockstep"' in "".join(raised.value.__notes__)


def test_context_takes_models_of_transformers_only():
    with pytest.raises(TypeError, match=r"expected a model of transformers.*context\.attention"):
        fzero.nn.functional(torch.nn.Linear(2, 2), context="cp")
    with pytest.raises(TypeError, match=r"context=True: expected the name of an axis"):
        fzero.nn.functional(torch.nn.Linear(2, 2), context=True)  # pyright: ignore[reportArgumentType]
