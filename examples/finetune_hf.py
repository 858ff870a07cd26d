"""Fine-tune a Hugging Face folder, of which each rank reads its own bytes, in bfloat16 or float16, with dropout by key.

    python finetune_hf.py                               # a tiny Llama with random weights, on 2 simulated ranks
    torchrun --nproc-per-node 8 finetune_hf.py --model FOLDER --data 'texts/*.txt' --lr 2e-5 --backend inductor

No rank ever holds the whole model, neither on the host nor on a GPU. Documents are the paragraphs of the text, by
default of Python's own library, and the first are held out. The same command goes on after a stop, at any `--stage`
and on any number of ranks; `--out` gets a folder for `from_pretrained`.
"""

import argparse
import functools
import glob
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer

import fzero
from fzero import data, observe, optim, random

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a local folder; by default a tiny Llama")
parser.add_argument("--data", help="a pattern of the names of text files")
parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16", "float16"])
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16, help="documents of a step, over all ranks")
parser.add_argument("--context", type=int, default=128, help="tokens of a document; the rest is cut off")
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate; 2e-5 for a real model")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", choices=["fx", "inductor", "eager"], help="inductor needs a compiler")
parser.add_argument("--out", default="runs/finetune_hf", help="the folder of checkpoints, log and tuned model")
args = parser.parse_args()


def load() -> tuple[Any, Any]:
    """Return a model, whose weights are not read yet, and its tokenizer; or tiny ones."""
    if args.model:
        with init_empty_weights():  # buffers, which no folder has, are computed
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(args.model)
    vocabulary: Any = {byte: i for i, byte in enumerate([*sorted(ByteLevel.alphabet()), "</s>"])}
    tokenizer = GPT2Tokenizer(vocabulary, merges=[], eos_token="</s>")
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), attention_dropout=0.1, **TINY)
    return AutoModelForCausalLM.from_config(config), tokenizer


def collate(documents: list[str]) -> torch.Tensor:
    """Return `[b, 2, context]`: tokens, padded at the end, and for each the next one; -100 for padding."""
    batch = torch.tensor([0, -100])[:, None].repeat(len(documents), 1, args.context)
    for row, document in zip(batch, documents, strict=True):
        tokens = torch.tensor([*tokenizer(document)["input_ids"], tokenizer.eos_token_id][: args.context + 1])
        row[0, : len(tokens) - 1], row[1, : len(tokens) - 1] = tokens[:-1], tokens[1:]
    return batch


mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
torch.manual_seed(0)  # the same weights on every process
model, tokenizer = load()
files = sorted(glob.glob(args.data or f"{sysconfig.get_path('stdlib')}/*.py")) or parser.error("no such files")
documents = [p for file in files for p in Path(file).read_text(errors="replace").split("\n\n") if len(p) > 16]
train = data.batches(documents[8 * args.batch :], mesh, global_batch=args.batch, collate=collate)
apply, params, buffers = fzero.nn.functional(model.train(), remat=True)  # each block gathers its own weights
apply_eval = fzero.nn.functional(model.eval(), remat=True).apply  # without dropout
buffers = mesh.device_put(buffers)
policy = fzero.Precision(param=getattr(torch, args.precision))
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.95)), policy)
opt = optim.dynamic_loss_scale(opt, initial=256.0 if args.precision == "float16" else 1.0)  # of a sum over tokens


def token_losses(apply: Any, params: Any, buffers: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of each document's losses, and the number of its tokens."""
    output, _ = apply(params, buffers, input_ids=batch[:, 0], use_cache=False)
    losses = F.cross_entropy(output.logits.float().mT, batch[:, 1], reduction="none")
    return losses.sum(1), (batch[:, 1] != -100).sum(1)


def train_step(params: Any, opt_state: Any, buffers: Any, batch: torch.Tensor, key: Any) -> Any:
    loss_fn = random.seeded(lambda p, b, x: fzero.tree.map(torch.sum, token_losses(apply, p, b, x)))
    scale = optim.loss_scale(opt_state).scale
    how: Any = {"micro_batches": 2, "batch_argnums": 2, "precision": policy, "reduce": "weighted", "gather": False}
    loss, grads = fzero.scaled_value_and_grad(functools.partial(loss_fn, key), scale, **how)(params, buffers, batch)
    metrics = {"loss": loss, "norm": optim.global_norm(grads), "scale": scale}
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, metrics


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate: Any = fzero.evaluate(step, functools.partial(token_losses, apply_eval), weighted=True, gather=False)
zeros: Any = functools.partial(fzero.tree.map, lambda p: torch.zeros_like(p, device="cpu"), params)
params, opt_state = step.init(zeros if args.model else params, opt)
for like in (params, optim.master_params(params, opt_state)) if args.model else ():
    fzero.checkpoint.hf.read(args.model, like, mesh, partial=True)  # fills the shards where they lie
if args.backend != "eager":
    step, evaluate = fzero.jit(step, backend=args.backend), fzero.jit(evaluate, backend=args.backend)
runs, key = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh), random.key(0)
params, opt_state, done = runs.restore(like=(params, opt_state, 0))
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, batch in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, buffers, batch, random.fold_in(key, i))
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            held_out = data.epoch(documents[: 8 * args.batch], mesh, global_batch=args.batch, collate=collate)
            log(i + 1, {"held-out loss": data.mean(evaluate(params, buffers, *some) for some in held_out)})
fzero.checkpoint.hf.write(f"{args.out}/model", optim.master_params(params, opt_state), mesh)
if mesh.rank == 0:
    _ = model.config.save_pretrained(f"{args.out}/model"), tokenizer.save_pretrained(f"{args.out}/model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
