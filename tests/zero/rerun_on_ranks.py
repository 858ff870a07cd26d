"""Two ranks, of which one makes a mistake in its products, once or in each step; or whose memory fails."""

import sys
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.zero import Rerun

MISTAKES = {"once": (3,), "always": range(100), "memory": ()}
CALLS = iter(range(100))


def main(what: str) -> None:
    call = 0

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        nonlocal call
        call = next(CALLS)
        scale = 1.001 if mesh.rank == 1 and call in MISTAKES[what] else 1.0  # what the device of rank 1 gets wrong

        def loss_fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            return (scale * torch.tanh(x @ p["w"])).square().mean()

        loss, grads = fzero.value_and_grad(loss_fn)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh, opt = fzero.mesh(dp=-1, timeout=60), optim.adamw(0.1)
    step = fzero.shard(train_step, stage=3, mesh=mesh, check=Rerun(every=2, swap="dp"))
    params, opt_state = step.init({"w": torch.randn(6, 6)}, opt)
    for i in range(6):
        params, opt_state, _ = step(params, opt_state, mesh.split(torch.randn(4, 6)))
        if what == "memory" and i == 3 and mesh.rank == 1:
            params["w"].pieces[0].numpy().view("uint8")[5] ^= 4
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
