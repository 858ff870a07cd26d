"""Plan a step of a Llama of 6.7 billion parameters for 64 ranks, without its memory: docs/plan.md shows the result.

python docs/_plan_llama_7b.py
"""

import pathlib
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero import optim

DOCS = pathlib.Path(__file__).parent


def plan() -> fzero.graph.Plan:
    """Plan a step with AdamW on float32 masters: bfloat16, a sequence of 2,048 tokens a rank, blocks run again."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, attn_implementation="sdpa"))
    apply, params, buffers = fzero.nn.functional(model.train(), remat=True)
    precision = fzero.Precision(param=torch.bfloat16)
    opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4)), precision)

    def loss_fn(params: Any, buffers: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = apply(params, buffers, input_ids=tokens)[0].logits.float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(params: Any, opt_state: Any, buffers: Any, tokens: torch.Tensor) -> Any:
        grad_of = fzero.value_and_grad(loss_fn, precision=precision, batch_argnums=2, gather=False)
        loss, grads = grad_of(params, buffers, tokens)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2))
    params, opt_state = step.init(params, opt)
    tokens = step.mesh.split(torch.zeros(2, 2048, dtype=torch.long, device="meta"))
    return fzero.plan(step, params, opt_state, buffers, tokens, world_size=64)


if __name__ == "__main__":
    result = plan()
    print(result)
    result.plot(DOCS / "plan.png")
