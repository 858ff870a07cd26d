"""Print how long plans take: of deep models, of many leaves, of many micro-batches, and the rows of `fzero plan`.

python benchmarks/planner_speed.py [--rounds 3] [--cases NAME ...] [--tree FOLDER] [--write]

Each plan is made in a process of its own, after a small plan that imports everything. Seconds are of the processor, so
that other work on the machine counts little, and by the clock. `--tree` is a folder with an older fzero, which is then
measured in turns with this one; the plans of both must be equal, byte by byte. Cases that take long run once.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

sys.path.insert(0, os.environ.get("PLANNED_TREE", str(pathlib.Path(__file__).parents[1])))

import torch

import fzero
from benchmarks.jit_compile import experts, experts_loss, step_of
from fzero import optim
from tests.helpers import train_step_for

ROOT = pathlib.Path(__file__).parents[1]


def gpt(layers: int, k: int = 1) -> fzero.graph.Plan:
    """Plan a narrow GPT at stage 3 for 8 ranks, with k micro-batches."""
    step, args = step_of(layers, 3, fzero.mesh(dp=2, simulate=True), k)
    return fzero.plan(step, *args, world_size=8)


def leaves(layers: int) -> fzero.graph.Plan:
    """Plan layers of 197 leaves at stage 3 for 8 ranks; a unit is a layer."""
    opt = optim.adamw(1e-3)
    options: Any = {"check": False, "units": lambda path, leaf: ".".join(path.split(".")[:2])}
    step = fzero.shard(train_step_for(experts_loss, opt), stage=3, mesh=fzero.mesh(dp=2, simulate=True), **options)
    args = (*step.init(experts(layers), opt), step.mesh.split(torch.randint(32, (4, 9))))
    return fzero.plan(step, *args, world_size=8)


def rows() -> fzero.tuning.ConfigurationTable:
    """Plan the rows of the command for Llama 3 8B on an H100, without the cache, in one process."""
    make_step: Any = fzero.tuning.model_step("llama-3-8b", length=8192)
    options: Any = {"world_size": 64, "global_batch": 512, "memory": 80e9, "machine": "h100", "depth": 32}
    return fzero.tuning.tune(make_step, stages=(1, 2, 3), cache=False, **options)


class Case:
    """A plan to measure: its name, its goal in seconds by the clock, how to make it, and whether it runs once."""

    def __init__(self, name: str, goal: float, make: Callable[[], Any], once: bool = False) -> None:
        self.name, self.goal, self.make, self.once = name, goal, make, once


CASES = {
    "layers": Case("GPT of 64 layers", 1.5, lambda: gpt(64)),
    "k1": Case("GPT of 4 layers, 1 micro-batch", float("inf"), lambda: gpt(4)),
    "k64": Case("the same, 64 micro-batches", float("inf"), lambda: gpt(4, 64)),
    "leaves": Case("48 layers of 197 leaves", 6.0, lambda: leaves(48), once=True),
    "rows": Case("the rows of Llama 3 8B", 12.0, rows, once=True),
}


REMAINS = """## What remains

The goals of deep plans are missed. Each operation of a deep model is still traced, and each candidate schedule still
visits each node. Before these changes a sampled plan of 16 layers spent 24% on the trace and 69% on the candidates: the
graphs after the passes, seven orders of them, and their live bytes and seconds.

A block that is traced once and repeated in the graph would remove most of the trace only. It needs a mark of the block
in the user's code, since Python may do something else in any iteration. Schedules cannot be repeated either: gathers
fit below a peak that depends on the depth, so the order of an early block may differ from a late one's.

Rows of a table plan two models of few blocks each; their traces differ by stage, remat and micro-batch. Of the 15 rows
of Llama 3 8B tracing took 79 of 200 s before. Rows that were planned before come from the cache on disk
(`fzero.tune(cache=True)`)."""


def measure(name: str) -> dict[str, Any]:
    """Measure a case in this process; return the processor's seconds, the clock's, and a hash of the plan."""
    torch.set_num_threads(1)
    gpt(1)
    torch.manual_seed(0)
    start, clock = time.process_time(), time.perf_counter()
    plan = CASES[name].make()
    took = [time.process_time() - start, time.perf_counter() - clock]
    root = str(pathlib.Path(fzero.__file__).parents[1])
    text = plan.to_json().replace(root, "")
    return {"cpu": took[0], "clock": took[1], "plan": hashlib.sha256(text.encode()).hexdigest()}


def elsewhere(name: str, tree: pathlib.Path, cache: str) -> dict[str, Any]:
    """Measure a case in a process of its own, with fzero of a folder."""
    env = {**os.environ, "PLANNED_TREE": str(tree), "PYTHONPATH": str(tree), "XDG_CACHE_HOME": cache}
    command = [sys.executable, __file__, "--measure", name]
    done = subprocess.run(command, env=env, cwd=cache, stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    print(name, tree, result, file=sys.stderr, flush=True)
    return result


def tables(names: Sequence[str], trees: Sequence[pathlib.Path], rounds: int) -> list[str]:
    """Measure the cases with fzero of each folder, in turns."""
    from benchmarks.report import quartiles, table

    lines = []
    with tempfile.TemporaryDirectory() as cache:
        for name in names:
            case = CASES[name]
            runs = [{tree: elsewhere(name, tree, cache) for tree in trees} for _ in range(1 if case.once else rounds)]
            same = len({x["plan"] for run in runs for x in run.values()}) == 1
            for tree in trees:
                version = "this version" if tree == ROOT else "before"
                times = [quartiles([run[tree][key] for run in runs]) for key in ("cpu", "clock")]
                goal = "" if case.goal == float("inf") else f"{case.goal:g}"
                lines.append([case.name, version, *times, goal, "yes" if same else "no"])
    head = ["plan", "version", "seconds of the processor", "by the clock", "goal, s", "equal plans"]
    return [
        f"The median and the quartiles of {rounds} rounds in turns; one run of what takes long.",
        table(head, lines),
        REMAINS,
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tree", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
    else:
        from benchmarks.report import publish

        trees = [ROOT] if options.tree is None else [options.tree, ROOT]
        text = tables(options.cases, trees, options.rounds)
        publish(__file__, "python benchmarks/planner_speed.py", text, options.write)
