"""Find the processes of the world: torchrun's, Slurm's, or those of an existing process group.

fzero launches nothing. `docs/launch.md` describes how to launch with torchrun and srun.
"""

import datetime
import os
import re
import time
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import (
    DistNetworkError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from fzero._liveness import HeartbeatClient, current_heartbeat, register_heartbeat, start_heartbeat
from fzero._notice import trouble_link
from fzero._torch import default_store
from fzero.ranks._rendezvous import MissingRankError, rendezvous, store_patience

__all__ = ["TIMEOUT", "World", "check_timeout", "connect_store", "find_device", "find_world", "join"]


TIMEOUT = 300.0  # seconds
_RETRY_SECONDS = 0.1  # before the next try to reach rank 0

_PROCESS_OF: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""The process that first used each default group. A forked child inherits its parent's group and connections."""


class World(NamedTuple):
    """This process's rank among the processes that were launched together, and the address where they meet.

    Attributes:
        rank: 0 to size - 1.
        size: the number of processes.
        local_rank: this process's rank among the processes of its host, and the number of its accelerator.
        address: the address of the rendezvous, "host:port"; "" if the process group exists already.
    """

    rank: int
    size: int
    local_rank: int
    address: str


def find_world() -> World | None:
    """Find the processes that were launched together with this process; None if it was launched alone."""
    if not torch.distributed.is_available():
        return None
    env = os.environ
    local = _read_number("LOCAL_RANK", _read_number("SLURM_LOCALID", 0))
    if torch.distributed.is_initialized():
        return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), local, "")
    if "RANK" in env and _read_number("WORLD_SIZE", 1) > 1 and "MASTER_ADDR" not in env:
        raise ValueError(f"RANK and WORLD_SIZE={env['WORLD_SIZE']} are set, but MASTER_ADDR is not: set all or none")
    if all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        rank, size = _read_number("RANK", 0), _read_number("WORLD_SIZE", 1)
        if rank >= size:
            raise ValueError(f"RANK={rank} and WORLD_SIZE={size}: ranks are 0 to WORLD_SIZE - 1")
        return World(rank, size, local, f"{env['MASTER_ADDR']}:{_read_number('MASTER_PORT', 29500)}")
    # srun sets it for the tasks of a step; a batch script, which is one process, does not have it
    size = _read_number("SLURM_STEP_NUM_TASKS", 1)
    if size > 1 and "SLURM_PROCID" in env:
        return World(_read_number("SLURM_PROCID", 0), size, local, _slurm_address())
    return None


def _read_number(name: str, default: int) -> int:
    """Read an environment variable that holds a number, 0 or more."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\s*\d+\s*", text, re.ASCII):
        raise ValueError(f"{name}={text!r}: expected a number, 0 or more")
    return int(text)


def _slurm_address() -> str:
    """Return the address where a Slurm step's tasks meet: its first host, and a port derived from the job's number."""
    env = os.environ
    host = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
    number = _read_number("SLURM_JOB_ID", 0) + _read_number("SLURM_STEP_ID", 0)
    port = env.get("MASTER_PORT") or 20000 + number % 10000
    return f"{host}:{port}"


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: "gpu[07-09,12]" is gpu07, gpu08, gpu09 and gpu12."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r}: expected host names; set MASTER_ADDR to the first host")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group())


def find_device(device: str | None, world: World | None) -> torch.device:
    """Return the device of this process's ranks, which `torch.accelerator` knows.

    Args:
        device: "cpu", "meta", or the type of this machine's accelerator; None for the accelerator if there is one. A
            process group that exists already and cannot use the accelerator keeps to the CPU.
        world: the result of `find_world`. A process of a new world takes the accelerator of its local rank; any other
            process takes torch's current one.

    Raises:
        ValueError: if `device` is anything else, or names an accelerator that torch does not see.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if device not in (None, "cpu", "meta", kind):
        count = torch.accelerator.device_count()
        available = "no accelerator" if kind == "cpu" else f"{count} device{'s' * (count != 1)} of type {kind!r}"
        choices = '"cpu"' if kind == "cpu" else f'"cpu" or "{kind}"'
        raise ValueError(
            f"device={device!r}: expected {choices}, since torch sees {available} here; leave device out to use an "
            "accelerator where there is one: each process takes the one of its LOCAL_RANK"
        )
    if (
        device == "meta"
        or kind == "cpu"
        or device == "cpu"
        or (device is None and world is not None and not _can_use(kind, world))
    ):
        return torch.device(device or "cpu")
    if world is not None and world.address:
        return torch.device(kind, world.local_rank % torch.accelerator.device_count())
    return torch.device(kind, torch.accelerator.current_device_index())


