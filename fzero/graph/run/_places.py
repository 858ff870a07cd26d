"""The places of a graph at which a rank waits for other ranks, for its heartbeat to show."""

import functools
import operator
import os
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from fzero._liveness import current_heart
from fzero._torch import line_of
from fzero.graph.run._clock import profiler_name

__all__ = ["at_place"]


def at_place(f: Callable[..., Any], collective: Any, line: str) -> Callable[..., Any]:
    """Return the function of a wait that publishes its place; `f` itself if this process has no heartbeat.

    Args:
        f: a function that waits.
        collective: the node that it waits for.
        line: the user's source line, as "file:line"; "" for that of the collective.
    """
    if current_heart() is None:
        return f
    place = _describe(collective, line)

    @functools.wraps(f)
    def wait_at_place(*args: Any) -> Any:
        heart = current_heart()
        if heart is None:
            return f(*args)
        heart.at(place, waiting=True)
        out = f(*args)
        heart.at("work")
        return out

    return wait_at_place


def _describe(collective: Any, line: str) -> str:
    """Describe a collective: "all_gather at train.py:31"."""
    if not isinstance(collective, Node):
        return "a collective"
    while collective.target is operator.getitem:  # one of several that were started together
        collective = collective.all_input_nodes[0]
    name = profiler_name(collective.target).rpartition("::")[2].partition(".")[0]
    for suffix in ("_coalesced", "_tensor", "_into"):
        name = name.removesuffix(suffix)
    line = line or line_of(collective)
    return f"{name} at {os.path.basename(line)}" if line else name
