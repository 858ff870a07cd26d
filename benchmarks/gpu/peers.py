"""Peers: the step of a GPT in fzero, plain torch, DDP, FSDP2 and DeepSpeed, each as its own documentation says.

AdamW in bfloat16 with float32 masters. Each system is measured alone, one after the other.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.case import Case, LeftOutError, Setting, Values
from benchmarks.gpu.meter import MB, milliseconds
from benchmarks.peers.gpt import Config
from benchmarks.peers.systems import Setup, System, ddp, deepspeed, fsdp2, fzero_system, plain
from fzero import tree

__all__ = ["NEEDS_ALL_RANKS", "cases"]

NEEDS_ALL_RANKS = False
GPT, TOY = Config(1024, 8, 16, 1024), Config(32, 2, 2, 16)


class OnDevice(Config):
    """The same model, with parameters that are drawn on the default device, which takes no time on a GPU."""

    def params(self) -> dict[str, Any]:
        """Make the parameters."""
        device = torch.get_default_device()
        with torch.device("meta"):
            shapes = super().params()
        return tree.map(lambda x: torch.randn(x.shape, device=device).mul_(0.02 if x.ndim > 1 else 1.0), shapes)


def cases(setting: Setting) -> list[Case]:
    """List the systems; those that matter most come first."""
    is_compiled = "inductor" in setting.backends
    systems = [
        fzero_system(3, setting.backend),
        fsdp2(True, is_compiled),
        plain(is_compiled),
        fzero_system(0, setting.backend),
        ddp(0, is_compiled),
        fzero_system(2, setting.backend),
        fsdp2(False, is_compiled),
        *[deepspeed(stage) for stage in (3, 2, 1)],
        fzero_system(1, setting.backend),
        *([fsdp2(True, False), fzero_system(3, "fx")] if is_compiled else []),
    ]
    return [
        Case(system.key.replace(" ", "-"), _measure(system, setting), compiles=system.is_compiled) for system in systems
    ]


def _measure(system: System, setting: Setting) -> Callable[[], list[Values]]:
    def run() -> list[Values]:
        if system.name == "DeepSpeed" and importlib.util.find_spec("deepspeed") is None:
            raise LeftOutError("deepspeed is not installed")
        mesh, config = setting.mesh, OnDevice(*(TOY if setting.toy else GPT))
        meter, start = setting.meter(), time.perf_counter()
        batches = mesh.device_put(config.batches(1, mesh.rank, 1))
        with mesh.device:
            train = system.build(Setup(config, 1, mesh, is_half=True))
            train(batches[0])
            seconds = time.perf_counter() - start
            for _ in range(2):
                train(batches[0])
            peaks = meter.peaks(lambda: train(batches[0]), batches)
            times = meter.seconds(lambda: train(batches[0]))
        row: Values = {"stage": system.stage, **milliseconds(times)}
        if peaks.reserved is not None:
            row |= {"allocated MB": peaks.allocated / MB, "reserved MB": peaks.reserved / MB}
        return [row | {"first step s": seconds}]

    return run
