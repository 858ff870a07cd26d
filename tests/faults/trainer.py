"""What each rank of a world under faults runs: it trains on from the newest checkpoint, and tells what it sees."""

import hashlib
import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fzero
from fzero import optim, random, tree
from fzero.checkpoint import _files

EVERY = 3  # steps between saves
OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(1e-2, 2, 500)))


class Fault(NamedTuple):
    """The fault in a rank's n-th save: see `KINDS`; a kill at a random moment comes from outside."""

    kind: str
    rank: int = 0
    save: int = 1
    operation: int = 0  # at which operation on files


class Start(NamedTuple):
    """The way in which a world is started."""

    processes: int
    simulated: int  # ranks in its one process; 0 for a rank a process
    stage: int
    background: bool
    steps: int
    fault: Fault


def params() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    width = 17
    blocks = [
        {"w": torch.randn(width, 2 * width, generator=g) / 9, "v": torch.randn(2 * width, width, generator=g) / 9}
        for _ in range(2)
    ]
    results: dict[str, Any] = {"blocks": blocks, "emb": torch.randn(11, width, generator=g), "b": torch.zeros(width)}
    return {**results, "head": results["emb"]}


def loss_fn(params: Any, batch: Any, key: Any) -> torch.Tensor:
    x = params["emb"][batch[0]] + params["b"]
    for block in params["blocks"]:
        x = x + torch.tanh(x @ block["w"]) @ block["v"]
    return F.cross_entropy(random.dropout(key, x, 0.1) @ params["head"].T, batch[1])


def train_step(params: Any, opt_state: Any, key: Any, batch: Any) -> Any:
    key, use = random.split(key)
    loss, grads = fzero.value_and_grad(loss_fn)(params, batch, use)
    updates, opt_state = OPT.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, key, loss


def batch_at(i: int) -> Any:
    """The global batch of a step, whatever the ranks."""
    g = torch.Generator().manual_seed(1000 + i)
    return torch.randint(11, (24,), generator=g), torch.randint(11, (24,), generator=g)


def digest(step: Any, state: Any) -> str:
    """Sum up all bits of a state, as it is whole."""
    total = hashlib.sha256()
    whole = {**state, **{k: step.gather(state[k]) for k in ("params", "opt_state")}}
    for x in tree.tensors(whole):
        total.update(bytes(x.contiguous().view(-1).view(torch.uint8).tolist()))
    return total.hexdigest()[:16]


class Breaking:
    """The module `os` for one rank's saves: it does what a fault says at its n-th operation on files."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.saves, self.left = fault, 0, -1

    def begin(self) -> None:
        self.saves += 1
        self.left = self.fault.operation if self.saves == self.fault.save else -1

    def __getattr__(self, name: str) -> Any:
        result = getattr(os, name)
        return self._counted(result) if name in ("writev", "fsync", "rename", "unlink", "makedirs") else result

    def _counted(self, f: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            self.wait_for_disk()
            if self.left == -1 and self.saves == self.fault.save:
                self.strike(args)
            return f(*args, **options)

        return call

    def strike(self, args: Any) -> None:
        kind = self.fault.kind
        if kind == "killed in a save":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "disk full":
            raise OSError(28, "No space left on device")
        elif kind == "disk read-only":
            raise OSError(30, "Read-only file system")
        elif kind == "slow rank":
            time.sleep(0.5)

    def wait_for_disk(self) -> None:
        time.sleep(0.05 if self.fault.kind == "slow disk" else 0.0)


def step_clock(seconds: float) -> None:
    """Let this process's clock jump, as Python shows it: the time of the day, not the monotonic one."""
    now, now_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: now() + seconds, lambda: now_ns() + int(seconds * 1e9)


def use_memory() -> None:
    """Run out of memory: this process may have 64 MB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    results = []
    try:
        while True:
            results.append(torch.ones(1 << 22))
    finally:
        results.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train(start: Start, root: Path) -> str:
    """Train to `start.steps`; return the digest of the end."""
    mesh = fzero.mesh(dp=start.simulated, simulate=True) if start.simulated else fzero.mesh(dp=-1)
    breaking = Breaking(start.fault)
    if mesh.rank == start.fault.rank:
        _files.os = breaking  # pyright: ignore
    if start.fault.kind == "disk full by a limit" and mesh.rank == start.fault.rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    def tell(event: str, **what: Any) -> None:
        if mesh.rank == 0:
            with open(root / "log", "a") as f:
                f.write(json.dumps({"event": event, **what}) + "\n")

    step = fzero.shard(train_step, stage=start.stage, mesh=mesh, check=False)
    meta = tree.map(lambda x: x.to("meta"), params())
    with fzero.checkpoint.checkpoints(root / "run", mesh, keep=3, timeout=10) as runs:
        if runs.newest() is None:
            state: Any = dict(zip(("params", "opt_state"), step.init(params(), OPT), strict=True))
            state |= {"key": random.key(7), "step": 0}
            tell("fresh")
        else:
            like: Any = dict(zip(("params", "opt_state"), step.init(meta, OPT), strict=True))
            state = runs.restore({**like, "key": random.key(0), "step": 0})
            tell("resumed", step=state["step"], digest=digest(step, state))
        while state["step"] < start.steps:
            i = state["step"]
            batch = mesh.split(batch_at(i))
            p, s, key, _ = step(state["params"], state["opt_state"], state["key"], batch)
            state = {"params": p, "opt_state": s, "key": key, "step": i + 1}
            tell("step", step=i + 1)
            if mesh.rank == start.fault.rank and i % 7 == start.fault.operation:
                if start.fault.kind == "a rank raises":
                    raise RuntimeError("planted")
                if start.fault.kind == "out of memory":
                    use_memory()
                if start.fault.kind == "clock stepped":
                    step_clock((-1) ** i * 3600.0 * 24**start.fault.save)
            if (i + 1) % EVERY == 0:
                runs.wait()
                tell("committed", step=i + 1 - EVERY)
                tell("saving", step=i + 1, digest=digest(step, state))
                breaking.begin()
                runs.save(i + 1, state, background=start.background)
        runs.wait()
        tell("committed", step=state["step"] // EVERY * EVERY)
        return digest(step, state)
