"""The order of a graph's operations: roles of nodes, prefetches, and the list scheduler."""

from fzero.graph.passes.scheduling._schedule import Orders, schedule

__all__ = ["Orders", "schedule"]
