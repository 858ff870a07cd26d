"""A folder in an object store, through fsspec."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from fzero.checkpoint._error import CheckpointError, DamagedError

__all__ = ["Remote"]


class Remote:
    """A folder in an object store, through fsspec. One PUT commits."""

    is_shared = True

    def __init__(self, path: str) -> None:
        import fsspec

        self.path = self.common_name = path.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.path)
        except (ImportError, ValueError) as error:  # the store needs a package, or is unknown
            raise CheckpointError(f"{self.path!r}: {error}") from error

    def _path_of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def subfolder(self, name: str) -> "Remote":
        """Return the files of a subfolder."""
        return Remote(f"{self.path}/{name}")

    def _list_entries(self, kind: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted([e["name"].rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == kind])

    def names(self) -> list[str]:
        """List the files in the folder; none if there is no folder."""
        return self._list_entries("file")

    def folders(self) -> list[str]:
        """List the subfolders."""
        return self._list_entries("directory")

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""
        try:
            return self._fs.info(self._path_of(name))["size"]
        except FileNotFoundError:
            return None

    def free(self) -> None:
        """Return None: a store is never full."""

    def get(self, name: str) -> bytes:
        """Read a small file."""
        return self._fs.cat_file(self._path_of(name))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file in one request."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(self._path_of(name), data)

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file, part by part."""
        self._fs.makedirs(self._root, exist_ok=True)
        with self._fs.open(self._path_of(name), "wb") as f:
            for part in parts:
                for view in part:
                    f.write(view)

    def read_into(self, name: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill the views in turn with the bytes of a file from `offset` on."""
        numel = sum(len(v) for v in views)
        try:
            data = self._fs.cat_file(self._path_of(name), start=offset, end=offset + numel)
        except FileNotFoundError:
            raise DamagedError(f"{self.path!r}: {name} is missing") from None
        if len(data) != numel:
            raise DamagedError(f"{self.path!r}: {name} is damaged: it ends before byte {offset + numel}")
        view_start = 0
        for view in views:
            view[:] = data[view_start : view_start + len(view)]
            view_start += len(view)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, if they exist."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path_of(name))

    def remove_all(self, first_name: str = "") -> None:
        """Remove the folder, the file `first_name` before all others."""
        self.remove([first_name] if first_name else [])
        self.remove(self.names())
        with contextlib.suppress(OSError, NotImplementedError):  # the store may have no folders
            self._fs.rmdir(self._root)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Do nothing: a store has no locks."""
        yield
