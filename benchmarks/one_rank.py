"""One rank of a world whose other ranks do not exist, as far as memory and its own work go.

torch's "fake" backend sends nothing: what would arrive is whatever lies in the buffer. So the numbers that are trained
mean nothing; the bytes that are allocated, and the operations that run, are those of a real rank.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

import fzero

__all__ = ["alone"]


@contextmanager
def alone(backend: str = "fake", **axes: Any) -> Iterator[fzero.ranks.Mesh]:
    """Make this process rank 0 of a mesh. The ranks that do not exist say what this one says.

    Args:
        backend: of the process group; "cpu:fake,cuda:nccl" issues NCCL's collectives, which only the CUDA without a
            GPU (tests/cuda) lets return.
        **axes: the axes of the mesh and their sizes.
    """
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=math.prod(axes.values()))
    gather_texts = fzero.ranks.gather_texts
    _replace_gather_texts(lambda mine, mesh, *_, **__: [mine] * mesh.size)
    try:
        yield fzero.mesh(simulate=False, **axes)
    finally:
        _replace_gather_texts(gather_texts)
        dist.destroy_process_group()


def _replace_gather_texts(f: Callable[..., list[str]]) -> None:
    """Replace what asks all ranks by the store, in each module of fzero that uses it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fzero") and hasattr(module, "gather_texts"):
            module.gather_texts = f  # pyright: ignore[reportAttributeAccessIssue]
