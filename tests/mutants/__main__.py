"""Plant one-line faults in fzero, one at a time, and show that the tests catch each.

python -m tests.mutants [NAME ...]      (`make mutants`)
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from tests.mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parents[2]


def caught(mutant: Mutant) -> tuple[bool, str]:
    """Apply the fault in a copy of the project, and tell whether a test fails there, and which."""
    with tempfile.TemporaryDirectory() as folder:
        return run_tests(mutant, pathlib.Path(folder))


def run_tests(mutant: Mutant, folder: pathlib.Path) -> tuple[bool, str]:
    """Copy the project into a folder, apply the fault there, and run its tests."""
    for name in ("fzero", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "fzero" / mutant.file
    path.write_text(mutant.planted(path.read_text()))
    run = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *mutant.tests]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutants"}
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1 and bool(failed), failed[0] if failed else done.stdout[-300:]


def main() -> None:
    """Try the mutants named on the command line, or all, and print a table."""
    console, table = Console(width=150), Table("fault", "caught by")
    unknown = set(sys.argv[1:]) - {m.name for m in MUTANTS}
    if unknown:
        raise SystemExit(f"no mutant has the name {', '.join(map(repr, sorted(unknown)))}")
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    survivors = []
    for mutant, (ok, by) in zip(chosen, ThreadPoolExecutor(2).map(caught, chosen), strict=True):
        console.print(f"{'caught  ' if ok else 'SURVIVED'} {mutant.name}")
        table.add_row(mutant.name, by.split(" - ")[0].removeprefix("FAILED ") if ok else f"[red]nothing: {by}")
        survivors += [] if ok else [mutant.name]
    console.print(table)
    console.print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults caught")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
