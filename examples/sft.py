"""Fine-tune a chat model on conversations: its chat template, packed rows, and a loss of the answers only.

    python sft.py                                       # a tiny Llama that adds numbers, on 2 simulated ranks
    torchrun --nproc-per-node 8 sft.py --model FOLDER --data chats.jsonl --lr 2e-5 --context 2048

A line of `--data` is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}.
The first tenth is held out. The same command goes on after a stop; `--out` gets the tuned model.
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
parser.add_argument("--data", help="a file of conversations, one a line")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--ranks", type=int, default=2, help="simulated ranks; under torchrun its processes are used")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8, help="rows of a step, over all ranks")
parser.add_argument("--context", type=int, default=256, help="tokens of a row")
parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate; 2e-5 for a real model")
parser.add_argument("--every", type=int, default=50, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--out", default="runs/sft", help="the folder of checkpoints, log and tuned model")
args = parser.parse_args()


def load() -> tuple[Any, Any, list[Any]]:
    """Return a model, its tokenizer and conversations: those of the arguments, or tiny ones about sums."""
    if all(pair := (args.model, args.data)) or (any(pair) and parser.error("--model and --data go together")):
        chats = [json.loads(line)["messages"] for line in Path(args.data).read_text().splitlines()]
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(args.model), chats
    vocabulary: Any = {byte: i for i, byte in enumerate([*sorted(ByteLevel.alphabet()), "</s>"])}
    tokenizer = GPT2Tokenizer(vocabulary, merges=[], eos_token="</s>", chat_template=CHAT)
    said = [(f"{a} + {b}", f"{a + b}", f"{c} + {d}", f"{c + d}") for a, b, c, d in torch.randint(40, (800, 4)).tolist()]
    chats = [[{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(texts)] for texts in said]
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(tokenizer), **TINY)), tokenizer, chats


def encode(messages: list[Any]) -> torch.Tensor:
    """Return a conversation's tokens, for each the next one if the assistant says it, else -100, and its position."""
    tokens, answers = list[int](), list[int]()
    for i in [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        asked = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(messages[: i + 1], return_dict=False)
        answers += [-100] * (len(asked) - len(answers)) + tokens[len(asked) :]
    return torch.tensor([tokens, [*answers[1:], -100], [*range(len(tokens))]])[:, : args.context]


def pack(chats: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fill rows `[3, context]` with whole conversations, one after the other."""
    rows = list[list[torch.Tensor]]()
    for chat in chats:
        if not rows or sum([x.shape[1] for x in [*rows[-1], chat]]) > args.context:
            rows.append([])
        rows[-1].append(chat)
    blank = torch.tensor([[0], [-100], [0]]).expand(3, args.context)
    return [torch.cat([*row, blank], 1)[:, : args.context] for row in rows]


mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
torch.manual_seed(0)  # the same weights on every process
model, tokenizer, chats = load()
rows = pack([encode(chat) for chat in chats])
test, train = rows[: len(rows) // 10], data.batches(rows[len(rows) // 10 :], mesh, global_batch=args.batch)
apply, params, buffers = fzero.nn.functional(model, remat=True)  # each block gathers its own weights, and runs again
buffers = mesh.device_put(buffers)
half = fzero.Precision(param=torch.bfloat16)
rate = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate)), half)


def token_losses(params: Any, buffers: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of each row's answers, and the number of their tokens."""
    tokens, labels, index = batch.unbind(1)
    chat = (index == 0).cumsum(1)  # the number of a token's conversation
    sees = (chat[:, :, None] == chat[:, None, :]).tril()  # [b, t, t]: the earlier tokens of the same conversation
    output, _ = apply(params, buffers, tokens, attention_mask=sees[:, None], position_ids=index, use_cache=False)
    return F.cross_entropy(output.logits.float().mT, labels, reduction="none").sum(1), (labels != -100).sum(1)


def train_step(params: Any, opt_state: Any, buffers: Any, batch: Any) -> Any:
    how: Any = {"micro_batches": 2, "batch_argnums": 2, "precision": half, "reduce": "weighted", "gather": False}
    grad_of = fzero.value_and_grad(lambda p, b, x: fzero.tree.map(torch.sum, token_losses(p, b, x)), **how)
    loss, grads = grad_of(params, buffers, batch)  # the mean of all ranks' answers
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "norm": optim.global_norm(grads)}


step = fzero.shard(train_step, stage=args.stage, mesh=mesh)
evaluate = fzero.jit(fzero.evaluate(step, token_losses, weighted=True, gather=False), backend=args.backend)
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(params, opt), 0))
step = fzero.jit(step, backend=args.backend)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, batch in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, buffers, batch)
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            held_out = data.epoch(test, mesh, global_batch=args.batch)
            log(i + 1, {"held-out loss": data.mean(evaluate(params, buffers, *pair) for pair in held_out)})
fzero.checkpoint.hf.write(f"{args.out}/model", optim.master_params(params, opt_state), mesh)
if mesh.rank == 0:
    _ = model.config.save_pretrained(f"{args.out}/model"), tokenizer.save_pretrained(f"{args.out}/model")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
