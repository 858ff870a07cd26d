"""Values: the leaves of a tree that are not tensors, but JSON: numbers, text, None, dicts and lists of these."""

from collections.abc import Mapping
from typing import Any

__all__ = ["is_empty", "is_json", "is_none", "possible_paths", "values_like"]


def is_json(x: Any) -> bool:
    """Return whether JSON preserves a value: a dict with string keys, a list, a number, text or None."""
    if type(x) is dict:
        return all(type(k) is str for k in x) and all(map(is_json, x.values()))
    return all(map(is_json, x)) if type(x) is list else x is None or type(x) in (bool, int, float, str)


def is_empty(x: Any) -> bool:
    """Return whether a value is None, or a dict or list of such values only."""
    if type(x) is dict:
        return all(map(is_empty, x.values()))
    return all(map(is_empty, x)) if type(x) is list else x is None


def is_none(x: Any) -> bool:
    """Return whether a value is None, or a dict or list that holds None and nothing else, and is not empty."""
    return is_empty(x) and x not in ([], {})


def values_like(like: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved value at each path of a tree. A dict that was not saved as one value is read key by key.

    If the tree and the checkpoint both hold only None, such as master weights that no parameter needs, the tree's value
    is returned. The number of None differs between the ranks of a pipeline: a rank has one per block.
    """
    return {path: _value_like(path, value, saved) for path, value in like.items()}


def _value_like(path: str, value: Any, saved: Mapping[str, Any]) -> Any:
    if value is not None and is_none(value) and is_none(saved.get(path)):
        return value
    if path in saved or type(value) is not dict:
        return saved.get(path)
    return {key: _value_like(_join_path(path, key), x, saved) for key, x in value.items()}


def possible_paths(path: str, value: Any, saved: Mapping[str, Any]) -> list[str]:
    """List the paths at which the checkpoint may hold a value or its parts."""
    if path in saved or type(value) is not dict or not value:
        return [path]
    return [p for key, x in value.items() for p in possible_paths(_join_path(path, key), x, saved)]


def _join_path(path: str, key: str) -> str:
    """Return the path of a key below another path."""
    return f"{path}.{key}" if path else key
