"""Parts of a tree: the entries, tensors and boxes, that are averaged together. A unit lies in one part."""

from typing import Any

from fzero import tree
from fzero.sharding import Shard, Slot, is_box

__all__ = ["divide_into_parts", "merge", "select"]


def divide_into_parts(anchor: Any, count: int) -> list[frozenset[int]]:
    """Divide a tree's entries into neighbouring parts of about equal size; return the entries' positions."""
    entries = tree.flatten(anchor, is_box)[0]
    units: dict[Any, list[int]] = {}
    for i, x in enumerate(entries):
        if x is not None:
            units.setdefault(("unit", x.spec_id) if isinstance(x, Shard | Slot) else ("leaf", id(x)), []).append(i)
    sizes = [sum([x.numel() for x in tree.tensors([entries[i] for i in members])]) for members in units.values()]
    total, numel_before = max(sum(sizes), 1), 0
    parts: list[set[int]] = [set() for _ in range(count)]
    for members, size in zip(units.values(), sizes, strict=True):
        parts[min((2 * numel_before + size) * count // (2 * total), count - 1)] |= set(members)
        numel_before += size
    return [frozenset(part) for part in parts]


def select(values: Any, part: frozenset[int]) -> Any:
    """Return a tree with None in place of the entries outside a part; None stays None."""
    if values is None:
        return None
    entries, structure = tree.flatten(values, is_box)
    return tree.unflatten(structure, [x if i in part else None for i, x in enumerate(entries)])


def merge(values: Any, part_values: Any) -> Any:
    """Return a tree with the entries of `part_values` that are not None."""
    entries, structure = tree.flatten(values, is_box)
    changed_leaves = tree.flatten(part_values, is_box)[0]
    return tree.unflatten(structure, [x if y is None else y for x, y in zip(entries, changed_leaves, strict=True)])
