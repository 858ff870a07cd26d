"""model_step: models by name have the parameters of transformers', and can be planned in every configuration."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import fzero
from fzero import tuning
from fzero.tuning import Configuration
from fzero.tuning._recipe import recipe
from fzero.tuning.models._forward_pass import ForwardOptions, compute_loss
from fzero.tuning.models._model_names import ModelShape, init, make_batch
from fzero.tuning.models._presets import PRESETS, model_shape
from fzero.tuning.models._steps import ModelStep
from fzero.tuning.search import ConfigurationPlanner
from fzero.tuning.search._extrapolation import choose_depths
from tests.helpers import cases, either
from tests.tuning.helpers import TINY

# parameters as their authors count them: transformers' models on the meta device, and for ViT-G/14 the formula of its
# block; mixtral and llama by their model cards
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "bert-large": 335_174_458,
    "vit-g-14": 1_844_440_680,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_model(name):
    shape = PRESETS[name]
    assert fzero.tree.numel(init(shape, shape.depth)) == PARAMETERS[name]


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
HF: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "mistral": {**SIZES, "num_key_value_heads": 2},
    "qwen2": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 40},
    "bert": {**SIZES, "max_position_embeddings": 40},
    "vit": {k: v for k, v in SIZES.items() if k != "vocab_size"} | {"image_size": 32, "patch_size": 8},
}
MODELS = {"vit": "ForImageClassification", "gpt2": "LMHeadModel", "bert": "ForMaskedLM"}


@pytest.mark.parametrize("kind", HF)
def test_a_hugging_face_configuration_is_read_by_file_and_folder(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **HF[kind])
    config.save_pretrained(tmp_path)
    auto = {"vit": transformers.AutoModelForImageClassification, "bert": transformers.AutoModelForMaskedLM}
    with torch.device("meta"):
        model = auto.get(kind, transformers.AutoModelForCausalLM).from_config(config)
    shape = model_shape(str(tmp_path))
    assert replace(model_shape(str(tmp_path / "config.json")), name="") == replace(shape, name="")
    assert fzero.tree.numel(init(shape, shape.depth)) == sum(p.numel() for p in model.parameters()), shape


def kinds(*few: str) -> list[Any]:
    """List the tiny models; all but a few are more of the same."""
    return [n if n in few else pytest.param(n, marks=pytest.mark.slow) for n in TINY]


@pytest.fixture
def tiny(monkeypatch):
    for name, shape in TINY.items():
        monkeypatch.setitem(PRESETS, f"tiny-{name}", shape)


@pytest.mark.parametrize("name", kinds("causal"))
def test_every_model_can_be_planned(name, tiny):
    make_step = tuning.model_step(f"tiny-{name}", length=16)
    asked = {"world_size": 4, "global_batch": 8, "memory": 1e9, "machine": "h100", "micro_batches": (1,)}
    table = fzero.tune(make_step, **asked, stages=(3,), remat=either(("matmuls",), (False, "matmuls")), offload=(0.5,))
    assert len(table.rows) == either(1, 2) and not table.skipped and table.best()
    for row in table.rows:
        assert row.flops and row.traffic_bytes["dp"] and (row.host_bytes > 0) == (row.config.offload > 0)


@pytest.mark.parametrize("name", kinds("causal", "image", "experts"))
def test_a_models_loss_is_a_number_and_trains(name, tiny):
    """The functions are models, not only shapes: with real values a step lowers the loss."""
    step, params, opt_state, batch = tuning.model_step(f"tiny-{name}", length=16)(Configuration(3, 2, 1, ranks=2))
    torch.manual_seed(0)

    def real(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return torch.randint(8, x.shape)
        return torch.randn(x.shape, dtype=x.dtype) * 0.05

    whole = fzero.tree.map(real, init(TINY[name], 2))
    optimizer = fzero.optim.master_weights(fzero.optim.adamw(3e-2), fzero.Precision(param=torch.bfloat16))
    opt = fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), optimizer)
    params, opt_state = step.init(whole, opt)
    samples = tuning.models._model_names.make_batch(TINY[name], 4, 16)
    batch = step.mesh.split(fzero.tree.map(real, samples))
    losses = []
    for _ in range(4):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0], losses


@pytest.mark.slow
def test_experts_are_split_over_an_axis_of_their_own(tiny):
    """Half of them lie on each rank, tokens travel along ep, and the lines to paste make such a mesh."""
    make_step = tuning.model_step("tiny-experts", length=16)
    asked = {"world_size": 8, "global_batch": 8, "memory": 1e9, "machine": "h100", "micro_batches": (1,)}
    table = fzero.tune(make_step, **asked, stages=(2,), remat=(False,), ep=(1, 2))
    one, two = (next(r for r in table.rows if r.config.ep == n) for n in (1, 2))
    assert {*one.traffic_bytes} == {"dp"} and {*two.traffic_bytes} == {"dp", "dp,ep", "ep"}
    paths, leaves, _ = fzero.tree.flatten_with_paths(init(TINY["experts"], 2))
    expert = sum(x.numel() for path, x in zip(paths, leaves, strict=True) if ".experts." in path)
    rest = sum(x.numel() for x in leaves) - expert
    assert one.device_bytes["parameters"] == 2 * (expert + rest) and two.device_bytes["parameters"] == 2 * (
        expert / 2 + rest
    )
    assert "ep" in str(table).splitlines()[1].split() and ", ep 2" in str(two.config)
    said = recipe(two.config)
    assert "fzero.mesh(dp=-1, ep=2)" in said and 'split=fzero.parallel.experts.split_rule("experts")' in said
    assert "ep" not in recipe(one.config).replace("step", "").replace("depth", "")


@pytest.mark.parametrize("name,ep", [("tiny-gpt2", 2), ("tiny-experts", 8)])
def test_experts_that_do_not_divide_are_refused(tiny, name, ep):
    with pytest.raises(ValueError, match=rf"ep={ep} does not divide the [04] experts of"):
        tuning.model_step(name, length=16)(Configuration(1, 1, 1, ranks=8, ep=ep))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["masked"], ["causal"]))
def test_a_chunked_loss_is_the_loss_without_its_logits(name):
    """Of a tied head and of one with a bias; and no plan holds the logits of all tokens."""
    shape = replace(TINY[name], vocab=9000)
    params = fzero.tree.map(lambda p: torch.randn(p.shape) * 0.1, init(shape, 2))
    batch = fzero.tree.map(lambda x: torch.randint(shape.vocab, x.shape), make_batch(shape, 2, 16))
    losses = [compute_loss(shape, ForwardOptions(chunked=x), lambda block: block, params, batch) for x in (False, True)]
    assert losses[0] == pytest.approx(losses[1].item(), rel=1e-5)
    config = Configuration(1, 64, 1, ranks=2, depth=2)
    plans = [fzero.plan(*ModelStep(shape, 16, False)(replace(config, chunked_loss=c))) for c in (False, True)]
    assert plans[1].peak_bytes < plans[0].peak_bytes - 4 * 64 * 16 * 9000


@pytest.mark.slow
def test_explicit_attention_keeps_its_weights(tiny):
    plans = [
        fzero.plan(*tuning.model_step("tiny-gpt2", length=16, explicit=e)(Configuration(1, 64, 1, ranks=2)))
        for e in (False, True)
    ]
    assert plans[1].peak_bytes > plans[0].peak_bytes + 2 * 64 * 4 * 16 * 16


@pytest.mark.slow
@pytest.mark.parametrize("stage", (2, 3))
def test_a_deep_model_is_extrapolated_from_models_of_few_blocks(stage):
    make_step = tuning.model_step("gpt2", length=512)
    config = Configuration(stage, 4, 1, True, ranks=16, depth=24)
    row = ConfigurationPlanner(make_step, tuning.A100)(config)
    plan = fzero.plan(*make_step(config), hardware=tuning.A100.as_hardware())
    assert row.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


BAD = {
    "no such model": (("llama-4", 16), r"model 'llama-4' is unknown: expected one of llama-3-8b, .*module:function"),
    "no length": (("gpt2", 0), r"length=0: expected an int"),
    "a long text": (("gpt2", 1025), r"length=1025: gpt2 has 1024 positions"),
    "a small image": (("vit-g-14", 100), r"length=100: vit-g-14 takes images of 224 pixels"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_model_names_are_refused(name):
    (model, length), message = BAD[name]
    with pytest.raises(ValueError, match=message):
        tuning.model_step(model, length=length)


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "expected a Hugging Face configuration"),
        ('{"a": 1}', "expected a Hugging Face configuration with a model_type: 'model_type'"),
        ('{"model_type": "mamba"}', "model_type 'mamba' is none of llama, .*: write a make_step"),
        (
            json.dumps({"model_type": "llama", "hidden_size": 3}),
            "the configuration of llama lacks 'num_hidden_layers'",
        ),
    ],
)
def test_wrong_configuration_files_are_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        tuning.model_step(str(path), length=16)


@pytest.mark.slow
def test_quantised_states_appear_in_the_plan_and_in_the_lines_to_paste():
    """Codes on the wire and moments in 8 bits, with the bytes that they save, and their lines in the recipe."""
    make_step = tuning.model_step("gpt2", length=64)
    options = {"world_size": 8, "global_batch": 8, "machine": "h100", "stages": (3,), "remat": (True,), "depth": 1}
    plain = fzero.tune(make_step, **options, micro_batches=(1,)).rows[0]
    coded = fzero.tune(make_step, **options, micro_batches=(1,), gather="int8", reduce="int4").rows[0]
    small = fzero.tune(make_step, **options, micro_batches=(1,), moments="int8").rows[0]
    # gathers send a byte and its scale for two, sums half a byte and its scale for four; some gather twice, some once
    assert 1.56 / 6 < coded.traffic_bytes["dp"] / plain.traffic_bytes["dp"] < 2.6 / 8
    numel = fzero.tree.numel(init(PRESETS["gpt2"], 1)) / 8
    # the shards are the master weights, so the state holds moments alone
    assert plain.device_bytes["optimizer state"] == pytest.approx(8 * numel, rel=0.02)
    saved = plain.device_bytes["optimizer state"] - small.device_bytes["optimizer state"]
    assert saved == pytest.approx(6 * numel, rel=0.02)
    for moments in either((), ("bfloat16",)):
        halved = fzero.tune(make_step, **options, micro_batches=(1,), moments=moments).rows[0]
        saved = plain.device_bytes["optimizer state"] - halved.device_bytes["optimizer state"]
        assert saved == pytest.approx(4 * numel, rel=0.02)
    lines = recipe(coded.config)
    coded_policy = "param=torch.bfloat16, shard=torch.float32, gather=fzero.codecs.int8(), reduce=fzero.codecs.int4()"
    assert f"Precision({coded_policy})" in lines
    assert 'optim.adamw(3e-4, moments="int8")' in recipe(small.config) and "moments" not in lines
    assert "gather int8, reduce int4" in str(coded.config) and "moments int8" in str(small.config)


def test_a_plan_with_float8_multiplies_the_layers_of_blocks_in_float8():
    """Six layers a block, each with a product forward and two backward; sizes that 16 does not divide stay exact."""
    config = Configuration(3, 1, 1, ranks=8, depth=1)
    has_rows = torch.__version__ >= "2.13"  # torch 2.11 has no rowwise product on a CPU, where this is traced
    for scaling in either(("rowwise",), ("tensorwise", "rowwise")) if has_rows else ("tensorwise",):
        coded = replace(config, float8=scaling)
        plan = fzero.plan(*tuning.model_step("gpt2", length=64)(coded))
        count = sum(o.times for o in plan.operations if o.target == "aten._scaled_mm.default")
        assert count == 6 * 3
        assert f"float8 {scaling}" in str(coded) and f'scaling="{scaling}")' in recipe(coded)
        (call,) = re.findall(r"fzero\.nn\.functional\(.*\)$", recipe(coded), re.MULTILINE)
        assert eval(call, {"fzero": fzero, "model": torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])})
    narrow = ModelStep(ModelShape("gpt2", 24, 1, 4, 48, 64, positions=16, tied=True), 16, False)
    assert not any("_scaled_mm" in o.target for o in fzero.plan(*narrow(replace(config, float8="rowwise"))).operations)
    assert "float8" not in recipe(config)


@pytest.mark.slow
def test_a_compiled_step_has_other_seconds_and_the_same_bytes():
    make_step = tuning.model_step("gpt2", length=64)
    options = {"world_size": 8, "global_batch": 8, "machine": "h100", "stages": (3,), "remat": (True,), "depth": 1}
    plain, compiled = (fzero.tune(make_step, **options, compiled=x).rows[0] for x in (False, True))
    assert compiled.seconds < 0.9 * plain.seconds and compiled.peak_bytes == plain.peak_bytes
    assert compiled.traffic_bytes == plain.traffic_bytes and ", compiled" in str(compiled.config)


@pytest.mark.parametrize("word", ["gather", "reduce", "moments", "float8"])
def test_unknown_dtypes_of_a_plan_are_refused(word):
    options = {"world_size": 8, "global_batch": 8, "machine": "h100", "depth": 2}
    with pytest.raises(ValueError, match=f"{word}='int3': expected "):
        fzero.tune(tuning.model_step("gpt2", length=64), **options, **{word: "int3"})


def test_remat_every_2_recomputes_every_second_block():
    """Half of the blocks do the work twice. Models of few blocks prove a deep one, if their depths have its parity."""
    make_step = ModelStep(replace(TINY["causal"], depth=2), 32, False)
    rows = {
        remat: ConfigurationPlanner(make_step, tuning.H100)(Configuration(2, 2, 1, remat, ranks=2, depth=2))
        for remat in (False, "every-2", True)
    }
    assert rows["every-2"].flops == pytest.approx((rows[False].flops + rows[True].flops) / 2)
    assert rows[True].peak_bytes < rows["every-2"].peak_bytes < rows[False].peak_bytes
    depths = choose_depths(Configuration(2, 2, 2, "every-2", ranks=2, depth=18), is_uniform=True)
    assert len(depths) >= 3 and all(depth % 2 == 0 for depth in depths)
    with pytest.raises(ValueError, match=r"remat='every-2' with pp=2: a pipeline treats all blocks alike: choose pp=1"):
        make_step(Configuration(2, 2, 2, "every-2", pp=2, depth=12))


@pytest.mark.slow
def test_few_blocks_prove_a_model_whose_every_second_block_recomputes():
    make_step = ModelStep(replace(TINY["causal"], depth=18), 32, False)
    config = Configuration(2, 2, 2, "every-2", ranks=2, depth=18)
    row = ConfigurationPlanner(make_step, tuning.H100)(config)
    full = ConfigurationPlanner(make_step, tuning.H100)(row)
    assert not row.in_full and full.in_full
    assert full.peak_bytes == pytest.approx(row.peak_bytes, rel=0.005)
