"""The names in DCP of a tree's leaves, and of the parts of its other values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fzero import tree
from fzero._arguments import check_callable
from fzero._torch import pytree
from fzero.checkpoint.layout import LeafSource, TreeLayout, is_entry

__all__ = ["KeyPath", "NameMap", "flatten_value", "keys_at", "list_keys", "name_leaves", "nest_values", "stored_names"]


NameMap = Callable[[str], str]
KeyPath = tuple[str | int, ...]


def list_keys(values: Any, sources: Mapping[str, LeafSource]) -> dict[str, KeyPath]:
    """Return the keys that lead to each leaf of a tree, by its path. DCP rebuilds the tree from them."""
    try:
        pairs, _ = pytree.tree_flatten_with_path(values, is_entry)
    except ValueError:  # the user registered a pytree node without names for its children
        return {}
    paths, _, _ = tree.flatten_with_paths(values, is_entry)
    keys_by_path = {path: tuple(map(_plain_key, keys)) for path, (keys, _) in zip(paths, pairs, strict=True)}
    return {path: _keys_in_full_list(keys_by_path[source.path], source) for path, source in sources.items()}


def _keys_in_full_list(keys: KeyPath, source: LeafSource) -> KeyPath:
    """Return the keys that lead to a leaf in the full list, given its keys in a stacked list."""
    depth = next((i for i in range(len(keys)) if ".".join(map(str, keys[:i])) == source.list), None)
    return keys if depth is None else (*keys[:depth], source.item_index, *keys[depth + 1 :])


def _plain_key(key: Any) -> str | int:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return str(key.name) if isinstance(key, pytree.GetAttrKey) else str(key.key)


def name_leaves(layout: TreeLayout, name: NameMap | None) -> dict[str, str]:
    """Return the name of each leaf and value, by path.

    Raises:
        ValueError: if two of them have one name.
    """
    if name is not None:
        check_callable("name", name, "a function from a leaf's path to its name in the checkpoint")
    names = {path: path if name is None else name(path) for path in [*layout.leaf_index, *layout.values]}
    named_paths = [(names[path], path) for path in layout.leaf_index]
    named_paths += [
        (part, path) for path, value in layout.values.items() for part, _, _ in flatten_value(names[path], (), value)
    ]
    path_of_name: dict[str, str] = {}
    for n, path in named_paths:
        if n in path_of_name:
            raise ValueError(f"leaves {path_of_name[n]!r} and {path!r} have one name, {n!r}: expected a name for each")
        path_of_name[n] = path
    return names


def flatten_value(name: str, keys: KeyPath, value: Any) -> Iterator[tuple[str, KeyPath, Any]]:
    """Yield the name, the keys and the value of each part of a JSON value that DCP names.

    The parts are the items of dicts, and of lists that hold dicts.
    """
    parts: Sequence[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif _holds_dicts(value):
        parts = list(enumerate(value))
    if not parts:
        yield name, keys, value
    for key, part in parts:
        yield from flatten_value(f"{name}.{key}" if name else str(key), (*keys, key), part)


def _holds_dicts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(x, dict) or _holds_dicts(x) for x in value)


def nest_values(parts: dict[KeyPath, Any]) -> Any:
    """Build a value from its parts: the inverse of `flatten_value`."""
    if () in parts:
        return parts[()]
    below: dict[str | int, dict[KeyPath, Any]] = {}
    for keys, x in parts.items():
        below.setdefault(keys[0], {})[keys[1:]] = x
    values = {key: nest_values(below[key]) for key in below}
    return [values[i] for i in sorted(values, key=int)] if all(isinstance(key, int) for key in values) else values


def stored_names(name: str, metadata: Metadata) -> dict[str, KeyPath]:
    """List the names under which a checkpoint stores a value or its parts, with the keys that lead to each part."""
    entries = metadata.state_dict_metadata
    if name in entries:
        return {name: ()}
    start = f"{name}." if name else ""
    parts = [part for part in entries if part.startswith(start)]
    return {part: _keys_below(name, part, metadata) or tuple(part[len(start) :].split(".")) for part in parts}


def _keys_below(name: str, part: str, metadata: Metadata) -> KeyPath:
    """Return the keys from a value to its part, as the planner that saved them noted; () if it noted none."""
    keys = metadata.planner_data.get(part) if isinstance(metadata.planner_data, dict) else None
    if not isinstance(keys, tuple) or ".".join(map(str, keys)) != part:  # a foreign planner's, or damaged
        return ()
    depth = next((i for i in range(len(keys)) if ".".join(map(str, keys[:i])) == name), None)
    return () if depth is None else keys[depth:]


def keys_at(path: str, name: str, keys: dict[str, KeyPath]) -> KeyPath:
    """Return the keys that lead to a leaf in the nested dict that DCP builds. The first key is a string."""
    if name != path:
        return (name,)
    first_key, *inner_keys = keys.get(path) or (path,)
    return (str(first_key), *inner_keys)
