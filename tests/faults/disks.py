"""A disk that fills up, or becomes read-only, while a run saves on it: a file system in memory of its own."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["KINDS", "disk", "no_disk", "repair", "strike"]

KINDS = ("the disk is full", "the disk is read-only")
SIZE = "32m"


def no_disk() -> str:
    """Return what this machine lacks for a disk of its own; "" if nothing."""
    return "" if os.name == "posix" and os.geteuid() == 0 and _mounts() else "the rights to mount a file system"


def _mounts() -> bool:
    here = Path(f"/tmp/fz{os.getpid()}disk")
    here.mkdir(exist_ok=True)
    is_mounted = _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(here))
    _ = is_mounted and _run("umount", str(here))
    here.rmdir()
    return is_mounted


def _run(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Have a disk of its own at a folder, if this machine allows it."""
    folder.mkdir(exist_ok=True)
    is_mounted = not no_disk() and _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder))
    try:
        yield
    finally:
        _ = is_mounted and _run("umount", "-l", str(folder))


def strike(folder: Path, kind: str) -> None:
    """Let a disk fill up, or be read-only from now on."""
    if kind == "the disk is full":
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as f:
            while True:
                f.write(bytes(1 << 16))
        return
    end = time.monotonic() + 5
    while not _run("mount", "-o", "remount,ro", str(folder)) and time.monotonic() < end:
        time.sleep(0.002)  # a file was being written


def repair(folder: Path) -> None:
    """Let a disk be whole again."""
    _run("mount", "-o", "remount,rw", str(folder))
    (folder / "filler").unlink(missing_ok=True)
