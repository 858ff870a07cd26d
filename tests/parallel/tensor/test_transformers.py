"""Models of transformers train with tensor parallelism, untouched: the numbers of the whole model."""

from typing import Any

import pytest
import torch

import fzero
from fzero import tree
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases, train_step_for
from tests.models.table import loss_of
from tests.parallel.tensor.model import OPT
from tests.parallel.tensor.models import GPT2, losses_of, model_of, step_and_params

MESHES = [(fzero.mesh(tp=2, dp=2), 3), (fzero.mesh(dp=1, tp=2, simulate="lockstep"), 2)]
FAMILIES: dict[str, Any] = {"llama": None, "gpt2": GPT2, "qwen2": None, "qwen3": None, "mistral": None, "gemma2": None}
FAST = ("llama",)
# gemma2 casts the weights of its norms: their gradients are summed over tokens in float32, here part by part. Softmaxes
# of routers are taken in float32, and their gradients are sums over parts of the experts
FLOAT32 = 1e-6


def check(
    model: torch.nn.Module, layers: tp.Layers, mesh: fzero.ranks.Mesh, stage: int, rtol: float = 1e-12, **options: Any
) -> dict[str, Any]:
    """Train both, compare, and return the split parameters."""
    axis: Any = tuple([name for name, _ in mesh.shape if name != "tp"])
    size = 8 if "ep" in axis else 4
    expected, losses = losses_of(options.pop("dense", model), size)
    rules = [layers.split, *options.pop("rules", [])]
    train_step, params, batches = step_and_params(model, layers, size, **options)
    step = fzero.shard(train_step, stage=stage, mesh=mesh, axis=axis, split=rules)
    state = step.init(params, OPT)
    for batch, wanted in zip(batches, losses, strict=True):
        *state, loss = step(*state, mesh.split(batch, axis))
        torch.testing.assert_close(loss, wanted, rtol=rtol, atol=0)
    assert_trees_close(layers.pack(step.gather(state[0])), expected, rtol)
    return state[0]


def split_over(params: dict[str, Any], axis: str = "tp") -> set[str]:
    """Name the parameters that are split over an axis."""
    leaves = zip(*tree.flatten_with_paths(params, tree.is_box)[:2], strict=True)
    return {path for path, x in leaves if hasattr(x, "spec") and axis in [s.axis for s in x.spec.split]}


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sequence"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES])
def test_training_by_a_models_tp_plan_equals_training_of_the_whole_model(name, sequence):
    model = model_of(name)
    layers = tp.layers(model, FAMILIES[name], sequence=sequence)
    for mesh, stage in MESHES:
        casts = name == "gemma2" and (sequence or mesh.size > 2)
        params = check(model, layers, mesh, stage, FLOAT32 if casts else 1e-12)
    whole = {name for name, p in params.items() if name not in split_over(params)}
    assert all(p.ndim < 2 or "wpe" in n for n, p in model.named_parameters() if n in whole)
    assert not whole & set(layers.param_splits)


LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4}
DENSE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}


@pytest.mark.parametrize(
    "name,rank,experts,sequence",
    cases(
        [("deepseek_v2", 8, "", True)],
        [
            ("deepseek_v2", None, "", False),
            ("deepseek_v2", 8, "batched_mm", False),
            ("glm4_moe_lite", 8, "batched_mm", True),
            ("minicpm3", 8, "", False),
        ],
    ),
)
def test_latent_attention_trains_as_the_whole_model(name, rank, experts, sequence):
    """Its norms and rotary embedding work in float32."""
    options = {**LATENT, **DENSE, "first_k_dense_replace": 1 if experts else 2, "q_lora_rank": rank}
    model = model_of(name, experts, **(options if name != "minicpm3" else {**LATENT, "q_lora_rank": rank}))
    layers = tp.layers(model, sequence=sequence)
    for mesh, stage in MESHES:
        params = check(model, layers, mesh, stage, FLOAT32)
    assert {"model.layers.0.self_attn.kv_b_proj.weight"} <= split_over(params)
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" not in split_over(params)


