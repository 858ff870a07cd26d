"""Train a byte-level GPT made of pure functions, sharded by a ZeRO stage, on simulated ranks or on real ones.

    python train_gpt.py --stage 3                       # 4 simulated ranks, on Python's own library
    python train_gpt.py --stage 3 --plan                # a rank's memory and collectives, and a picture; no training
    python train_gpt.py --precision bfloat16 --accumulate 4 --remat --offload 0.4  # as large models are trained
    torchrun --nproc-per-node 2 train_gpt.py            # the same script on 2 processes
Stop it, kill it: the same command goes on, at any `--stage` and on any number of ranks.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fzero
from fzero import data, observe, optim

CONFIG = {"layers": 2, "heads": 4, "width": 128, "context": 64}


def init(config: dict[str, int], seed: int = 0) -> dict[str, Any]:
    generator, d, h, layers = torch.Generator().manual_seed(seed), config["width"], config["heads"], config["layers"]

    def normal(*shape: int, std: float = d**-0.5) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def block() -> dict[str, torch.Tensor]:
        attention = {"qkv": normal(d, 3, h, d // h), "out": normal(h, d // h, d, std=(2 * layers * d) ** -0.5)}
        mlp = {"up": normal(d, 4 * d), "down": normal(4 * d, d, std=(8 * layers * d) ** -0.5)}
        return {"norm1": torch.ones(d), **attention, "norm2": torch.ones(d), **mlp}

    rest = {"tokens": normal(256, d, std=0.02), "positions": normal(config["context"], d, std=0.02)}
    return {**rest, "blocks": [block() for _ in range(layers)], "norm": torch.ones(d), "head": normal(d, 256, std=0.02)}


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.float(), scale.shape, scale.float()).to(x.dtype)


def apply_block(block: dict[str, torch.Tensor], x: torch.Tensor, linear: Any) -> torch.Tensor:
    qkv = linear(norm(x, block["norm1"]), block["qkv"].flatten(1).mT).unflatten(-1, block["qkv"].shape[1:])
    heads = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
    x = x + linear(heads.transpose(1, 2).flatten(2), block["out"].flatten(0, 1).mT)
    return x + linear(F.gelu(linear(norm(x, block["norm2"]), block["up"].mT)), block["down"].mT)


def losses_of(params: Any, windows: torch.Tensor, remat: bool = False, linear: Any = F.linear) -> torch.Tensor:
    """[b, t + 1] bytes → [b], the mean loss of each window."""
    run = fzero.remat(apply_block) if remat else apply_block
    x = F.embedding(windows[:, :-1], params["tokens"]) + params["positions"]
    for block in params["blocks"]:
        x = run(block, x, linear)
    logits = norm(x, params["norm"]) @ params["head"]
    return F.cross_entropy(logits.float().mT, windows[:, 1:], reduction="none").mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a file to train on; by default Python's own library")
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage")
    parser.add_argument("--ranks", type=int, default=4, help="simulated ranks; under torchrun its processes are used")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="windows of a step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a rank in one step")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--codecs", nargs="*", default=[], choices=["int8", "int4", "float8"], help="as int8 int4")
    parser.add_argument("--matmul-precision", default="exact", choices=["exact", "float8"], help="of the blocks")
    parser.add_argument("--remat", action="store_true", help="run each block again in the backward pass")
    parser.add_argument("--moments", choices=["bfloat16", "int8"], help="the optimizer's; by default in float32")
    parser.add_argument("--offload", type=float, default=0.0, help="the share of the optimizer's state on the host")
    parser.add_argument("--plan", action="store_true", help="print a rank's plan, draw it into plan.png, and stop")
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations, with a checkpoint each")
    parser.add_argument("--backend", default="fx", help="inductor needs a compiler, and is faster")
    parser.add_argument("--out", default="runs/train_gpt", help="the folder of checkpoints and log")
    if not 0 <= (args := parser.parse_args()).offload <= 1:
        parser.error(f"--offload {args.offload}: expected a share, from 0 to 1")
    mesh = fzero.mesh(dp=-1, simulated_ranks=args.ranks)
    files = [Path(args.text)] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = text.long().unfold(0, CONFIG["context"] + 1, CONFIG["context"])
    test, train = windows[:64], data.batches(windows[64:], mesh, global_batch=args.batch)
    rate = optim.warmup_cosine(1.5e-3, warmup_steps=args.steps // 10, total_steps=args.steps)
    codecs: Any = {key: getattr(fzero.codecs, x)() for key, x in zip(("gather", "reduce"), args.codecs, strict=False)}
    policy = fzero.Precision(getattr(torch, args.precision), full=lambda path, leaf: "norm" in path, **codecs)
    opt = optim.master_weights(optim.adamw(rate, b2=0.99, weight_decay=0.1, moments=args.moments), policy)
    opt = optim.offload(opt, args.offload, update_on="device" if args.moments else "host")
    opt = optim.dynamic_loss_scale(optim.chain(optim.clip_by_global_norm(1.0), opt))
    way = args.remat, fzero.nn.float8_linear if args.matmul_precision == "float8" else F.linear

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:  # knows nothing of ranks
        f, how = lambda p, x: losses_of(p, x, *way).mean(), {"precision": policy, "micro_batches": args.accumulate}
        loss, grads = fzero.scaled_value_and_grad(f, opt_state.scale, **how)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, {"loss": loss}

    step: Any = fzero.shard(train_step, args.stage, mesh)
    evaluate = fzero.evaluate(step, losses_of)
    if args.plan:
        (plan := fzero.plan(step, *step.init(init(CONFIG), opt), train[0])).plot("plan.png")
        return print(plan)
    runs = fzero.checkpoint.checkpoints(f"{args.out}/checkpoints", mesh)
    params, opt_state, done = runs.restore(like=(*step.init(init(CONFIG), opt), 0))
    step = fzero.jit(step, backend=args.backend)
    with runs, observe.log(observe.progress(args.steps), observe.jsonl(f"{args.out}/log.jsonl"), mesh=mesh) as log:
        for i, batch in train.steps(done, args.steps):
            params, opt_state, actual = step(params, opt_state, batch)
            log(i + 1, actual)
            if (i + 1) % (args.every or args.steps) == 0 or i + 1 == args.steps:
                runs.save(i + 1, (params, opt_state, i + 1))  # beside the training
                batches = data.epoch(test, mesh, global_batch=args.batch)
                log(i + 1, {"held-out loss": data.mean(evaluate(params, *some) for some in batches)})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
