"""Units by module granularity, as DeepSpeed counts it."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from fzero.tree import Tree
from fzero.units._rule import UnitPolicy, leaves_of, number

__all__ = ["by_granularity"]


def by_granularity(params: Tree, threshold: float, most: int = 10**9) -> UnitPolicy:
    """Make a rule whose units are the topmost subtrees of a granularity of at most `threshold`.

    The granularity of a subtree is its parameters / (1 + its descendants), rounded down, as in DeepSpeed's
    `stage3_module_granularity_threshold`. A node whose children are all numbered subtrees is a list and does not count.
    A leaf outside such subtrees is in a unit with the other leaves of its own node.

    **Prefer `by_size`.** The ratio hardly tells the levels of a model apart. In the model that DeepSpeed made it for,
    of 48 layers with 64 experts, an expert has 96, a layer 101, and the root 101. So no threshold selects the layers:
    one that does makes the whole model one unit, unless it has more than `most` elements.

    Args:
        params: the tree that is to be cut, on the meta device or not. Only paths, sizes and dtypes are read.
        threshold: parameters per descendant. With 0 each node that holds leaves is a unit.
        most: elements of a unit of several leaves.

    Returns:
        A rule for `fzero.shard(units=)`. `print` shows its table: units, elements and leaves.

    Raises:
        TypeError: if the tree holds no tensor of floating point.
        ValueError: if `threshold` is no number from 0 on, or `most` no int from 1 on.

    Example:
        >>> import fzero, torch
        >>> expert = lambda: {name: {"w": torch.zeros(4, 2)} for name in ("gate", "up", "down")}
        >>> params = {"embed": {"w": torch.zeros(100)}, "experts": [expert() for _ in range(3)]}
        >>> print(fzero.units.by_granularity(params, 6))
        unit              elements   leaves
        embed                  100        1
        experts.0               24        3
        experts.1               24        3
        experts.2               24        3
        4 units                172       10
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold >= 0:
        raise ValueError(f"threshold={threshold!r}: expected a number from 0 on, in parameters per descendant")
    most, known = number("most", most, 1), leaves_of(params)
    nodes = _nodes({tuple(path.split(".")): x.numel() for path, x in known.leaves.items()})
    fine = {keys for keys, node in nodes.items() if node.is_module and node.ratio <= threshold and node.numel <= most}
    return known.rule({path: _unit(path, fine, nodes, most) for path in known.leaves})


_Keys = tuple[str, ...]


class _Node(NamedTuple):
    """A subtree that is no leaf.

    Attributes:
        numel: elements of all leaves below it.
        own: elements of the leaves that it holds itself.
        counted: itself, if it counts, and what counts below it.
        is_module: whether it counts, and holds other subtrees.
    """

    numel: int
    own: int
    counted: int
    is_module: bool

    @property
    def ratio(self) -> int:
        """The granularity."""
        return self.numel // self.counted


def _nodes(numels: Mapping[_Keys, int]) -> dict[_Keys, _Node]:
    """Return the subtrees by their keys."""
    below: dict[_Keys, dict[_Keys, None]] = {(): {}}
    total, own = dict[_Keys, int](), dict[_Keys, int]()
    for leaf, numel in numels.items():
        home = leaf[:-1]
        own[home] = own.get(home, 0) + numel
        for depth in range(len(leaf)):
            total[leaf[:depth]] = total.get(leaf[:depth], 0) + numel
            if depth:
                below.setdefault(leaf[: depth - 1], {})[leaf[:depth]] = None
            below.setdefault(leaf[:depth], {})
    found: dict[_Keys, _Node] = {}
    for keys in sorted(below, key=len, reverse=True):  # the deepest first
        children = below[keys]
        is_list = bool(children) and keys not in own and all(child[-1].isdigit() for child in children)
        counted = sum(found[child].counted for child in children) + (not is_list)
        found[keys] = _Node(total[keys], own.get(keys, 0), counted, bool(children) and not is_list)
    return found


def _unit(path: str, fine: Container[_Keys], nodes: Mapping[_Keys, _Node], most: int) -> str:
    """Name the unit of a leaf: the topmost subtree around it that is fine, or its own node, or itself."""
    keys = tuple(path.split("."))
    for depth in range(len(keys)):
        if keys[:depth] in fine:
            return ".".join(keys[:depth]) or "params"
    home = keys[:-1]
    return (".".join(home) if home and nodes[home].own <= most else path) or "params"