@pytest.mark.parametrize("sequence", [False, True])
def test_an_activation_with_parameters_runs_on_parts(sequence):
    """Apertus's own plan leaves its activation out, whose two numbers then had the gradient of one rank's columns."""
    model = model_of("apertus", hidden_act="xielu")
    layers = tp.layers(model, sequence=sequence)
    for mesh, stage in MESHES:
        check(model, layers, mesh, stage, FLOAT32)
    left_out = tp.layers(model, {"model.layers.*.mlp.act_fn": None})
    assert [name for name in layers.styles if name not in left_out.styles] == [
        "model.layers.0.mlp.act_fn",
        "model.layers.1.mlp.act_fn",
    ]


def test_a_plan_that_leaves_out_what_follows_a_latent_is_refused():
    model = model_of("minicpm3", **LATENT, q_lora_rank=8)
    with pytest.raises(ValueError, match=r"the plan must give 'model\.layers\.0\.self_attn\.kv_b_proj' .* 'colwise'"):
        tp.layers(model, {"*.kv_b_proj": None})


def test_a_latent_multiplies_in_float8_as_in_the_whole_model():
    """Every other product is exact, so the latent's alone tells the losses apart."""
    model = model_of("minicpm3", **{**LATENT, "kv_lora_rank": 12}, q_lora_rank=8).float()
    policy = fzero.nn.MatmulPrecision("float8", layers=lambda path, _: "kv_a_proj_with_mqa" in path)
    mesh, layers = fzero.mesh(dp=1, tp=2, simulate="lockstep"), tp.layers(model)

    def first_loss(layers: Any, **options: Any) -> torch.Tensor:
        train_step, params, (batch, _) = step_and_params(model, layers, **options)
        if layers is None:
            return train_step(params, OPT.init(params), batch)[2]
        step = fzero.shard(train_step, stage=2, mesh=mesh, axis="dp", split=layers.split)
        return step(*step.init(params, OPT), mesh.split(batch, "dp"))[2]

    exact, whole, split = first_loss(None), *[first_loss(x, matmul_precision=policy) for x in (None, layers)]
    assert (exact - whole).abs() > 1e-4 and (whole - split).abs() < 1e-6 * whole.abs()


def test_a_latent_without_the_layers_that_follow_it_is_refused():
    mlp = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)})
    with pytest.raises(ValueError, match="goes into kv_a_layernorm and kv_b_proj, and there is no 'kv_a_layernorm'"):
        tp.layers(mlp, {"up": "mla_kv_a_proj"})


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sequence"])
def test_a_model_with_tied_embeddings_trains_with_remat(sequence):
    model = model_of("llama", tie_word_embeddings=True)
    layers = tp.layers(model, sequence=sequence)
    params = check(model, layers, fzero.mesh(dp=2, tp=2), 3, remat=True)
    assert "lm_head.weight" not in params and "model.embed_tokens.weight" in split_over(params)


