"""Train a byte-level GPT with mixtures of experts, on ranks that share the experts along an axis "ep".

    python moe.py                                       # 8 experts over ep=2, dp=2: 4 simulated ranks
    python moe.py --experts 16 --capacity 0             # dropless; with --experts 0 the dense equivalent
    python moe.py --plan --experts 64 --ep 64 --world 512
    torchrun --nproc-per-node 2 moe.py                  # the same script on 2 processes

Every second block has experts in place of its feed-forward part. A token uses two, so the dense equivalent is a GPT
whose feed-forward part is as wide as two experts. The log shows what is dropped, and the experts' loads.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fzero
from fzero import data, observe, optim
from fzero.parallel import experts as moe

LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 128, 64
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts")
parser.add_argument("--dp", type=int, default=2, help="simulated ranks for each of these; or what torchrun has")
parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
parser.add_argument("--capacity", type=float, default=1.25, help="seats of an expert, by even routing; 0: no drops")
parser.add_argument("--text", help="a file to train on; by default Python's own library")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=16, help="windows of a step, over all ranks")
parser.add_argument("--every", type=int, default=100, help="steps between two evaluations, with a checkpoint each")
parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
parser.add_argument("--plan", action="store_true", help="print one rank's plan, and stop")
parser.add_argument("--world", type=int, help="with --plan: the number of ranks")
parser.add_argument("--out", default="runs/moe", help="the folder of checkpoints and log")
args = parser.parse_args()


def init() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-2] ** -0.5

    def block(experts: int) -> dict[str, Any]:
        many, hidden = ((experts,), 2 * WIDTH) if experts else ((), 4 * WIDTH)
        mlp: Any = {"up": normal(*many, WIDTH, hidden), "down": normal(*many, hidden, WIDTH)}
        attention: Any = {"qkv": normal(3, HEADS, WIDTH, WIDTH // HEADS), "out": normal(WIDTH, WIDTH)}
        return attention | ({"router": normal(WIDTH, experts), "experts": mlp} if experts else mlp)

    blocks = [block(args.experts if i % 2 else 0) for i in range(LAYERS)]
    return {"embed": normal(256, WIDTH), "places": normal(CONTEXT, WIDTH), "blocks": blocks, "head": normal(WIDTH, 256)}


def ffn(p: Any, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    return linear(F.gelu(linear(rows, p["up"])), p["down"])


def forward(params: Any, windows: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """[b, t + 1] bytes → [b], the mean loss of each window; and how the layers with experts routed the bytes."""
    x, routings = F.embedding(windows[:, :-1], params["embed"]) + params["places"], []
    for p in params["blocks"]:
        q, k, v = torch.einsum("btd,chdk->cbhtk", F.layer_norm(x, (WIDTH,)), p["qkv"])
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]
        h = F.layer_norm(x, (WIDTH,))
        if "experts" in p:
            routings.append(moe.route(h @ p["router"], k=2, normalize=True))
            x = x + moe.layer(ffn, p["experts"], h, routings[-1], capacity=args.capacity or None)
        else:
            x = x + F.gelu(h @ p["up"]) @ p["down"]
    logits = F.layer_norm(x, (WIDTH,)) @ params["head"]
    return F.cross_entropy(logits.mT, windows[:, 1:], reduction="none").mean(1), routings


def loss_fn(params: Any, windows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss with the routers' own; beside it the plain one, and the last layer's drops and loads."""
    losses, routings = forward(params, windows)
    results = {"loss": fzero.collectives.pmean(losses.detach().mean())}
    if routings:
        stats = moe.stats(routings[-1], args.capacity or None)
        results |= {"dropped": stats["dropped"], "least": stats["load"].min(), "most": stats["load"].max()}
    return losses.mean() + sum([0.01 * moe.balance_loss(r) + 0.001 * moe.z_loss(r) for r in routings]), results


def train_step(params: Any, opt_state: Any, windows: torch.Tensor) -> Any:
    (_, actual), grads = fzero.value_and_grad(loss_fn, has_aux=True)(params, windows)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, actual


mesh = fzero.mesh(dp=-1, ep=args.ep, simulated_ranks=args.dp * args.ep)
files = [Path(args.text)] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
windows = text.long().unfold(0, CONTEXT + 1, CONTEXT)
test, train = windows[:64], data.batches(windows[64:], mesh, global_batch=max(args.batch, mesh.size))
rate = optim.warmup_cosine(1.5e-3, warmup_steps=args.steps // 10, total_steps=args.steps)
opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.99, weight_decay=0.1))
step: Any = fzero.shard(train_step, stage=args.stage, mesh=mesh, split=moe.split_rule("experts", axis="ep"))
evaluate = fzero.evaluate(step, lambda params, windows: forward(params, windows)[0])
if args.plan:
    print(f"{args.experts // args.ep} of {args.experts} experts of each layer on a rank of {args.world or mesh.size}:")
    world = {"dp": args.world // args.ep} if args.world else None
    print(fzero.plan(step, *step.init(init(), opt), train[0], world_size=world))
    raise SystemExit
runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
params, opt_state, done = runs.restore(like=(*step.init(init(), opt), 0))
step = fzero.jit(step, backend=args.backend)
with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
    for i, batch in train.steps(done, args.steps):
        params, opt_state, metrics = step(params, opt_state, batch)
        log(i + 1, metrics)
        if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
            runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
            batches = data.epoch(test, mesh, global_batch=train.global_batch)
            log(i + 1, {"held-out loss": data.mean(evaluate(params, *some) for some in batches)})
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
