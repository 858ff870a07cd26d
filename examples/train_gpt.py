"""Train a byte-level GPT, sharded by a ZeRO stage, on simulated ranks or on real ones.

    python examples/train_gpt.py                               # stage 2 on 4 simulated ranks
    python examples/train_gpt.py --stage 3 --steps 50 --compare   # unsharded training beside it
    python examples/train_gpt.py --stage 3 --plan              # one rank's memory and collectives; no training
    python examples/train_gpt.py --precision bfloat16 --accumulate 4 --remat  # as large models are trained
    python examples/train_gpt.py --precision bfloat16 --offload 0.4 --plan    # two fifths of the state on the host
    torchrun --nproc-per-node 2 examples/train_gpt.py          # the same script on 2 processes
    torchrun --nproc-per-node 4 examples/train_gpt.py --pp 2 --tp 2 --accumulate 4  # stages, and parts of each matrix
    python examples/train_gpt.py --pp 4 --accumulate 8 --plan  # each rank's memory, and a picture of the schedule
    python examples/train_gpt.py --checkpoints runs/gpt        # stop it, kill it; the same command goes on

The text is the Python standard library's own source code, unless `--text FILE` names another.
"""

import argparse
import contextlib
import functools
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

import fzero
from fzero import optim
from fzero.parallel import tensor as tp

CONFIG = {"layers": 2, "heads": 4, "width": 128, "context": 64}
TENSOR = tp.split({"qkv": 2, "out": 0, "up": 1, "down": 0})  # by heads and by hidden units


