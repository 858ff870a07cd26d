"""Planted faults: each breaks a law of `make cuda`, in a copy of fzero."""

import pathlib
import shutil

import pytest

from tests.cuda import processes
from tests.cuda.faults import FAULTS, ON_ANOTHER_STREAM, LaneFault
from tests.mutants.changes import becomes


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_breaks_its_law(name, tmp_path):
    fault = FAULTS[name]
    assert fault.law(processes.measure_task(fault.task, fault.backend, 3)[3])
    broken = processes.measure_task(fault.task, fault.backend, 3, root=plant(fault, tmp_path))
    assert not fault.law(broken[3])


def test_the_sanitizer_finds_a_copy_that_starts_before_its_source_is_written(tmp_path):
    change = becomes("A = B(C).copy_(C, non_blocking=True)", ON_ANOTHER_STREAM)
    fault = FAULTS["a block is freed while a copy reads it"]._replace(change=change)
    with pytest.raises(AssertionError, match="CUDASanitizerErrors"):
        processes.measure_task(fault.task, fault.backend, 3, root=plant(fault, tmp_path), sanitizer=True)


def plant(fault: LaneFault, folder: pathlib.Path) -> pathlib.Path:
    """Copy the project into a folder, with a fault."""
    for name in ("fzero", "tests", "benchmarks"):
        shutil.copytree(processes.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "fzero" / fault.file
    path.write_text(fault.change.plant(path.read_text(), fault.symbol))
    return folder
