"""Waits of a graph for other ranks, which the rank publishes by its heartbeat."""

import functools
import operator
import os
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from fzero._liveness import current_heartbeat
from fzero._torch import node_line
from fzero.graph.run._clock import profiler_name

__all__ = ["published_wait"]


def published_wait(f: Callable[..., Any], collective: Any, line: str) -> Callable[..., Any]:
    """Return the function of a wait that publishes itself; `f` itself if this process has no heartbeat.

    Args:
        f: a function that waits.
        collective: the node that it waits for.
        line: the user's source line, as "file:line"; "" for that of the collective.
    """
    if current_heartbeat() is None:
        return f
    activity = _describe_collective(collective, line)

    @functools.wraps(f)
    def publish_and_wait(*args: Any) -> Any:
        heartbeat = current_heartbeat()
        if heartbeat is None:
            return f(*args)
        heartbeat.publish(activity, waiting=True)
        out = f(*args)
        heartbeat.publish("work")
        return out

    return publish_and_wait


def _describe_collective(collective: Any, line: str) -> str:
    """Describe a collective: "all_gather at train.py:31"."""
    if not isinstance(collective, Node):
        return "a collective"
    while collective.target is operator.getitem:  # one of several that were started together
        collective = collective.all_input_nodes[0]
    name = profiler_name(collective.target).rpartition("::")[2].partition(".")[0]
    for suffix in ("_coalesced", "_tensor", "_into"):
        name = name.removesuffix(suffix)
    line = line or node_line(collective)
    return f"{name} at {os.path.basename(line)}" if line else name
