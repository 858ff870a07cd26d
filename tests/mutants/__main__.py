"""Plant one-line faults in fzero, one at a time, and show that the tests catch each.

python -m tests.mutants [NAME ...]      (`make mutants`)

Each fault gets a copy of the project, and a process that runs its tests there until one fails. The processes are
forked from this one, which has imported torch and runs nothing: fzero they import themselves, from their copy.
"""

import importlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[2]
WORKERS, SECONDS = 2, 900  # at the same time; of one fault's tests
PRELOAD = ("pytest", "hypothesis", "numpy", "torch", "torch._dynamo", "torch._inductor.compile_fx", "transformers")


class Verdict(NamedTuple):
    """Whether a fault was caught, and by which test; else what was seen instead."""

    mutant: Mutant
    caught: bool
    by: str


class Run(NamedTuple):
    """A process that runs the tests of a fault in a folder."""

    mutant: Mutant
    process: int
    folder: pathlib.Path
    end: float


def copy(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Copy what the tests need of a project."""
    for name in ("fzero", "tests", "examples"):
        shutil.copytree(root / name, folder / name)  # with its __pycache__, which is valid there
    shutil.copy(root / "pyproject.toml", folder)


def start(mutant: Mutant, project: pathlib.Path) -> Run:
    """Plant the fault in a copy of the project, and fork a process that runs its tests."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mutant-"))
    copy(project, folder)
    path = folder / "fzero" / mutant.file
    path.write_text(mutant.planted(path.read_text()))
    process = os.fork()
    if process == 0:
        run_tests(mutant, folder)
    return Run(mutant, process, folder, time.monotonic() + SECONDS)


def run_tests(mutant: Mutant, folder: pathlib.Path) -> None:
    """Run the tests of a fault in its folder, and exit with pytest's code; the output goes to a file there."""
    code = 99
    try:
        os.setsid()  # what it starts ends with it
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        os.environ["HYPOTHESIS_PROFILE"] = "mutants"
        sys.path[0] = str(folder)
        for name in [name for name in sys.modules if name.split(".")[0] in ("fzero", "tests")]:
            del sys.modules[name]
        import pytest

        early = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis is there already
        words = ["-n0", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-W", early, *mutant.tests]
        code = int(pytest.main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def verdict(run: Run, status: int) -> Verdict:
    """Read what pytest said, and remove the copy."""
    output = (run.folder / "output").read_text(errors="replace")
    shutil.rmtree(run.folder)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if os.waitstatus_to_exitcode(status) == 1 and failed:
        return Verdict(run.mutant, True, failed[0].split(" - ")[0].removeprefix("FAILED "))
    return Verdict(run.mutant, False, f"exit code {os.waitstatus_to_exitcode(status)}: {output[-300:]}")


def verdicts(mutants: list[Mutant], project: pathlib.Path) -> Iterator[Verdict]:
    """Run the tests of all, a few at the same time; yield each as it ends."""
    waiting, running = list(mutants), dict[int, Run]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            run = start(waiting.pop(0), project)
            running[run.process] = run
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            yield verdict(running.pop(process), status)
        for run in running.values():
            if time.monotonic() > run.end:
                os.killpg(run.process, signal.SIGKILL)
        time.sleep(0.05)


def chosen(names: list[str]) -> list[Mutant]:
    """Return the mutants of these names, or all; check that each finds its line."""
    unknown = set(names) - {m.name for m in MUTANTS}
    if unknown:
        raise SystemExit(f"no mutant has the name {', '.join(map(repr, sorted(unknown)))}")
    found = [m for m in MUTANTS if not names or m.name in names]
    for mutant in found:
        try:
            mutant.planted((ROOT / "fzero" / mutant.file).read_text())
        except LookupError as error:
            raise SystemExit(str(error)) from None
    return found


def main() -> None:
    """Try the mutants named on the command line, or all, and print a table."""
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    mutants = chosen(sys.argv[1:])
    for name in PRELOAD:
        importlib.import_module(name)
    console, found = Console(width=150), list[Verdict]()
    with tempfile.TemporaryDirectory() as project:  # as it is now, whatever is edited meanwhile
        copy(ROOT, pathlib.Path(project))
        for i, v in enumerate(verdicts(mutants, pathlib.Path(project)), 1):
            console.print(f"{i:>4} {'caught  ' if v.caught else 'SURVIVED'} {v.mutant.name}", highlight=False)
            found.append(v)
    table = Table("fault", "caught by")
    for v in sorted(found, key=lambda v: mutants.index(v.mutant)):
        table.add_row(v.mutant.name, v.by if v.caught else f"[red]nothing: {v.by}")
    console.print(table)
    console.print(f"{sum(v.caught for v in found)} of {len(found)} faults caught")
    sys.exit(not all(v.caught for v in found))


if __name__ == "__main__":
    main()
