"""Policies that choose units: by size, or by module granularity as DeepSpeed counts it."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName, LayoutRules, OverRule, SplitRules, layout_rules
from fzero.sharding.units._subtrees import divide_tree
from fzero.sharding.units._unit_policy import NUMEL, UnitPolicy, find_unit_leaves
from fzero.sharding.units._units import MAX_UNIT_NUMEL
from fzero.tree import Tree

__all__ = ["by_granularity", "by_size"]


@api_boundary
def by_granularity(params: Tree, threshold: float, max_numel: int = 10**9) -> UnitPolicy:
    """Make a rule whose units are the topmost subtrees with a granularity of at most `threshold`.

    The granularity of a subtree is its parameters / (1 + its descendants), rounded down, as in DeepSpeed's
    `stage3_module_granularity_threshold`. A node whose children are all numbered subtrees is a list and does not count.
    A leaf outside such subtrees is in a unit with the other leaves of its own node.

    **Prefer `by_size`.** The ratio hardly distinguishes the levels of a model. DeepSpeed made it for a model of 48
    layers with 64 experts: there an expert has 96, a layer 101, and the root 101. So no threshold selects the layers.
    A threshold from 101 on makes the whole model one unit, unless it has more than `max_numel` elements.

    Args:
        params: the tree that will be sharded, on the meta device or not. Only paths, sizes and dtypes are read.
        threshold: parameters per descendant. With 0 each node that holds leaves is a unit.
        max_numel: the largest number of elements of a unit with several leaves.

    Returns:
        A rule for `fzero.shard(units=)`. `print` shows its table: units, elements and leaves.

    Raises:
        TypeError: if the tree holds no tensor of floating point.
        ValueError: if `threshold` is not a number of at least 0, or `max_numel` not an int of at least 1.

    Example:
        >>> import fzero, torch
        >>> expert = lambda: {name: {"w": torch.zeros(4, 2)} for name in ("gate", "up", "down")}
        >>> params = {"embed": {"w": torch.zeros(100)}, "experts": [expert() for _ in range(3)]}
        >>> print(fzero.sharding.by_granularity(params, 6))
        unit              elements   leaves
        embed                  100        1
        experts.0               24        3
        experts.1               24        3
        experts.2               24        3
        4 units                172       10
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold >= 0:
        raise ValueError(f"threshold={threshold!r}: expected a number from 0 on, in parameters per descendant")
    max_numel, unit_leaves = check_int("max_numel", max_numel, 1, NUMEL), find_unit_leaves(params)
    nodes = _tree_nodes({tuple(path.split(".")): x.numel() for path, x in unit_leaves.leaves.items()})
    fine_keys = {
        keys for keys, node in nodes.items() if node.is_module and node.ratio <= threshold and node.numel <= max_numel
    }
    return unit_leaves.make_rule({path: _unit_name(path, fine_keys, nodes, max_numel) for path in unit_leaves.leaves})


_Keys = tuple[str, ...]


class _Node(NamedTuple):
    """A subtree that is not a leaf.

    Attributes:
        numel: the number of elements of all leaves below it.
        direct: the number of elements of its direct children that are leaves.
        modules: the number of nodes that count, at it and below it.
        is_module: whether it counts and holds other subtrees.
    """

    numel: int
    direct: int
    modules: int
    is_module: bool

    @property
    def ratio(self) -> int:
        """The granularity."""
        return self.numel // self.modules


def _tree_nodes(numels: Mapping[_Keys, int]) -> dict[_Keys, _Node]:
    """Return the nodes of a tree by their keys."""
    below: dict[_Keys, dict[_Keys, None]] = {(): {}}
    total, direct = dict[_Keys, int](), dict[_Keys, int]()
    for leaf, numel in numels.items():
        parent = leaf[:-1]
        direct[parent] = direct.get(parent, 0) + numel
        for depth in range(len(leaf)):
            total[leaf[:depth]] = total.get(leaf[:depth], 0) + numel
            if depth:
                below.setdefault(leaf[: depth - 1], {})[leaf[:depth]] = None
            below.setdefault(leaf[:depth], {})
    nodes: dict[_Keys, _Node] = {}
    for keys in sorted(below, key=len, reverse=True):  # the deepest first
        children = below[keys]
        is_list = bool(children) and keys not in direct and all(child[-1].isdigit() for child in children)
        modules = sum(nodes[child].modules for child in children) + (not is_list)
        nodes[keys] = _Node(total[keys], direct.get(keys, 0), modules, bool(children) and not is_list)
    return nodes


