"""Planted faults: each breaks a law of the lane, in a copy of fzero."""

import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.cuda import lane
from tests.mutants.changes import Change, becomes, skipped

Facts = dict[str, Any]


class LaneFault(NamedTuple):
    """A fault, the task that shows it, and the law: whether it holds of the facts of a stage."""

    file: str
    symbol: str
    change: Change
    task: str
    backend: str
    law: Callable[[Facts], bool]


def never_waits(step: Facts) -> bool:
    return step["waits"] == []


def waits_for_each_copy(step: Facts) -> bool:
    return step["waits"] == ["event wait"] * step["counts"]["copy: device to pinned"]


def requests_its_plan(step: Facts) -> bool:
    return step["requested"] <= 1.005 * step["plan"] + step["workspace"]


FAULTS = {
    "values are held until the end of the step": LaneFault(
        "graph/run/_program.py",
        "_with_frees",
        becomes("A._replace(free=B)", "A._replace(free=[])"),
        "toy",
        "fx",
        requests_its_plan,
    ),
    "a number is read from the device": LaneFault(
        "sharding/_segments.py",
        "global_norm",
        becomes("torch.stack(A).sum().sqrt()", "torch.stack(A).sum().sqrt() + 0 * torch.stack(A).sum().item()"),
        "dense",
        "eager",
        never_waits,
    ),
    "a copy to the host is read before it has come": LaneFault(
        "collectives/_moves.py",
        "wait_to_host",
        skipped("A.event.synchronize()"),
        "offload, host update",
        "fx",
        waits_for_each_copy,
    ),
    "a copy to the host waits as it starts": LaneFault(
        "collectives/_moves.py",
        "_enqueued",
        becomes("A.copy_(B, non_blocking=True)", "A.copy_(B)"),
        "offload, host update",
        "fx",
        waits_for_each_copy,
    ),
}


UNCAUGHT = {"values are held until the end of the step": "this change frees as much as before: find where it counts"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_breaks_its_law(name, tmp_path, request):
    if name in UNCAUGHT:
        request.applymarker(pytest.mark.xfail(strict=True, reason=UNCAUGHT[name]))
    fault = FAULTS[name]
    for folder in ("fzero", "tests", "benchmarks"):
        shutil.copytree(lane.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "fzero" / fault.file
    path.write_text(fault.change.planted(path.read_text(), fault.symbol))
    assert fault.law(lane.facts(fault.task, fault.backend)[3])
    broken = lane.facts(fault.task, fault.backend, 3, root=tmp_path)
    assert not fault.law(broken[3])
