"""The user's cache folder: the calibrated machine, and rows that were planned before."""

import os
import pathlib

__all__ = ["cache_folder", "write_atomically"]


def cache_folder() -> pathlib.Path:
    """Return the path of the cache folder: `fzero` in `$XDG_CACHE_HOME` or `~/.cache`. The folder may not exist yet."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fzero"


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Write a file atomically, also while other processes write it. Create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
