"""The user's cache folder: what fzero measured of this machine, and rows that were planned before."""

import os
import pathlib

__all__ = ["cache_folder", "written"]


def cache_folder() -> pathlib.Path:
    """Return the folder: `fzero` in `$XDG_CACHE_HOME`, or in `~/.cache`. It need not be there."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fzero"


def written(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all, whoever else writes it. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
