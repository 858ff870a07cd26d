"""One process of `make cuda`: rank 0 of a world whose other ranks do not exist. It prints what its steps did, as JSON.

    python -m tests.cuda.worker TASK --backend fx --ranks 8 --stages 0 1 2 3

Memory, kernels, copies, waits and collectives are those of a real rank; the numbers mean nothing. On a GPU the
collectives are torch's "fake" ones, since one card has no others to talk to.
"""

import argparse
import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import fzero
from benchmarks.one_rank import alone
from fzero import tuning
from fzero.ranks import _agreement
from tests.cuda import log, streams
from tests.cuda.steps import TASKS, Task
from tests.cuda.timeline import NoteWork, Timeline, timeline

WARM_UP = 3  # calls before the one that is recorded


@contextmanager
def rank_0_of(axes: dict[str, int]) -> Iterator[fzero.ranks.Mesh]:
    """Make this process rank 0 of a mesh.

    Numbers that ranks compare would come by kernels that copy nothing, so the absent ranks say what this one says.
    """
    with (
        mock.patch.object(_agreement, "all_gather_numbers", lambda mine, mesh: [mine.tolist()] * mesh.size),
        alone("cpu:fake,cuda:nccl" if log.without_gpu() else "fake", **axes) as mesh,
    ):
        yield mesh


def measure(
    task: Task, stage: int, backend: str, mesh: fzero.ranks.Mesh, device_graph: bool = False, timed: bool = False
) -> dict[str, Any]:
    """Run a step at a stage, and return its facts; bytes."""
    torch.manual_seed(0)
    step = fzero.shard(task.train_step, stage=stage, mesh=mesh, check=False, **task.shard)
    with torch.device("cuda"):
        params, local = task.params(mesh), task.batch()
    state: list[Any] = list(step.init(params, task.opt, donate=True))
    batch = mesh.local(local, task.batch_axes)
    del params, local
    torch.cuda.empty_cache()  # of the full parameters that were given
    jitted = step if backend == "eager" else fzero.jit(step, backend=backend, device_graph=device_graph)
    run: Callable[..., Any] = jitted

    def call() -> None:
        state[:] = run(*state, batch)[:2]

    plan = None if backend == "eager" else jitted.plan(*state, batch)
    for _ in range(WARM_UP):
        call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _, events = log.record(call)
    memory = torch.cuda.memory_stats()
    return {
        "stage": stage,
        "plan": plan and plan.peak_bytes,
        "workspace": plan and plan.workspace_bytes,
        "planned": plan and plan.allocator_peaks(expandable_segments=_segments_expand())._asdict(),
        "requested": memory["requested_bytes.all.peak"],
        "peak": memory["allocated_bytes.all.peak"],
        "reserved": memory["reserved_bytes.all.peak"],
        "waits": log.waits(events),
        "counts": log.counts(events),
        "collectives": streams.collectives(events),
        "early_frees": streams.early_frees(events),
        "timeline": _time(call, mesh.size) if timed else None,
        "kernels": sorted({e.name for e in events if e.kind in ("kernel", "product")}),
    }


def _segments_expand() -> bool:
    return "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _time(call: Callable[[], None], ranks: int) -> Timeline:
    """Call a step on H100s whose machines hold eight each."""
    hardware = tuning.H100.as_hardware()
    with NoteWork(hardware):
        _, events = log.record(call)
    return timeline(events, hardware, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--backend", choices=("eager", "fx", "inductor"), default="fx")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--default-device", action="store_true", help="call torch.set_default_device first")
    parser.add_argument("--device-graph", action="store_true", help="record the step as a graph of the device")
    parser.add_argument("--timeline", action="store_true", help="give each work and collective its seconds")
    args = parser.parse_args()
    log.leave_out_cudnn()
    if args.default_device:
        torch.set_default_device("cuda")
    task = TASKS[args.task](args.ranks)
    with rank_0_of(task.mesh) as mesh:
        for stage in args.stages:
            print(
                "FACTS",
                json.dumps(measure(task, stage, args.backend, mesh, args.device_graph, args.timeline)),
                flush=True,
            )
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
