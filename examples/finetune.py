"""Fine-tune a language model on lines of text: `torchrun --nproc-per-node 2 examples/finetune.py MODEL TEXT OUT`."""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fzero
from fzero import observe, optim

MODEL, TEXT, OUT, STEPS = *sys.argv[1:4], 200
mesh = fzero.mesh(dp=-1)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
apply, params, buffers = fzero.nn.functional(model.train())
buffers = mesh.device_put(buffers)


def collate(lines: list[str]) -> dict[str, torch.Tensor]:
    batch = tokenizer(lines, padding="max_length", truncation=True, max_length=128, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


with open(TEXT) as f:
    data = fzero.data.batches([line for line in f if line.strip()], mesh, global_batch=16, collate=collate)
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(2e-5, warmup_steps=STEPS // 10, total_steps=STEPS)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)), half)


def train_step(params: Any, opt_state: Any, buffers: Any, batch: Any) -> Any:
    how: Any = {"micro_batches": 2, "batch_argnums": 2, "precision": half}
    loss, grads = fzero.value_and_grad(lambda p, b, batch: apply(p, b, **batch)[0].loss, **how)(params, buffers, batch)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss}


step = fzero.jit(fzero.shard(train_step, stage=3, mesh=mesh))
with fzero.checkpoint.checkpoints(f"{OUT}/run", mesh) as runs, observe.log(observe.progress(STEPS), mesh=mesh) as log:
    params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
    for i, batch in data.steps(done, STEPS):
        params, opt_state, metrics = step(params, opt_state, buffers, batch)
        log(i + 1, metrics)
        if (i + 1) % 50 == 0:
            runs.save(i + 1, (params, opt_state, i + 1))
fzero.checkpoint.hf.write(OUT, optim.master_params(params, opt_state), mesh)
if mesh.rank == 0:
    _ = model.config.save_pretrained(OUT), tokenizer.save_pretrained(OUT)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
