"""Private classes of torch.distributed.checkpoint that its metadata may contain; nothing else is unpickled.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_dcp.py` shows which.
"""

import io
import pickle
from typing import TYPE_CHECKING, Any

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


class _Unpickler(pickle.Unpickler):
    """Unpickles numbers, containers and the classes of DCP's metadata, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and (module, name) in _ALLOWED:
            return _path
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of DCP's metadata")


def _path(*parts: str) -> str:
    return "/".join(parts)


def load_metadata(data: bytes) -> "Metadata":
    """Unpickle a file `.metadata` of torch.distributed.checkpoint safely; torch itself uses a bare `pickle.load`.

    Raises:
        pickle.UnpicklingError: if the data is no such file, or asks for a class or function that such files do not
            contain.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}, expected Metadata")
    return metadata
