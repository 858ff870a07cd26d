"""Plan a step of Llama 3 8B on one long sequence over 8 ranks: docs/context.md has its table.

    python docs/_plan_long_llama.py 1048576 --layers 2 3 4 --save host

Plans of few layers lie on a line; the table has the line at 32 layers.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F

import fzero
from fzero import nn, optim
from fzero.parallel import context

WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY, RANKS = 4096, 32, 8, 14336, 128256, 8
PRECISION = fzero.Precision(param=torch.bfloat16, reduce=torch.float32, master=torch.float32)
OPT = optim.master_weights(optim.adamw(1e-4), PRECISION)


def mlp(x: torch.Tensor, p: Any) -> torch.Tensor:
    h = F.rms_norm(x, (WIDTH,), p["norm"])
    return x + (F.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def block(x: torch.Tensor, p: Any) -> torch.Tensor:
    """A block without its rotation of queries and keys, whose values are freed at once."""
    qkv = F.rms_norm(x, (WIDTH,), p["norm"]) @ p["qkv"]
    heads = qkv.unflatten(-1, (HEADS + 2 * KEY_HEADS, -1)).transpose(1, 2)
    y = context.attention(*heads.split([HEADS, KEY_HEADS, KEY_HEADS], 1), causal=True)
    return nn.tiled(mlp, 8192)(x + y.transpose(1, 2).flatten(2) @ p["out"], p["mlp"])


def plan(tokens: int, layers: int, save: str | None) -> Any:
    """Plan the step with a model of so many layers."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    def weights() -> dict[str, Any]:
        own = {"gate": empty(WIDTH, HIDDEN), "up": empty(WIDTH, HIDDEN), "down": empty(HIDDEN, WIDTH)}
        qkv = empty(WIDTH, WIDTH * (HEADS + 2 * KEY_HEADS) // HEADS)
        return {"norm": empty(WIDTH), "qkv": qkv, "out": empty(WIDTH, WIDTH), "mlp": own | {"norm": empty(WIDTH)}}

    ends = {name: empty(VOCABULARY, WIDTH) for name in ("embed", "head")}
    params = {**ends, "blocks": [weights() for _ in range(layers)]}
    run = fzero.remat(block, save=save)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["tokens"]]
        for p in params["blocks"]:
            x = run(x, p)
        total = nn.linear_cross_entropy(x, params["head"], batch["labels"], reduction="sum")
        return total, (batch["labels"] != -100).sum()

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn, reduce="weighted", precision=PRECISION)(params, batch)
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.jit(fzero.shard(train_step, stage=3, mesh=fzero.mesh(cp=RANKS, device="meta")), backend="fx")
    numbers = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    batch = context.split(step.mesh, {"tokens": numbers, "labels": numbers})
    return fzero.plan(step, *step.init(params, OPT), batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--save", choices=["host"], help="where the inputs of blocks wait for the backward pass")
    args = parser.parse_args()
    for layers in args.layers:
        print(f"{layers} layers: {plan(args.tokens, layers, args.save).peak_bytes / 1e9:.3f} GB", flush=True)
