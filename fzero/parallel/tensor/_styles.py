"""Styles: how one layer of a module is split, as data. Their names are those of transformers' and torch's plans."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero._arguments import check_int
from fzero._call_hints import call_hints
from fzero.axes import axis_if_bound, axis_size

__all__ = [
    "NAMED",
    "ColumnParallel",
    "DividedAttributes",
    "Embedding",
    "Experts",
    "Heads",
    "ParamSplit",
    "ReplicatedParams",
    "RowParallel",
    "Style",
    "divided",
    "heads_of",
    "kv_groups",
    "layer_splits",
    "packed",
    "parameter_split",
]


class ParamSplit(NamedTuple):
    """How a parameter is split over the ranks.

    Attributes:
        dim: the dimension that is split.
        packed: the number of matrices that lie along it, one after the other; each of them is split. If there are
            several, they get a dimension of their own: `[.., k m, ..]` becomes `[.., k, m, ..]`.
        heads: the number of attention heads in m, which are never split; 0 if there are none.
        may_replicate: whether the parameter stays replicated if its heads do not divide among the ranks.
    """

    dim: int
    packed: int = 1
    heads: int = 0
    may_replicate: bool = False

    @property
    def unpacked_dim(self) -> int:
        """The dimension that is split, counted after `unpack`."""
        return self.dim + (self.packed > 1)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """View a parameter of the model so that its matrices have a dimension of their own."""
        return x.unflatten(self.dim, (self.packed, -1)) if self.packed > 1 else x

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `unpack`."""
        return x.flatten(self.dim, self.dim + 1) if self.packed > 1 else x


@dataclass(frozen=True)
class ColumnParallel:
    """A linear layer of which each rank computes some columns of the output."""

    gather: bool = False
    packed: int = 1

    @property
    def description(self) -> str:
        """The style in words."""
        of = f" of each of {self.packed} matrices" if self.packed > 1 else ""
        return f"some columns{of}" + (", joined" if self.gather else "")


@dataclass(frozen=True)
class RowParallel:
    """A linear layer of which each rank holds some rows; with `split_input` it splits a replicated input itself."""

    split_input: bool = False

    @property
    def description(self) -> str:
        """The style in words."""
        return "some rows" + (", of an input that is split" if self.split_input else "")


@dataclass(frozen=True)
class Embedding:
    """An embedding of which each rank holds part of the vocabulary."""

    description = "a part of the vocabulary"


@dataclass(frozen=True)
class ReplicatedParams:
    """A layer with replicated weights whose input differs by rank, such as a norm of each head."""

    description = "replicated, on parts"


@dataclass(frozen=True)
class Experts:
    """A layer of experts, of which each rank holds part of every expert; the plan names its parameters one by one."""

    description = "a part of each expert"


@dataclass(frozen=True)
class _LocalParams:
    """A module that uses this rank's part of its own parameters; the plan names these one by one."""

    description = "a part of its own parameters"


@dataclass(frozen=True)
class DividedAttributes:
    """A module that runs with some of its attributes divided by the number of ranks."""

    names: tuple[str, ...]

    @property
    def description(self) -> str:
        """The style in words."""
        return f"a part of its {', '.join(self.names)}"


Style = ColumnParallel | RowParallel | Embedding | ReplicatedParams | Experts | _LocalParams | DividedAttributes

NAMED: Mapping[str, Style | None] = {
    "colwise": ColumnParallel(),
    "colwise_rep": ColumnParallel(gather=True),
    "colwise_gather_output": ColumnParallel(gather=True),
    "packed_colwise": ColumnParallel(packed=2),
    "rowwise": RowParallel(),
    "rowwise_rep": RowParallel(split_input=True),
    "rowwise_split_input": RowParallel(split_input=True),
    "packed_rowwise": RowParallel(),
    "embedding_rowwise": Embedding(),
    "replicated_with_grad_allreduce": ReplicatedParams(),
    "moe_tp_experts": Experts(),
    "local_params": _LocalParams(),
    "replicate": None,
}
_PARAMETERS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}


@call_hints
def packed(count: int) -> ColumnParallel:
    """Return the style of a linear layer that holds several matrices, each of which is split: `packed(3)` for QKV.

    Raises:
        ValueError: if `count` is not a positive int.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.packed(3)
        ColumnParallel(gather=False, packed=3)
    """
    return ColumnParallel(packed=check_int("count", count, 1, "the number of matrices side by side, 3 for q, k and v"))


@call_hints
def divided(*names: str) -> DividedAttributes:
    """Return the style of a module that counts heads or columns in attributes. Each rank gets its part of the counts.

    Args:
        *names: the names of attributes that hold ints, such as "num_heads" or "split_size".

    Raises:
        ValueError: if `names` is empty or holds anything but names.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.divided("split_size")
        DividedAttributes(names=('split_size',))
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names={names!r}: expected names of attributes, such as 'num_heads'")
    return DividedAttributes(names)


# How styles split parameters.


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
    if isinstance(style, ColumnParallel | RowParallel):
        inputs, results = _dimensions(name, module)
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
    if style not in _PARAMETERS or not x.ndim:
        expected = ", ".join(_PARAMETERS)
        raise ValueError(f"parameter {name!r} has the style {style!r}: expected None, or one of {expected}")
    dim, count = _PARAMETERS[style]
    return ParamSplit(max(x.ndim + dim, 0), count)


def _dimensions(name: str, module: torch.nn.Module) -> tuple[int, int]:
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


def heads_of(module: torch.nn.Module, size: int) -> int:
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
