"""Print the table of ZeRO's stages, measured: what a rank holds between steps, where, and what a step moves.

python benchmarks/bytes_per_rank.py [RANKS]
python benchmarks/bytes_per_rank.py --write  # into the README, which has eight ranks

Exact counts, the same on every machine: state bytes by `ShardedStep.state_bytes`, elements by
`fzero.collectives.record`. Ψ is the
number of parameters, so 12.00Ψ bytes are float32 parameters with Adam's two moments, and 2.00Ψ elements one all_reduce.
"""

import pathlib
import sys
from typing import Any

import torch

import fzero
from fzero import optim, tree

README = pathlib.Path(__file__).parents[1] / "README.md"
MARKS = ("<!-- bytes_per_rank -->", "<!-- /bytes_per_rank -->")


def model(width: int = 64, layers: int = 4) -> dict[str, Any]:
    """Make the parameters of an MLP with residual blocks; no size divides evenly."""
    torch.manual_seed(0)
    blocks = [{"w": torch.randn(width, width + 1), "v": torch.randn(width + 1, width)} for _ in range(layers)]
    return {"embed": torch.randn(257, width), "blocks": blocks, "bias": torch.zeros(())}


def loss_fn(params: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Predict a token from the one before."""
    x = params["embed"][tokens[:, :-1]]
    for p in params["blocks"]:
        x = x + torch.tanh(x @ p["w"]) @ p["v"] / 64
    logits = x @ params["embed"].T + params["bias"]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rows(ranks: int) -> list[str]:
    """Measure each stage."""
    mesh, opt, params = fzero.mesh(dp=ranks, simulate=True), optim.adamw(1e-3), model()
    psi = sum(x.numel() for x in tree.tensors(params))
    out = []
    for stage in range(len(fzero.zero.STAGES)):
        moved = []
        for k in (1, 4):

            def train_step(params: Any, opt_state: Any, batch: Any, k: int = k) -> Any:
                loss, grads = fzero.value_and_grad(loss_fn, micro_batches=k)(params, batch)
                updates, opt_state = opt.update(grads, opt_state, params)
                return optim.apply_updates(params, updates), opt_state, loss

            step = fzero.shard(train_step, stage=stage, mesh=mesh)
            cut, opt_state = step.init(params, opt)
            with fzero.collectives.record() as log:
                step(cut, opt_state, mesh.split(torch.randint(257, (4 * ranks, 9))))
            moved.append(log.elements / psi)
        held = [step.state_bytes(x) / psi for x in (cut, opt_state)]
        low = step.init(params, optim.offload(opt, 1.0, params=step.layout.shards_params))
        lies = [step.state_bytes(*low, space=space) / psi for space in ("device", "host")]
        layout, grads = step.layout, {"once": "sharded, once a step", "each": "sharded, each micro-batch"}
        out.append(
            f"| {stage} | {layout.params} | {grads.get(layout.grads, layout.grads)} | {layout.opt_state} "
            f"| {held[0]:.2f}Ψ + {held[1]:.2f}Ψ = {sum(held):.2f}Ψ | {lies[0]:.2f}Ψ, {lies[1]:.2f}Ψ "
            f"| {moved[0]:.2f}Ψ | {moved[1]:.2f}Ψ |"
        )
    return out


def table(ranks: int) -> str:
    """Return the table as Markdown."""
    head = [
        "| stage | parameters | gradients | optimizer state | bytes held by a rank "
        "| offloaded: device, host | elements moved, 1 micro-batch | 4 micro-batches |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join(head + rows(ranks))


def write() -> None:
    """Write the table of eight ranks into the README."""
    head, rest = README.read_text().split(f"{MARKS[0]}\n")
    README.write_text(f"{head}{MARKS[0]}\n{table(8)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 8))
