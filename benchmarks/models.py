"""The models that benchmarks/jit_memory.py measures: two GPTs, a convolutional net and a Llama of transformers."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fzero import nn
from tests.tiny_gpt import gpt_loss, gpt_params

__all__ = ["MODELS"]

Model = tuple[Callable[..., Any], Any, Any]  # its loss, its parameters, a rank's batch


def gpt(width: int, layers: int, batch: int) -> Model:
    """Make a GPT's loss, its parameters and a rank's batch."""
    return gpt_loss, gpt_params(width, layers, vocab=256, context=128), torch.randint(256, (batch, 129))


def conv() -> Model:
    """Make a convolutional net, each layer a unit of its own."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x = batch["x"]
        for p in params["blocks"]:
            x = F.max_pool2d(F.relu(F.conv2d(x, p["w"], padding=1)), 2)
        return F.cross_entropy(x.mean((2, 3)) @ params["head"], batch["y"])

    sizes = [3, 32, 64, 128]
    blocks = [{"w": torch.randn(o, i, 3, 3) / 3 / i**0.5} for i, o in itertools.pairwise(sizes)]
    batch = {"x": torch.randn(8, 3, 32, 32), "y": torch.randint(10, (8,))}
    return loss, {"blocks": blocks, "head": torch.randn(sizes[-1], 10) / 11}, batch


def llama() -> Model:
    """Make a Llama of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 344, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation="eager"))
    apply, params, buffers = nn.functional(model)

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        inputs = tokens[:, :-1]
        logits = apply(params, buffers, input_ids=inputs, attention_mask=torch.ones_like(inputs))[0].logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss, params, torch.randint(256, (4, 129))


# What makes it, and the numbers of micro-batches to measure.
MODELS: dict[str, tuple[Callable[[], Model], tuple[int, ...]]] = {
    "A": (lambda: gpt(256, 4, 4), (1, 4)),
    "B": (lambda: gpt(512, 8, 1), (1,)),
    "conv": (conv, (1,)),
    "llama": (llama, (1,)),
}
