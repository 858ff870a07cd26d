"""TRL's trainers and LoRA, sharded and unchanged: `make test-all` with the extra `plugs`."""

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from fzero.plugs import transformers as plug
from tests.plugs.helpers import list_logged, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")]
WORDS = 90


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of the words w0, w1, ...."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(WORDS)} | {"<unk>": WORDS, "<pad>": WORDS + 1, "<eos>": WORDS + 2}
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=of_words, **special)


def model() -> LlamaForCausalLM:
    set_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 97}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    special = {"pad_token_id": WORDS + 1, "eos_token_id": WORDS + 2, "bos_token_id": WORDS + 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special))


def make(kind: str, lora: bool, folder: Any) -> Any:
    """Make an SFTTrainer or a DPOTrainer of random sentences; with LoRA the base is the reference."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    draw = random.Random(0)

    def sentence(count: int) -> str:
        return " ".join([f"w{draw.randrange(WORDS)}" for _ in range(count)])

    names = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected")}[kind]
    rows = [{name: " " * j + sentence(3 + (i * j) % 5) for j, name in enumerate(names)} for i in range(24)]
    rows = datasets.Dataset.from_list(rows)
    options: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": []}
    options |= {"max_steps": 4, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    common: dict[str, Any] = {"train_dataset": rows, "eval_dataset": rows.select(range(6))}
    common |= {"processing_class": tokenizer()}
    if lora:
        peft = pytest.importorskip("peft")
        common["peft_config"] = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    if kind == "sft":
        return trl.SFTTrainer(model(), trl.SFTConfig(**options), **common)
    return trl.DPOTrainer(model(), None if lora else model(), args=trl.DPOConfig(**options), **common)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_sharded_trl_trainer_has_the_losses_of_the_plain_one(tmp_path, kind, lora, stage):
    plain = make(kind, lora, tmp_path)
    before = [p.clone() for p in weights(plain.model)]
    sharded = plug.shard_trainer(make(kind, lora, tmp_path), stage=stage)
    for trainer in (plain, sharded):
        trainer.train()
        trainer.evaluate()
    for expected, actual in zip(plain.state.log_history, sharded.state.log_history, strict=True):
        timed = [name for name in expected if "runtime" in name or "per_second" in name]
        numbers = {name: x for name, x in expected.items() if name not in timed}
        torch.testing.assert_close({name: actual[name] for name in numbers}, numbers, rtol=1e-4, atol=1e-5)
    full = plug.full_model(sharded)
    torch.testing.assert_close(weights(full), weights(plain.model), rtol=1e-5, atol=1e-5)
    moved = [not torch.equal(p, q) for p, q in zip(before, weights(full), strict=True)]
    assert any(moved) and all(moved) != lora
    assert len(list_logged(sharded, "loss")) == 4
