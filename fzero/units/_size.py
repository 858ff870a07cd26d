"""Units by their sizes: the smallest subtrees that are large enough."""

from typing import Any

from fzero.axes.axis import AxisName
from fzero.axes.rules import LayoutRules, OverRule, SplitRules, given_rules
from fzero.layout.subtrees import pieces
from fzero.layout.units import MOST
from fzero.tree import Tree
from fzero.units._rule import UnitPolicy, leaves_of, number

__all__ = ["by_size"]


def by_size(
    params: Tree,
    least: int | None = None,
    most: int = MOST,
    over: AxisName | OverRule = None,
    split: SplitRules | None = None,
) -> UnitPolicy:
    """Make a rule whose units are the smallest subtrees of at least `least` elements, with at most `most`.

    Neighbours that are smaller are joined, up to `most`. A rest that is still smaller than `least` joins the unit
    before it, or the one after it, where there is room. So many small leaves need few collectives, and a
    large subtree needs no large buffer. A unit never has two dtypes, two sets of axes or splits, nor a part of a tie.

    Args:
        params: the tree that is to be cut, on the meta device or not. Only paths, sizes and dtypes are read.
        least: elements; by default half of `most`. With 1 each leaf is a unit.
        most: elements of a unit of several leaves. A leaf that has more is a unit of its own.
        over: what `fzero.shard` is given as `over`, so that sizes are those of leaves that can share a unit.
        split: the same of `split`. Sizes are those of whole leaves, before they are split.

    Returns:
        A rule for `fzero.shard(units=)`. `print` shows its table: units, elements and leaves.

    Raises:
        TypeError: if the tree holds no tensor of floating point, or `over` or `split` is no rule.
        ValueError: if `least` or `most` is no int from 1 on, or `most` is less than `least`.

    Example:
        >>> import fzero, torch
        >>> layer = {"attn": torch.zeros(40), "experts": [{"up": torch.zeros(20), "down": torch.zeros(20)}] * 1}
        >>> print(fzero.units.by_size({"embed": torch.zeros(30), "layers": [layer], "norm": torch.zeros(2)}, 30, 60))
        unit                             elements   leaves
        embed                                  30        1
        layers.0.attn                          40        1
        layers.0.experts to norm               42        3
        3 units                               112        5
    """
    most = number("most", most, 1)
    least = max(most // 2, 1) if least is None else number("least", least, 1)
    if least > most:
        raise ValueError(f"least={least:,} is more than most={most:,}: a unit cannot have both")
    known, rules = leaves_of(params), given_rules(None, over, split)
    kinds: dict[tuple[Any, ...], dict[str, int]] = {}
    for path, x in known.leaves.items():
        kinds.setdefault(_kind(path, x, rules), {})[path] = x.numel()
    names: dict[str, str] = {}
    for numels in kinds.values():
        for piece in pieces(numels, least, most, known.leaves):
            names.update(dict.fromkeys(piece.paths, piece.name))
    return known.rule({path: names[path] for path in known.leaves})  # in the order of the tree


def _kind(path: str, leaf: Any, rules: LayoutRules) -> tuple[Any, ...]:
    """Return what the leaves of a unit share: dtype, the axes they are sharded over, and those that split them."""
    over = rules.over(path, leaf) if rules.over else None
    axes = (over,) if isinstance(over, str) else over
    return (
        leaf.dtype,
        None if axes is None else tuple(axes),
        tuple(sorted((rules.split and rules.split(path, leaf)) or ())),
    )
