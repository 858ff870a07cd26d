"""Distil a language model into a smaller one (arXiv:1503.02531): the teacher is frozen, and sharded as the student is.

    python distill.py                                   # a tiny Llama into half of it, on 2 simulated ranks
    torchrun --nproc-per-node 8 distill.py --model FOLDER --data 'texts/*.txt' --lr 1e-4 --context 1024

The student has half of the teacher's layers, and begins with every second one's weights. `--model` is the teacher: a
folder, or a hub's name. By default the text is Python's own library, a token a byte, and its first
windows are held out. The same command goes on after a stop; `--out` gets the student.
"""

import argparse
import copy
import glob
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import fzero
from fzero import data, observe, optim

TINY = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="the teacher; by default a tiny Llama with random weights")
parser.add_argument("--data", help="a pattern of the names of text files")
parser.add_argument("--temperature", type=float, default=2.0, help="by which both models' logits are divided")
parser.add_argument("--weight", type=float, default=0.9, help="of the teacher in the loss; the text has the rest")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16, help="windows of a step, over all ranks")
parser.add_argument("--context", type=int, default=64, help="tokens of a window")
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate; 1e-4 for a real model")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--out", default="runs/distill", help="the folder of checkpoints, log and student")
args = parser.parse_args()


def load() -> tuple[Any, Any]:
    """Return the teacher, and a function that returns a file's tokens."""
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        teacher = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return teacher, lambda file: tokenizer(Path(file).read_text())["input_ids"]
    config = AutoConfig.for_model("llama", vocab_size=256, initializer_range=0.2, **TINY)
    return AutoModelForCausalLM.from_config(config), lambda file: list(Path(file).read_bytes())


def halve(teacher: Any) -> Any:
    """Make a model of half as many layers, with the weights of every second one."""
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers = (config.num_hidden_layers + 1) // 2
    half, weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32), teacher.state_dict()
    of_teacher = {name: re.sub(r"\.(\d+)\.", lambda m: f".{2 * int(m[1])}.", name) for name in half.state_dict()}
    half.load_state_dict({name: weights[other] for name, other in of_teacher.items()})
    return half


mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
torch.manual_seed(0)  # the same weights on every process
teacher_model, tokens_of = load()
files = sorted(glob.glob(args.data or f"{sysconfig.get_path('stdlib')}/*.py")) or parser.error("no such files")
windows = torch.tensor([t for file in files for t in tokens_of(file)]).unfold(0, args.context + 1, args.context)
held_out, train = windows[: 8 * args.batch], data.batches(windows[8 * args.batch :], mesh, global_batch=args.batch)
student = halve(teacher_model)
apply, params, buffers = fzero.nn.functional(student, remat=True)  # each block gathers its own weights, and runs again
teach, _, constants = fzero.nn.functional(teacher_model.requires_grad_(False), remat=True)
buffers = mesh.device_put((buffers, {name: constants.pop(name) for name, _ in teacher_model.named_buffers()}))
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)), half)


def score(params: Any, teacher: Any, buffers: Any, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each window's loss, its divergence from the teacher, and the share of tokens that both find likeliest."""
    own, others = buffers
    tokens, labels = windows[:, :-1], windows[:, 1:]
    logits = apply(params, own, input_ids=tokens, use_cache=False)[0].logits.float()
    target = teach({}, {**teacher, **others}, input_ids=tokens, use_cache=False)[0].logits.float()
    text = F.cross_entropy(logits.mT, labels, reduction="none").mean(1)
    log_p, log_q = (F.log_softmax(x / args.temperature, -1) for x in (target, logits))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean(1) * args.temperature**2
    agreement = (logits.argmax(-1) == target.argmax(-1)).float().mean(1)
    loss = args.weight * divergence + (1 - args.weight) * text
    return {"loss": loss, "divergence": divergence, "agreement": agreement}


def train_step(params: Any, opt_state: Any, teacher: Any, buffers: Any, windows: torch.Tensor) -> Any:
    how: Any = {"micro_batches": 2, "batch_argnums": 3, "precision": half, "gather": False}
    grad_of = fzero.value_and_grad(lambda p, t, b, x: score(p, t, b, x)["loss"].mean(), **how)
    loss, grads = grad_of(params, teacher, buffers, windows)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optim.global_norm(grads)}


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate = fzero.jit(fzero.evaluate(step, score, gather=False), backend=args.backend)
teacher = step.partition(half.cast(constants))  # in the layout of the parameters, and never updated
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
step = fzero.jit(step, backend=args.backend)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, windows in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, teacher, buffers, windows)
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            batches = data.epoch(held_out, mesh, global_batch=args.batch)
            means = data.mean(evaluate(params, teacher, buffers, *some) for some in batches)
            log(i + 1, {f"held-out {name}": x for name, x in means.items()})
fzero.checkpoint.hf.write(f"{args.out}/model", optim.master_params(params, opt_state), mesh)
if mesh.rank == 0:
    student.config.save_pretrained(f"{args.out}/model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
