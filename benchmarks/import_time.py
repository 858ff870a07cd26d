"""Print what `import fzero` adds to `import torch`: seconds, modules, and the largest parts of both.

python benchmarks/import_time.py [--rounds 9] [--tree FOLDER] [--write]

Each import runs in a process of its own, after `import torch`. Seconds are of the processor, so that other work on the
machine counts little, and by the clock. Python's compiled code is kept in a folder of its own: the first import makes
it, and all others read it. `--tree` is a folder with an older fzero, which is then measured in turns with this one.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.report import publish, quartiles, table

ROOT = pathlib.Path(__file__).parents[1]
GOAL = 0.4  # seconds above `import torch`
PACKAGES = ("checkpoint", "data", "errors", "nn", "observe", "parallel.experts", "parallel.tensor", "tuning", "testing")
SCRIPT = """
import json, sys, time, torch
{before}
modules, start, clock = len(sys.modules), time.process_time(), time.perf_counter()
import {name}
print(json.dumps([time.process_time() - start, time.perf_counter() - clock, len(sys.modules) - modules]))
"""


def run(tree: pathlib.Path, cache: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with fzero of a folder, and with compiled code in another."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": cache}
    line = [sys.executable, *command]
    return subprocess.run(line, env=env, cwd=cache, capture_output=True, check=True, text=True)


def time_import(tree: pathlib.Path, cache: str, name: str, before: str = "") -> list[float]:
    """Import a module after torch; return the processor's seconds, the clock's, and the number of new modules."""
    return json.loads(run(tree, cache, "-c", SCRIPT.format(name=name, before=before)).stdout)


def parts(tree: pathlib.Path, cache: str) -> Mapping[str, tuple[float, int]]:
    """Return the milliseconds and modules of each part of `import fzero`: a package of fzero, or another library."""
    log = run(tree, cache, "-X", "importtime", "-c", "import torch, sys; sys.stderr.write('=\\n'); import fzero").stderr
    seconds: dict[str, list[float]] = defaultdict(list)
    for own, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", log[log.index("=\n") :]):
        depth = 2 if name.startswith("fzero.") else 1
        seconds[".".join(name.split(".")[:depth])].append(int(own) / 1000)
    return {name: (sum(times), len(times)) for name, times in seconds.items()}


def in_turns(trees: Sequence[pathlib.Path], rounds: int) -> list[str]:
    """Measure the import of fzero of each folder, in turns."""
    with tempfile.TemporaryDirectory() as cache:
        compiled = {tree: time_import(tree, cache, "fzero") for tree in trees}
        seconds = {tree: list[list[float]]() for tree in trees}
        for _ in range(rounds):
            for tree in trees:
                seconds[tree].append(time_import(tree, cache, "fzero"))
        rows = []
        for tree in trees:
            cpu, clock, modules = zip(*seconds[tree], strict=True)
            name = "this version" if tree == ROOT else "before"
            cells = [quartiles(cpu), quartiles(clock), f"{compiled[tree][0]:.2f}", int(modules[0])]
            met = statistics.median(cpu) <= GOAL
            rows.append([name, *cells, "met" if met else "missed"])
        head = ["`import fzero`", "seconds of the processor", "by the clock", "first import", "modules"]
        largest = sorted(parts(ROOT, cache).items(), key=lambda item: -item[1][0])[:12]
        later = [[f"`fzero.{name}`", *time_import(ROOT, cache, f"fzero.{name}", "import fzero")] for name in PACKAGES]
    return [
        f"Above `import torch`, the median and the quartiles of {rounds} rounds in turns. The first import compiles "
        "Python's code.",
        table([*head, f"goal: ≤ {GOAL} s"], rows),
        "The largest parts of this version, by `-X importtime`, which itself takes time.",
        table(["part", "milliseconds", "modules"], [[n, f"{ms:.0f}", count] for n, (ms, count) in largest]),
        "What is imported at its first use, and what that adds to `import fzero`.",
        table(
            ["package", "seconds of the processor", "modules"], [[n, f"{cpu:.2f}", int(m)] for n, cpu, _, m in later]
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tree", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    trees = [ROOT] if options.tree is None else [options.tree, ROOT]
    publish(__file__, "python benchmarks/import_time.py", in_turns(trees, options.rounds), options.write)
