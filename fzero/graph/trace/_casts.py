"""Casts to a wider dtype and back, which give the value itself."""

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fzero._torch import OpOverload
from fzero.graph.ir import aten, signature
from fzero.graph.passes._uses import family

__all__ = ["without_round_trips"]

CAST = aten._to_copy.default


def without_round_trips(graph: Graph) -> None:
    """Use a value itself where it was cast to a dtype that holds all of its own, and back.

    A half-precision shard whose gradient is summed in float32 is cast so: first for the gradient's dtype, then for its
    gather. The second copy would wait for the backward pass, where the unit is gathered again.

    Args:
        graph: a traced graph without writes, which is changed.
    """
    for node in list(graph.nodes):
        wide = _cast(node)
        source = None if wide is None else _cast(wide)
        if source is None or wide is None or not _holds_all(wide.meta["val"].dtype, source.meta["val"].dtype):
            continue
        views, users = family(node)
        handed_on = any(user.op == "output" for user in users)  # a result has memory of its own
        same = signature(node.meta["val"]) == signature(source.meta["val"])
        if same and not handed_on and all(isinstance(view.target, OpOverload) for view in views):
            node.replace_all_uses_with(source)
            for view in views[1:]:  # which now lie in other memory
                args, kwargs = map_arg((view.args, view.kwargs), lambda a: a.meta["val"])
                view.meta["val"] = view.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    graph.eliminate_dead_code()


def _cast(node: Node) -> Node | None:
    """Return what a node casts to another dtype, if it does no more than that."""
    plain = node.target is CAST and {*node.kwargs} <= {"dtype"} and isinstance(node.args[0], Node)
    return node.all_input_nodes[0] if plain else None  # a number stands for itself


def _holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return whether each number of one dtype is one of another's."""
    if not (wide.is_floating_point and narrow.is_floating_point):
        return False
    return torch.promote_types(wide, narrow) == wide and wide != narrow
