"""The tests of this folder run by `make cuda`, in its own environment; nobody else collects them."""

import json
from typing import Any

from tests.cuda import processes


def pytest_ignore_collect(config: Any) -> bool | None:
    """Collect the laws only where they are named, since any build of torch with CUDA could run them."""
    return None if processes.is_here() and any("tests/cuda" in str(path) for path in config.args) else True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Keep what became of each law, for benchmarks/cuda.md."""
    if not processes.LAWS.parent.exists():
        return
    laws = [
        {"law": report.nodeid, "outcome": outcome, "reason": getattr(report, "wasxfail", "")}
        for outcome in ("passed", "xfailed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, [])
    ]
    processes.LAWS.write_text(json.dumps(laws))
