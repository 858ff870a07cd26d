"""Run the cases of a part, one after the other, on this rank. Rank 0 writes what becomes of them, a JSON a line.

python -m benchmarks.gpu.worker PART OUT [--skip N] [--seconds S] [--toy] [--backends eager fx inductor]
python -m benchmarks.gpu.worker PART OUT --compile I N     # each N-th case that compiles, from the I-th; not measured

First comes {"cases": [[name, is_check], ...], "card": ...}, then for each case {"start": i} and {"end": a result}. A
process whose device does not answer any more ends, so that the next case begins in a new one (`benchmarks.gpu.run`).
"""

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config

import fzero
from benchmarks.gpu.case import RANKS, Case, LeftOutError, Result, Setting
from benchmarks.gpu.meter import from_rank_0
from benchmarks.one_rank import alone
from benchmarks.report import machine
from fzero._torch import wait_for_device
from tests.cuda import log

__all__ = ["run_cases"]

Emit = Callable[[dict[str, Any]], None]
LEAST = 2.0  # seconds that a case needs to begin
COMPILE_THREADS = 2  # of each process where many compile
BROKEN = 3  # the exit status of a process whose device does not answer


def run_cases(part: str, cases: list[Case], emit: Emit, skip: int, seconds: float) -> bool:
    """Run cases until the time is over; return whether the device still answers.

    Args:
        part: the name of the part.
        cases: all its cases.
        emit: takes what becomes of them.
        skip: how many cases ran before, in another process.
        seconds: the time that is left. Who started this process ends a case that takes longer.
    """
    end = time.monotonic() + seconds
    emit({"cases": [[case.name, case.is_check] for case in cases], "card": card()})
    for i, case in list(enumerate(cases))[skip:]:
        if from_rank_0(time.monotonic() + LEAST > end):
            emit({"end": Result(part, case.name, "left out", "no time was left").to_json()})
            continue
        emit({"start": i})
        result = try_case(part, case)
        is_alive = clean_up()
        emit({"end": result.to_json()})
        if not is_alive:
            return False
    return True


def try_case(part: str, case: Case) -> Result:
    """Run a case. An error becomes its outcome, and goes to the log as a whole."""
    result, start = Result(part, case.name, "ok", is_check=case.is_check), time.monotonic()
    torch.manual_seed(0)  # all ranks draw the same parameters
    try:
        rows = case.run()
        holds = min([row.pop("holds", True) for row in rows], default=True)
        result.outcome = "ok" if holds else "wrong"
        result.rows = rows
    except LeftOutError as error:
        result.outcome, result.reason = "left out", str(error)
    except torch.OutOfMemoryError as error:
        result.outcome, result.reason = "left out", f"the card has too little memory: {first_line(error)}"
    except Exception as error:
        traceback.print_exc()
        result.outcome, result.reason = "failed", f"{type(error).__name__}: {first_line(error)}"
    result.seconds = time.monotonic() - start
    return result


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut where it is long."""
    return next(iter(str(error).splitlines()), "")[:300]


def clean_up() -> bool:
    """Free what a case left; return whether the device still answers."""
    try:
        torch.compiler.reset()
        gc.collect()
        wait_for_device()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


def card() -> str:
    """Name the cards, or the machine if it has none."""
    if not torch.cuda.is_available():
        return machine()
    properties = torch.cuda.get_device_properties(0)
    count, memory = torch.cuda.device_count(), properties.total_memory / 1e9
    return f"{count} x {properties.name} ({memory:.0f} GB), CUDA {torch.version.cuda}, {machine()}"


@contextmanager
def world(needs_all_ranks: bool) -> Iterator[fzero.ranks.Mesh]:
    """Make the mesh: of all processes, or of 8 ranks if this process is alone and a part needs no others."""
    if needs_all_ranks or int(os.environ["WORLD_SIZE"]) > 1:
        mesh = fzero.mesh(simulate=False, dp=-1)
        yield mesh
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    with alone(dp=RANKS) as mesh:
        yield mesh


def main() -> int:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part")
    parser.add_argument("out", type=Path)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--compile", type=int, nargs=2, metavar=("I", "N"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--backends", nargs="+", default=["eager", "fx", "inductor"])
    args = parser.parse_args()
    log.leave_out_cudnn()
    module = importlib.import_module(f"benchmarks.gpu.{args.part}")
    is_first = os.environ["RANK"] == "0"

    def emit(event: dict[str, Any]) -> None:
        if is_first:
            with args.out.open("a") as file:
                file.write(json.dumps(event) + "\n")

    with world(module.NEEDS_ALL_RANKS) as mesh:
        exists = dist.get_backend() != "fake"
        only_compiles = args.compile is not None
        setting = Setting(mesh, exists, args.toy, log.without_gpu(), tuple(args.backends), only_compiles)
        cases = module.cases(setting)
        if only_compiles:
            first, every = args.compile
            cases = [case for case in cases if case.compiles][first::every]
            inductor_config.compile_threads = COMPILE_THREADS
        is_alive = run_cases(args.part, cases, emit, args.skip, args.seconds)
    return 0 if is_alive else BROKEN


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries may hold up a usual end
