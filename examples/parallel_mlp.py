"""Tensor parallelism (tp) inside ZeRO (dp): Megatron's MLP. The same train step, outside any mesh, is the dense one.

    python examples/parallel_mlp.py --stage 3 --dp 2 --tp 2               # dp x tp simulated ranks
    torchrun --nproc-per-node 4 examples/parallel_mlp.py --tp 2           # four processes; dp is what is left

Each rank along "tp" has some columns of `up` and the same rows of `down`; over "dp" the stage shards what it has.
docs/tutorial/4_axes.md says why the two functions around the matrices, Megatron's f and g, are what they are.
"""

import argparse
from typing import Any

import torch

import fzero
from fzero import optim

opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def tp() -> Any:
    """Return the axis where there is one; outside any mesh (), no axis, along which nothing is sent."""
    return "tp" if "tp" in fzero.axes.axis_names() else ()


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    for block in params["blocks"]:
        h = torch.tanh(
            fzero.collectives.pvary(x, tp()) @ block["up"] + block["hidden"]
        )  # f: backward, the sum of the ranks' parts
        x = (
            x + fzero.collectives.psum_invariant(h @ block["down"], tp()) + block["bias"]
        )  # g: forward, the sum of the ranks' parts
    return (x - batch["y"]).square().mean()


def split(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
    """Say which leaves "tp" splits, and along which dimension: up by columns, down by rows."""
    dims = {"up": 1, "hidden": 0, "down": 0}
    name = path.split(".")[-1]
    return {"tp": dims[name]} if name in dims else None


def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, torch.Tensor]:
    loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


def init(layers: int = 3, d: int = 16, hidden: int = 48) -> Any:
    def block() -> dict[str, torch.Tensor]:
        up, down = torch.randn(d, hidden) / d**0.5, torch.randn(hidden, d) / hidden**0.5
        return {"up": up, "hidden": torch.zeros(hidden), "down": down, "bias": torch.zeros(d)}

    return {"blocks": [block() for _ in range(layers)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--dp", type=int, default=2, help="simulated data-parallel ranks; else what the world leaves")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks: 1, 2, 3, 4, 6, ... (divide 48)")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # the same parameters and batches on every rank

    mesh = fzero.mesh(
        dp=-1, tp=args.tp, simulated_ranks=args.dp * args.tp
    )  # the processes of torchrun or srun, else simulated
    say = print if mesh.rank == 0 else lambda *words: None
    step = fzero.shard(train_step, stage=args.stage, mesh=mesh, axis="dp", split=split)

    dense = mesh.device_put(init())
    dense_state = opt.init(dense)
    params, opt_state = step.init(dense, opt)  # full leaves in
    say(f"{mesh!r}, stage {args.stage}; block 0 on a rank: {params['blocks'][0]['up']!r}")
    for i in range(args.steps):
        n = 4 * dict(mesh.shape)["dp"]
        batch = mesh.device_put({"x": torch.randn(n, 16), "y": torch.randn(n, 16)})  # the global batch
        params, opt_state, loss = step(params, opt_state, mesh.split(batch, "dp"))  # tp ranks get the same examples
        dense, dense_state, dense_loss = train_step(dense, dense_state, batch)
        say(f"step {i + 1:>3}: loss {loss:.12f}, dense and unsharded {dense_loss:.12f}")

    full = step.gather(params)  # full leaves again; on all ranks, since it is a collective
    pairs = zip(fzero.tree.tensors(full), fzero.tree.tensors(dense), strict=True)
    apart = max((x - y).abs().max().item() for x, y in pairs)
    held, all_ = step.state_bytes(params, opt_state), sum(x.nbytes for x in fzero.tree.tensors((dense, dense_state)))
    say(f"a rank holds {held:,} bytes of {all_:,}; largest difference of a parameter from dense training: {apart:.1e}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
