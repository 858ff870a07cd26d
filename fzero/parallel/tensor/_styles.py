"""Styles: what becomes of one layer of a module, as data. Their names are those of transformers' and torch's plans."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
    "NAMED",
    "ColumnParallel",
    "Cut",
    "Divided",
    "Embedding",
    "Experts",
    "Local",
    "RowParallel",
    "Shared",
    "Style",
    "divided",
    "heads_of",
    "kv_groups",
    "layer_cuts",
    "packed",
    "parameter_cut",
]


class Cut(NamedTuple):
    """How a parameter is cut over the ranks.

    Attributes:
        dim: the dimension that is cut.
        packed: how many matrices lie along it, one after the other: each of them is cut. Such a parameter gets one
            dimension more, `[.., k m, ..]` becomes `[.., k, m, ..]`, so that a part of it is a part of each.
        heads: how many heads of attention m holds, which are never cut; 0 where there are none.
        shared: whether the parameter stays whole where its heads do not divide among the ranks.
    """

    dim: int
    packed: int = 1
    heads: int = 0
    shared: bool = False

    @property
    def along(self) -> int:
        """The dimension that is cut, once the matrices have one of their own."""
        return self.dim + (self.packed > 1)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """View a parameter as the model has it so that its matrices have a dimension of their own."""
        return x.unflatten(self.dim, (self.packed, -1)) if self.packed > 1 else x

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `unpack`."""
        return x.flatten(self.dim, self.dim + 1) if self.packed > 1 else x


# ---------------------------------------------------------------- styles


@dataclass(frozen=True)
class ColumnParallel:
    """A linear layer of which each rank has some of the results."""

    gather: bool = False
    packed: int = 1

    @property
    def shown(self) -> str:
        """What becomes of the layer, in words."""
        of = f" of each of {self.packed} matrices" if self.packed > 1 else ""
        return f"some columns{of}" + (", joined" if self.gather else "")


@dataclass(frozen=True)
class RowParallel:
    """A linear layer of which each rank has some of the inputs; `cut` if it is given all of them."""

    cut: bool = False

    @property
    def shown(self) -> str:
        """What becomes of the layer, in words."""
        return "some rows" + (", of an input that is cut" if self.cut else "")


@dataclass(frozen=True)
class Embedding:
    """An embedding of which each rank has a part of the vocabulary."""

    shown = "a part of the vocabulary"


@dataclass(frozen=True)
class Shared:
    """A layer with whole weights that works on what differs by rank, such as a norm of each head."""

    shown = "whole, on parts"


@dataclass(frozen=True)
class Experts:
    """A layer of experts of each of which every rank has a part; its parameters are named one by one."""

    shown = "a part of each expert"


@dataclass(frozen=True)
class Local:
    """A module that uses the rank's part of parameters of its own, which are named one by one."""

    shown = "a part of its own parameters"


@dataclass(frozen=True)
class Divided:
    """A module whose attributes of these names are divided by the number of ranks while it runs."""

    names: tuple[str, ...]

    @property
    def shown(self) -> str:
        """What becomes of the module, in words."""
        return f"a part of its {', '.join(self.names)}"


Style = ColumnParallel | RowParallel | Embedding | Shared | Experts | Local | Divided

NAMED: Mapping[str, Style | None] = {
    "colwise": ColumnParallel(),
    "colwise_rep": ColumnParallel(gather=True),
    "colwise_gather_output": ColumnParallel(gather=True),
    "packed_colwise": ColumnParallel(packed=2),
    "rowwise": RowParallel(),
    "rowwise_rep": RowParallel(cut=True),
    "rowwise_split_input": RowParallel(cut=True),
    "packed_rowwise": RowParallel(),
    "embedding_rowwise": Embedding(),
    "replicated_with_grad_allreduce": Shared(),
    "moe_tp_experts": Experts(),
    "local_params": Local(),
    "replicate": None,
}
_PARAMETERS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}


def packed(count: int) -> ColumnParallel:
    """Make the style of a linear layer that computes several things at once, each of which is cut: `packed(3)` for QKV.

    Raises:
        ValueError: if `count` is no number of matrices.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.packed(3)
        ColumnParallel(gather=False, packed=3)
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}: expected how many matrices lie side by side, such as 3 for q, k and v")
    return ColumnParallel(packed=count)


def divided(*names: str) -> Divided:
    """Make the style of a module that counts heads or columns in attributes: a rank has its part of them.

    Args:
        *names: attributes that are ints, such as "num_heads" or "split_size".

    Raises:
        ValueError: if no name is given.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.divided("split_size")
        Divided(names=('split_size',))
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names={names!r}: expected names of attributes, such as 'num_heads'")
    return Divided(names)


# ---------------------------------------------------------------- what they cut


def layer_cuts(name: str, style: Style, module: torch.nn.Module) -> dict[str, Cut]:
    """Return how a style cuts the parameters of a module itself, by their names in it.

    Raises:
        TypeError: if the module is no layer that the style knows.
        ValueError: if it has an option that a part of it cannot honour.
    """
    if isinstance(style, Embedding):
        if not isinstance(module, torch.nn.Embedding):
            raise TypeError(f"layer {name!r} is a {type(module).__name__}, and its style is for a torch.nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(f"embedding {name!r}: max_norm, scale_grad_by_freq and sparse need the whole table")
        return {"weight": Cut(0)}
    if isinstance(style, ColumnParallel | RowParallel):
        inputs, results = _dimensions(name, module)
        if isinstance(style, RowParallel):
            return {"weight": Cut(inputs)}
        found = {"weight": Cut(results, style.packed), "bias": Cut(0, style.packed)}
        return {own: found[own] for own, _ in module.named_parameters(recurse=False)}
    return {}


def parameter_cut(name: str, style: str, x: torch.Tensor) -> Cut:
    """Return how a parameter that is named by itself is cut, such as experts' `[count, results, inputs]`.

    Raises:
        ValueError: if the style is for no parameter.
    """
    if style not in _PARAMETERS or not x.ndim:
        known = ", ".join(_PARAMETERS)
        raise ValueError(f"parameter {name!r} has the style {style!r}: expected None, or one of {known}")
    dim, count = _PARAMETERS[style]
    return Cut(max(x.ndim + dim, 0), count)


def _dimensions(name: str, module: torch.nn.Module) -> tuple[int, int]:
    """Return the dimensions of the inputs and of the results of a linear layer's weight."""
    kind = type(module)
    if "forward" not in vars(module):
        if isinstance(module, torch.nn.Linear) and kind.forward is torch.nn.Linear.forward:
            return 1, 0
        if kind.__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys():  # transformers'
            return 0, 1
    raise TypeError(
        f"layer {name!r} is a {kind.__name__} with a forward pass of its own: tensor parallel layers are "
        "torch.nn.Linear, torch.nn.Embedding and transformers' Conv1D; leave it out, plan={name: None}"
    )


def heads_of(module: torch.nn.Module, size: int) -> int:
    """Return how many heads of a module of attention so many columns are; 0 if it says nothing of heads."""
    width = next((w for name in ("head_dim", "attention_head_size") if isinstance(w := vars(module).get(name), int)), 0)
    return size // width if width and not size % width else 0


def kv_groups(heads: int, groups: int, n: int) -> int:
    """Return how many of a rank's query heads, one after the other, share each of its key and value heads."""
    return math.gcd(groups, heads // n)
