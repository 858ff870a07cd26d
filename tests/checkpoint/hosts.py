"""Hosts in one process: each rank is a thread with its own part of a state, and any of them may die at any moment.

One thread runs at a time. Each operation on a file, message and value in the store is a moment at which another thread,
drawn by a seed, may go on, and at which a rank or a whole host may die. Where the others wait for the dead, their
waits end with an error, as `fzero._liveness` ends them.
"""

import contextlib
import os
import random
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import DistNetworkError

from fzero import tree
from fzero.checkpoint import _agree, _files, _shared_memory
from fzero.ranks import Mesh

__all__ = ["Death", "ThreadMesh", "World", "local"]

FILE_OPERATIONS = ("writev", "fsync", "rename", "unlink", "makedirs")


class Died(BaseException):
    """No `except Exception` sees it, as none sees a kill."""


class Death(NamedTuple):
    """The death of a rank's process, or of a host with all its processes, at one of all operations of the world."""

    host: bool
    at: int


class ThreadMesh(Mesh):
    """The mesh of a rank that is a thread."""

    @property
    def distributed(self) -> bool:
        return True

    @property
    def rank(self) -> int:
        return RANK.number

    @property
    def process_group(self) -> None:
        """The whole world."""


class _Rank(threading.local):
    number = -1


RANK = _Rank()


def local(values: Any, rank: int) -> Any:
    """Return a rank's part of a tree of a simulated mesh."""
    return tree.map(lambda x: x[rank] if isinstance(x, torch.Tensor) else x, values)


class World:
    """Ranks on hosts: `World(["a", "a", "b"], seed).run(program)`."""

    def __init__(self, hosts: list[str], seed: int, deaths: tuple[Death, ...] = ()) -> None:
        self.hosts, self.deaths, self.rng, self.operations = hosts, deaths, random.Random(seed), 0
        self.size, self.lost = len(hosts), set[str]()  # the hosts that are lost
        self.dead, self.ended = set[int](), set[int]()
        self.waits: dict[int, Callable[[], bool]] = {}
        self.turns = [threading.Semaphore(0) for _ in hosts]  # released when it is a rank's turn
        self.store: dict[str, bytes] = {}
        self.mail: dict[tuple[int, int], deque[torch.Tensor]] = {}
        self.rounds: list[dict[int, torch.Tensor]] = []
        self.round_of = [0] * self.size

    def moment(self) -> None:
        """Die here, or let another rank go on; then return when it is this rank's turn again."""
        self.operations += 1
        mine = RANK.number
        for death in self.deaths:
            if death.at == self.operations and death.host:
                self.lost.add(self.hosts[mine])
                self.dead |= {r for r, host in enumerate(self.hosts) if host == self.hosts[mine]}
            elif death.at == self.operations:
                self.dead.add(mine)
        self.wait(lambda: True)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Wait until something is there. Raise an error if it never will be, since another rank died."""
        mine = RANK.number
        self.waits[mine] = is_there
        self._pass_on()
        self.turns[mine].acquire()
        if mine in self.dead:
            raise Died
        if not is_there():
            raise ConnectionError("another rank is lost")

    def _pass_on(self) -> None:
        alive = [r for r in range(self.size) if r not in self.ended]
        ready = [r for r in alive if r in self.dead or self.waits[r]()]
        if alive:  # if none is ready, the wait of one ends with an error
            self.turns[self.rng.choice(ready or alive)].release()

    def run(self, program: Callable[[ThreadMesh], Any]) -> list[Any]:
        """Run a program on each rank; return its results: the result, its exception, or `Died`."""
        results: list[Any] = [None] * self.size
        mesh = ThreadMesh((("dp", self.size),), object())
        self.waits = {r: lambda: True for r in range(self.size)}

        def be(rank: int) -> None:
            RANK.number = rank
            self.turns[rank].acquire()
            try:
                results[rank] = program(mesh)
            except BaseException as error:
                results[rank] = error
            self.ended.add(rank)
            self._pass_on()

        with self._patched():
            threads = [threading.Thread(target=be, args=(r,)) for r in range(self.size)]
            for thread in threads:
                thread.start()
            self._pass_on()
            for thread in threads:
                thread.join()
        return results

    def lose(self, memory: Path) -> list[str]:
        """Remove the memory of the hosts that are lost, and return the others, each for its ranks."""
        for host in self.lost:
            shutil.rmtree(memory / "fzero" / host, ignore_errors=True)
        return [host for host in self.hosts if host not in self.lost]

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "broadcast", "isend", "recv"):
                patch.setattr(torch.distributed, name, getattr(self, f"_{name}"))
            patch.setattr(torch.distributed, "new_group", lambda **options: "copies")
            patch.setattr(_agree, "default_store", lambda: self)
            patch.setattr(_shared_memory, "_host_name", lambda: self.hosts[RANK.number])
            patch.setattr(_files, "os", _Counted(self))
            patch.setattr(_shared_memory, "os", _Counted(self))
            yield

    def _all_gather(self, theirs: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        for x, y in zip(theirs, self._exchange(mine), strict=True):
            x.copy_(y)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.moment()
        i = self.round_of[RANK.number]
        self.round_of[RANK.number] += 1
        if i == len(self.rounds):
            self.rounds.append({})
        self.rounds[i][RANK.number] = x.clone()
        self.wait(lambda: len(self.rounds[i]) == self.size)
        return [self.rounds[i][r] for r in range(self.size)]

    def _broadcast(self, x: torch.Tensor, source: int, group: Any) -> None:
        x.copy_(self._exchange(x)[source])

    def _isend(self, x: torch.Tensor, to: int, group: Any) -> Any:
        self.moment()
        self.mail.setdefault((RANK.number, to), deque()).append(x.clone())
        return _Sent(self, RANK.number, to)

    def _recv(self, x: torch.Tensor, source: int, group: Any) -> None:
        mail = self.mail.setdefault((source, RANK.number), deque())
        self.wait(lambda: bool(mail))
        self.moment()
        x.copy_(mail.popleft())

    def set(self, key: str, text: str) -> None:
        """Set a value of the store."""
        self.moment()
        self.store[key] = text.encode()

    def get(self, key: str) -> bytes:
        """Return a value of the store."""
        return self.store[key]

    def check(self, keys: list[str]) -> bool:
        """Wait for keys of the store."""
        try:
            self.wait(lambda: all(key in self.store for key in keys))
        except ConnectionError as error:
            raise DistNetworkError("the connection is closed") from error
        return True


class _Sent(NamedTuple):
    world: World
    rank: int
    to: int

    def wait(self) -> None:
        self.world.wait(lambda: not self.world.mail[self.rank, self.to])


class _Counted:
    """The module `os`, whose operations on files are moments."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        result = getattr(os, name)
        if name not in FILE_OPERATIONS or RANK.number < 0:
            return result

        def call(*args: Any, **options: Any) -> Any:
            self._world.moment()
            if name == "writev":  # a part, as a system may; the next operation may never come
                return os.write(args[0], args[1][0][: len(args[1][0]) // 2 + 1])
            return result(*args, **options)

        return call
