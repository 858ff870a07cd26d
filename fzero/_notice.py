"""One-line notices, each shown once."""

import functools
import logging

__all__ = ["notice"]


@functools.cache
def notice(message: str) -> None:
    """Log a message, as a warning of the logger "fzero", the first time that it is given."""
    logging.getLogger("fzero").warning(message)
