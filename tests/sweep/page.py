"""The page docs/models.md, from the results of a sweep."""

from typing import Any

__all__ = ["written"]


def written(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Write the page."""
    return ""
