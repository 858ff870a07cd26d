"""The rule that splits experts over an axis, and a layer's checks of that rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero._torch.levels import may_differ
from fzero._tracebacks import api_boundary
from fzero.axes import SplitRule, axis_if_bound, axis_names, axis_size, bound_axis, current_rules, loss_axes, rules_in

__all__ = ["check_axis", "check_parts", "check_split", "split_rule"]


@dataclass(frozen=True)
class _ExpertSplit:
    """The rule of `split`. A layer reads from it over which axis the experts were split."""

    names: tuple[str, ...]
    axis: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Return the axis and dimension over which a leaf is split.

        Raises:
            ValueError: if the leaf belongs to one expert in a list.
        """
        parts = path.split(".")
        matches = [i for i, part in enumerate(parts) if part in self.names]
        if not matches or self.axis not in axis_names():
            return None
        if any(part.isdigit() for part in parts[matches[0] + 1 :]):
            raise ValueError(
                f"leaf {path!r} belongs to one expert in a list, but fzero.parallel.experts.split_rule splits leaves "
                "that hold all experts along dimension 0: stack them, or name another part of the path"
            )
        return {self.axis: 0}

    def unused_names(self, paths: Sequence[str]) -> list[str]:
        """List the names that are part of no path."""
        parts = {part for path in paths for part in path.split(".")}
        return [name for name in self.names if name not in parts]


@api_boundary
def split_rule(*names: str, axis: str = "ep") -> SplitRule:
    """Make the rule for `fzero.shard(split=)` that splits experts over an axis, along dimension 0.

    Args:
        *names: parts of the paths of leaves that hold experts. "experts" matches "layers.3.experts.up", but not
            "shared_experts.up".
        axis: the name of the axis. On a mesh without an axis of this name, nothing is split.

    Returns:
        A rule `(path, leaf) -> {axis: 0}`, or None for other leaves. On a mesh with the axis `step.init` refuses a name
        that no parameter has.

    Raises:
        TypeError: if `axis` is not a name.
        ValueError: if `names` is empty, or a name has a dot. The rule raises it for experts in a list, one leaf each.

    Example:
        >>> import fzero
        >>> rule = split_rule("experts")
        >>> fzero.mesh(ep=2).spmd(
        ...     lambda: print(rule("mlp.experts.up", torch.ones(4, 2)), rule("mlp.router", torch.ones(2)))
        ... )()
        {'ep': 0} None
    """
    if not names or not all(isinstance(name, str) and "." not in name for name in names):
        raise ValueError(f"names={names!r}: expected parts of the paths of experts, such as 'experts', without a dot")
    axis_if_bound(axis)

    return _ExpertSplit(names, axis)


def check_axis(axis: str) -> None:
    """Check that tokens are sent along the axis over which experts are split, and that data differs along it.

    If two axes have the same size, all shapes match, and only the numbers would be wrong.

    Raises:
        ValueError: if the step's rule splits experts over another axis, or if the axis is not a data-parallel axis.
    """
    if axis_size(axis_if_bound(axis)) == 1:
        return
    data_axis_names = tuple([a.name for a in loss_axes()])
    split_axes = [rule.axis for rule in rules_in(current_rules().split) if isinstance(rule, _ExpertSplit)]
    if split_axes and axis not in split_axes:
        raise ValueError(
            f"axis={axis!r}: tokens are sent along it, but the experts are split by "
            f"fzero.parallel.experts.split_rule(axis={split_axes[0]!r}): give both the same axis"
        )
    if axis not in data_axis_names:
        axes = tuple([name for name in axis_names() if name in (*data_axis_names, axis)])
        raise ValueError(
            f"axis={axis!r}: the step splits its data along {data_axis_names}, so the ranks along {axis!r} would send "
            f"the same tokens, and count them twice: set fzero.shard(axis={axes}), and use mesh.split(batch, {axes})"
        )


def check_split(experts: Any, count: int, axis: str) -> None:
    """Check that each leaf holds this rank's experts along dimension 0.

    Raises:
        ValueError: if a leaf does not, or if all ranks hold the same experts. The message names the leaf.
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
    """Check that ranks hold different experts. Only a simulation knows which tensors are equal.

    Raises:
        ValueError: if all leaves are equal on the ranks along the axis.
    """
    n = axis_size(axis_if_bound(axis))
    if leaves and n > 1 and not any(may_differ(leaf, bound_axis(axis).token) for leaf in leaves):
        raise ValueError(
            f"axis={axis!r}: all leaves of experts are equal on the {n} ranks along {axis!r}, but each rank must hold "
            f"its own of the {count} experts: split them over that axis, "
            f"fzero.shard(split=fzero.parallel.experts.split_rule('experts'))"
        )


def _unbound_message(axis: str) -> str:
    names = axis_names()
    return f"{axis!r} is none of the bound axes, {', '.join(map(repr, names))}" if names else "no axis is bound here"


def _check_size(path: str, leaf: torch.Tensor, count: int, axis: str) -> None:
    """Raise an error if a leaf of experts has not the rows of this rank's experts."""
    n = axis_size(axis_if_bound(axis))
    size = leaf.shape[0] if leaf.ndim else None
    if size == count // n:
        return
    label = f"experts leaf {path!r} has the shape {list(leaf.shape)}"
    if size == count:
        raise ValueError(
            f"{label}: it is not split, and the {n} ranks along {axis!r} hold {count // n} experts each: "
            f"fzero.shard(split=fzero.parallel.experts.split_rule('experts', axis={axis!r})), where 'experts' is "
            f"part of the leaf's path"
        )
    bound = f"{n} ranks along {axis!r}" if axis_if_bound(axis) else f"1 rank, since {_unbound_message(axis)}"
    raise ValueError(
        f"{label}: expected {count // n} experts along dimension 0, for a routing over {count} experts on {bound}; "
        "give the router and each leaf the same number of experts, and split the leaves over the layer's axis only"
    )
