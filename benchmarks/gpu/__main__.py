"""Check and measure fzero on one to eight GPUs in ten minutes, and write benchmarks/gpu.md: `make gpu`.

python -m benchmarks.gpu [--minutes 10] [--gpus N] [--parts checks memory ...] [--out benchmarks/gpu.md]
python -m benchmarks.gpu --rehearse      # without a GPU, on the CUDA of tests/cuda: all code runs, no number is judged
python -m benchmarks.gpu --toy           # tiny models, on a CPU if there is no GPU

With one card a part stands for rank 0 of 8, whose other ranks do not exist, where it needs no others. The status is 1
if a check failed, 2 if there is no GPU, 130 if the run was stopped.
"""

import argparse
import functools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.report import exit_status, write
from benchmarks.gpu.run import ROOT, Launch, Outcome, Part, compile_all, launch, run_parts
from tests.cuda import processes

PARTS = [Part("checks", 3, 3), Part("memory", 3, 4), Part("peers", 3, 6), Part("offload", 2, 2), Part("speeds", 1)]
PARTS += [Part("kernels", 1, 1)]
COMPILING = 0.3  # of the time, at most
STOPPED = "The run was stopped by hand."
NO_GPU = """torch {version} sees no GPU here.
If there is one, its driver may be older than this torch. Then take a torch that fits it:
  make gpu GPU_PYTHON=python3
or rehearse without a GPU:
  make gpu ARGS=--rehearse"""


def main() -> int:
    """Run the parts and write the report."""
    args = arguments()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if problem := problem_with(args, gpus):
        print(problem, file=sys.stderr)
        return 2
    ranks = args.gpus or (1 if args.rehearse else min(max(gpus, 1), 8))
    notes = [f"{ranks} processes, one a card." if ranks > 1 else "One process."]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the parts' processes, too, as Ctrl-C does
    with tempfile.TemporaryDirectory() as cache:
        variables = rehearsal(ranks, cache) if args.rehearse else {}
        if args.rehearse:
            notes.append("**A rehearsal on the CUDA without a GPU: kernels do nothing, so no number or time counts.**")
        args.logs = args.logs or Path(cache, "logs")
        args.logs.mkdir(parents=True, exist_ok=True)
        options = ["--toy"] * args.toy + ["--backends", *args.backends]
        args.compilers = (os.cpu_count() or 1) // ranks if args.compilers is None else args.compilers
        outcome = run_and_report(args, launch(ranks, options, variables), notes)
    status = 130 if STOPPED in notes else exit_status(outcome, args.rehearse)
    words = {0: "no check failed", 130: "stopped before all was done"}
    bad = [f"{r.part}, {r.case}: {r.outcome} {r.reason}" for r in outcome.results if r.outcome in ("wrong", "failed")]
    print("\n".join([*bad, f"wrote {args.out}; {words.get(status, 'a check failed')}"]))
    return status


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts; default 10")
    parser.add_argument("--gpus", type=int, default=0, help="processes, one a card; default all cards, at most 8")
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    parser.add_argument("--backends", nargs="+", default=["eager", "fx", "inductor"], help="the last is the default's")
    parser.add_argument("--compilers", type=int, help="processes that compile before; default: the cores; 0 for none")
    parser.add_argument("--rehearse", action="store_true", help="run on the CUDA without a GPU")
    parser.add_argument("--toy", action="store_true", help="tiny models")
    parser.add_argument("--out", type=Path, help="default benchmarks/gpu.md; .venv-cuda/gpu.md if nothing real is run")
    parser.add_argument("--logs", type=Path, help="a folder for what the parts print; default: it is not kept")
    args = parser.parse_args()
    args.out = args.out or (processes.ENVIRONMENT if args.rehearse or args.toy else ROOT / "benchmarks") / "gpu.md"
    return args


def problem_with(args: argparse.Namespace, gpus: int) -> str:
    """Say why nothing can run here; "" if it can."""
    if args.rehearse and not processes.is_here():
        return "this torch is built without CUDA; `make gpu ARGS=--rehearse` makes an environment with one"
    return "" if gpus or args.rehearse or args.toy else NO_GPU.format(version=torch.__version__)


def run_and_report(args: argparse.Namespace, launch: Launch, notes: list[str]) -> Outcome:
    """Run the parts, write the report after each case and at the end, and return what became of them."""
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    outcomes = [Outcome("", [], 0.0)]
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(outcome: Outcome) -> None:
        outcomes.append(outcome)
        write(outcome, args.out, command, notes, is_last=False)

    try:
        parts = [part for part in PARTS if part.name in args.parts]
        say, end = functools.partial(print, flush=True), time.monotonic() + args.minutes * 60
        if args.compilers and {"inductor"} & {*args.backends}:
            compile_all(parts, args.compilers, COMPILING * args.minutes * 60, launch, say, args.logs)
        run_parts(parts, end - time.monotonic(), launch, say, keep, args.logs)
    except KeyboardInterrupt:
        notes.append(STOPPED)
    write(outcomes[-1], args.out, command, notes, is_last=True)
    return outcomes[-1]


def rehearsal(ranks: int, cache: str) -> dict[str, str]:
    """Return the environment of a rehearsal: the CUDA without a GPU, with so many devices, and its own caches."""
    variables = processes.variables(lazy=True) | {"CUDA_LOG_DEVICES": str(ranks), "TORCHINDUCTOR_CACHE_DIR": cache}
    return {name: value for name, value in variables.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


if __name__ == "__main__":
    sys.exit(main())
