"""Where a checkpoint's files lie: what a folder must do, on a local disk or in an object store."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from fzero.checkpoint._error import CheckpointError, DamagedError

__all__ = ["Files", "LocalFolder", "Remote", "files_at", "locked"]


# A folder of an object store, through fsspec.


class Remote:
    """A folder of an object store, through fsspec: one PUT commits."""

    is_shared = True

    def __init__(self, path: str) -> None:
        import fsspec

        self.path = self.common_name = path.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.path)
        except (ImportError, ValueError) as error:  # a store that needs a package, or that nobody knows
            raise CheckpointError(f"{self.path!r}: {error}") from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def at(self, name: str) -> "Remote":
        """Return the files of a folder in this one."""
        return Remote(f"{self.path}/{name}")

    def _entries(self, kind: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted([e["name"].rstrip("/").rsplit("/", 1)[-1] for e in found if e["type"] == kind])

    def names(self) -> list[str]:
        """List the files that are there; none if there is no folder."""
        return self._entries("file")

    def folders(self) -> list[str]:
        """List the folders that are there."""
        return self._entries("directory")

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is not there."""
        try:
            return self._fs.info(self._at(name))["size"]
        except FileNotFoundError:
            return None

    def free(self) -> None:
        """Return None: a store has room."""

    def get(self, name: str) -> bytes:
        """Read a small file."""
        return self._fs.cat_file(self._at(name))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._at(name), data)

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file, part by part."""
        self._fs.makedirs(self._root, exist_ok=True)
        with self._fs.open(self._at(name), "wb") as f:
            for part in parts:
                for view in part:
                    f.write(view)

    def read_into(self, name: str, at: int, views: Sequence[memoryview]) -> None:
        """Fill views one after the other with a file's bytes from `at` on."""
        numel = sum(len(v) for v in views)
        try:
            data = self._fs.cat_file(self._at(name), start=at, end=at + numel)
        except FileNotFoundError:
            raise DamagedError(f"{self.path!r}: {name} is missing") from None
        if len(data) != numel:
            raise DamagedError(f"{self.path!r}: {name} is damaged: it ends before byte {at + numel}")
        offset = 0
        for view in views:
            view[:] = data[offset : offset + len(view)]
            offset += len(view)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

    def remove_all(self, first: str = "") -> None:
        """Remove the folder, one of its files before all others."""
        self.remove([first] if first else [])
        self.remove(self.names())
        with contextlib.suppress(OSError, NotImplementedError):  # a store whose folders are files
            self._fs.rmdir(self._root)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Do nothing: a store has no locks."""
        yield


# Where a checkpoint's files lie: what is asked of a folder, and how a local one does it.


_VECTORS = 1024  # at most in one call of the system
_AHEAD = 1 << 24  # bytes


class Files(Protocol):
    """The files of one folder, by name. Names hold no separator."""

    path: str
    common_name: str  # what all ranks call it
    is_shared: bool  # whether rank 0 sees what the others wrote

    def names(self) -> list[str]:
        """List the files that are there; none if there is no folder."""
        ...

    def folders(self) -> list[str]:
        """List the folders that are there."""
        ...

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is not there."""
        ...

    def free(self) -> int | None:
        """Return the bytes that there is room for; None if that cannot be told."""
        ...

    def get(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            FileNotFoundError: if it is not there.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once: whoever looks finds the old one or the new one. It is durable on return."""
        ...

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file, part by part. It is durable on return."""
        ...

    def read_into(self, name: str, at: int, views: Sequence[memoryview]) -> None:
        """Fill views one after the other with a file's bytes from `at` on.

        Raises:
            CheckpointError: if the file ends before, or is not there.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there."""
        ...

    def remove_all(self, first: str = "") -> None:
        """Remove the folder, one of its files before all others. Of a link to a folder remove the link alone."""
        ...

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Keep other processes from writing into the folder, where the file system can.

        Raises:
            CheckpointError: if another one does.
        """
        ...

    def at(self, name: str) -> "Files":
        """Return the files of a folder in this one."""
        ...


def files_at(path: Any) -> Files:
    """Return the files of a folder: of a path, or of a URL that fsspec knows, such as `"s3://bucket/run"`."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise TypeError(f"path={path!r}: expected the path of a folder, or a URL such as 's3://bucket/run'")
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        return Remote(text)
    return LocalFolder(rest if separator else text)


class LocalFolder:
    """A folder of this machine, or of a file system that all machines of a run mount."""

    is_shared = True

    def __init__(self, path: str) -> None:
        self.path = self.common_name = os.path.abspath(os.path.expanduser(path))

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def at(self, name: str) -> "LocalFolder":
        """Return the files of a folder in this one."""
        return LocalFolder(self._at(name))

    def names(self) -> list[str]:
        """List the files that are there; none if there is no folder."""
        return [e.name for e in self._entries() if e.is_file()]

    def folders(self) -> list[str]:
        """List the folders that are there."""
        return [e.name for e in self._entries() if e.is_dir()]

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as found:
                return sorted(found, key=lambda e: e.name)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError(f"{self.path!r} is a file, expected a folder") from None

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is not there."""
        try:
            return os.stat(self._at(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free(self) -> int | None:
        """Return the bytes that there is room for on the disk of the folder, or of the first above it that is there."""
        path = self.path
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return shutil.disk_usage(path).free

    def get(self, name: str) -> bytes:
        """Read a small file."""
        with open(self._at(name), "rb") as f:
            return f.read()

    def make(self) -> None:
        """Make the folder, and those above it."""
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{self.path!r} is a file, or lies below one: expected a folder") from None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file at once, by renaming one that is durable."""
        self.make()
        with open(self._at(f".{name}.tmp"), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.rename(self._at(f".{name}.tmp"), self._at(name))
        self.sync()

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file, part by part, without a copy."""
        self.make()
        with open(self._at(name), "xb", buffering=0) as f:
            fd, at, flush_start = f.fileno(), 0, 0
            for part in parts:
                for views in _batched(part):
                    at += _finish(lambda rest, _: os.writev(fd, rest), views)
                if at - flush_start >= _AHEAD:  # the disk begins now, and not at the end: a fifth of a save's time
                    _begin_to_write(fd, flush_start, at - flush_start)
                    flush_start = at
            os.fsync(fd)
        self.sync()

    def sync(self) -> None:
        """Make the names in the folder durable."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_into(self, name: str, at: int, views: Sequence[memoryview]) -> None:
        """Fill views one after the other with a file's bytes from `at` on."""
        try:
            fd = os.open(self._at(name), os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedError(f"{self.path!r}: {name} is missing") from None
        try:
            for batch in _batched(views):
                at += _finish(lambda rest, count, start=at: os.preadv(fd, rest, start + count), batch)
        except EOFError:
            raise DamagedError(f"{self.path!r}: {name} is damaged: it ends before byte {at}") from None
        finally:
            os.close(fd)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._at(name))

    def remove_all(self, first: str = "") -> None:
        """Remove the folder, one of its files before all others. Of a link to a folder remove the link alone."""
        if os.path.islink(self.path):
            os.unlink(self.path)
            return
        self.remove([first] if first else [])
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes from writing into the folder, where the file system has locks."""
        self.make()
        with open(self._at(".lock"), "wb") as f, locked(f.fileno(), self.path):
            yield


@contextlib.contextmanager
def locked(fd: int, path: str) -> Iterator[None]:
    """Hold the lock of an open file or folder, where the file system has locks.

    Raises:
        CheckpointError: if another process holds it.
    """
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = "another process saves here; give each a folder, or mesh= if they are ranks of one run"
        raise CheckpointError(f"{path!r}: {text}") from None
    except OSError:
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a process that was forked meanwhile has the file, too, and keeps it open
            fcntl.flock(fd, fcntl.LOCK_UN)


def _begin_to_write(fd: int, start: int, numel: int) -> None:
    """Let the system write what it has of a file to the disk, without waiting for it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, numel, os.POSIX_FADV_DONTNEED)


def _batched(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split views into as many as one call of the system takes."""
    nonempty = [v for v in views if len(v)]
    for i in range(0, len(nonempty), _VECTORS):
        yield nonempty[i : i + _VECTORS]


def _finish(call: Any, views: list[memoryview]) -> int:
    """Call the system until all bytes are moved, which it may do in parts: 2 GiB at most at once on Linux."""
    total = 0
    while views:
        count = call(views, total)
        if not count:
            raise EOFError
        total += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
    return total
