"""ZeRO stage 2 by hand, from four transforms, in one process.

    python examples/zero_by_hand.py

Data-parallel training keeps the same parameters, gradients and optimizer state on every rank. ZeRO sees that a rank
needs the full parameters only for the forward and backward pass: for the update, 1/N of everything is enough.

Sent in a step: ordinary data parallelism sums the gradients by an all_reduce, which is a reduce_scatter and then an
all_gather. ZeRO-2 puts the update between the two: the same traffic, with 1/N of the moments and of the work on them.
"""

from typing import Any

import torch

import fzero
from fzero import optim

RANKS = 4
opt = optim.adam(1e-2)


def loss_fn(params: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    x = batch["x"]
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    return (x @ params["head"] - batch["y"]).square().mean()


# What you would write on one machine.


def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, torch.Tensor]:
    loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


# ZeRO-2: what each rank runs.


def zero2(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, torch.Tensor]:
    # `params` is full and the same on every rank. `batch` is this rank's part. `opt_state` is 1/N of Adam's moments.

    # 1. partition: divide the parameters into units (here each block, and the head), and each unit, padded to a
    #    multiple of N, into N equal shards; keep our own. Nothing is sent.
    shards = fzero.partition(params)

    # 2. Plain torch.func on full parameters: each rank has another gradient, because it has another part of the batch.
    #    This gather sends nothing: shards keep the full leaves that they come from, until something changes them.
    grads, loss = torch.func.grad_and_value(loss_fn)(fzero.gather(shards), batch)

    # 3. reduce_scatter: add the gradients of all ranks, and keep our own shard of the sum. With / N it is the mean.
    grads = fzero.tree.map(lambda g: g / fzero.axes.axis_size(), fzero.reduce_scatter(grads, like=shards))

    # (Differentiating through the gather does 2 and 3 at once, because reduce_scatter is gather's transpose:
    # torch.func.grad(lambda shards: loss_fn(fzero.gather(shards), batch))(shards). That is what fzero.shard does,
    # and stage 3 is the same program that keeps its shards between steps and leaves step 5 out.)

    # 4. step: update our shard of the parameters with our shard of the gradients and of the moments.
    shards, opt_state = fzero.transforms.step(opt)(shards, grads, opt_state)

    # 5. gather: put the new shards together, so that every rank has the full parameters for the next step.
    return fzero.gather(shards), opt_state, fzero.collectives.pmean(loss)


def init(params: Any) -> Any:
    # Moments of a shard: the optimizer never sees full parameters.
    return opt.init(fzero.partition(params))


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    params = {
        "blocks": [{"w": torch.randn(9, 9) / 3, "b": torch.zeros(9)} for _ in range(3)],
        "head": torch.randn(9, 2) / 3,
    }
    batch = {"x": torch.randn(32, 9), "y": torch.randn(32, 2)}  # the global batch

    mesh = fzero.mesh(dp=RANKS)  # four ranks, simulated as a batch dimension of this process
    step = fzero.shard(train_step, stage=2, mesh=mesh)  # the same, in one line
    params, batch = mesh.device_put((params, batch))  # to a GPU, if there is one

    unsharded, unsharded_state = params, opt.init(params)
    by_hand, by_hand_state = params, mesh.spmd(init)(params)
    one_line, one_line_state = step.init(params, opt)
    for _ in range(5):
        unsharded, unsharded_state, loss = train_step(unsharded, unsharded_state, batch)
        by_hand, by_hand_state, hand_loss = mesh.spmd(zero2)(by_hand, by_hand_state, mesh.split(batch))
        one_line, one_line_state, line_loss = step(one_line, one_line_state, mesh.split(batch))
        torch.testing.assert_close((hand_loss, by_hand), (loss, unsharded))
        torch.testing.assert_close((line_loss, one_line), (loss, unsharded))
        print(f"loss {loss:.6f} unsharded, {hand_loss:.6f} by hand, {line_loss:.6f} by fzero.shard")

    with fzero.collectives.record() as log:
        mesh.spmd(zero2)(by_hand, by_hand_state, mesh.split(batch))
    print("\nWhat a step sends, for each unit, padding included; the metric is the loss, an all_reduce counted twice:")
    print(log)
    print("\nA unit's moments on one rank:", by_hand_state.mu["blocks"][0]["w"])
    full = sum(x.numel() * x.element_size() for x in fzero.tree.tensors(unsharded_state))
    print(f"Bytes of optimizer state on one rank: {full:,} unsharded, {step.state_bytes(by_hand_state):,} by ZeRO-2")


if __name__ == "__main__":
    main()