def _unit_name(path: str, fine_keys: Container[_Keys], nodes: Mapping[_Keys, _Node], max_numel: int) -> str:
    """Name the unit of a leaf: the topmost fine subtree around it, or else its node, or else the leaf itself."""
    keys = tuple(path.split("."))
    for depth in range(len(keys)):
        if keys[:depth] in fine_keys:
            return ".".join(keys[:depth]) or "params"
    parent = keys[:-1]
    return (".".join(parent) if parent and nodes[parent].direct <= max_numel else path) or "params"


@api_boundary
def by_size(
    params: Tree,
    min_numel: int | None = None,
    max_numel: int = MAX_UNIT_NUMEL,
    over: AxisName | OverRule = None,
    split: SplitRules | None = None,
) -> UnitPolicy:
    """Make a rule whose units are the smallest subtrees of at least `min_numel` elements, with at most `max_numel`.

    Smaller neighbours are joined, up to `max_numel`. A rest that is still smaller than `min_numel` joins the unit
    before it, or the unit after it, if there is room. So many small leaves need few collectives, and a large subtree
    needs no large buffer. A unit never mixes dtypes, sets of axes or splits, and never separates tied leaves.

    Args:
        params: the tree that will be sharded, on the meta device or not. Only paths, sizes and dtypes are read.
        min_numel: the smallest number of elements of a unit; by default half of `max_numel`. With 1 each leaf is a
            unit.
        max_numel: the largest number of elements of a unit with several leaves. A larger leaf is a unit of its own.
        over: the argument `over` of `fzero.shard`: leaves that it shards over other axes cannot share a unit.
        split: the argument `split` of `fzero.shard`, likewise. Sizes count full leaves, before the split.

    Returns:
        A rule for `fzero.shard(units=)`. `print` shows its table: units, elements and leaves.

    Raises:
        TypeError: if the tree holds no tensor of floating point, or `over` or `split` is not a rule.
        ValueError: if `min_numel` or `max_numel` is not an int of at least 1, or `max_numel` is less than `min_numel`.

    Example:
        >>> import fzero, torch
        >>> layer = {"attn": torch.zeros(40), "experts": [{"up": torch.zeros(20), "down": torch.zeros(20)}] * 1}
        >>> print(fzero.sharding.by_size({"embed": torch.zeros(30), "layers": [layer], "norm": torch.zeros(2)}, 30, 60))
        unit                             elements   leaves
        embed                                  30        1
        layers.0.attn                          40        1
        layers.0.experts to norm               42        3
        3 units                               112        5
    """
    max_numel = check_int("max_numel", max_numel, 1, NUMEL)
    min_numel = max(max_numel // 2, 1) if min_numel is None else check_int("min_numel", min_numel, 1, NUMEL)
    if min_numel > max_numel:
        raise ValueError(
            f"min_numel={min_numel:,} is more than max_numel={max_numel:,}: expected at most as many elements"
        )
    unit_leaves, rules = find_unit_leaves(params), layout_rules(None, over, split)
    kinds: dict[tuple[Any, ...], dict[str, int]] = {}
    for path, x in unit_leaves.leaves.items():
        kinds.setdefault(_unit_key(path, x, rules), {})[path] = x.numel()
    names: dict[str, str] = {}
    for numels in kinds.values():
        for subtree in divide_tree(numels, min_numel, max_numel, unit_leaves.leaves):
            names.update(dict.fromkeys(subtree.paths, subtree.name))
    return unit_leaves.make_rule({path: names[path] for path in unit_leaves.leaves})  # the table follows the tree


def _unit_key(path: str, leaf: Any, rules: LayoutRules) -> tuple[Any, ...]:
    """Return the properties that the leaves of a unit share: dtype, the axes they are sharded over, the split axes."""
    over = rules.over(path, leaf) if rules.over else None
    axes = (over,) if isinstance(over, str) else over
    return (
        leaf.dtype,
        None if axes is None else tuple(axes),
        tuple(sorted((rules.split and rules.split(path, leaf)) or ())),
    )
