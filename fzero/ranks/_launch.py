"""Which processes are the world: torchrun's, Slurm's, or those of a process group that exists already.

fzero launches nothing. `docs/launch.md` says how torchrun and srun do.
"""

import datetime
import os
import re
import secrets
import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed import (
    DistNetworkError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from fzero._notice import see

__all__ = ["TIMEOUT", "AbsentError", "World", "check_device", "check_timeout", "join", "shake_hands", "world_at_hand"]

# How the processes of a world find each other in a store that may hold what the dead have left there.
#
# torchrun's agent keeps one store for all generations of its workers, so a key may be of an earlier one. Therefore each
# rank says hello with a fresh number, and rank 0 answers it with a fresh number of its own, the world's. Only a rank 0
# that lives can answer a number that is new. Restart counts do not do: ranks can disagree on them (pytorch#135712).


PAUSE = 0.01  # seconds between two looks of rank 0


class AbsentError(RuntimeError):
    """A rank did not come to the meeting in time."""


def shake_hands(store: Any, rank: int, size: int, timeout: float) -> str:
    """Meet the other ranks in a store, and agree with them on a prefix that no other world has.

    Args:
        store: a `torch.distributed.Store`, whatever it holds already.
        rank: this process's rank.
        size: the number of ranks.
        timeout: for how many seconds rank 0 waits for the others, and they for rank 0.

    Returns:
        The prefix, the same on all ranks.

    Raises:
        AbsentError: on every rank that came, if one did not come in time. The message names it.
        DistNetworkError: if the store goes away meanwhile.
    """
    return _as_rank_0(store, size, timeout) if rank == 0 else _as_another(store, rank, timeout)


def _as_rank_0(store: Any, size: int, timeout: float) -> str:
    """Answer all who say hello until each of them has come, or the time is over; then tell all which it is."""
    world, end = f"fzero/{secrets.token_hex(8)}", time.monotonic() + timeout
    answered: dict[int, bytes] = {}
    absent = list(range(1, size))
    while absent:
        for rank in absent:
            _answer(store, rank, world, answered)
        absent = [rank for rank in absent if not store.check([f"{world}/arrived/{rank}"])]
        if absent and time.monotonic() > end:
            break
        time.sleep(PAUSE if absent else 0)
    store.set(f"{world}/absent", str(absent[0]) if absent else "")
    if absent:
        raise AbsentError(_absent(absent[0]))
    return world


def _answer(store: Any, rank: int, world: str, answered: dict[int, bytes]) -> None:
    """Answer a rank's hello, if there is one that is new; it may be of a rank that died, which does not hear it."""
    if store.check([f"fzero/hello/{rank}"]):
        hello = store.get(f"fzero/hello/{rank}")
        if answered.get(rank) != hello:
            store.set(f"fzero/answer/{hello.decode()}", world)
            answered[rank] = hello


def _as_another(store: Any, rank: int, timeout: float) -> str:
    """Say hello, and wait for the answer of rank 0; then it is rank 0 who knows when the time is over."""
    hello = secrets.token_hex(8)
    store.set(f"fzero/hello/{rank}", hello)
    world = _awaited(store, f"fzero/answer/{hello}", timeout, f"rank {rank} met no rank 0")
    store.set(f"{world}/arrived/{rank}", "")
    absent = _awaited(store, f"{world}/absent", 2 * timeout, f"rank {rank} lost rank 0, which did not say who is there")
    if absent:
        raise AbsentError(_absent(int(absent)))
    return world


def _awaited(store: Any, key: str, timeout: float, otherwise: str) -> str:
    """Wait for a key, and return its value.

    Raises:
        AbsentError: if it is not set in time. Says what `otherwise` says.
    """
    try:
        store.wait([key], datetime.timedelta(seconds=timeout))
    except DistNetworkError:  # the store is gone, not late
        raise
    except RuntimeError as error:
        raise AbsentError(otherwise) from error
    return store.get(key).decode()


def _absent(rank: int) -> str:
    return f"rank {rank} did not arrive"


TIMEOUT = 300.0  # seconds
AGAIN = 0.1  # seconds, before another try to reach rank 0

_PROCESS_OF: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""The process that each default group was first seen in: a forked child has its parent's group, and its connections."""


class World(NamedTuple):
    """This process's place among those that were launched together, and where they find each other.

    Attributes:
        rank: 0 to size - 1.
        size: the number of processes.
        local_rank: the place among those of this machine: the number of its GPU.
        place: where they meet, "host:port"; "" if they have met.
    """

    rank: int
    size: int
    local_rank: int
    place: str


def world_at_hand() -> World | None:
    """Find the processes that this one was launched with; None if it is alone."""
    if not torch.distributed.is_available():
        return None
    env = os.environ
    local = _number("LOCAL_RANK", _number("SLURM_LOCALID", 0))
    if torch.distributed.is_initialized():
        return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), local, "")
    if "RANK" in env and _number("WORLD_SIZE", 1) > 1 and "MASTER_ADDR" not in env:
        raise ValueError(f"RANK and WORLD_SIZE={env['WORLD_SIZE']} are set, and MASTER_ADDR is not: set all, or none")
    if all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        if rank >= size:
            raise ValueError(f"RANK={rank} and WORLD_SIZE={size}: ranks are 0 to WORLD_SIZE - 1")
        return World(rank, size, local, f"{env['MASTER_ADDR']}:{_number('MASTER_PORT', 29500)}")
    # set by srun for the tasks that it starts together; in a batch script, which is alone, there is none
    size = _number("SLURM_STEP_NUM_TASKS", 1)
    if size > 1 and "SLURM_PROCID" in env:
        return World(_number("SLURM_PROCID", 0), size, local, _slurm_place())
    return None


