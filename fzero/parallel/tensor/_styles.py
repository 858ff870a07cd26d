"""Styles: how one layer of a module is split, as data. Their names are those of transformers' and torch's plans."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero._arguments import check_int
from fzero._tracebacks import api_boundary

__all__ = [
    "NAMED",
    "PARAMETERS",
    "ColumnParallel",
    "DividedAttributes",
    "Embedding",
    "Experts",
    "LatentProjection",
    "ParamSplit",
    "ReplicatedParams",
    "RowParallel",
    "Style",
    "divided",
    "packed",
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
    """A linear layer of which each rank computes some columns of the output.

    Attributes:
        gather: whether the ranks' columns are joined.
        packed: the number of matrices in the weight, of each of which a rank has some columns.
        sums_input_gradient: whether the gradient of the input is summed over the ranks. It is not for an input whose
            gradient is summed before, as that of a latent is.
    """

    gather: bool = False
    packed: int = 1
    sums_input_gradient: bool = True

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
class LatentProjection:
    """The linear layer of latent attention that computes the latent of keys and values, and the key's rotary part.

    Its weight is replicated. Each rank's heads use all of its result, so the gradient of the result is summed over the
    ranks. The norm and the column-parallel layer that follow run on this result.
    """

    description = "replicated, its result used by each rank's heads"


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


Style = (
    ColumnParallel
    | RowParallel
    | Embedding
    | ReplicatedParams
    | LatentProjection
    | Experts
    | _LocalParams
    | DividedAttributes
)

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
    "mla_kv_a_proj": LatentProjection(),
    "moe_tp_experts": Experts(),
    "local_params": _LocalParams(),
    "replicate": None,
}
PARAMETERS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}


@api_boundary
def packed(count: int) -> ColumnParallel:
    """Return the style of a linear layer that holds several matrices, each of which is split: `packed(3)` for QKV.

    Raises:
        ValueError: if `count` is not a positive int.

    Example:
        >>> from fzero.parallel import tensor as tp
        >>> tp.packed(3)
        ColumnParallel(gather=False, packed=3, sums_input_gradient=True)
    """
    return ColumnParallel(packed=check_int("count", count, 1, "the number of matrices side by side, 3 for q, k and v"))


@api_boundary
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
