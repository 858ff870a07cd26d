"""Saving and loading in the format of torch.distributed.checkpoint (DCP), with checks before and clear errors after."""

import os
import secrets
import warnings
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fzero import tree
from fzero._arguments import check_path
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary
from fzero.checkpoint._agree import agree, all_or_none, check_same_on_ranks
from fzero.checkpoint._error import CheckpointError
from fzero.checkpoint._read_memory import materialize
from fzero.checkpoint._save import TIMEOUT
from fzero.checkpoint.dcp._leaf_names import NameMap, list_keys, name_leaves
from fzero.checkpoint.dcp._metadata_reader import METADATA, CheckedReader, read_metadata
from fzero.checkpoint.dcp._planners import LoadPlanner, SavePlanner
from fzero.checkpoint.layout import MANIFEST, is_entry, layout_text, local_tree
from fzero.ranks import Mesh
from fzero.tree import Tree

__all__ = ["load", "save"]


@api_boundary
def save(path: StrPath, values: Tree, mesh: Mesh | None = None, *, name: NameMap | None = None) -> None:
    """Save a tree, in any layout, in the format of torch.distributed.checkpoint (DCP). All ranks of the mesh call it.

    Any program that uses DCP reads the leaves by their paths: `{"model": params}` as `{"model": module.state_dict()}`.
    A tied leaf is written at each of its paths. If only fzero reads it, prefer `fzero.save`, which writes checksums.

    Args:
        path: a folder on a file system, without a checkpoint in it.
        values: the tree, as `fzero.save` takes it.
        mesh: the ranks; None for a tree without boxes in one process.
        name: maps a leaf's path to its name in the checkpoint; None to use the path.

    Raises:
        CheckpointError: on all ranks, if a rank fails, the ranks' trees differ, or the folder holds a checkpoint.
        ValueError: if two leaves have one name, or a box was sharded for another mesh. The message names the path.
        TypeError: if a checkpoint cannot hold a leaf. The message names its path.
        DonatedError: if a leaf was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> fzero.checkpoint.dcp.save(folder, {"model": {"w": torch.arange(3.0)}, "step": 7})
        >>> fzero.checkpoint.dcp.load(folder, like={"model": {"w": torch.zeros(3)}, "step": 0})
        {'model': {'w': tensor([0., 1., 2.])}, 'step': 7}
    """
    folder = _check_folder(path, "save(path, values)")

    def prepare() -> tuple[bytes, SavePlanner]:
        local = local_tree("the tree", values, mesh)
        planner = SavePlanner(local, name_leaves(local.layout, name), list_keys(values, local.sources))
        existing = [file for file in (METADATA, MANIFEST) if os.path.exists(os.path.join(folder, file))]
        if existing:  # DCP would overwrite it file by file, so that a kill meanwhile would leave a mixture of both
            raise CheckpointError(
                f"{folder!r} holds a checkpoint ({existing[0]}): save to a folder of its own, or remove it"
            )
        return f"{folder}\n".encode() + layout_text(local.layout), planner

    _, planner = agree("dcp.save", prepare, secrets.token_hex(8), mesh, TIMEOUT)
    writer = FileSystemWriter(folder, overwrite=False)
    _call_dcp(f"nothing was saved to {folder!r}", dcp_save, mesh, storage_writer=writer, planner=planner)


@api_boundary
def load(
    path: StrPath, like: Tree, mesh: Mesh | None = None, *, partial: bool = False, name: NameMap | None = None
) -> Tree:
    """Read a checkpoint of torch.distributed.checkpoint (DCP) into a tree, in any layout. All ranks call it.

    Only DCP's own classes and values that `torch.load(weights_only=True)` accepts are unpickled: no code in files runs.

    Args:
        path: the folder.
        like: a tree with the names, shapes and dtypes of the saved tree, in the layout that the result should have.
            Its tensors are overwritten and become the result's. Tensors on the meta device get new memory.
        mesh: the ranks that `like` lies on; None for a tree without boxes in one process.
        partial: whether the checkpoint may have leaves that `like` lacks, such as the optimizer's.
        name: maps a leaf's path to its name in the checkpoint; None to use the path.

    Returns:
        The tree. Its values that are not tensors come from the checkpoint. A tied leaf is read by its first name.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, or it has other leaves. The message names the first
            three. Also if its files cannot be read; `like` may then be partly overwritten.
        ValueError: if two leaves have one name, or a box was sharded for another mesh. The message names the path.
        DonatedError: if a leaf of `like` was donated.

    Example:
        >>> import fzero, tempfile, torch
        >>> folder, mesh = tempfile.mkdtemp(), fzero.mesh(dp=2)
        >>> fzero.checkpoint.dcp.save(folder, {"model": {"w": torch.arange(3.0)}, "step": 7})  # or an FSDP2 program
        >>> like = mesh.spmd(fzero.partition)({"weights": torch.empty(3)})
        >>> name = lambda path: path.replace("weights", "model.w")
        >>> fzero.checkpoint.dcp.load(folder, like=like, mesh=mesh, partial=True, name=name)["weights"].data
        tensor([[0., 1.],
                [2., 0.]])
    """
    folder = _check_folder(path, "load(path, like)")

    def prepare() -> tuple[Any, LoadPlanner, dict[str, str]]:
        metadata = read_metadata(folder)
        result = materialize(like, mesh)
        local = local_tree("like", result, mesh)
        names = name_leaves(local.layout, name)
        return result, LoadPlanner(folder, local, names, metadata, partial), names

    result, planner, names = all_or_none(f"loading {folder!r}", prepare, mesh)
    check_same_on_ranks(f"loading {folder!r}", repr(names).encode(), mesh)
    reader = CheckedReader(folder, planner.metadata)
    _call_dcp(f"{folder!r} could not be read", dcp_load, mesh, storage_reader=reader, planner=planner)
    paths, entries, structure = tree.flatten_with_paths(result, is_entry)
    values = planner.values()
    return tree.unflatten(structure, [values.get(p, x) for p, x in zip(paths, entries, strict=True)])


def _check_folder(path: StrPath, call: str) -> str:
    text = check_path("path", path, "the path of a folder", f"fzero.checkpoint.dcp.{call}")
    if "://" in text:
        raise ValueError(
            f"path={text!r} is a URL: expected a local folder; copy it, or use fzero.checkpoint, which takes URLs"
        )
    return os.path.abspath(text)


def _call_dcp(problem: str, f: Callable[..., Any], mesh: Mesh | None, **options: Any) -> None:
    """Call one of DCP's functions, on all ranks of a mesh or in this process alone.

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
        raise CheckpointError(f"{problem}: rank {rank}: {text}") from error
