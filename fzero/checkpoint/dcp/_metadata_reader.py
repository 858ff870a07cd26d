"""A checkpoint's metadata is read first, and bounds what torch then reads of its files."""

import pickle
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from fzero._torch import load_metadata
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._files import LocalFolder

__all__ = ["METADATA", "CheckedReader", "read_metadata"]


class CheckedReader(FileSystemReader):
    """Reads the files of a checkpoint whose metadata has been read."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata, self._files = metadata, LocalFolder(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        for item in plan.items:
            info = self.storage_data.get(item.storage_index)
            if info is None:
                raise CheckpointError(f"{METADATA} does not say in which file {item.storage_index.fqn!r} is")
            size = self._files.size(info.relative_path)
            if size is None or info.offset + info.length > size:  # else torch reserves memory as the metadata says
                problem = "is missing" if size is None else f"has {size:,} bytes of {info.offset + info.length:,}"
                raise CheckpointError(f"{info.relative_path} {problem}; it holds {item.storage_index.fqn!r}")
        return super().read_data(plan, planner)


METADATA = ".metadata"  # the file that DCP writes last
_MAX_METADATA_BYTES = 1 << 30


def read_metadata(folder: str) -> Metadata:
    """Read the metadata of a folder of DCP.

    Raises:
        CheckpointError: if the folder holds none, or it is damaged.
    """
    try:
        files = LocalFolder(folder)
        size = files.size(METADATA) or 0
        if size > _MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{folder!r}: {METADATA} has {size:,} bytes: expected at most {_MAX_METADATA_BYTES:,}"
            )
        return load_metadata(files.get(METADATA))
    except FileNotFoundError:
        raise CheckpointError(f"{folder!r} is not a checkpoint of DCP: it has no file {METADATA}") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder!r}: {METADATA} is damaged, or not DCP's: {error}") from None