def _can_use(kind: str, world: World) -> bool:
    """Return whether a world's processes can communicate on accelerators of a type."""
    if world.address:
        return torch.distributed.Backend.default_device_backend_map.get(kind, "gloo") != "gloo"
    backends = dict(pair.split(":") for pair in torch.distributed.get_backend_config().split(","))
    return backends.get(kind, "gloo") != "gloo"


def check_timeout(timeout: float | None) -> None:
    """Check that a timeout is a valid number of seconds, or None.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is not above 0 and below 1e9.
    """
    if timeout is None:
        return
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"timeout={timeout!r}: expected a number of seconds, or None for no heartbeats")
    if not 0 < timeout < 1e9:  # also refuses nan
        raise ValueError(f"timeout={timeout!r}: expected seconds, above 0 and below 1e9")


def join(world: World, device: torch.device, timeout: float | None = TIMEOUT) -> None:
    """Wait for the other processes of the world, and create the default process group. Start this rank's heartbeat.

    Args:
        world: the result of `find_world`.
        device: the process's device; torch names the backend of its type. Tensors on the CPU use gloo.
        timeout: how long to wait for the other processes at most, in seconds; None for no heartbeat.

    Raises:
        RuntimeError: if a process does not arrive in time (the message names its rank), or if this process was forked
            from a rank.
    """
    heartbeat = None
    if world.address:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        store = _open_store(world, TIMEOUT if timeout is None else timeout)
        store.set_timeout(datetime.timedelta(seconds=store_patience(TIMEOUT if timeout is None else timeout)))
        heartbeat = _start_heartbeat(world, store, timeout)
        store.set_timeout(datetime.timedelta(minutes=30))  # torch's default, for later uses of the store
        of_device = torch.distributed.get_default_backend_for_device(device)
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{of_device}"
        torch.distributed.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    group = torch.distributed.group.WORLD
    if group is not None and _PROCESS_OF.setdefault(group, os.getpid()) != os.getpid():
        raise RuntimeError(
            f"this process was forked from rank {world.rank} and has its connections, which only one process can use: "
            'start it with the method "spawn" or "forkserver", or create no mesh in it'
        )
    is_real = group is not None and torch.distributed.get_backend(group) not in ("fake",)  # that one has no ranks
    if not world.address and is_real and current_heartbeat() is None:
        heartbeat = _start_heartbeat(world, PrefixStore("fzero", default_store()), timeout)
    if heartbeat is not None:
        register_heartbeat(heartbeat, group)


def _start_heartbeat(world: World, store: Store, timeout: float | None) -> HeartbeatClient | None:
    """Start this rank's heartbeat, if there are other ranks and it is wanted."""
    if timeout is None or world.size == 1:
        return None
    address = world.address.rpartition(":")[0] or os.environ.get("MASTER_ADDR", "")
    return start_heartbeat(store, world.rank, world.size, address, timeout)


def _open_store(world: World, timeout: float) -> Store:
    """Open the world's store, and wait there for the other processes.

    All later keys, also those of process groups, get a prefix that only this world has.
    """
    count = f"{world.size} process{'es' * (world.size > 1)}"
    meeting = f"{count} should meet at {world.address}; launch them together, or free the port{trouble_link('a-hang')}"
    seconds = store_patience(timeout)
    end = time.monotonic() + seconds
    while True:
        remaining = max(end - time.monotonic(), _RETRY_SECONDS)
        try:
            store = connect_store(world, remaining)
            return PrefixStore(rendezvous(store, world.rank, world.size, timeout), store)
        except MissingRankError as error:
            raise RuntimeError(f"{error} within {seconds:g} s: {meeting}") from error
        except DistNetworkError as error:
            if world.rank == 0:
                raise RuntimeError(f"rank 0 could not open a store: {meeting}") from error
            if time.monotonic() >= end:
                raise RuntimeError(f"rank {world.rank} did not reach rank 0 within {seconds:g} s: {meeting}") from error
            time.sleep(_RETRY_SECONDS)  # rank 0 of an earlier world was ending


def connect_store(world: World, timeout: float) -> Store:
    """Connect to torchrun's store, if its agent serves one; else rank 0 serves a store for all ranks."""
    host, _, port = world.address.rpartition(":")
    is_master = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = datetime.timedelta(seconds=timeout)
    return TCPStore(host, int(port), None, is_master, limit, wait_for_workers=False, multi_tenant=True)
