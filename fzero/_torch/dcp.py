"""Private names of torch.distributed.checkpoint: what its metadata is pickled of, so that nothing else is unpickled.

All of these were seen on torch 2.11 and 2.13. `tests/_torch/test_dcp.py` says which one broke when torch changes.
"""

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["unpickled_metadata"]

_DCP = "torch.distributed.checkpoint."
_KNOWN = {
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
    # the folder that it was saved to
    *[(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")],
}


class _Unpickler(pickle.Unpickler):
    """Unpickles numbers, containers and the classes of DCP's metadata, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and (module, name) in _KNOWN:
            return _path
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of DCP's metadata")


def _path(*parts: str) -> str:
    return "/".join(parts)


def unpickled_metadata(data: bytes) -> "Metadata":
    """Unpickle a file `.metadata` of torch.distributed.checkpoint, which torch does with a bare `pickle.load`.

    Raises:
        pickle.UnpicklingError: if it is none, or asks for a class or function that is no part of such metadata.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(found).__name__}, expected Metadata")
    return found
