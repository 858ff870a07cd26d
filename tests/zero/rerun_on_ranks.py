"""Two ranks, of which one makes a mistake in its gradients, once or in each step; or whose memory fails."""

import sys

import torch

import fzero
from fzero import optim
from fzero.zero import Rerun

MISTAKES = {"once": (3,), "always": range(100), "memory": ()}
CALLS = iter(range(100))
what = sys.argv[1]


def plant(x: torch.Tensor) -> torch.Tensor:
    """Flip a bit on rank 1, in some calls of the step."""
    if mesh.rank == 1 and call in MISTAKES[what]:
        x = x.clone()
        x.view(torch.int32)[0] ^= 1 << 20
    return x


def train_step(params, opt_state, x):
    global call
    call = next(CALLS)
    loss, grads = fzero.value_and_grad(lambda p, x: (torch.tanh(x @ p["w"])).square().mean())(params, x)
    grads = fzero.tree.map(plant, grads)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


torch.set_num_threads(1)
torch.manual_seed(0)
mesh, opt, call = fzero.mesh(dp=-1, timeout=60), optim.adamw(0.1), 0
step = fzero.shard(train_step, stage=3, mesh=mesh, check=Rerun(every=2, swap="dp"))
params, opt_state = step.init({"w": torch.randn(6, 6)}, opt)
for i in range(6):
    params, opt_state, _ = step(params, opt_state, mesh.split(torch.randn(4, 6)))
    if what == "memory" and i == 3 and mesh.rank == 1:
        params["w"].pieces[0].numpy().view("uint8")[5] ^= 4
print("done", flush=True)