def load_text(file: Path | None) -> torch.Tensor:
    files = [file] if file else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(f.read_bytes() for f in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def get_batch(text: torch.Tensor, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the global batch of a seed: the same on every rank. Tokens and next tokens, [size, context]."""
    context = CONFIG["context"]
    start = torch.randint(len(text) - context, (size, 1), generator=torch.Generator().manual_seed(seed))
    window = text[start + torch.arange(context + 1)]
    return window[:, :-1], window[:, 1:]


def init(config: dict[str, int], seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    d, h, layers = config["width"], config["heads"], config["layers"]

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def block() -> dict[str, torch.Tensor]:
        return {
            "norm1": torch.ones(d),
            "qkv": normal(d, 3, h, d // h, std=d**-0.5),
            "out": normal(h, d // h, d, std=(2 * layers * d) ** -0.5),
            "norm2": torch.ones(d),
            "up": normal(d, 4 * d, std=d**-0.5),
            "down": normal(4 * d, d, std=(8 * layers * d) ** -0.5),
        }

    return {
        "tokens": normal(256, d, std=0.02),
        "positions": normal(config["context"], d, std=0.02),
        "blocks": [block() for _ in range(layers)],
        "norm": torch.ones(d),
        "head": normal(d, 256, std=0.02),
    }


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.float(), scale.shape, scale.float()).to(x.dtype)


def apply_block(block: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Add attention and an MLP. Along an axis "tp" a rank has some of the heads and of the hidden units."""
    q, k, v = torch.einsum("btd,dchk->cbhtk", tp.enter(norm(x, block["norm1"])), block["qkv"])
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + tp.leave(torch.einsum("bhtk,hkd->btd", attended, block["out"]))
    return x + tp.leave(F.gelu(tp.enter(norm(x, block["norm2"])) @ block["up"]) @ block["down"])


def embed(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, params["tokens"]) + params["positions"][: tokens.shape[1]]


def loss_of(params: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((norm(x, params["norm"]) @ params["head"]).flatten(0, 1).float(), targets.flatten())


def apply(params: dict[str, Any], tokens: torch.Tensor, remat: bool = False) -> torch.Tensor:
    """[batch, time] bytes → [batch, time, width]: all but the head."""
    run = fzero.remat(apply_block) if remat else apply_block
    x = embed(params, tokens)
    for block in params["blocks"]:
        x = run(block, x)
    return x


def loss_fn(params: Any, batch: tuple[torch.Tensor, torch.Tensor], remat: bool = False) -> torch.Tensor:
    return loss_of(params, apply(params, batch[0], remat), batch[1])


def pipelined(args: Any) -> fzero.parallel.pipeline.Pipeline:
    """Make the same loss, whose blocks the ranks along an axis "pp" run as a pipeline."""
    return fzero.pipeline(
        first=lambda rest, batch: embed(rest, batch[0]),
        block=apply_block,
        last=lambda rest, x, batch: loss_of(rest, x, batch[1]),
        micro_batches=args.accumulate,
        schedule=args.schedule,
        depth=CONFIG["layers"],
        remat=args.remat,
        split=TENSOR,
    )


def train(args: Any, text: torch.Tensor, mesh: fzero.ranks.Mesh | None, console: Console) -> tuple[Any, list[float]]:
    """Train sharded over a mesh, or unsharded without one; returns the whole parameters and the losses."""
    schedule = optim.warmup_cosine(args.lr, warmup_steps=args.steps // 10, total_steps=args.steps, end=args.lr / 10)
    matrices = functools.partial(fzero.tree.map, lambda p: p.ndim >= 2)
    policy = fzero.Precision(param=getattr(torch, args.precision), full=lambda path, leaf: "norm" in path)
    opt = optim.master_weights(optim.adamw(schedule, b2=0.99, weight_decay=0.1, mask=matrices), policy)
    opt = optim.offload(opt, args.offload) if args.offload else opt
    opt = optim.dynamic_loss_scale(optim.chain(optim.clip_by_global_norm(1.0), opt))
    piped = pipelined(args) if mesh and "pp" in mesh.axis_names else None
    objective = piped or functools.partial(loss_fn, remat=args.remat)
    how: dict[str, Any] = {"reduce": "weighted"} if piped else {"micro_batches": args.accumulate}

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:  # knows nothing of ranks
        take = fzero.scaled_value_and_grad(objective, opt_state.scale, precision=policy, **how)
        loss, grads = take(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step: Any = train_step
    if mesh is None:  # the same step, as it is
        step, split, whole = train_step, lambda batch: batch, lambda params: params
        params, opt_state = policy.cast(init(CONFIG)), opt.init(init(CONFIG))
        held = sum(x.nbytes for x in fzero.tree.tensors((params, opt_state)))
    else:
        data = tuple([name for name in mesh.axis_names if name != "tp"])  # the axes of the mean
        step = fzero.shard(train_step, args.stage, mesh, axis=data, split=piped.split if piped else TENSOR)
        split = functools.partial(mesh.split, axis="dp")
        whole = (lambda params: piped.unstack(step.gather(params), mesh)) if piped else step.gather
        params, opt_state = step.init(piped.stack(init(CONFIG), mesh) if piped else init(CONFIG), opt)
        held = step.state_bytes(params, opt_state)
    if args.jit:  # "fx", which needs no compiler, runs torch's own operations
        step = fzero.jit(step, donate=(0, 1), backend="inductor" if shutil.which("c++") else "fx")
    if args.plan:
        show_plans(step, (params, opt_state, split(get_batch(text, args.batch, seed=0))), piped, args, console)
        return params, []
    title = (f"stage {args.stage}, {mesh.size} ranks" if mesh else "unsharded") + f", {held / 1e6:.1f} MB a rank"
    losses: list[float] = []
    runs = fzero.checkpoint.checkpoints(args.checkpoints, mesh, keep=2) if args.checkpoints and mesh else None
    if runs:  # the newest one, whatever ranks and stage wrote it
        state = runs.restore(like={"params": params, "opt_state": opt_state, "losses": losses})
        params, opt_state, losses = state["params"], state["opt_state"], state["losses"]
    first, start = len(losses), 0.0
    with Progress(console=console) as progress, runs or contextlib.nullcontext():
        task = progress.add_task(title, total=args.steps, completed=first)
        for i in range(first, args.steps):
            params, opt_state, loss = step(params, opt_state, split(get_batch(text, args.batch, seed=i)))
            losses.append(loss.item())
            if runs and ((i + 1) % args.save_every == 0 or i + 1 == args.steps):
                runs.save(i + 1, {"params": params, "opt_state": opt_state, "losses": losses})
            start = time.perf_counter() if i == first else start  # the first step compiles
            speed = (i - first) * args.batch * CONFIG["context"] / max(time.perf_counter() - start, 1e-9)
            progress.update(task, advance=1, description=f"{title}, loss {losses[-1]:.3f}, {speed:,.0f} bytes/s")
            if i % max(args.steps // 10, 1) == 0 or i + 1 == args.steps:
                progress.print(f"step {i + 1:>5}: loss {losses[-1]:.3f}, {speed:,.0f} bytes/s, {title}")
    return whole(params), losses


def show_plans(
    step: Any, arguments: Any, piped: fzero.parallel.pipeline.Pipeline | None, args: Any, console: Console
) -> None:
    """Say what a rank will hold, in a pipeline each along it; and draw the first's, and the schedule."""
    if piped:
        console.print(str(piped.schedule(step.mesh)), markup=False, highlight=False)
        piped.schedule(step.mesh).plot(args.out.with_name("schedule.png"))
    for place in range(args.pp if piped else 1):
        plan = fzero.plan(step, *arguments, rank={"pp": place} if piped else 0)
        console.print(f"rank {place} along pp: {plan}" if piped else str(plan), markup=False, highlight=False)
        if not place:
            plan.plot(args.out.with_name("plan.png"))


@torch.no_grad()
def sample(params: Any, prompt: str, length: int = 300) -> str:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        x = apply(params, tokens[:, -CONFIG["context"] :])[0, -1]
        logits = norm(x, params["norm"]) @ params["head"]
        following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def plot(curves: dict[str, list[float]], levels: dict[str, float], file: Path) -> None:
    figure = Figure()
    axes = figure.subplots()
    for i, (label, losses) in enumerate(curves.items()):
        axes.plot(losses, label=label, linewidth=4 - 3 * i if len(curves) > 1 else 1.5, alpha=0.8)
    for (label, level), style in zip(levels.items(), ("--", ":"), strict=True):
        axes.axhline(level, label=label, linestyle=style, color="gray")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks; under torchrun its processes are used")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=16, help="global batch, in sequences")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a rank in one step")
    parser.add_argument("--pp", type=int, default=1, help="ranks of a pipeline")
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "zb"], help="of a pipeline")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each matrix: 2 or 4")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--remat", action="store_true", help="run each block again in the backward pass")
    parser.add_argument("--offload", type=float, default=0.0, help="the share of the optimizer's state on the host")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--text", type=Path, help="a file to train on")
    parser.add_argument("--jit", action=argparse.BooleanOptionalAction, default=True, help="compile the step")
    parser.add_argument("--plan", action="store_true", help="print and plot one rank's plan, and stop")
    parser.add_argument("--compare", action="store_true", help="also train unsharded, from the same start")
    parser.add_argument("--checkpoints", metavar="DIR", help="save there, and go on from the newest checkpoint in it")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("train_gpt.png"), help="where the loss curve goes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # with matrices this small more threads only wait for one another

    axes = {name: n for name, n in (("pp", args.pp), ("tp", args.tp)) if n > 1}
    mesh = fzero.mesh(dp=-1, **axes, simulated_ranks=args.ranks)
    console = Console(quiet=mesh.rank != 0, soft_wrap=True)
    text = load_text(args.text)
    train_text, held_out = text.tensor_split([len(text) * 9 // 10])
    console.print(f"{len(text):,} bytes of text; {mesh!r}; {CONFIG}")

    params, losses = train(args, train_text, mesh, console)
    curves = {f"stage {args.stage} on {mesh.size} ranks": losses}
    if args.compare and losses:
        _, curves["unsharded"] = train(args, train_text, None, console)
        apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
        console.print(f"largest difference between the two losses at any step: {apart:.1e}")
    if mesh.rank == 0 and losses:
        params = fzero.tree.map(lambda p: p.float().cpu(), params)  # half precision is slow on a CPU
        validation = loss_fn(params, get_batch(held_out, 512, seed=-1)).item()
        counts = torch.bincount(train_text, minlength=256) + 1.0  # all that a unigram model knows
        floor = -(counts / counts.sum()).log()[held_out].mean().item()
        plot(curves, {"validation": validation, "unigram model": floor}, args.out)
        console.print(f"\nsample:\n{sample(params, 'def main(')}\n", markup=False, highlight=False)
        console.print(f"validation loss {validation:.3f} nats/byte; a unigram model's: {floor:.3f}; curve: {args.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
