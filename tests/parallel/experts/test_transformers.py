"""Mixtures of transformers train with expert parallelism, untouched: the numbers of their own implementation."""

import warnings
from typing import Any

import pytest
import torch

import fzero
from fzero import tree
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.helpers import cases, train_step_for
from tests.models.table import CAUSAL, loss_of, pretrained
from tests.parallel.experts.model import OPT

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {"head_dim": 8},  # transposed, with biases
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "olmoe": {"eos_token_id": None},
    "deepseek_v3": {**LATENT, **GROUPS},
}
FAST = ("gpt_oss",)
# DeepSeek's router works in float32 whatever the model's dtype, so its sums over ranks round there
RTOL = {"deepseek_v3": 1e-6}


def model_of(name: str, experts: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = pretrained(AutoModelForCausalLM, name, experts=experts, **{**CAUSAL, **EXPERTS, **MODELS[name]})("eager")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / 4)
    return model.double()


def step_and_params(name: str, experts: str) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply, params, buffers = fzero.nn.functional(model_of(name, experts))

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return loss_of(apply(params, buffers, batch["input_ids"])[0], batch)

    return train_step_for(loss_fn, OPT), tree.map(torch.clone, params)


def batches() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [{name: torch.randint(37, (4, 7), generator=g) for name in ("input_ids", "targets")} for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in MODELS])
def test_expert_parallelism_has_the_numbers_of_the_models_own_experts(name):
    assert moe.transformers.register() == "fzero"
    train_step, params = step_and_params(name, "batched_mm")
    state, losses = (params, OPT.init(params)), []
    for batch in batches():
        *state, loss = train_step(*state, batch)
        losses.append(loss)
    train_step, params = step_and_params(name, "fzero")
    rtol, rule = RTOL.get(name, 1e-12), moe.transformers.split_rule(model_of(name, "fzero"))
    for mesh, stage in ((fzero.mesh(ep=2), 3), (fzero.mesh(dp=2, ep=2, simulate="lockstep"), 2)):
        step = fzero.shard(train_step, stage=stage, mesh=mesh, split=rule)
        mine = step.init(params, OPT)
        for batch, expected in zip(batches(), losses, strict=True):
            *mine, loss = step(*mine, mesh.split(batch))
            torch.testing.assert_close(loss, expected, rtol=rtol, atol=0)
        assert_trees_close(step.gather(mine[0]), state[0], rtol)
        split = {path for path, leaf in cut_leaves(mine[0]) if leaf.spec.split}
        assert split == {path for path in params if ".experts." in path}


def cut_leaves(params: Any) -> list[tuple[str, Any]]:
    paths, leaves, _ = tree.flatten_with_paths(params, is_leaf=tree.is_box)
    return [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if hasattr(leaf, "spec")]


def test_experts_that_are_not_split_are_refused():
    moe.transformers.register()
    train_step, params = step_and_params("qwen3_moe", "fzero")
    mesh = fzero.mesh(ep=2)
    step = fzero.shard(train_step, stage=0, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"Qwen3MoeExperts has 4 of 4 experts .*experts.transformers.split_rule\(model\)"
    ):
        step(*step.init(params, OPT), mesh.split(batches()[0]))


@pytest.mark.parametrize("by_name", [True, False])
def test_experts_that_are_split_over_another_axis_are_refused(by_name):
    moe.transformers.register()
    train_step, params = step_and_params("qwen3_moe", "fzero")
    mesh, rule = fzero.mesh(dp=2, ep=2), moe.split_rule("experts", axis="dp")
    step = fzero.shard(train_step, stage=0, mesh=mesh, split=rule if by_name else lambda *leaf: rule(*leaf))
    with pytest.raises(ValueError, match=r"axis='ep': .*experts.split_rule\("):
        step(*step.init(params, OPT), mesh.split(batches()[0]))


def test_the_split_rule_refuses_experts_of_another_implementation():
    """By name alone, llama4's experts would be split too, and compute something else without a word."""
    moe.transformers.register()
    with pytest.raises(ValueError, match=r"experts 'model.layers.0.mlp.experts' run by 'batched_mm', .*register\(\)"):
        moe.transformers.split_rule(model_of("qwen3_moe", "batched_mm"))
    module = model_of("qwen3_moe", "fzero").model.layers[0].mlp.experts
    module.shared = torch.nn.Parameter(torch.ones(9))  # such as a norm, which all experts use
    rule, leaf = moe.transformers.split_rule(module), torch.ones(4)
    assert rule("down_proj", leaf) is None  # no axis of that name
    paths = ["down_proj", "any.where.down_proj", "other_down_proj", "shared"]
    assert fzero.mesh(ep=2).spmd(lambda: [rule(p, leaf) for p in paths])() == [{"ep": 0}, {"ep": 0}, None, None]
    llama = pretrained(AutoModelForCausalLM, "llama4_text", **{**CAUSAL, **EXPERTS, "head_dim": 8})("eager")
    with pytest.raises(ValueError, match="Llama4ForCausalLM has no experts that an implementation of transformers'"):
        moe.transformers.split_rule(llama)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["glm4_moe", "ernie4_5_moe", "minimax", "flex_olmo", "granitemoe", "nemotron_h", "jamba"]
)
def test_expert_parallelism_of_further_families_equals_their_own_experts(name):
    """The registry serves all of them; experts without gates (nemotron_h) too."""
    MODELS.setdefault(name, {**LATENT, **GROUPS, "n_group": 1, "head_dim": 8, "eos_token_id": None})
    RTOL[name] = 1e-6
    test_expert_parallelism_has_the_numbers_of_the_models_own_experts(name)


@pytest.mark.parametrize("name", cases(FAST, ["qwen3_moe"]))
def test_a_model_with_experts_trains_unsplit_without_a_notice(name):
    model = model_of(name, "")
    implementation = model.config._experts_implementation
    apply, params, buffers = fzero.nn.functional(model)
    (batch, _) = batches()

    def loss_fn(params: Any) -> torch.Tensor:
        return loss_of(apply(params, buffers, batch["input_ids"])[0], batch)

    assert model.config._experts_implementation == implementation == "grouped_mm"
    grads, loss = torch.func.grad_and_value(loss_fn)(params)
    by_loop = model_of(name, "eager")
    expected = loss_of(by_loop(batch["input_ids"]), batch)
    expected.backward()
    assert_trees_close(loss, expected.detach())
    assert_trees_close(grads, {k: p.grad for k, p in by_loop.named_parameters()})


def test_an_implementation_of_experts_that_the_user_chose_is_kept():
    for experts in ("eager", "batched_mm", moe.transformers.register()):
        apply, _, _ = fzero.nn.functional(model_of("mixtral", experts))
        assert apply.module.config._experts_implementation == experts  # pyright: ignore
