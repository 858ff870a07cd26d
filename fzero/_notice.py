"""One-line notices that are logged once, and links to docs/trouble.md for longer explanations."""

import functools
import logging

__all__ = ["trouble_link", "warn_once"]


@functools.cache
def warn_once(message: str) -> None:
    """Log a message as a warning of the logger "fzero", unless it was logged before."""
    logging.getLogger("fzero").warning(message)


def trouble_link(heading: str) -> str:
    """Return the end of a message: a link to a heading of docs/trouble.md, by its anchor."""
    return f"; see docs/trouble.md#{heading}"
