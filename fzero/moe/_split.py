"""The rule that splits experts over an axis, and what a layer asks of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero._torch.levels import may_differ
from fzero.axes.rules import SplitRule, rules_in
from fzero.axes.scope import axis_names, axis_size, data_axes, lookup, rules_here, where_bound

__all__ = ["ExpertSplit", "check_axis", "check_parts", "check_split", "split"]


@dataclass(frozen=True)
class ExpertSplit:
    """The rule of `split`: it tells a layer over which axis the experts were split."""

    names: tuple[str, ...]
    axis: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Say how a leaf is cut.

        Raises:
            ValueError: if the leaf is of one expert in a list.
        """
        parts = path.split(".")
        found = [i for i, part in enumerate(parts) if part in self.names]
        if not found or self.axis not in axis_names():
            return None
        if any(part.isdigit() for part in parts[found[0] + 1 :]):
            raise ValueError(
                f"leaf {path!r} is of one expert in a list: moe.split cuts leaves that hold all experts along "
                "dimension 0; stack them, or name another part of the path"
            )
        return {self.axis: 0}


def split(*names: str, axis: str = "ep") -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits experts over an axis, by dimension 0.

    Args:
        *names: parts of the paths of leaves that hold experts: "experts" means "layers.3.experts.up" and not
            "shared_experts.up".
        axis: the name of the axis. On a mesh that has none of that name nothing is split.

    Returns:
        A rule `(path, leaf) -> {axis: 0}`, or None for other leaves.

    Raises:
        TypeError: if `axis` is no name.
        ValueError: if no name is given, or one has a dot. The rule raises it for experts that are a list, a leaf each.

    Example:
        >>> import fzero
        >>> rule = split("experts")
        >>> fzero.mesh(ep=2).spmd(
        ...     lambda: print(rule("mlp.experts.up", torch.ones(4, 2)), rule("mlp.router", torch.ones(2)))
        ... )()
        {'ep': 0} None
    """
    if not names or not all(isinstance(name, str) and "." not in name for name in names):
        raise ValueError(f"names={names!r}: expected parts of the paths of experts, such as 'experts', without a dot")
    where_bound(axis)

    return ExpertSplit(names, axis)


def check_axis(axis: str) -> None:
    """Check that tokens travel along the axis that experts are split over, and that data differs along it.

    Where two axes have as many ranks all shapes fit, and only the numbers would be wrong.

    Raises:
        ValueError: if the rule of the running step splits over another axis, or if the axis is none of the data's.
    """
    if axis_size(where_bound(axis)) == 1:
        return
    data = tuple([a.name for a in data_axes()])
    over = [rule.axis for rule in rules_in(rules_here().split) if isinstance(rule, ExpertSplit)]
    if over and axis not in over:
        raise ValueError(
            f"axis={axis!r}: tokens travel along it, and the experts are split by "
            f"fzero.moe.split(axis={over[0]!r}): give both the same axis"
        )
    if axis not in data:
        wanted = tuple([name for name in axis_names() if name in (*data, axis)])
        raise ValueError(
            f"axis={axis!r}: the step has its data along {data}, so ranks along {axis!r} would send the same tokens, "
            f"and count them twice: say fzero.shard(axis={wanted}), and mesh.split(batch, {wanted})"
        )


def check_split(experts: Any, count: int, axis: str) -> None:
    """Check that each leaf has this rank's experts along dimension 0.

    Raises:
        ValueError: if one has not, which it names; or if ranks have the same experts.
    """
    leaves = []
    for path, leaf in zip(*tree.flatten_with_paths(experts, tree.is_box)[:2], strict=True):
        if tree.is_box(leaf):
            raise ValueError(f"experts leaf {path!r} is {leaf!r}: gather it first, by fzero.gather or fzero.remat")
        if isinstance(leaf, torch.Tensor):
            _check_size(path, leaf, count, axis)
            leaves.append(leaf)
    check_parts(leaves, count, axis)


def check_parts(leaves: Sequence[torch.Tensor], count: int, axis: str) -> None:
    """Check that ranks have different experts, as far as types tell: a simulation knows what is equal.

    Raises:
        ValueError: if all leaves are equal on the ranks along the axis.
    """
    n = axis_size(where_bound(axis))
    if leaves and n > 1 and not any(may_differ(leaf, lookup(axis).token) for leaf in leaves):
        raise ValueError(
            f"axis={axis!r}: all leaves of experts are equal on the {n} ranks along {axis!r}, and each rank is to have "
            f"its own of the {count} experts: split them over that axis, fzero.shard(split=fzero.moe.split('experts'))"
        )


def _check_size(path: str, leaf: torch.Tensor, count: int, axis: str) -> None:
    n = axis_size(where_bound(axis))
    size = leaf.shape[0] if leaf.ndim else None
    if size == count // n:
        return
    where = f"experts leaf {path!r} has the shape {list(leaf.shape)}"
    if size == count:
        raise ValueError(
            f"{where}: it is not split, and the {n} ranks along {axis!r} have {count // n} experts each: "
            f"fzero.shard(split=fzero.moe.split('experts', axis={axis!r})), where 'experts' is part of the leaf's path"
        )
    bound = (
        f"{n} ranks along {axis!r}"
        if where_bound(axis)
        else f"1 rank: of {axis_names()}, the axes here, none is {axis!r}"
    )
    raise ValueError(
        f"{where}: expected {count // n} experts along dimension 0, as the routing is of {count} on {bound}; "
        "give the router and each leaf as many experts, and split the leaves over the layer's axis alone"
    )
