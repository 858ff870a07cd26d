"""A model of experts whose loss has its routers' logits, which hooks collect in the blocks."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from fzero.plugs import transformers as plug
from tests.plugs.helpers import VOCAB, list_logged, make_trainer, weights


def mixtral() -> Any:
    set_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", **sizes, **heads, output_router_logits=True)
    )


def test_an_eager_step_trains_routers_as_the_plain_trainer(tmp_path):
    plain = make_trainer(tmp_path, model=mixtral(), max_steps=3)
    plain.train()
    sharded = plug.shard_trainer(make_trainer(tmp_path, model=mixtral(), max_steps=3), stage=3, backend=None)
    sharded.train()
    assert list_logged(sharded, "loss", "grad_norm") == pytest.approx(list_logged(plain, "loss", "grad_norm"), abs=1e-5)
    for actual, expected in zip(weights(plug.full_model(sharded)), weights(plain.model), strict=True):
        assert actual.sub(expected).abs().max() < 1e-5


@pytest.mark.parametrize("backend", [None, "fx"])
def test_blocks_that_run_again_are_refused_before_the_model_is_used_up(tmp_path, backend):
    trainer = make_trainer(tmp_path, model=mixtral(), activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"config.output_router_logits is set.*gradient_checkpointing=False"):
        plug.shard_trainer(trainer, stage=3, backend=backend)
    assert not any(p.is_meta for p in trainer.model.parameters())
