"""How styles split parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.axes import axis_if_bound, axis_size
from fzero.parallel.tensor._styles import (
    PARAMETERS,
    ColumnParallel,
    Embedding,
    LatentProjection,
    ParamSplit,
    RowParallel,
    Style,
)

__all__ = ["Heads", "count_heads", "kv_groups", "layer_splits", "parameter_split"]


def layer_splits(name: str, style: Style, module: torch.nn.Module) -> dict[str, ParamSplit]:
    """Return how a style splits the parameters of a module itself, by their names in it.

    Raises:
        TypeError: if the style does not support the module.
        ValueError: if an embedding has an option that needs the full table.
    """
    if isinstance(style, Embedding):
        if not isinstance(module, torch.nn.Embedding):
            raise TypeError(
                f"layer {name!r} is a {type(module).__name__}, but its style is for a torch.nn.Embedding: give it "
                f"another style, or leave it out, plan={{{name!r}: None}}"
            )
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(
                f"embedding {name!r}: max_norm, scale_grad_by_freq and sparse need the full table: leave it out, "
                f"plan={{{name!r}: None}}"
            )
        return {"weight": ParamSplit(0)}
    if isinstance(style, LatentProjection) and _weight_dimensions(name, module) != (1, 0):
        raise TypeError(f"layer {name!r} is a {type(module).__name__}, but its style is for a torch.nn.Linear")
    if isinstance(style, ColumnParallel | RowParallel):
        inputs, results = _weight_dimensions(name, module)
        if isinstance(style, RowParallel):
            return {"weight": ParamSplit(inputs)}
        splits = {"weight": ParamSplit(results, style.packed), "bias": ParamSplit(0, style.packed)}
        return {key: splits[key] for key, _ in module.named_parameters(recurse=False)}
    return {}


def parameter_split(name: str, style: str, x: torch.Tensor) -> ParamSplit:
    """Return how a parameter that a plan names itself is split, such as experts' weights `[count, outputs, inputs]`.

    Raises:
        ValueError: if the style does not apply to parameters.
    """
    if style not in PARAMETERS or not x.ndim:
        expected = ", ".join(PARAMETERS)
        raise ValueError(f"parameter {name!r} has the style {style!r}: expected None, or one of {expected}")
    dim, count = PARAMETERS[style]
    return ParamSplit(max(x.ndim + dim, 0), count)


def _weight_dimensions(name: str, module: torch.nn.Module) -> tuple[int, int]:
    """Return the input dimension and the output dimension of a linear layer's weight."""
    kind = type(module)
    if "forward" not in vars(module):
        if isinstance(module, torch.nn.Linear) and kind.forward is torch.nn.Linear.forward:
            return 1, 0
        if kind.__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys():  # transformers'
            return 0, 1
    raise TypeError(
        f"layer {name!r} is a {kind.__name__} with a forward pass of its own: expected torch.nn.Linear, "
        "torch.nn.Embedding or transformers' Conv1D; leave it out, plan={name: None}"
    )


def count_heads(module: torch.nn.Module, size: int) -> int:
    """Return the number of attention heads in `size` columns; 0 if the module has no attribute for a head's width."""
    width = next((w for name in ("head_dim", "attention_head_size") if isinstance(w := vars(module).get(name), int)), 0)
    return size // width if width and not size % width else 0


def kv_groups(heads: int, groups: int, n: int) -> int:
    """Return how many consecutive query heads of a rank share each of its key and value heads."""
    return math.gcd(groups, heads // n)


@dataclass(frozen=True)
class Heads:
    """The heads of an attention module.

    Attributes:
        query: the number of query heads.
        groups: the number of query heads that share a key and a value head, if the module has such groups; else 0.
        counts: the names of the module's attributes that hold a number of heads.
    """

    query: int
    groups: int
    counts: tuple[str, ...]

    def attributes(self, name: str, axis: str, values: Mapping[str, Any]) -> dict[str, int]:
        """Return the attributes with which the module runs on a rank's heads.

        Raises:
            ValueError: if the query heads do not divide among the ranks.
        """
        n = axis_size(axis_if_bound(axis))
        if self.query % n:
            raise ValueError(
                f"attention {name!r} has {self.query} heads, which do not divide by the {n} ranks along {axis!r}: "
                "change the size of the axis, or leave its layers out, plan={'...q_proj': None, ...}"
            )
        kv = self.query // self.groups if self.groups else self.query
        group_size = self.groups if not kv % n else kv_groups(self.query, self.groups, n)
        local_counts = {self.query: self.query // n, kv: self.query // n // max(group_size, 1)}
        attributes = {count: local_counts[values[count]] for count in self.counts}
        return attributes | ({"num_key_value_groups": group_size} if self.groups else {})
