"""One-line notices, each shown once, and what ends a message that needs more than a line."""

import functools
import logging

__all__ = ["notice", "see"]


@functools.cache
def notice(message: str) -> None:
    """Log a message, as a warning of the logger "fzero", the first time that it is given."""
    logging.getLogger("fzero").warning(message)


def see(heading: str) -> str:
    """Return the end of a message: where docs/trouble.md says more, by the anchor of a heading."""
    return f"; see docs/trouble.md#{heading}"
