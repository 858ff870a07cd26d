"""Print how long training takes to start: from the building of a model to the end of its first step.

python benchmarks/first_step.py [--ranks 1 2 4] [--write]

The GPT of benchmarks/peers, model A, stage 3, beside FSDP2 with torch.compile, on ranks of one machine. Each run is a
torchrun of its own. Cold: all ranks share an empty cache of Inductor. Warm: a second run with the same cache. Imports
are not counted. Of "auto", the step at which compiled code takes over, and when, is printed too. Some 10 minutes.
"""

import argparse
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch.distributed as dist
from torch import set_num_threads

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.peers.gpt import CONFIGS
from benchmarks.peers.systems import SYSTEMS, Setup, fzero_system
from benchmarks.report import publish, table

FOUND = [SYSTEMS["FSDP2-3-reshard-compile"], *[fzero_system(3, backend) for backend in ("inductor", "auto", "fx")]]
BUILDS = {system.key: system.build for system in FOUND}
COLD_GOAL, WARM_GOAL = 1.5, 4.0  # of FSDP2's time; seconds
STEPS = 1000  # of "auto", at most


def run(name: str) -> dict[str, float]:
    """Build a system on these ranks, run a step, and of "auto" more until it is compiled."""
    import torch._inductor.compile_fx  # noqa: F401  before the clock starts

    set_num_threads(1)
    mesh = fzero.mesh(simulate=False, dp=-1)
    config = CONFIGS["A"]
    (batch,) = config.batches(1, mesh.rank, 1)
    dist.barrier()
    start = time.perf_counter()
    train = BUILDS[name](Setup(config, 1, mesh))
    train(batch)
    metrics = {"seconds": time.perf_counter() - start}
    if name == "fzero-3-auto":
        metrics |= until_compiled(lambda: train(batch), start)
    dist.barrier()
    return metrics


def until_compiled(step: Any, start: float) -> dict[str, float]:
    """Run steps until the log says that one runs compiled, which it does on all ranks at once; say which and when."""
    said: list[logging.LogRecord] = []
    log = logging.getLogger("fzero.jit")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: said.append(record) is None)
    for i in range(1, STEPS):
        step()
        if any("compiled" in record.msg for record in said):
            return {"step": i, "compiled": time.perf_counter() - start}
    return {}


def launch(name: str, ranks: int, cache: str) -> dict[str, float]:
    """Do that in processes of their own, with Inductor's cache in a folder; the first rank's numbers."""
    torchrun = pathlib.Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--nproc-per-node", str(ranks), __file__, "--system", name]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=env, capture_output=True, check=False, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    metrics = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print(name, ranks, metrics, file=sys.stderr, flush=True)
    return metrics


def measure(ranks: int) -> list[list[Any]]:
    """Measure all systems, cold and warm; a row for each."""
    rows, peers = [], None
    for name in BUILDS:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = launch(name, ranks, cache), launch(name, ranks, cache)
        peers = peers or cold
        said = ""
        if name == "fzero-3-inductor":
            good = [cold["seconds"] <= COLD_GOAL * peers["seconds"], warm["seconds"] <= WARM_GOAL]
            said = ", ".join(["met" if x else "missed" for x in good])
        if "step" in cold:
            said = f"compiled from step {cold['step']:.0f} on, after {cold['compiled']:.0f} s"
        ratio = cold["seconds"] / peers["seconds"]
        rows.append([ranks, name, f"{cold['seconds']:.1f}", f"{ratio:.2f}", f"{warm['seconds']:.1f}", said])
    return rows


def main() -> None:
    """Measure, print and keep the table; or run one system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="default 1 2 4")
    parser.add_argument("--write", action="store_true", help="keep the table in first_step.md")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system:
        metrics = run(args.system)
        if dist.get_rank() == 0:
            print(json.dumps(metrics), flush=True)
        dist.destroy_process_group()
        return
    rows = [row for ranks in args.ranks for row in measure(ranks)]
    head = ["ranks", "system", "cold, s", "cold / FSDP2's", "warm, s", "goals"]
    parts = [
        f"Goals, for fzero with Inductor: cold at most {COLD_GOAL} times FSDP2 with torch.compile, warm at most "
        f"{WARM_GOAL:g} s.",
        table(head, rows),
    ]
    publish(__file__, "python benchmarks/first_step.py", parts, args.write)


if __name__ == "__main__":
    main()
