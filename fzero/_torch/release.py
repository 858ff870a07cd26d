"""Private torch APIs about waits: which errors are those of a broken connection, and how waits end early.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_release.py` shows which.
"""

import contextlib
import datetime
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["is_connection_error", "release_waits"]

# Texts of gloo's errors, which are RuntimeErrors: each has its source file's path, but the second.
_GLOO = ("gloo/transport", "Application timeout caused pair closure", "Gloo connectFullMesh failed")
_TAG = 1 << 22  # of a message that nobody sends


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error is that of a connection to another rank, or of a wait for one."""
    if isinstance(error, dist.DistError):  # NCCL's, and those of stores
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO)


def release_waits(store: Any) -> None:
    """End all waits of this process for other ranks: each raises an error, now and later.

    gloo closes a group's connections when one wait runs into its timeout. So here one waits for a message that nobody
    sends, a millisecond long. NCCL's communicators are aborted. The connection to the world's store is shut down.
    """
    _shut_down(store)
    for group in list(distributed_c10d._world.pg_map):
        if group.size() < 2:
            continue
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            if backend.name() == "gloo":
                _time_out(backend)
            else:
                backend.abort()


def _shut_down(store: Any) -> None:
    """Shut down this process's connections to the port of a store."""
    while isinstance(store, dist.PrefixStore):  # pyright: ignore[reportPrivateImportUsage]
        store = store.underlying_store
    port = getattr(store, "port", None)  # a store of files has none
    if not port or not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.type == socket.SOCK_STREAM and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)


def _time_out(backend: Any) -> None:
    """Let one wait of a group run into its timeout. A connection that is closed already raises another error."""
    for i in range(1, backend.size()):
        try:
            work = backend.recv([torch.zeros(1, device="cpu")], (backend.rank() + i) % backend.size(), _TAG)
            work.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
