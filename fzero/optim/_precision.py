"""Precision: a policy of dtypes, and how a tree follows it.

The policy is data. `fzero.value_and_grad(precision=)` sums gradients by it, `optim.master_weights` keeps masters by it,
and no tensor is cast anywhere else: an operation's own dtypes are the model's business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero.sharding import Shard, Slot, box_of, facts, is_box
from fzero.tree import Tree

__all__ = ["GradientDtypes", "Precision"]


class GradientDtypes(NamedTuple):
    """The dtypes of a gradient while it is summed over ranks, and while it is summed over micro-batches."""

    reduce: torch.dtype
    grad: torch.dtype


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters, gradients and master weights: mixed precision (arXiv:1710.03740) as data.

    Attributes:
        param: of parameters: between steps, in their gathers, and in the computation.
        reduce: of gradients while they are summed over ranks.
        master: of the master weights that `optim.master_weights` keeps in the sharded optimizer state.
        grad: of gradients while they are summed over micro-batches, and as the update gets them; by default `reduce`.
        full: a rule `(path, leaf) -> bool` for leaves that are kept in `master`'s dtype throughout, such as norms and
            routers: `lambda path, leaf: "norm" in path`. They have no second copy. A block with leaves of both kinds
            is two units.

    Raises:
        TypeError: if a dtype is not a floating-point one.
        ValueError: if master weights would be in half precision, or narrower than the parameters.

    Example:
        >>> precision = Precision(param=torch.bfloat16, full=lambda path, leaf: "norm" in path)
        >>> params = precision.cast({"w": torch.ones(2, 2), "norm": torch.ones(2)})
        >>> params["w"].dtype, params["norm"].dtype
        (torch.bfloat16, torch.float32)
    """

    param: torch.dtype
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    grad: torch.dtype | None = None
    full: Callable[[str, torch.Tensor], bool] | None = None

    def __post_init__(self) -> None:
        """Check the dtypes."""
        given = {"param": self.param, "reduce": self.reduce, "master": self.master, "grad": self.grad}
        for name, dtype in given.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"{name}={dtype!r}: expected a floating-point dtype, such as torch.bfloat16")
        if self.master.itemsize < 4:
            raise ValueError(
                f"master={self.master}: master weights in half precision lose every update smaller than their last "
                "bit; keep them in torch.float32, or train without optim.master_weights"
            )
        if self.param.itemsize > self.master.itemsize:
            raise ValueError(f"param={self.param} is wider than master={self.master}; expected the reverse")

    def dtype_of(self, path: str, leaf: torch.Tensor) -> torch.dtype:
        """Return the dtype that a parameter is kept in: its own if it is not a floating-point one."""
        if not leaf.is_floating_point():
            return leaf.dtype
        return self.master if self.full is not None and self.full(path, leaf) else self.param

    def cast(self, params: Tree) -> Tree:
        """Cast a tree of parameters to the dtypes that they are kept in; units by the leaf's rule when they were cut.

        `step.init(params, optim.master_weights(opt, precision))` does it, after it made the master weights: cast
        first, they would start from rounded values.
        """
        return tree.map(lambda x, kept: x.to(kept.dtype), params, self.kept(params))

    def kept(self, params: Tree) -> Tree:
        """Make a tree like `params`, on any layout, of empty meta tensors with the dtypes that they are kept in."""
        paths, entries, structure = tree.flatten_with_paths(params, is_box)
        found: dict[int, torch.Tensor] = {}  # places of one tensor have one dtype, the first's
        for i, (path, x) in enumerate(zip(paths, entries, strict=True)):
            if isinstance(x, Shard):
                empty = torch.empty(0, dtype=facts(x.uid).dtype, device="meta")
                entries[i] = box_of(x.uid, [empty] * len(x.parts))
            elif isinstance(x, torch.Tensor):
                if id(x) not in found:
                    found[id(x)] = torch.empty(0, dtype=self.dtype_of(path, x), device="meta")
                entries[i] = found[id(x)]
        return tree.unflatten(structure, entries)

    def gradients(self, dtype: torch.dtype) -> GradientDtypes:
        """Return the dtypes that gradients of parameters of this dtype are summed in, over ranks and micro-batches.

        Those of leaves kept in full precision are in no narrower dtype than theirs.
        """
        own = GradientDtypes(self.reduce, self.grad or self.reduce)
        if dtype == self.param:
            return own
        return GradientDtypes(torch.promote_types(own.reduce, dtype), torch.promote_types(own.grad, dtype))

    def check(self, name: str, paths: Sequence[str], entries: Sequence[Any]) -> None:
        """Check that parameters have the policy's dtypes, without which it would silently do nothing.

        Raises:
            TypeError: if one has another. The message names it.
        """
        expected: dict[Any, torch.dtype] = {}  # places of one tensor have one dtype, the first's
        for path, x in zip(paths, entries, strict=True):
            leaf, key = x, id(x)
            if isinstance(x, Shard | Slot):
                index = x.index if isinstance(x, Slot) else 0
                shape, key = facts(x.uid).whole_shapes[index], (x.uid, index)
                leaf = torch.empty(shape, dtype=facts(x.uid).dtype, device="meta")
            if not isinstance(leaf, torch.Tensor):
                continue
            dtype = x.dtype if isinstance(x, Shard) else leaf.dtype
            if key not in expected:
                expected[key] = self.dtype_of(path, leaf)
            if not dtype == leaf.dtype == expected[key]:
                raise TypeError(
                    f"{name}: leaf {path!r} is {dtype}, and precision= says {expected[key]}: start with "
                    "params, opt_state = step.init(params, optim.master_weights(opt, precision)); unsharded, params = "
                    "precision.cast(params) after opt.init(params)"
                )
