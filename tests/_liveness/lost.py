"""A rank of a small world, in which one rank does what the first argument says."""

import os
import signal
import subprocess
import sys
import time

import torch

import fzero
from fzero import optim


def main() -> None:
    what, timeout = sys.argv[1], float(sys.argv[2])
    torch.set_num_threads(1)
    mesh = fzero.mesh(dp=-1, timeout=timeout)
    opt = optim.sgd(0.1)

    def train_step(params, opt_state, x):
        loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, stage=3, mesh=mesh, check=False)
    params, opt_state = step.init({"w": torch.ones(6, 6)}, opt)
    if what.startswith("jitted"):
        step = fzero.jit(step, backend="fx")
    for i in range(20):
        if mesh.rank == 1 and i == 5:
            if "killed" in what:
                os.kill(os.getpid(), signal.SIGKILL)
            elif "stopped" in what:
                print("child", os.getpid(), flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif "raises" in what:
                raise ValueError("planted")
            elif "ends" in what:
                sys.exit()
            elif "hangs" in what:
                time.sleep(1000)
            elif "calls another" in what:
                mesh.spmd(lambda x: fzero.collectives.psum(x, "dp"))(torch.ones(3))
            elif "computes" in what:  # it holds the lock of the interpreter, so that none of its threads runs
                end = time.monotonic() + timeout / 3
                while time.monotonic() < end:
                    sum(range(10**7))
            elif "child" in what:  # which compiles, for instance
                subprocess.run(["timeout", str(timeout / 3), "sh", "-c", "while :; do :; done"], check=False)
            elif "spins" in what:
                while not os.path.exists("/never"):
                    pass
            elif "polls" in what:
                while not os.path.exists("/never"):
                    time.sleep(0.05)
        params, opt_state, _ = step(params, opt_state, mesh.split(torch.ones(6, 6)))
    print("done", flush=True)


if __name__ == "__main__":
    main()
