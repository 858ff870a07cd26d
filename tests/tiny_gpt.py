"""A GPT in plain torch, small enough for tests."""

from typing import Any

import torch
import torch.nn.functional as F


def gpt_params(
    width: int = 24, layers: int = 2, vocab: int = 37, context: int = 16, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Parameters of a pre-norm GPT without biases."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) * 0.1).to(dtype)

    return {
        "wte": normal(vocab, width),
        "wpe": normal(context, width),
        "blocks": [
            {
                "ln1": torch.ones(width, dtype=dtype),
                "qkv": normal(width, 3 * width),
                "proj": normal(width, width),
                "ln2": torch.ones(width, dtype=dtype),
                "fc": normal(width, 4 * width),
                "out": normal(4 * width, width),
            }
            for _ in range(layers)
        ],
        "ln_f": torch.ones(width, dtype=dtype),
        "head": normal(width, vocab),
    }


def gpt_block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Attention and an MLP, each added to x [b, t, width]."""
    h = F.layer_norm(x, x.shape[-1:], p["ln1"])
    q, k, v = ((h @ p["qkv"]).unflatten(-1, (3, 4, -1)).movedim(-3, 0)).transpose(2, 3).unbind(0)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, heads, t, d]
    x = x + a.transpose(1, 2).flatten(2) @ p["proj"]
    return x + F.gelu(F.layer_norm(x, x.shape[-1:], p["ln2"]) @ p["fc"]) @ p["out"]


def gpt_loss(params: dict[str, Any], tokens: torch.Tensor, block: Any = gpt_block) -> torch.Tensor:
    """Next-token cross entropy of tokens [b, t + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["wte"][inputs] + params["wpe"][: inputs.shape[1]]  # [b, t, width]
    for p in params["blocks"]:
        x = block(p, x)
    logits = F.layer_norm(x, x.shape[-1:], params["ln_f"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
