"""Names: what torch.distributed.checkpoint calls the leaves of a tree, and the parts of its other values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fzero import tree
from fzero._torch import pytree
from fzero.checkpoint._cut import ShardedTree
from fzero.checkpoint._holdings import is_whole
from fzero.checkpoint._parts import LeafSource

__all__ = ["Keys", "Name", "flat", "keys_of", "names_of", "nested", "parts_of", "place_of"]

Name = Callable[[str], str]
Keys = tuple[str | int, ...]


def keys_of(values: Any, origins: Mapping[str, LeafSource]) -> dict[str, Keys]:
    """Return the keys that lead to each leaf of a tree, by its path: what DCP needs to build the tree again."""
    try:
        pairs, _ = pytree.tree_flatten_with_path(values, is_whole)
    except ValueError:  # a node registered without names for its children
        return {}
    paths, _, _ = tree.flatten_with_paths(values, is_whole)
    found = {path: tuple(map(_key, keys)) for path, (keys, _) in zip(paths, pairs, strict=True)}
    return {path: _of_item(found[origin.path], origin) for path, origin in origins.items()}


def _of_item(keys: Keys, origin: LeafSource) -> Keys:
    """Return the keys that lead to a leaf in the whole list, given those in a stacked one."""
    at = next((i for i in range(len(keys)) if ".".join(map(str, keys[:i])) == origin.list), None)
    return keys if at is None else (*keys[:at], origin.number, *keys[at + 1 :])


def _key(key: Any) -> str | int:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return str(key.name) if isinstance(key, pytree.GetAttrKey) else str(key.key)


def names_of(cut: ShardedTree, name: Name | None) -> dict[str, str]:
    """Return the name of each leaf and value, by its path.

    Raises:
        ValueError: if two have one name.
    """
    names = {path: path if name is None else name(path) for path in [*cut.number, *cut.values]}
    used = [(names[path], path) for path in cut.number]
    used += [(part, path) for path, value in cut.values.items() for part, _, _ in flat(names[path], (), value)]
    first: dict[str, str] = {}
    for n, path in used:
        if n in first:
            raise ValueError(f"leaves {first[n]!r} and {path!r} have one name, {n!r}: expected one for each")
        first[n] = path
    return names


def flat(name: str, keys: Keys, value: Any) -> Iterator[tuple[str, Keys, Any]]:
    """List the parts of a JSON value that DCP gives names to: dicts are opened, and lists that hold dicts."""
    parts: Sequence[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif _holds_dicts(value):
        parts = list(enumerate(value))
    if not parts:
        yield name, keys, value
    for key, part in parts:
        yield from flat(f"{name}.{key}" if name else str(key), (*keys, key), part)


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(x, dict) or _holds_dicts(x) for x in value)


def nested(parts: dict[Keys, Any]) -> Any:
    """Build a value of its parts: the inverse of `flat`."""
    if () in parts:
        return parts[()]
    below: dict[str | int, dict[Keys, Any]] = {}
    for keys, x in parts.items():
        below.setdefault(keys[0], {})[keys[1:]] = x
    built = {key: nested(below[key]) for key in below}
    return [built[i] for i in sorted(built, key=int)] if all(isinstance(key, int) for key in built) else built


def parts_of(name: str, metadata: Metadata) -> dict[str, Keys]:
    """List the names under which a checkpoint has a value, or its parts, with the keys that lead to each part."""
    there = metadata.state_dict_metadata
    if name in there:
        return {name: ()}
    found: dict[str, Keys] = {}
    start = f"{name}." if name else ""
    for part in there:
        if part.startswith(start):
            keys = tuple((metadata.planner_data or {}).get(part, ()))
            known = [i for i in range(len(keys)) if ".".join(map(str, keys[:i])) == name]
            found[part] = keys[known[0] :] if known else tuple(part[len(start) :].split("."))
    return found


def place_of(path: str, name: str, keys: dict[str, Keys]) -> Keys:
    """Return the keys that lead to a leaf in the nested dict that DCP builds, whose first one is a text."""
    if name != path:
        return (name,)
    first, *rest = keys.get(path) or (path,)
    return (str(first), *rest)
