"""Train a byte-level GPT with mixtures of experts, on simulated ranks or on real ones.

    python examples/moe.py                                  # 8 experts over ep=2, dp=2: 4 simulated ranks
    python examples/moe.py --experts 16 --capacity 0        # dropless
    python examples/moe.py --dense                          # the dense equivalent beside it
    torchrun --nproc-per-node 2 examples/moe.py             # the same script on 2 processes
    python examples/moe.py --plan --experts 64 --ep 64 --world 512

Every second block has experts in place of its feed-forward part. A token uses two, so the dense equivalent is a GPT
whose feed-forward part is as wide as two experts. The picture shows the losses, each expert's load, and the drops.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from train_gpt import CONFIG, get_batch, init, load_text, norm

import fzero
from fzero import optim
from fzero.parallel import experts as moe

WIDTH = CONFIG["width"]


def init_moe(experts: int, seed: int = 0) -> dict[str, Any]:
    """Make the GPT's parameters, with experts in every second block; `experts=0` is the dense equivalent."""
    params, g = init(CONFIG, seed), torch.Generator().manual_seed(seed + 1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * shape[-2] ** -0.5

    for block in params["blocks"][1::2]:
        hidden = 4 * WIDTH  # of the dense equivalent: two experts' of half of it
        if experts:
            half = hidden // 2
            block["router"] = normal(WIDTH, experts)
            block["experts"] = {"up": normal(experts, WIDTH, half), "down": normal(experts, half, WIDTH)}
            del block["up"], block["down"]
    return params


def ffn(p: Any, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    return linear(F.gelu(linear(rows, p["up"])), p["down"])


def apply_block(block: Any, x: torch.Tensor, capacity: float | None) -> tuple[torch.Tensor, Any]:
    q, k, v = torch.einsum("btd,dchk->cbhtk", norm(x, block["norm1"]), block["qkv"])
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + torch.einsum("bhtk,hkd->btd", attended, block["out"])
    h = norm(x, block["norm2"])
    if "experts" not in block:
        return x + F.gelu(h @ block["up"]) @ block["down"], None
    routing = moe.route(h @ block["router"], k=2, normalise=True)
    return x + moe.layer(ffn, block["experts"], h, routing, capacity=capacity), routing


def loss_fn(params: Any, batch: Any, capacity: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Cross entropy with the routers' own losses; beside it the plain one, and the experts' load in the last layer."""
    x, routings = F.embedding(batch[0], params["tokens"]) + params["positions"][: batch[0].shape[1]], []
    for block in params["blocks"]:
        x, routing = apply_block(block, x, capacity)
        routings += [] if routing is None else [routing]
    plain = F.cross_entropy((norm(x, params["norm"]) @ params["head"]).flatten(0, 1), batch[1].flatten())
    extra = [0.01 * moe.balance_loss(r) + 0.001 * moe.z_loss(r) for r in routings]
    watched = moe.stats(routings[-1], capacity) if routings else {}
    return plain + sum(extra, torch.zeros(())), {"loss": fzero.collectives.pmean(plain.detach()), **watched}


def train(
    args: Any, experts: int, mesh: fzero.ranks.Mesh, text: torch.Tensor, console: Console
) -> list[dict[str, Any]]:
    """Train, and return what was watched at each step."""
    schedule = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, b2=0.99, weight_decay=0.1))
    objective = functools.partial(loss_fn, capacity=args.capacity or None)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        (_, watched), grads = fzero.value_and_grad(objective, has_aux=True)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, watched

    step = fzero.shard(train_step, stage=args.stage, mesh=mesh, split=moe.split("experts", axis="ep"))
    params, opt_state = step.init(init_moe(experts), opt)
    if args.jit:
        step = fzero.jit(step, backend=args.backend)
    if args.plan:
        batch = mesh.split(get_batch(text, max(args.batch, mesh.size), seed=0))
        world = {"dp": args.world // args.ep} if args.world else None
        sizes = ", ".join(f"{axis}={n}" for axis, n in {**dict(mesh.shape), **(world or {})}.items())
        console.print(f"a rank of {sizes}, {experts // args.ep} experts of each layer on each rank:")
        console.print(str(fzero.plan(step, params, opt_state, batch, world_size=world)), markup=False, highlight=False)
        return []
    held = step.state_bytes(params, opt_state) / 1e6
    name = f"{experts} experts" if experts else "dense"
    history = []
    for i in track(range(args.steps), f"{name}, {held:.1f} MB a rank", console=console):
        params, opt_state, watched = step(params, opt_state, mesh.split(get_batch(text, args.batch, seed=i)))
        history.append({key: x.tolist() for key, x in watched.items()})
        if i % max(args.steps // 10, 1) == 0 or i + 1 == args.steps:
            console.print(f"step {i + 1:>5}: {_in_words(history[-1])}, {name}")
    return history


def _in_words(row: dict[str, Any]) -> str:
    text = f"loss {row['loss']:.3f}"
    if "load" in row:
        text += f", dropped {row['dropped']:.1%}, load {min(row['load']):.1%} to {max(row['load']):.1%}"
    return text


def plot(curves: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw the losses, and below them each expert's load and what is dropped."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, loads = figure.subplots(2, 1, sharex=True)
    for name, rows in curves.items():
        losses.plot([row["loss"] for row in rows], label=name)
    losses.set(ylabel="loss, nats per byte")
    losses.legend()
    rows = next(iter(curves.values()))
    loads.stackplot(range(len(rows)), *zip(*[row["load"] for row in rows], strict=True), linewidth=0)
    loads.plot([row["dropped"] for row in rows], color="black", label="dropped choices")
    loads.set(xlabel="step", ylabel="share of the choices, by expert", ylim=(0, 1))
    loads.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--dp", type=int, default=2, help="simulated ranks for each of these; or what torchrun has")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--capacity", type=float, default=1.25, help="seats of an expert, by even routing; 0: no drops")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="global batch, in sequences")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--text", type=Path, help="a file to train on")
    parser.add_argument("--jit", action=argparse.BooleanOptionalAction, default=True, help="compile the step")
    parser.add_argument("--backend", default="fx", choices=["fx", "inductor", "auto"])
    parser.add_argument("--dense", action="store_true", help="also train the dense equivalent")
    parser.add_argument("--plan", action="store_true", help="print one rank's plan, and stop")
    parser.add_argument("--world", type=int, help="with --plan: the number of ranks")
    parser.add_argument("--out", type=Path, default=Path("moe.png"), help="where the picture goes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with matrices this small more threads only wait for one another

    mesh = fzero.mesh(dp=-1, ep=args.ep, simulated_ranks=args.dp * args.ep)
    console = Console(quiet=mesh.rank != 0, soft_wrap=True)
    text = load_text(args.text)
    console.print(f"{len(text):,} bytes of text; {mesh!r}; {args.experts} experts in every second block")
    curves = {f"{args.experts} experts": train(args, args.experts, mesh, text, console)}
    if args.dense:
        curves["dense"] = train(args, 0, mesh, text, console)
    if mesh.rank == 0 and not args.plan:
        plot(curves, args.out)
        console.print(f"picture: {args.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
