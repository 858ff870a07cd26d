"""The folder of a checkpoint's files: the interface, and a local folder."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from fzero._arguments import check_path
from fzero._torch.types import StrPath
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._object_store import Remote

__all__ = ["Files", "LocalFolder", "files_at", "hold_lock"]


# no such file: also a link to itself, a name that no file can have, and a socket
_MISSING_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
_MAX_BUFFERS = 1024  # of one system call
_MAX_UNFLUSHED_BYTES = 1 << 24  # written before the system is told to flush them


class Files(Protocol):
    """The files in one folder, by name. A name contains no separator."""

    path: str
    common_name: str  # the same on all ranks
    is_shared: bool  # whether rank 0 sees the files that other ranks wrote

    def names(self) -> list[str]:
        """List the files in the folder; none if there is no folder."""
        ...

    def folders(self) -> list[str]:
        """List the subfolders."""
        ...

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        ...

    def free(self) -> int | None:
        """Return the free bytes for new files; None if the number is unknown."""
        ...

    def get(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            FileNotFoundError: if there is no such file.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically: a reader finds the old file or the new one. It is durable on return."""
        ...

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file, part by part. It is durable on return."""
        ...

    def read_into(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views in turn with the bytes of a file from `offset` on.

        Raises:
            CheckpointError: if the file is missing, or too short.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they exist."""
        ...

    def remove_all(self, first_name: str = "") -> None:
        """Remove the folder, the file `first_name` before all others. If the folder is a link, remove only the link."""
        ...

    def exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Keep other processes from writing into the folder, if the file system has locks.

        Raises:
            CheckpointError: if another process holds the folder.
        """
        ...

    def subfolder(self, name: str) -> "Files":
        """Return the files of a subfolder."""
        ...


def files_at(path: StrPath, name: str = "path", call: str = "") -> Files:
    """Return the files of a folder, given its path or a URL that fsspec supports, such as `"s3://bucket/run"`.

    Args:
        path: the path or URL.
        name: the name of the user's argument.
        call: the user's call in the order of its arguments.

    Raises:
        TypeError: if `path` is no path.
        ValueError: if `path` is empty.
    """
    text = check_path(name, path, "the path of a folder, or a URL such as 's3://bucket/run'", call)
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("file", "local"):
        return Remote(text)
    return LocalFolder(rest if separator else text)


class LocalFolder:
    """A folder on this machine, or on a file system that all machines of a run mount."""

    is_shared = True

    def __init__(self, path: str) -> None:
        self.path = self.common_name = os.path.abspath(os.path.expanduser(path))

    def _path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def subfolder(self, name: str) -> "LocalFolder":
        """Return the files of a subfolder."""
        return LocalFolder(self._path_of(name))

    def names(self) -> list[str]:
        """List the files in the folder; none if there is no folder."""
        return [e.name for e in self._list_entries() if e.is_file()]

    def folders(self) -> list[str]:
        """List the subfolders."""
        return [e.name for e in self._list_entries() if e.is_dir()]

    def _list_entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                return sorted(entries, key=lambda e: e.name)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError(f"{self.path!r} is a file: expected a folder") from None

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        try:
            status = os.stat(self._path_of(name))
        except UnicodeEncodeError:
            return None
        except OSError as error:
            if error.errno in _MISSING_ERRORS:
                return None
            raise
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def free(self) -> int | None:
        """Return the free bytes on the disk of the folder, or of its nearest existing parent."""
        path = self.path
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return shutil.disk_usage(path).free

    def get(self, name: str) -> bytes:
        """Read a small file."""
        with open(self._open_file(name), "rb") as f:
            return f.read()

    def _open_file(self, name: str) -> int:
        """Open a plain file to read it. A pipe in its place would wait for ever, and a device would never end.

        Raises:
            FileNotFoundError: if there is no such file, or it is not a plain one.
        """
        try:
            fd = os.open(self._path_of(name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _MISSING_ERRORS:
                raise FileNotFoundError(error.errno, error.strerror, name) from None
            raise
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "not a plain file", name)

    def make(self) -> None:
        """Make the folder and its parents."""
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{self.path!r} is a file, or lies below one: expected a folder") from None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically: write a temporary file, make it durable, and rename it."""
        self.make()
        with open(self._path_of(f".{name}.tmp"), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.rename(self._path_of(f".{name}.tmp"), self._path_of(name))
        self.sync()

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file part by part, without a copy."""
        self.make()
        with open(self._path_of(name), "xb", buffering=0) as f:
            fd, offset, flush_start = f.fileno(), 0, 0
            for part in parts:
                for views in _write_batches(part):
                    offset += _repeat_until_moved(lambda rest, _: os.writev(fd, rest), views)
                # flushing from now on, not at the end, saves a fifth of a save's time
                if offset - flush_start >= _MAX_UNFLUSHED_BYTES:
                    _start_writeback(fd, flush_start, offset - flush_start)
                    flush_start = offset
            os.fsync(fd)
        self.sync()

    def sync(self) -> None:
        """Make the names in the folder durable."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_into(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views in turn with the bytes of a file from `offset` on."""
        try:
            fd = self._open_file(name)
        except FileNotFoundError:
            raise DamagedError(f"{self.path!r}: {name} is missing") from None
        try:
            for batch in _write_batches(views):
                offset += _repeat_until_moved(
                    lambda rest, count, start=offset: os.preadv(fd, rest, start + count), batch
                )
        except EOFError:
            raise DamagedError(f"{self.path!r}: {name} is damaged: it ends before byte {offset}") from None
        finally:
            os.close(fd)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they exist."""
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._path_of(name))

    def remove_all(self, first_name: str = "") -> None:
        """Remove the folder, the file `first_name` before all others. If the folder is a link, remove only the link."""
        if os.path.islink(self.path):
            os.unlink(self.path)
            return
        self.remove([first_name] if first_name else [])
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes from writing into the folder, if the file system has locks."""
        self.make()
        with open(self._path_of(".lock"), "wb") as f, hold_lock(f.fileno(), self.path):
            yield


@contextlib.contextmanager
def hold_lock(fd: int, path: str) -> Iterator[None]:
    """Hold the lock of an open file or folder, if the file system has locks.

    Raises:
        CheckpointError: if another process holds the lock.
    """
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = "another process saves here: give each process its own folder, or mesh= if they are ranks of one run"
        raise CheckpointError(f"{path!r}: {text}") from None
    except OSError:
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a process forked meanwhile also has the file open, and would keep the lock
            fcntl.flock(fd, fcntl.LOCK_UN)


def _start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Ask the system to write a range of a file to the disk, without waiting."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def _write_batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split views into batches, each small enough for one system call."""
    nonempty = [v for v in views if len(v)]
    for i in range(0, len(nonempty), _MAX_BUFFERS):
        yield nonempty[i : i + _MAX_BUFFERS]


def _repeat_until_moved(call: Any, views: list[memoryview]) -> int:
    """Repeat a system call until all bytes are moved. One call may move fewer: at most 2 GiB on Linux."""
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
