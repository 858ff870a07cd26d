"""What tests of the plugs share: a tiny Llama, random documents, and a Trainer of them."""

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import fzero
from fzero.optim import MasterState
from fzero.optim._base import find_state
from fzero.sharding import Shard
from tests.helpers import either

VOCAB = 97


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    """Make a Llama of one or two blocks, always with the same weights."""
    set_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": either(1, 2),
        "vocab_size": VOCAB,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=dropout))


def documents(count: int, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Make random documents; each has another number of labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (count, length), generator=generator)
    return [{"input_ids": x, "labels": x.masked_fill(torch.arange(length) < i % 5, -100)} for i, x in enumerate(tokens)]


def arguments(folder: pathlib.Path, **options: Any) -> TrainingArguments:
    """Make arguments for short runs on the CPU, which log each step."""
    defaults = {"use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "report_to": []}
    defaults |= {"disable_tqdm": True, "save_strategy": "no", "learning_rate": 1e-2, "weight_decay": 0.1}
    return TrainingArguments(output_dir=str(folder), **{**defaults, **options})


def make_trainer(
    folder: pathlib.Path, kind: type[Trainer] = Trainer, dropout: float = 0.0, model: Any = None, **options: Any
) -> Trainer:
    """Make a Trainer of the tiny Llama; names of `Trainer`'s own arguments go there, others to its arguments."""
    own = {
        k: options.pop(k)
        for k in ("optimizers", "compute_loss_func", "callbacks", "data_collator", "train_dataset")
        if k in options
    }
    model = llama(dropout) if model is None else model
    data = {"train_dataset": documents(40), "eval_dataset": documents(6)}
    return kind(model, arguments(folder, **options), **{**data, **own})


def list_logged(trainer: Trainer, *names: str) -> list[float]:
    """List the logged values of these names, in the order of the steps."""
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def weights(model: torch.nn.Module) -> Sequence[torch.Tensor]:
    """List the parameters of a model."""
    return [p.detach() for p in model.parameters()]


def assert_shards_are_masters(engine: Any) -> None:
    """Each rank holds its part of the parameters once, in float32; no copy in half precision, and none in the state."""
    assert {x.data.dtype for x in engine.params.values() if isinstance(x, Shard)} == {torch.float32}
    assert not fzero.tree.tensors(find_state(engine.opt_state, MasterState).master)