@pytest.mark.parametrize(
    "heads,kv,ranks,simulate,sequence",
    cases(
        [(6, 3, 2, "lockstep", True), (4, 2, 4, "vmap", False)],
        [(4, 1, 2, "lockstep", False), (12, 3, 4, "vmap", True)],
    ),
)
def test_key_and_value_heads_that_do_not_divide_are_shared(heads, kv, ranks, simulate, sequence):
    """Query heads 2 to 4 of 6 need key and value heads 1 and 2 of 3; each rank takes those that its own need."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 4 * heads, "vocab_size": 24}
    model = model_of("qwen2", **sizes)
    params = check(model, tp.layers(model, sequence=sequence), fzero.mesh(dp=1, tp=ranks, simulate=simulate), 2)
    assert not any("k_proj" in name or "v_proj" in name for name in split_over(params))
    assert "model.layers.0.self_attn.q_proj.weight" in split_over(params)


def test_query_heads_that_do_not_divide_are_refused():
    model = model_of("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)
    with pytest.raises(ValueError, match=r"q_proj.weight' holds 3 heads, which do not divide by the 2 ranks"):
        check(model, tp.layers(model), fzero.mesh(dp=1, tp=2), 0)


@pytest.mark.slow
def test_a_loss_takes_logits_that_nobody_gathers():
    model = model_of("llama")
    layers = tp.layers(model, {"lm_head": "colwise"})

    def loss(output: Any, batch: Any) -> torch.Tensor:
        assert output.logits.shape[-1] == 24 // fzero.axes.axis_size("tp")
        return tp.cross_entropy(output.logits, batch["targets"])

    for mesh, stage in MESHES:
        check(model, layers, mesh, stage, loss=loss)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sequence"])
@pytest.mark.parametrize("experts_split", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "split"])
def test_mixtral_trains_with_experts_over_another_axis(experts_split, sequence):
    """Attention over tp, experts over ep, and each expert split over tp or not."""
    moe.transformers.register()
    dense, model = (model_of("mixtral", experts=experts) for experts in ("batched_mm", "fzero"))
    left_out = dict.fromkeys(["*.experts", "*.experts.gate_up_proj", "*.experts.down_proj"])
    layers = tp.layers(model, None if experts_split else left_out, sequence=sequence)
    rules = [moe.transformers.split_rule(model)]
    for mesh, stage in ((fzero.mesh(dp=1, ep=2, tp=2), 3), (fzero.mesh(ep=2, tp=2, simulate="lockstep"), 2)):
        params = check(model, layers, mesh, stage, FLOAT32 if experts_split else 1e-12, dense=dense, rules=rules)
        experts = {name for name in params if ".experts." in name}
        assert split_over(params, "ep") == experts and (experts <= split_over(params)) == experts_split


@pytest.mark.slow
def test_mixtral_trains_with_each_expert_cut_and_no_axis_for_experts():
    dense = model = model_of("mixtral", experts="batched_mm")
    check(model, tp.layers(model), fzero.mesh(dp=2, tp=2), 3, FLOAT32, dense=dense)


@pytest.mark.slow
def test_a_jitted_tensor_parallel_model_equals_the_eager_one():
    model = model_of("llama")
    expected, losses = losses_of(model)
    layers = tp.layers(model, sequence=True)
    train_step, params, batches = step_and_params(model, layers)
    mesh = fzero.mesh(dp=2, tp=2)
    step = fzero.shard(train_step, stage=2, mesh=mesh, axis="dp", split=layers.split)
    jitted, state = fzero.jit(step, backend="fx", **LEAST), step.init(params, OPT)
    for batch, wanted in zip(batches, losses, strict=True):
        *state, loss = jitted(*state, mesh.split(batch, "dp"))
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    assert_trees_close(layers.pack(step.gather(state[0])), expected)


def test_layers_with_one_input_share_one_sum_in_the_backward_pass():
    """An attention and an MLP: a sum forward and a sum backward each, whatever the number of their columns."""
    model = model_of("llama", tie_word_embeddings=False)
    for sequence in (False, True):
        layers = tp.layers(model, sequence=sequence)
        train_step, params, batches = step_and_params(model, layers)
        mesh = fzero.mesh(dp=1, tp=2)
        step = fzero.shard(train_step, stage=0, mesh=mesh, axis="dp", split=layers.split)
        state = step.init(params, OPT)
        with fzero.collectives.record() as log:
            step(*state, mesh.split(batches[0], "dp"))
        stream = 16 * 4 * 8  # elements of the residual stream; an all_reduce of it counts twice
        kinds = [
            e.kind for e in log.other_events if e.axis == "tp" and e.elements == stream * (1 + (e.kind == "all_reduce"))
        ]
        blocks = 2 * 2  # an attention and an MLP in each of two
        # besides: the embedding forward, the head backward, and the cut of the first block and the join of the last
        if sequence:
            assert kinds.count("reduce_scatter") == 2 * blocks and kinds.count("all_gather") == 2 * blocks + 2
        assert kinds.count("all_reduce") == (2 if sequence else 2 * blocks + 2)


@pytest.mark.slow
def test_dropout_by_a_key_draws_equal_masks_along_tp():
    """Ranks along tp draw alike, or the residual stream would part; in a simulation that is an error by type."""
    model = model_of("gpt2", dropout=0.2).train()
    layers = tp.layers(model, GPT2)
    apply, params, buffers = fzero.nn.functional(model, tp=layers)
    batch = step_and_params(model, layers)[2][0]

    def loss(params: Any, batch: Any) -> torch.Tensor:
        run = fzero.random.seeded(lambda: apply(params, buffers, batch["input_ids"])[0])
        return loss_of(run(fzero.random.key(0)), batch)

    results = []
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(dp=2, tp=2, simulate=simulate)
        step = fzero.shard(train_step_for(loss, OPT), stage=2, mesh=mesh, axis="dp", split=layers.split)
        results.append(step(*step.init(params, OPT), mesh.split(batch, "dp"))[::2])
    assert_trees_close(*results)
    assert not torch.equal(results[0][1], loss(params, batch))
