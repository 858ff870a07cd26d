"""Private classes of torch.distributed.checkpoint that its metadata may contain; nothing else is unpickled.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_dcp.py` shows which.
"""

import enum
import io
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["load_metadata"]

_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    *[
        (f"{_DCP}metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ],
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # the folder of the checkpoint
    *[(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")],
}


_MAX_PATH_LETTERS = 4096


_Python: Any = pickle._Unpickler  # pyright: ignore


class _Unpickler(_Python):
    """Unpickles numbers, containers and the classes of DCP's metadata, and calls nothing else.

    The one in C fills a table as long as a file says, and sets attributes of classes and functions, too.
    """

    dispatch: ClassVar[dict[int, Any]] = {op: f for op, f in _Python.dispatch.items() if op != pickle.BYTEARRAY8[0]}

    def load_build(self) -> None:
        kind = type(self.stack[-2])
        if not kind.__module__.startswith(_DCP) or issubclass(kind, enum.Enum):  # what the process shares
            raise pickle.UnpicklingError(f"it sets attributes of a {kind.__name__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and (module, name) in _ALLOWED:
            return _joined_path
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of DCP's metadata")


def _joined_path(*parts: str) -> str:
    if sum(len(part) + 1 for part in parts) > _MAX_PATH_LETTERS:  # each call may double what the last one made
        raise pickle.UnpicklingError("it holds a path that is too long")
    return "/".join(parts)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise pickle.UnpicklingError(reason)


def _check_metadata(metadata: "Metadata") -> None:
    """Check that each field has its type, that chunks lie in their leaves, and that files lie in the folder."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

    for name, entry in metadata.state_dict_metadata.items():
        _require(type(name) is str, f"{str(name)[:40]!r} is not a name")
        if isinstance(entry, TensorStorageMetadata):
            _require(isinstance(entry.properties.dtype, torch.dtype), f"leaf {name!r} has no dtype")
            _require(_is_size(entry.size), f"leaf {name!r} has no shape")
            for chunk in entry.chunks:
                _require(_is_chunk(chunk.offsets, chunk.sizes, entry.size), f"a chunk of {name!r} lies outside of it")
        else:
            _require(isinstance(entry, BytesStorageMetadata), f"{name!r} is neither a leaf nor a value")
    for index, info in metadata.storage_data.items():
        _require(isinstance(index, MetadataIndex) and isinstance(info, _StorageInfo), "it does not say where parts lie")
        path = info.relative_path
        is_inside = type(path) is str and path not in ("", ".", "..") and not any(c in path for c in "/\\\0")
        _require(is_inside, f"{index.fqn!r} is in {str(path)[:80]!r}: expected a file of the folder")
        _require(_is_count(info.offset) and _is_count(info.length), f"{index.fqn!r} lies at no range of bytes")


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 1 << 48


def _is_size(x: Any) -> bool:
    return isinstance(x, torch.Size) and all(map(_is_count, x))


def _is_chunk(offsets: Any, sizes: Any, size: torch.Size) -> bool:
    if not (_is_size(offsets) and _is_size(sizes) and len(offsets) == len(sizes) == len(size)):
        return False
    return all(a + n <= m for a, n, m in zip(offsets, sizes, size, strict=True))


def load_metadata(data: bytes) -> "Metadata":
    """Unpickle a file `.metadata` of torch.distributed.checkpoint safely; torch itself uses a bare `pickle.load`.

    Raises:
        pickle.UnpicklingError: if the data is no such file, or asks for a class or function that such files do not
            contain.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        if isinstance(metadata, Metadata):
            _check_metadata(metadata)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}, expected Metadata")
    return metadata
