"""Fine-tune low-rank adapters (LoRA, arXiv:2106.09685) made by peft: the frozen model is sharded as well.

    python lora.py                                      # a tiny Llama that adds numbers, on 2 simulated ranks
    torchrun --nproc-per-node 8 lora.py --model FOLDER --data answers.jsonl --lr 2e-4 --context 1024

A line of `--data` is {"prompt": "...", "completion": "..."}. The first tenth is held out. The loss is of completions
alone. The same command goes on after a stop. Checkpoints hold only adapters; `--out` gets them as peft reads them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, LlamaConfig

import fzero
from fzero import data, observe, optim

TINY: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder, or a hub's name; by default a tiny Llama with random weights")
parser.add_argument("--data", help="a file of prompts and completions, one a line")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16, help="examples of a step, over all ranks")
parser.add_argument("--context", type=int, default=32, help="tokens of an example; the rest is cut off")
parser.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
parser.add_argument("--lr", type=float, default=2e-2, help="the highest learning rate; 2e-4 for a real model")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--out", default="runs/lora", help="the folder of checkpoints, log and adapters")
args = parser.parse_args()


def load() -> tuple[Any, Any, list[Any]]:
    """Return a model, its tokenizer and examples: those of the arguments, or tiny ones about sums."""
    if all(pair := (args.model, args.data)) or (any(pair) and parser.error("--model and --data go together")):
        examples = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(args.model), examples
    vocabulary: Any = {byte: i for i, byte in enumerate([*sorted(ByteLevel.alphabet()), "</s>"])}
    tokenizer = GPT2Tokenizer(vocabulary, merges=[], eos_token="</s>")
    sums = torch.randint(40, (800, 2)).tolist()
    examples = [{"prompt": f"{a} + {b} = ", "completion": f"{a + b}"} for a, b in sums]
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **TINY)), tokenizer, examples


def encode(example: Any) -> torch.Tensor:
    """Return `[2, context]`: the tokens, and for each the next one if it belongs to the completion, else -100."""
    asked = tokenizer(example["prompt"])["input_ids"]
    said = tokenizer(example["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    tokens, labels = torch.tensor([asked + said, [-100] * len(asked) + said])
    blank = args.context + 1 - len(tokens)  # below zero it cuts
    return torch.stack([F.pad(tokens, (0, blank))[:-1], F.pad(labels, (0, blank), value=-100)[1:]])


mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
torch.manual_seed(0)  # the same weights on every process
model, tokenizer, examples = load()
rows = [encode(example) for example in examples]
test, train = rows[: len(rows) // 10], data.batches(rows[len(rows) // 10 :], mesh, global_batch=args.batch)
model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
apply, params, constants = fzero.nn.functional(model, remat=True)  # the parameters are the adapters
buffers = mesh.device_put({name: constants.pop(name) for name, _ in model.named_buffers()})
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)), half)


def token_losses(params: Any, frozen: Any, buffers: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of each completion's losses, and the number of its tokens."""
    tokens, labels = batch.unbind(1)
    output, _ = apply(params, {**frozen, **buffers}, input_ids=tokens, use_cache=False)
    return F.cross_entropy(output.logits.float().mT, labels, reduction="none").sum(1), (labels != -100).sum(1)


def train_step(params: Any, opt_state: Any, frozen: Any, buffers: Any, batch: torch.Tensor) -> Any:
    how: Any = {"micro_batches": 2, "batch_argnums": 3, "precision": half, "reduce": "weighted", "gather": False}
    grad_of = fzero.value_and_grad(lambda p, f, b, x: fzero.tree.map(torch.sum, token_losses(p, f, b, x)), **how)
    loss, grads = grad_of(params, frozen, buffers, batch)  # the mean of all ranks' completions
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optim.global_norm(grads)}


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate = fzero.jit(fzero.evaluate(step, token_losses, weighted=True, gather=False), backend=args.backend)
frozen = step.partition(half.cast(constants))  # in the layout of the parameters, and never updated
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
step = fzero.jit(step, backend=args.backend)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, batch in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, frozen, buffers, batch)
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            held_out = data.epoch(test, mesh, global_batch=args.batch)
            log(i + 1, {"held-out loss": data.mean(evaluate(params, frozen, buffers, *some) for some in held_out)})
adapters = step.gather(optim.master_params(params, opt_state))
if mesh.rank == 0:
    model.save_pretrained(f"{args.out}/adapters", state_dict=adapters)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
