"""Pre-train a language model on long sequences: the tokens of each are split over the ranks of an axis.

    python long_context.py                              # a tiny Llama on 2 simulated ranks, half of each sequence each
    torchrun --nproc-per-node 8 long_context.py --model FOLDER --data 'tokens/*.bin' --end 128001 --cp 8 --context 65536

A shard is a file of tokens without a header, 16 bits each (32 if the vocabulary needs them), each document followed by
`--end`; documents do not see each other. The last shard is held out. By default the documents are the modules of
Python's own library, a token a byte. `--model` is a folder, or a hub's name, whose configuration is used. The same
command goes on after a stop, with any `--cp`.
"""

import argparse
import glob
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import fzero
from fzero import data, observe, optim
from fzero.parallel import context

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="whose configuration to use; by default a tiny Llama's")
parser.add_argument("--data", help="a pattern of the shards' names")
parser.add_argument("--end", type=int, default=256, help="the token that ends a document")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--cp", type=int, default=2, help="ranks that share each sequence")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=4, help="sequences of a step, over all ranks")
parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate; 3e-4 for a real model")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--out", default="runs/long_context", help="the folder of checkpoints, log and trained model")
args = parser.parse_args()
config = AutoConfig.from_pretrained(args.model) if args.model else AutoConfig.for_model("llama", vocab_size=257, **TINY)
DTYPE = torch.uint16 if config.vocab_size <= 2**16 else torch.uint32


def windows_of(files: list[str]) -> Any:
    """Cut shards into windows of `context` tokens and the token after them. Only what is read is loaded."""
    shards = [torch.from_file(f, size=os.path.getsize(f) // DTYPE.itemsize, dtype=DTYPE) for f in files]
    return torch.utils.data.ConcatDataset([x.unfold(0, args.context + 1, args.context) for x in shards])  # pyright: ignore


def library_shards(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for i in range(4):
        tokens = [t for f in files[i::16] for t in (*f.read_bytes(), args.end)]
        own = folder / f"{i}.{os.getpid()}"  # each process writes all, and renames: none reads half a shard
        own.write_bytes(torch.tensor(tokens, dtype=DTYPE).numpy().tobytes())
        own.replace(folder / f"{i}.bin")
    return f"{folder}/*.bin"


if args.context % (2 * args.cp):
    parser.error(f"--context {args.context} does not divide into two equal parts for each of --cp {args.cp} ranks")
mesh = fzero.mesh(dp=-1, cp=args.cp, simulated_ranks=args.ranks)
*shards, held_out = sorted(glob.glob(args.data or library_shards(Path(args.out, "shards")))) or parser.error("no data")
train = data.batches(windows_of(shards), mesh, global_batch=args.batch, collate=torch.stack, axis="dp")
test = torch.utils.data.Subset(windows_of([held_out]), range(8 * args.batch))

torch.manual_seed(0)  # the same weights on every process
model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
apply, params, buffers = fzero.nn.functional(model, remat=True, context="cp")
buffers = mesh.device_put(buffers)
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps, end=args.lr / 10)
adamw = optim.adamw(rate, b2=0.95, weight_decay=0.1)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), adamw), half)


def token_losses(params: Any, buffers: Any, windows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, t + 1] tokens → the sum of the losses of this rank's tokens of each sequence, and their number."""
    windows = windows.long()  # a GPU does not index 16 bits
    is_end = windows[:, :-1] == args.end
    document = F.pad(is_end[:, :-1], (1, 0)).cumsum(1)  # a document starts after another's end
    own = context.positions(args.context // args.cp, device=windows.device)  # where this rank's tokens lie
    output, _ = apply(params, buffers, input_ids=windows[:, own], documents=document[:, own])
    labels = windows[:, own + 1].masked_fill(is_end[:, own], -100)  # an end does not tell which document follows
    losses = F.cross_entropy(output.logits.float().mT, labels, reduction="none")
    return losses.sum(1), (labels != -100).sum(1)


def train_step(params: Any, opt_state: Any, buffers: Any, windows: torch.Tensor) -> Any:
    how: Any = {"micro_batches": 2, "batch_argnums": 2, "precision": half, "reduce": "weighted", "gather": False}
    grad_of = fzero.value_and_grad(lambda p, b, x: fzero.tree.map(torch.sum, token_losses(p, b, x)), **how)
    loss, grads = grad_of(params, buffers, windows)  # the mean of all ranks' tokens
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optim.global_norm(grads)}


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate = fzero.jit(fzero.evaluate(step, token_losses, weighted=True, gather=False, axis="dp"), backend=args.backend)
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
step = fzero.jit(step, backend=args.backend)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, windows in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, buffers, windows)
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            batches = data.epoch(test, mesh, global_batch=args.batch, collate=torch.stack, axis="dp")
            log(i + 1, {"held-out loss": data.mean(evaluate(params, buffers, *batch) for batch in batches)})

fzero.checkpoint.hf.write(f"{args.out}/model", optim.master_params(params, opt_state), mesh)
if mesh.rank == 0:
    config.save_pretrained(f"{args.out}/model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
