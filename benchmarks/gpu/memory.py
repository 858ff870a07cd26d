"""Memory: the allocator's peaks of a rank's step beside its plan, for BERT-large and ViT-g/14 at each stage.

Adam in bfloat16 with float32 masters, 16 bytes a parameter. The formula is README's: state and the gradients given to
the update.
"""

from collections.abc import Callable
from typing import Any

import torch

import fzero
from benchmarks.gpu.case import Case, Setting, Values
from benchmarks.gpu.encoder import HALF, Config, batch_of, init, train_step_of
from benchmarks.gpu.meter import MB, Meter, milliseconds
from fzero import optim, tree

__all__ = ["NEEDS_ALL_RANKS", "PUBLISHED", "cases"]

NEEDS_ALL_RANKS = False
LIMIT = 1.05  # of the plan
# What ZeRO's stages take for ViT-g/14 on 8 GPUs, 16 images a rank, by a published reading of DeepSpeed, in MB.
PUBLISHED = {("vit-g", 1): 20_201, ("vit-g", 2): 21_152, ("vit-g", 3): 20_208}
MODELS = {
    "bert-large": Config(1024, 24, 16, 4096, 128, 30522, 0, 64),
    "vit-g": Config(1664, 48, 16, 8192, 257, 1000, 3 * 14 * 14, 16),
}
TOY = {
    "bert-large": Config(64, 3, 4, 256, 16, 256, 0, 4),
    "vit-g": Config(64, 3, 4, 256, 17, 10, 3 * 4 * 4, 2),
}


def cases(setting: Setting) -> list[Case]:
    """List the steps: BERT-large in the default backend, and ViT-g, which has more layers, in "fx"."""
    cases = []
    for model, backend in (("bert-large", setting.backend), ("vit-g", "fx")):
        for stage in (3, 2, 1, 0):
            run = _sharded(model, stage, backend, setting)
            name = f"{model}, stage {stage}, {backend}"
            cases.append(Case(name, run, is_check=True, compiles=backend == "inductor"))
    return cases


def _sharded(model: str, stage: int, backend: Any, setting: Setting) -> Callable[[], list[Values]]:
    def run() -> list[Values]:
        c, mesh = (TOY if setting.toy else MODELS)[model], setting.mesh
        opt = optim.master_weights(optim.adam(1e-4), HALF)
        meter = setting.meter()
        step = fzero.shard(train_step_of(c, opt, HALF), stage=stage, mesh=mesh, check=False)
        with mesh.device:
            state: list[Any] = [*step.init(lambda: init(c), opt)]
            batch = mesh.local(batch_of(c))
        jitted = fzero.jit(step, backend=backend)
        plan = jitted.plan(*state, batch)
        psi = sum([x.numel() for x in tree.tensors(_shapes(c))])
        formula = step.state_bytes(*state) + 2 * psi // (mesh.size if stage else 1)
        planned = plan.peak_bytes + plan.workspace_bytes
        row = {"formula MB": formula / MB, "plan MB": planned / MB, "planned ms": plan.seconds * 1e3}
        row |= _measure(meter, jitted, state, batch)
        ratio = row["requested MB"] / row["plan MB"]
        if "reserved MB" in row:
            row["reserved / plan"] = row["reserved MB"] / row["plan MB"]
            row["reserved / planned"] = row["reserved MB"] * MB / plan.allocator_peaks().reserved_bytes
        if not setting.toy and (limit := PUBLISHED.get((model, stage))):
            row["published MB"] = limit
        # a plan for a CPU counts gloo's buffers, which a world whose ranks do not exist does not take
        is_good = ratio <= LIMIT or mesh.device.type == "cpu"
        return [row | {"requested / plan": ratio, "holds": is_good}]

    return run


def _measure(meter: Meter, step: Callable[..., Any], state: list[Any], batch: Any) -> Values:
    """Run a step until it is steady, and return its peaks and times."""

    def run() -> None:
        state[:] = step(*state, batch)[:2]

    for _ in range(3):  # to compile, and to settle
        run()
    peaks = meter.peaks(run, (state, batch))
    row: Values = {"requested MB": peaks.requested / MB, "allocated MB": peaks.allocated / MB}
    if peaks.reserved is not None:
        row["reserved MB"] = peaks.reserved / MB
    return row | milliseconds(meter.seconds(run))


def _shapes(c: Config) -> Any:
    """Make the parameters without memory."""
    with torch.device("meta"):
        return init(c)
