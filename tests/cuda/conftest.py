"""The lane's tests run by `make cuda`, in its own environment; nobody else collects them."""

import json
from typing import Any

from tests.cuda import lane

collect_ignore_glob = [] if lane.is_here() else ["*.py"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Keep what became of each law, for benchmarks/cuda.md."""
    if not lane.is_here():
        return
    laws = [
        {"law": report.nodeid, "outcome": outcome, "reason": getattr(report, "wasxfail", "")}
        for outcome in ("passed", "xfailed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, [])
    ]
    lane.LAWS.write_text(json.dumps(laws))
