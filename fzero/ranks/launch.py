"""Which processes are the world: torchrun's, Slurm's, or those of a process group that exists already.

fzero launches nothing. `docs/launch.md` says how torchrun and srun do.
"""

import datetime
import os
import re
import time
from typing import NamedTuple

import torch
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

__all__ = ["World", "join", "world_at_hand"]

TIMEOUT = 300.0  # seconds


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
    local = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
    if torch.distributed.is_initialized():
        return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), local, "")
    if "RANK" in env and int(env.get("WORLD_SIZE", 1)) > 1 and "MASTER_ADDR" not in env:
        raise ValueError(f"RANK and WORLD_SIZE={env['WORLD_SIZE']} are set, and MASTER_ADDR is not: set all, or none")
    if all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        place = f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', 29500)}"
        return World(int(env["RANK"]), int(env["WORLD_SIZE"]), local, place)
    # set by srun for the tasks that it starts together; in a batch script, which is alone, there is none
    size = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if size > 1 and "SLURM_PROCID" in env:
        return World(int(env["SLURM_PROCID"]), size, local, _slurm_place())
    return None


def _slurm_place() -> str:
    """Choose where the tasks of a Slurm step meet: its first machine, at a port that follows from the job's number."""
    env = os.environ
    host = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "localhost"))
    number = int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
    port = env.get("MASTER_PORT") or 20000 + number % 10000
    return f"{host}:{port}"


def _first_host(nodes: str) -> str:
    """Return the first machine of Slurm's list: "gpu[07-09,12]" is gpu07, gpu08, gpu09 and gpu12."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r}: expected names of machines; set MASTER_ADDR to the first")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found.group())


def join(world: World, kind: str, timeout: float = TIMEOUT) -> None:
    """Meet the other processes of the world, and make the default process group.

    Args:
        world: as `world_at_hand` found it.
        kind: "cpu" or "cuda": gloo alone, or with nccl.
        timeout: how long to wait for the others, in seconds.

    Raises:
        RuntimeError: if some have not come by then. Names them.
    """
    if not world.place:
        return
    if kind == "cuda":
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    meeting = f"{world.size} processes should meet at {world.place}; launch them together, or free the port"
    try:
        store = _store(world, timeout)
    except RuntimeError as error:  # DistStoreError and DistNetworkError are RuntimeErrors
        raise RuntimeError(f"rank {world.rank} met no rank 0 within {timeout:g} s: {meeting}") from error
    store.set(f"fzero/arrived/{world.rank}", "")
    end = time.monotonic() + timeout
    for rank in range(world.size):
        left = datetime.timedelta(seconds=max(end - time.monotonic(), 0.1))
        try:
            store.wait([f"fzero/arrived/{rank}"], left)
        except RuntimeError as error:
            raise RuntimeError(f"rank {rank} did not arrive within {timeout:g} s: {meeting}") from error
    store.set_timeout(datetime.timedelta(minutes=30))  # torch's own, for all that follows
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)


def _store(world: World, timeout: float) -> Store:
    """Open the store through which the processes find each other; torchrun's own, if it keeps one."""
    limit = datetime.timedelta(seconds=timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", world.rank, world.size, timeout=limit))[0]
    host, _, port = world.place.rpartition(":")
    first = world.rank == 0
    return TCPStore(host, int(port), None, first, limit, wait_for_workers=False, multi_tenant=True)
