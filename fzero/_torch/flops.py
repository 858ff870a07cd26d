"""torch's formulas for floating-point operations, on all versions."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["flop_formulas", "with_query_heads"]


@functools.cache
def flop_formulas() -> Mapping[Any, Any]:
    """Return torch's formulas for FLOPs. On CUDA builds their module imports triton, so it is imported when used."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def with_query_heads(packet: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Give the keys and values of attention as many heads as its queries have, for its formula.

    The formulas of torch 2.11 refuse grouped heads. Those of torch 2.13 count the work of as many heads as the queries
    have, so this function changes nothing there. It can go with torch 2.12.
    """
    if "scaled_dot_product" not in str(packet):
        return args
    heads = args[0].shape[1]  # the first argument is the queries, or the gradients of their result

    def expand(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            return x
        return torch.empty((x.shape[0], heads, *x.shape[2:]), dtype=x.dtype, device="meta")

    return [*(expand(x) for x in args[:4]), *args[4:]]
