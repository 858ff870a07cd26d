"""ZeRO stage 2 by hand, from four transforms, in one process.

    python examples/zero_by_hand.py

Data-parallel training keeps the same parameters, gradients and optimizer state on every rank. ZeRO sees that a rank
needs the whole parameters only for the forward and backward pass: for the update, 1/N of everything is enough.
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


# ---------------------------------------------------------------- what you would write on one machine


def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, torch.Tensor]:
    loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


# ---------------------------------------------------------------- ZeRO-2: what each rank runs


def zero2(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, torch.Tensor]:
    # `params` is whole and the same on every rank. `batch` is this rank's part. `opt_state` is 1/N of Adam's moments.

    # 1. partition: cut the parameters in units, each unit in N equal shards, and keep our own. Nothing is sent.
    shards = fzero.partition(params)

    # 2. Plain torch.func on whole parameters: each rank has another gradient, because it has another part of the batch.
    grads, loss = torch.func.grad_and_value(loss_fn)(fzero.gather(shards), batch)

    # 3. reduce_scatter: add the gradients of all ranks, and keep our own shard of the sum. With / N it is the mean.
    grads = fzero.tree.map(lambda g: g / fzero.axis_size(), fzero.reduce_scatter(grads, like=shards))

    # 4. step: update our shard of the parameters with our shard of the gradients and of the moments.
    shards, opt_state = fzero.step(opt)(shards, grads, opt_state)

    # 5. gather: put the new shards together, so that every rank has the whole parameters for the next step.
    return fzero.gather(shards), opt_state, fzero.pmean(loss)


def init(params: Any) -> Any:
    # Moments of a shard: the optimizer never sees whole parameters.
    return opt.init(fzero.partition(params))


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    params = {
        "blocks": [{"w": torch.randn(9, 9) / 3, "b": torch.zeros(9)} for _ in range(3)],
        "head": torch.randn(9, 2) / 3,
    }
    batches = [{"x": torch.randn(32, 9), "y": torch.randn(32, 2)} for _ in range(5)]

    mesh = fzero.mesh(dp=RANKS)  # four ranks, simulated as a batch dimension of this process
    step = fzero.shard(train_step, stage=2, mesh=mesh)  # the same, in one line

    unsharded, unsharded_state = params, opt.init(params)
    by_hand, by_hand_state = params, mesh.spmd(init)(params)
    one_line, one_line_state = step.init(params, opt)
    for batch in batches:
        unsharded, unsharded_state, loss = train_step(unsharded, unsharded_state, batch)
        by_hand, by_hand_state, hand_loss = mesh.spmd(zero2)(by_hand, by_hand_state, mesh.split(batch))
        one_line, one_line_state, line_loss = step(one_line, one_line_state, mesh.split(batch))
        torch.testing.assert_close((hand_loss, by_hand), (loss, unsharded))
        torch.testing.assert_close((line_loss, one_line), (loss, unsharded))
        print(f"loss {loss:.6f} unsharded, {hand_loss:.6f} by hand, {line_loss:.6f} by fzero.shard")

    with fzero.record() as log:
        mesh.spmd(zero2)(by_hand, by_hand_state, mesh.split(batches[0]))
    print("\nWhat a step sends, for each unit; a metric is a scalar:")
    print(log)
    print("\nA unit's moments on one rank:", by_hand_state.mu["blocks"][0]["w"])
    whole = sum(x.numel() * x.element_size() for x in fzero.tree.tensors(unsharded_state))
    print(f"Bytes of optimizer state on one rank: {whole:,} unsharded, {step.state_bytes(by_hand_state):,} by ZeRO-2")


if __name__ == "__main__":
    main()
