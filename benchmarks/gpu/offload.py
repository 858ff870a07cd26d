"""Offload: the time of a step by the share of the optimizer's state that lies on the host (DeepSpeed's Twin-Flow).

Stage 3, AdamW in bfloat16 with float32 masters behind a clip by the global norm.
"""

from collections.abc import Callable
from typing import Any

import fzero
from benchmarks.gpu.case import Case, Setting, Values
from benchmarks.gpu.encoder import HALF, Config, batch_of, init, train_step_of
from benchmarks.gpu.meter import MB, milliseconds
from fzero import optim

__all__ = ["NEEDS_ALL_RANKS", "cases"]

NEEDS_ALL_RANKS = False
MODEL, TOY = Config(4096, 4, 32, 16384, 512, 32000, 0, 4), Config(64, 3, 4, 256, 16, 256, 0, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "ratio 0": {"ratio": 0.0},
    "ratio 1": {"ratio": 1.0},
    "ratio 0.2": {"ratio": 0.2},
    "ratio 0.5": {"ratio": 0.5},
    "ratio 1, updated on the device": {"ratio": 1.0, "update_on": "device"},
    "ratio 1, a step late": {"ratio": 1.0, "delay": 1},
    "ratio 0.8": {"ratio": 0.8},
    "ratio 1, parameters too": {"ratio": 1.0, "params": True},
}


def cases(setting: Setting) -> list[Case]:
    """List the ratios and the ways to update."""
    compiles = setting.backend == "inductor"
    return [Case(name, _measure(options, setting), compiles=compiles) for name, options in OPTIONS.items()]


def _measure(options: dict[str, Any], setting: Setting) -> Callable[[], list[Values]]:
    def run() -> list[Values]:
        c, mesh = TOY if setting.toy else MODEL, setting.mesh
        opt = optim.offload(optim.master_weights(optim.adamw(1e-4), HALF), **options)
        opt = optim.chain(optim.clip_by_global_norm(1.0), opt)
        meter = setting.meter()
        step = fzero.shard(train_step_of(c, opt, HALF), stage=3, mesh=mesh, check=False)
        with mesh.device:
            state: list[Any] = [*step.init(lambda: init(c), opt)]
            batch = mesh.local(batch_of(c))
        jitted = fzero.jit(step, backend=setting.backend)
        plan = jitted.plan(*state, batch)

        def train() -> None:
            state[:] = jitted(*state, batch)[:2]

        for _ in range(3):
            train()
        peaks = meter.peaks(train, (state, batch))
        moved = sum([t.bytes * t.times for t in plan.transfers])
        return [
            {
                "ratio": options["ratio"],
                **milliseconds(meter.seconds(train)),
                "plan MB": (plan.peak_of("device") + plan.workspace_bytes) / MB,
                "requested MB": peaks.requested / MB,
                "host plan MB": plan.peak_of("host") / MB,
                "copied MB a step": moved / MB,
            }
        ]

    return run
