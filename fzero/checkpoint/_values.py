"""Values: what of a tree is no tensor, and JSON: numbers, text, None, dicts and lists of these."""

from collections.abc import Mapping
from typing import Any

__all__ = ["is_json", "is_none", "is_nothing", "paths_of", "values_like"]


def is_json(x: Any) -> bool:
    """Return whether a value comes back from JSON as it is: dicts with keys of text, lists, numbers, text, None."""
    if type(x) is dict:
        return all(type(k) is str for k in x) and all(map(is_json, x.values()))
    return all(map(is_json, x)) if type(x) is list else x is None or type(x) in (bool, int, float, str)


def is_nothing(x: Any) -> bool:
    """Return whether a value is None, or a dict or list of nothing else."""
    return all(map(is_nothing, x.values() if type(x) is dict else x)) if type(x) in (dict, list) else x is None


def is_none(x: Any) -> bool:
    """Return whether a value is None, or holds some and nothing else."""
    return is_nothing(x) and x not in ([], {})


def values_like(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved value of each path of a tree. Of a dict that was not saved as one, its keys' values.

    Where both have nothing but None, such as the masters of parameters that need none, the tree's own is returned: on
    other ranks of a pipeline there are as many as these have blocks.
    """
    return {path: _value_like(path, value, saved) for path, value in mine.items()}


def _value_like(path: str, value: Any, saved: Mapping[str, Any]) -> Any:
    if value is not None and is_none(value) and is_none(saved.get(path)):
        return value
    if path in saved or type(value) is not dict:
        return saved.get(path)
    return {key: _value_like(_below(path, key), x, saved) for key, x in value.items()}


def paths_of(path: str, value: Any, saved: Mapping[str, Any]) -> list[str]:
    """List the paths under which a value, or its parts, are looked for."""
    if path in saved or type(value) is not dict or not value:
        return [path]
    return [p for key, x in value.items() for p in paths_of(_below(path, key), x, saved)]


def _below(path: str, key: str) -> str:
    """Return the path of a key of what is at a path."""
    return f"{path}.{key}" if path else key
