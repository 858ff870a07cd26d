"""Checks: sharded training on the GPU has the numbers of plain training on the CPU, at each stage, recorded or not."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fzero
from benchmarks.gpu.case import Case, Setting, Values
from benchmarks.gpu.encoder import HALF, Config, batch_of, init, train_step_of
from fzero import optim, tree

__all__ = ["NEEDS_ALL_RANKS", "cases"]

NEEDS_ALL_RANKS = True
STEPS = 5  # a recorded step runs twice before it is recorded
MODEL, TOY = Config(128, 2, 4, 512, 32, 256, 0, 0), Config(16, 2, 2, 32, 8, 32, 0, 0)
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a leaf's largest value
HALF_LIMIT = 1.5  # times what plain training in half precision differs from plain training in float32


class Way(NamedTuple):
    """A way to train.

    Attributes:
        stage: the ZeRO stage.
        backend: of `fzero.jit`, or "eager".
        dtype: float32 or float64; bfloat16 stands for half precision with float32 masters.
        is_recorded: whether the step becomes a graph of the GPU.
        update: "host" or "device" if half of the optimizer's state lies on the host.
        simulated: the number of simulated ranks; 0 for the processes.
    """

    stage: int
    backend: Any
    dtype: torch.dtype = torch.float32
    is_recorded: bool = False
    update: str = ""
    simulated: int = 0

    @property
    def name(self) -> str:
        """The way in words."""
        words = [f"stage {self.stage}", self.backend, str(self.dtype).removeprefix("torch.")]
        words += ["recorded"] * self.is_recorded + [f"offload, {self.update} update"] * bool(self.update)
        return ", ".join(words + [f"{self.simulated} simulated ranks"] * bool(self.simulated))


def cases(setting: Setting) -> list[Case]:
    """List the checks, the quickest first."""
    stages = range(len(fzero.zero.STAGES))
    ways = [Way(s, b) for b in setting.backends if b != "inductor" for s in stages]
    ways += [Way(s, "fx", is_recorded=True) for s in stages if setting.mesh.device.type == "cuda"]
    ways += [Way(s, "eager", torch.float64, simulated=4) for s in stages]
    ways += [Way(s, "fx", simulated=4) for s in stages]
    ways += [Way(3, "fx", update=update) for update in ("host", "device")]
    if "inductor" in setting.backends:
        ways += [Way(s, "inductor") for s in stages]
        ways += [Way(s, "inductor", is_recorded=True) for s in stages if setting.mesh.device.type == "cuda"]
        ways += [Way(3, "inductor", torch.bfloat16)]

    def run(way: Way) -> Callable[[], list[Values]]:
        return lambda: [check(way, setting)]

    return [Case(way.name, run(way), is_check=True, compiles=way.backend == "inductor") for way in ways]


def config(setting: Setting) -> Config:
    """Return the model, with a global batch that any number of ranks divides."""
    c = TOY if setting.toy else MODEL
    return c._replace(batch=setting.mesh.size * 4)


def optimizer(way: Way) -> optim.Optimizer:
    """Make a way's optimizer. Its eps is large, so that gradients of nearly 0 do not turn noise into updates."""
    adamw = optim.adamw(1e-2, eps=1e-4)
    pair = optim.master_weights(adamw, HALF) if way.dtype is torch.bfloat16 else adamw
    pair = optim.offload(pair, 0.5, update_on=way.update) if way.update else pair
    return optim.chain(optim.clip_by_global_norm(1.0), pair)


def start(c: Config, way: Way) -> tuple[Any, list[Any]]:
    """Make the parameters and the global batches on the CPU, the same at each call."""
    dtype = torch.float32 if way.dtype is torch.bfloat16 else way.dtype
    torch.manual_seed(0)
    with torch.device("cpu"):
        params = tree.map(lambda x: x.to(dtype), init(c))
        return params, [batch_of(c) for _ in range(STEPS)]


@functools.cache
def train_plainly(c: Config, dtype: torch.dtype) -> Any:
    """Train plainly on the CPU; return the parameters and the losses."""
    way = Way(0, "eager", dtype)
    params, batches = start(c, way)
    opt, precision = optimizer(way), HALF if dtype is torch.bfloat16 else None
    train_step, losses = train_step_of(c, opt, precision), []
    state = [params if precision is None else precision.cast(params), opt.init(params)]
    for batch in batches:
        *state, loss = train_step(*state, batch)
        losses.append(loss)
    return state[0], losses


def train(c: Config, way: Way, mesh: fzero.ranks.Mesh) -> Any:
    """Train in a way; return the full parameters and the losses, on the CPU."""
    params, batches = start(c, way)
    opt = optimizer(way)
    train_step = train_step_of(c, opt, HALF if way.dtype is torch.bfloat16 else None)
    step = fzero.shard(train_step, stage=way.stage, mesh=mesh)
    state, losses = [*step.init(params, opt)], []
    run = step if way.backend == "eager" else fzero.jit(step, backend=way.backend, device_graph=way.is_recorded)
    for batch in batches:
        *state[:], loss = run(*state, mesh.split(batch))
        losses.append(step.gather(loss).clone())
    losses = [x.double().mean().to(x.dtype) for x in losses]  # simulated ranks have one each
    return tree.map(lambda x: x.detach().cpu(), (step.gather(state[0]), losses))


def check(way: Way, setting: Setting) -> Values:
    """Return the row of a way."""
    c = config(setting)
    mesh = fzero.mesh(dp=way.simulated, simulate=True) if way.simulated else setting.mesh
    is_half = way.dtype not in LIMITS
    truth = train_plainly(c, torch.float32 if is_half else way.dtype)
    difference = largest_difference(train(c, way, mesh), truth)
    # two ways to round bfloat16 differ by about as much as each of them from float32
    allowed = HALF_LIMIT * largest_difference(train_plainly(c, way.dtype), truth) if is_half else LIMITS[way.dtype]
    if setting.rehearse:
        return {"difference": "not judged", "allowed": allowed}
    return {"difference": difference, "allowed": allowed, "holds": difference <= allowed}


def largest_difference(actual: Any, expected: Any) -> float:
    """Return the largest difference between two trees, each leaf's of its largest value. A nan is infinitely wrong."""
    largest = 0.0
    for x, y in zip(tree.tensors(actual), tree.tensors(expected), strict=True):
        difference = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30)
        largest = max(largest, difference.nan_to_num(nan=float("inf")).item())
    return largest
