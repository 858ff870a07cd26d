"""Train every model in the default backend, beside "fx" and beside unsharded training: `make sweep`.

Each case is a line, and is kept in `.sweep/results.jsonl`: what is there and went well is not run again. All models run
their first case before any runs its second, so that a sweep which is cut short has seen each.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.distributed.launch import environment
from tests.sweep.cases import Case, cases_of
from tests.sweep.families import MODELS
from tests.sweep.page import render_page

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / ".sweep" / "results.jsonl"
PAGE = ROOT / "docs" / "models.md"
SECONDS = 900  # of a case
DONE = ("ok", "refused")


def commands() -> Iterator[tuple[str, Case]]:
    """Yield the cases of all models, the first of each first."""
    listed = [(name, cases_of(model, i)) for i, (name, model) in enumerate(MODELS.items())]
    for i in range(max(len(cases) for _, cases in listed)):
        for name, cases in listed:
            if i < len(cases):
                yield name, cases[i]


def run(name: str, case: Case) -> dict[str, Any]:
    """Run a case in a process, or in as many as it has ranks."""
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if case.processes else []
    words = [sys.executable, *ranks, "-m", "tests.sweep.run", name, case.name]
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"model": name, "case": case.name, "outcome": "failed", "why": f"took over {SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    return {"model": name, "case": case.name, "outcome": "failed", "why": done.stderr.strip()[-400:]}


def read() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the last result of each case that was run."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(actual["model"], actual["case"]): actual for actual in map(json.loads, lines)}


def main() -> int:
    """Run what is missing; returns 1 if a case failed or gave wrong numbers."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--models", default="", help="a regular expression of names")
    parser.add_argument("--cases", default="", help="likewise")
    parser.add_argument("--fresh", action="store_true", help="run again what is there")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 1) // 2, 1), help="cases at a time")
    parser.add_argument("--write", action="store_true", help="write docs/models.md, and run nothing")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(render_page(read()))
        return 0
    keys = {} if asked.fresh else {key for key, actual in read().items() if actual["outcome"] in DONE}
    todo = [
        (name, case)
        for name, case in commands()
        if re.search(asked.models, name) and re.search(asked.cases, case.name) and (name, case.name) not in keys
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    bad = 0
    with ThreadPoolExecutor(asked.jobs) as pool, RESULTS.open("a") as file:
        for i, actual in enumerate(pool.map(lambda one: run(*one), todo), 1):
            file.write(json.dumps(actual) + "\n")
            file.flush()
            bad += actual["outcome"] in ("failed", "wrong")
            error = (
                f"{actual['from fx']:.0e} from fx, {actual['from unsharded']:.0e} from unsharded"
                if "from fx" in actual
                else ""
            )
            seconds = f"{actual.get('seconds', 0):.0f} s"
            print(
                f"{i}/{len(todo)}",
                actual["outcome"],
                actual["model"],
                "|",
                actual["case"],
                "|",
                error or actual["why"],
                seconds,
            )
            sys.stdout.flush()
    print(f"{len(todo) - bad} passed, {bad} failed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