def _number(name: str, default: int) -> int:
    """Read a variable of the environment that is a number, 0 or more."""
    said = os.environ.get(name, str(default))
    if not re.fullmatch(r"\s*\d+\s*", said, re.ASCII):
        raise ValueError(f"{name}={said!r}: expected a number, 0 or more")
    return int(said)


def _slurm_place() -> str:
    """Choose where the tasks of a Slurm step meet: its first machine, at a port that follows from the job's number."""
    env = os.environ
    host = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
    number = _number("SLURM_JOB_ID", 0) + _number("SLURM_STEP_ID", 0)
    port = env.get("MASTER_PORT") or 20000 + number % 10000
    return f"{host}:{port}"


def _first_host(nodes: str) -> str:
    """Return the first machine of Slurm's list: "gpu[07-09,12]" is gpu07, gpu08, gpu09 and gpu12."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r}: expected names of machines; set MASTER_ADDR to the first")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found.group())


def check_device(device: str | None) -> None:
    """Check that a mesh can be on a device; None is for the one that there is.

    Raises:
        ValueError: if it is not "cpu" or "cuda", or if it is "cuda" and there is no GPU.
    """
    if device is None or device == "cpu":
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = f"torch sees {gpus or 'no'} GPU{'s' * (gpus != 1)} here"
    if device != "cuda":
        raise ValueError(
            f'device={device!r}: expected "cpu" or "cuda", and {here}; with "cuda" each process takes the GPU of its '
            "LOCAL_RANK, among those that CUDA_VISIBLE_DEVICES lists"
        )
    if not gpus:
        raise ValueError(
            f'device="cuda", and {here}: say device="cpu", or leave it out to take a GPU where there is one'
        )


def check_timeout(timeout: float) -> None:
    """Check that a timeout is a number of seconds that can be waited for.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is not above 0 and below 1e9.
    """
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        raise TypeError(f"timeout={timeout!r}: expected a number of seconds")
    if not 0 < timeout < 1e9:  # nan is neither
        raise ValueError(f"timeout={timeout!r}: expected seconds, above 0 and below 1e9")


def join(world: World, kind: str, timeout: float = TIMEOUT) -> None:
    """Meet the other processes of the world, and make the default process group.

    Args:
        world: as `world_at_hand` found it.
        kind: "cpu" or "cuda": gloo alone, or with nccl.
        timeout: how long to wait for the others, in seconds.

    Raises:
        RuntimeError: if some have not come by then. Names them. Or if the process was forked from a rank.
    """
    if world.place:
        if kind == "cuda":
            torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        store = _met(world, timeout)
        store.set_timeout(datetime.timedelta(minutes=30))  # torch's own, for all that follows
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    group = torch.distributed.group.WORLD
    if group is not None and _PROCESS_OF.setdefault(group, os.getpid()) != os.getpid():
        raise RuntimeError(
            f"this process was forked from rank {world.rank} and has its connections, which only one of them can use: "
            'start it with the method "spawn" or "forkserver", or make no mesh in it'
        )


def _met(world: World, timeout: float) -> Store:
    """Open the store through which the processes find each other, and meet them there.

    What is written in it later, by process groups too, has the prefix that this world has for itself.
    """
    count = f"{world.size} process{'es' * (world.size > 1)}"
    meeting = f"{count} should meet at {world.place}; launch them together, or free the port{see('a-hang')}"
    end = time.monotonic() + timeout
    while True:
        left = max(end - time.monotonic(), AGAIN)
        try:
            store = _store(world, left)
            return PrefixStore(shake_hands(store, world.rank, world.size, left), store)
        except AbsentError as error:
            raise RuntimeError(f"{error} within {timeout:g} s: {meeting}") from error
        except DistNetworkError as error:
            if world.rank == 0:
                raise RuntimeError(f"rank 0 could open no store: {meeting}") from error
            if time.monotonic() >= end:
                raise RuntimeError(f"rank {world.rank} met no rank 0 within {timeout:g} s: {meeting}") from error
            time.sleep(AGAIN)  # a rank 0 of an earlier world was leaving


def _store(world: World, timeout: float) -> Store:
    """Connect to torchrun's own store, if it keeps one; else rank 0 keeps one, and the others connect to that."""
    host, _, port = world.place.rpartition(":")
    keeps = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = datetime.timedelta(seconds=timeout)
    return TCPStore(host, int(port), None, keeps, limit, wait_for_workers=False, multi_tenant=True)
