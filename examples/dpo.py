"""Align a chat model with preferences by DPO (arXiv:2305.18290): the policy and its reference are both sharded.

    python dpo.py                                       # a tiny Llama that is to add right, on 2 simulated ranks
    torchrun --nproc-per-node 8 dpo.py --model FOLDER --data preferences.jsonl --lr 5e-7 --context 1024

A line of `--data` is {"prompt": [MESSAGE, ...], "chosen": [MESSAGE], "rejected": [MESSAGE]}, as TRL has it, where a
message is {"role": "user", "content": "..."}. The first tenth is held out. The same command goes on after a stop.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, LlamaConfig

import fzero
from fzero import data, observe, optim

TINY: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder, or a hub's name; by default a tiny Llama with random weights")
parser.add_argument("--data", help="a file of preferences, one a line")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8, help="pairs of a step, over all ranks")
parser.add_argument("--context", type=int, default=64, help="tokens of a conversation; the rest is cut off")
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate; 5e-7 for a real model")
parser.add_argument("--beta", type=float, default=0.1, help="how much a deviation from the reference costs")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--out", default="runs/dpo", help="the folder of checkpoints, log and aligned model")
args = parser.parse_args()


def load() -> tuple[Any, Any, list[Any]]:
    """Return a model, its tokenizer and preferences: those of the arguments, or tiny ones about sums."""
    if all(pair := (args.model, args.data)) or (any(pair) and parser.error("--model and --data go together")):
        pairs = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(args.model), pairs
    vocabulary: Any = {byte: i for i, byte in enumerate([*sorted(ByteLevel.alphabet()), "</s>"])}
    tokenizer = GPT2Tokenizer(vocabulary, merges=[], eos_token="</s>", chat_template=CHAT)
    said = [(f"{a} + {b}", f"{a + b}", f"{a + b + 10 * c}") for a, b, c in torch.randint(1, 40, (800, 3)).tolist()]
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    pairs = [{k: [{"role": roles[k], "content": x}] for k, x in zip(roles, texts, strict=True)} for texts in said]
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **TINY)), tokenizer, pairs


def encode(pair: Any) -> torch.Tensor:
    """Return `[2, 2, context]`: of both answers the tokens, and for each the next one, outside of answers -100."""
    both = torch.tensor([0, -100])[:, None].repeat(2, 1, args.context)
    asked = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=False)
    for row, kind in zip(both, ("chosen", "rejected"), strict=True):
        tokens = tokenizer.apply_chat_template(pair["prompt"] + pair[kind], return_dict=False)[: args.context + 1]
        row[0, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        row[1, len(asked) - 1 : len(tokens) - 1] = torch.tensor(tokens[len(asked) :])
    return both


mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
torch.manual_seed(0)  # the same weights on every process
model, tokenizer, pairs = load()
rows = [encode(pair) for pair in pairs]
test, train = rows[: len(rows) // 10], data.batches(rows[len(rows) // 10 :], mesh, global_batch=args.batch)
apply, params, buffers = fzero.nn.functional(model, remat=True)  # each block gathers its own weights, and runs again
buffers = mesh.device_put(buffers)
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)), half)


def log_probabilities(params: Any, buffers: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each answer, [b, 2]. Padding comes last, and a causal model does not look there."""
    tokens, labels = batch.flatten(0, 1).unbind(1)
    output, _ = apply(params, buffers, input_ids=tokens, use_cache=False)
    return -F.cross_entropy(output.logits.float().mT, labels, reduction="none").sum(1).unflatten(0, (-1, 2))


def score(params: Any, reference: Any, buffers: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each pair's loss, the margin of its rewards, and whether the chosen answer has the larger one."""
    changes = log_probabilities(params, buffers, batch) - log_probabilities(reference, buffers, batch)
    margin = args.beta * (changes[:, 0] - changes[:, 1])
    return {"loss": -F.logsigmoid(margin), "margin": margin, "accuracy": margin > 0}


def train_step(params: Any, opt_state: Any, reference: Any, buffers: Any, batch: torch.Tensor) -> Any:
    how: Any = {"micro_batches": 2, "batch_argnums": 3, "precision": half, "gather": False}
    grad_of = fzero.value_and_grad(lambda p, r, b, x: score(p, r, b, x)["loss"].mean(), **how)
    loss, grads = grad_of(params, reference, buffers, batch)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optim.global_norm(grads)}


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate = fzero.jit(fzero.evaluate(step, score, gather=False), backend=args.backend)
reference = step.partition(half.cast(params))  # in the layout of the parameters, and never updated
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
step = fzero.jit(step, backend=args.backend)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, batch in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, reference, buffers, batch)
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            held_out = data.epoch(test, mesh, global_batch=args.batch)
            means = data.mean(evaluate(params, reference, buffers, *some) for some in held_out)
            log(i + 1, {f"held-out {name}": x for name, x in means.items()})
fzero.checkpoint.hf.write(f"{args.out}/model", optim.master_params(params, opt_state), mesh)
if mesh.rank == 0:
    _ = model.config.save_pretrained(f"{args.out}/model"), tokenizer.save_pretrained(f"{args.out}/model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
