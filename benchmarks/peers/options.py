"""What the measurement and its launcher can be told."""

import argparse

from benchmarks.peers.gpt import CONFIGS
from benchmarks.peers.systems import SYSTEMS, System

__all__ = ["choose", "measured_options"]


def measured_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    keys = ", ".join(SYSTEMS)
    parser.add_argument("--models", nargs="+", default=["A", "B"], choices=CONFIGS, help="default A B")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4], help="in a step; default 1 4")
    parser.add_argument("--systems", nargs="+", default=[""], help=f"rows whose name begins with one of these: {keys}")
    parser.add_argument("--rounds", type=int, default=7, help="of two timed steps of each row; default 7")
    parser.add_argument("--eager-peers", action="store_true", help="leave out the peers' rows with torch.compile")


def choose(prefixes: list[str], eager_peers: bool) -> list[System]:
    """List the systems that were asked for.

    Raises:
        SystemExit: if a prefix names none. Lists those that there are.
    """
    for prefix in prefixes:
        if not any(key.startswith(prefix) for key in SYSTEMS):
            raise SystemExit(f"--systems {prefix}: no row begins so; there are {', '.join(SYSTEMS)}")
    systems = [s for key, s in SYSTEMS.items() if key.startswith(tuple(prefixes))]
    return [s for s in systems if not (eager_peers and s.variant.endswith("-compile"))]
