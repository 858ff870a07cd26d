"""Saving and loading through torch.distributed.checkpoint: what is checked before, and what its errors become."""

import os
import pickle
import secrets
import warnings
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fzero import tree
from fzero._torch import unpickled_metadata
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import agree, all_or_none, check_same
from fzero.checkpoint._empty import made_of
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._holdings import holdings, is_whole
from fzero.checkpoint._manifest import MANIFEST, Manifest
from fzero.checkpoint._save import TIMEOUT
from fzero.dcp._names import Name, keys_of, names_of
from fzero.dcp._planners import LoadPlanner, Reader, SavePlanner
from fzero.ranks.mesh import Mesh

__all__ = ["load", "save"]

_METADATA = ".metadata"  # DCP's, which it writes last


@api_boundary
def save(path: Any, values: Any, mesh: Mesh | None = None, *, name: Name | None = None) -> None:
    """Save a tree, in any layout, as torch.distributed.checkpoint does. All ranks of the mesh call it.

    Any program that uses DCP reads the leaves by their paths: `{"model": params}` as `{"model": module.state_dict()}`.
    Tied leaves are written once for each place. For fzero alone take `fzero.save`, which checks sums.

    Args:
        path: a folder of a file system, in which there is no checkpoint yet.
        values: the tree, as `fzero.save` takes it.
        mesh: the ranks; None for a tree without boxes in one process.
        name: returns the name that a leaf has there, given its path; the path itself if it is None.

    Raises:
        CheckpointError: on all ranks, if any fails, the ranks' trees differ, or there is a checkpoint in the folder.
        ValueError: if two leaves have one name, or a box was cut for another mesh. Names the path.
        TypeError: if a leaf can be no part of a checkpoint. The message names its path.
        DonatedError: if a leaf was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.dcp.save(folder, {"model": {"w": torch.arange(3.0)}, "step": 7})
        >>> fzero.dcp.load(folder, like={"model": {"w": torch.zeros(3)}, "step": 0})
        {'model': {'w': tensor([0., 1., 2.])}, 'step': 7}
    """
    folder = _folder(path)
    planners: list[SavePlanner] = []

    def prepare() -> bytes:
        mine = holdings("the tree", values, mesh)
        planners.append(SavePlanner(mine, names_of(mine.cut, name), keys_of(values, mine.origins)))
        there = [file for file in (_METADATA, MANIFEST) if os.path.exists(os.path.join(folder, file))]
        if there:  # DCP would overwrite it file by file, and a kill between two leaves a mixture of both
            raise CheckpointError(
                f"{folder!r} holds a checkpoint ({there[0]}): save to a folder of its own, or remove it"
            )
        return f"{folder}\n".encode() + Manifest("", mine.cut, (), 0.0).text()

    agree("dcp.save", prepare, secrets.token_hex(8), mesh, TIMEOUT)
    writer = FileSystemWriter(folder, overwrite=False)
    _run(f"nothing was saved to {folder!r}", dcp_save, mesh, storage_writer=writer, planner=planners[0])


@api_boundary
def load(path: Any, like: Any, mesh: Mesh | None = None, *, partial: bool = False, name: Name | None = None) -> Any:
    """Read what torch.distributed.checkpoint saved into a tree, in any layout. All ranks of the mesh call it.

    Of pickles only DCP's own classes and values of torch.load(weights_only=True) are read: no code of the files runs.

    Args:
        path: the folder.
        like: a tree with the names, shapes and dtypes of what was saved, in the layout that the result is to have.
            Its tensors are overwritten, and become the result's. Of tensors on the meta device memory is made.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        partial: whether the checkpoint may have leaves that `like` has not, such as the optimizer's.
        name: returns the name that a leaf has there, given its path; the path itself if it is None.

    Returns:
        The tree. Values that are no tensors are the checkpoint's. Tied leaves are read from the first of their names.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, or it has other leaves; names the first three. Also
            if its files cannot be read; then `like` may hold parts of it.
        ValueError: if two leaves have one name, or a box was cut for another mesh. Names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=2)
        >>> fzero.dcp.save(folder, {"model": {"w": torch.arange(3.0)}, "step": 7})  # or an FSDP2 program
        >>> cut = mesh.spmd(fzero.partition)({"weights": torch.empty(3)})
        >>> renamed = lambda path: path.replace("weights", "model.w")
        >>> fzero.dcp.load(folder, like=cut, mesh=mesh, partial=True, name=renamed)["weights"].data
        tensor([[0., 1.],
                [2., 0.]])
    """
    folder = _folder(path)
    prepared: list[tuple[Any, LoadPlanner, dict[str, str]]] = []

    def prepare() -> None:
        metadata = _read_metadata(folder)
        made = made_of(like, mesh)
        mine = holdings("like", made, mesh)
        names = names_of(mine.cut, name)
        prepared.append((made, LoadPlanner(folder, mine, names, metadata, partial), names))

    all_or_none(f"loading {folder!r}", prepare, mesh)
    made, planner, names = prepared[0]
    check_same(f"loading {folder!r}", repr(names).encode(), mesh)
    reader = Reader(folder, planner.metadata)
    _run(f"{folder!r} could not be read", dcp_load, mesh, storage_reader=reader, planner=planner)
    paths, entries, structure = tree.flatten_with_paths(made, is_whole)
    values = planner.values()
    return tree.unflatten(structure, [values.get(p, x) for p, x in zip(paths, entries, strict=True)])


def _folder(path: Any) -> str:
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "://" in text:
        raise TypeError(f"path={path!r}: expected the path of a folder of a file system")
    return os.path.abspath(text)


def _run(what: str, f: Callable[..., Any], mesh: Mesh | None, **options: Any) -> None:
    """Call a function of DCP, on all ranks of a mesh or in this process alone.

    Raises:
        CheckpointError: if it fails on any rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            f({}, no_dist=mesh is None or not mesh.distributed, **options)
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        text = " ".join(str(first).split())
        text = text if isinstance(first, CheckpointError) else f"{type(first).__name__}: {text}"
        raise CheckpointError(f"{what}: rank {rank}: {text}") from error


def _read_metadata(folder: str) -> Metadata:
    try:
        with open(os.path.join(folder, _METADATA), "rb") as f:
            return unpickled_metadata(f.read())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder!r} is no checkpoint of DCP: it has no file {_METADATA}") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{folder!r}: {_METADATA} is damaged, or not of DCP: {error}") from None
