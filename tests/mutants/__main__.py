"""Plant faults in fzero, one at a time, and show that the tests catch each.

python -m tests.mutants [NAME ...]      (`make mutants`)

A fault is killed if a test fails, and has survived if none does. It is not applicable if the place that it names is not
found any more, or if its tests fail without it: each set of tests runs once without a fault, first. Nor is it if its
tests cannot be imported with it, which any import of fzero would show. A fault that
survives then meets what the same files hold for `make test-all`. Only if all are killed is the exit code 0.

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
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[2]
WORKERS, SECONDS = 2, 900  # at the same time; of one fault's tests
PRELOAD = ("pytest", "hypothesis", "numpy", "torch", "torch._dynamo", "torch._inductor.compile_fx", "transformers")


KILLED, SURVIVED, NOT_APPLICABLE = "killed", "survived", "not applicable"


class Verdict(NamedTuple):
    """The end of a fault, and the test that killed it; else what was seen instead."""

    mutant: Mutant
    outcome: str
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
    path.write_text(mutant.plant(path.read_text()))
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
        os.environ["HYPOTHESIS_PROFILE"] = "all" if "-m" in mutant.tests else "mutants"
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
    if failed and failed[0].startswith("ERROR") and "::" not in failed[0].split(" - ")[0]:  # a file, not a test of it
        return Verdict(run.mutant, NOT_APPLICABLE, f"the tests cannot be imported: {failed[0].removeprefix('ERROR ')}")
    if os.waitstatus_to_exitcode(status) == 1 and failed:
        return Verdict(run.mutant, KILLED, failed[0].split(" - ")[0].removeprefix("FAILED "))
    return Verdict(run.mutant, SURVIVED, f"exit code {os.waitstatus_to_exitcode(status)}: {output[-300:]}")


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


def without_faults(mutants: list[Mutant]) -> list[Mutant]:
    """Return a row that changes nothing for each set of tests."""
    return [*{m.tests: m._replace(name=f"no fault: {' '.join(m.tests)}", changes=()) for m in mutants}.values()]


def with_failing_tests(mutants: list[Mutant], results: list[Verdict]) -> list[Verdict]:
    """Tell which faults have tests that fail without the fault, from the verdicts of `without_faults`."""
    failing = {v.mutant.tests: v.by for v in results if not v.by.startswith("exit code 0")}
    why = "the tests fail without the fault: {}"
    return [Verdict(m, NOT_APPLICABLE, why.format(failing[m.tests])) for m in mutants if m.tests in failing]


def with_slow_tests(results: list[Verdict], project: pathlib.Path) -> Iterator[Verdict]:
    """Run the tests of `make test-all` for the faults that survived those of `make test`; yield those killed now."""
    survivors = [v.mutant for v in results if v.outcome == SURVIVED and "-m" not in v.mutant.tests]
    mutants = [m._replace(tests=(*m.tests, "-m", "slow or not slow")) for m in survivors]
    passing = {v.mutant.tests for v in verdicts(without_faults(mutants), project) if v.by.startswith("exit code 0")}
    for v in verdicts([m for m in mutants if m.tests in passing], project):
        if v.outcome == KILLED:
            yield v


def choose(names: list[str]) -> list[Mutant]:
    """Return the mutants of these names, or all."""
    unknown = set(names) - {m.name for m in MUTANTS}
    if unknown:
        raise SystemExit(f"no mutant has the name {', '.join(map(repr, sorted(unknown)))}")
    return [m for m in MUTANTS if not names or m.name in names]


def not_applicable(mutants: list[Mutant], project: pathlib.Path) -> list[Verdict]:
    """Tell which faults have no place in the project any more."""
    results = []
    for mutant in mutants:
        try:
            mutant.plant((project / "fzero" / mutant.file).read_text())
        except (LookupError, FileNotFoundError) as error:
            results.append(Verdict(mutant, NOT_APPLICABLE, str(error.args[0] if len(error.args) == 1 else error)))
    return results


def table(results: list[Verdict]) -> Table:
    """Show what became of each fault."""
    shown = Table("fault", "outcome", "by")
    for v in results:
        shown.add_row(v.mutant.name, v.outcome if v.outcome == KILLED else f"[red]{v.outcome}", escape(v.by))
    return shown


def summary(results: list[Verdict]) -> str:
    """Count the outcomes in one line."""
    count = Counter(v.outcome for v in results)
    return f"{len(results)} faults: " + ", ".join(f"{count[x]} {x}" for x in (KILLED, SURVIVED, NOT_APPLICABLE))


def main() -> None:
    """Try the mutants named on the command line, or all, and print a table."""
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    mutants = choose(sys.argv[1:])
    for name in PRELOAD:
        importlib.import_module(name)
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        project = pathlib.Path(folder)
        copy(ROOT, project)  # as it is now, whatever is edited meanwhile
        results = not_applicable(mutants, project)
        rest = [m for m in mutants if m not in [v.mutant for v in results]]
        results += with_failing_tests(rest, [*verdicts(without_faults(rest), project)])
        rest = [m for m in mutants if m not in [v.mutant for v in results]]
        for i, v in enumerate(verdicts(rest, project), 1):
            outcome = v.outcome if v.outcome == KILLED else v.outcome.upper()
            console.print(f"{i:>4} {outcome:<8} {v.mutant.name}", highlight=False, markup=False)
            results.append(v)
        killed = {v.mutant.name: v for v in with_slow_tests(results, project)}
        results = [killed.get(v.mutant.name, v)._replace(mutant=v.mutant) for v in results]
    console.print(table(sorted(results, key=lambda v: mutants.index(v.mutant))))
    console.print(summary(results))
    sys.exit(any(v.outcome != KILLED for v in results))


if __name__ == "__main__":
    main()
