"""Copies in memory: each host has a folder in shared memory, which outlives the processes, and copies elsewhere.

The files have the same format as on disk. A rank writes its file on its own host, and sends it to ranks on other
hosts. So nothing is lost if all processes die, or as many hosts as there are copies.
"""

import contextlib
import os
import socket
import zlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero._notice import warn_once
from fzero.checkpoint._error import CheckpointError, DamagedError
from fzero.checkpoint._files import LocalFolder
from fzero.checkpoint._tensor_bytes import view_bytes
from fzero.checkpoint.layout import MANIFEST, PAGE_BYTES, Manifest, data_name, parse_manifest
from fzero.ranks import Mesh, all_gather_numbers, all_gather_texts

__all__ = ["Hosts", "SharedMemory"]

_MAX_NEWEST_STEPS = 4  # steps of a host that may be the newest whole one: more than a host has at a time


def _host_name() -> str:
    """Return the name of this host."""
    return socket.gethostname()


def _copy_holders(hosts: Sequence[str], rank: int, copies: int) -> list[int]:
    """Return the ranks that hold copies of a rank's file: each on another host, as far as there are others.

    Hosts send to the hosts after them. The i-th rank of one sends to the i-th rank of the next, so that no rank
    holds more than its share where hosts have equally many ranks.

    Args:
        hosts: the host of each rank.
        rank: the rank whose file is copied.
        copies: how many copies to keep.
    """
    names = list(dict.fromkeys(hosts))
    ranks = {name: [r for r, h in enumerate(hosts) if h == name] for name in names}
    host_index, position = names.index(hosts[rank]), ranks[hosts[rank]].index(rank)
    next_hosts = [names[(host_index + i) % len(names)] for i in range(1, min(copies, len(names) - 1) + 1)]
    return [ranks[name][position % len(ranks[name])] for name in next_hosts]


def _to_words(data: bytes) -> list[int]:
    """Return bytes as numbers, four bytes each; the last number may have fewer."""
    return [int.from_bytes(data[i : i + 4], "big") for i in range(0, len(data), 4)]


def _from_words(words: Sequence[int], size: int) -> bytes:
    """Return the `size` bytes of which `_to_words` made the numbers."""
    return b"".join([word.to_bytes(min(4, size - 4 * i), "big") for i, word in enumerate(words)])


class Hosts:
    """The host of each rank, and a process group for saves, which send while a step runs its own collectives."""

    def __init__(self, mesh: Mesh | None, timeout: float, copies: int = 1) -> None:
        self.mesh, self.rank, self.host_of_rank, self.copies = mesh, 0, [_host_name()], copies
        self.group: Any = None
        if mesh is not None and mesh.distributed:
            self.rank, self.host_of_rank = mesh.rank, all_gather_texts(_host_name(), mesh)
        if len(set(self.host_of_rank)) > 1:  # true on all ranks or on none
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def receivers(self) -> list[int]:
        """List the ranks that hold copies of this rank's files."""
        return _copy_holders(self.host_of_rank, self.rank, self.copies)

    def senders(self) -> list[int]:
        """List the ranks whose files this rank holds copies of."""
        return [
            r for r in range(len(self.host_of_rank)) if self.rank in _copy_holders(self.host_of_rank, r, self.copies)
        ]

    def warn_of_one(self) -> None:
        """Print a notice if all ranks are on one host, since nothing there outlives it."""
        if self.copies and self.rank == 0 and len(set(self.host_of_rank)) == 1:
            warn_once(
                f"fzero: all ranks are on one host, {self.host_of_rank[0]!r}, so no other host has a copy: "
                "steps in memory outlive the processes, but not the host"
            )

    def leader(self, name: str) -> int:
        """Return the lowest rank on a host."""
        return self.host_of_rank.index(name)

    def numbers(self, local: Sequence[int]) -> list[list[int]]:
        """All-gather numbers, equally many on all ranks; return each rank's numbers, in rank order."""
        return (
            [list(local)]
            if len(self.host_of_rank) == 1
            else all_gather_numbers(torch.tensor(list(local), device="cpu"), self._mesh())
        )

    def _mesh(self) -> Mesh:
        assert self.mesh is not None
        return self.mesh

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Return one rank's bytes, on all ranks."""
        if self.group is None:
            if len(self.host_of_rank) == 1:
                return data
            (size,) = self.numbers([len(data)])[source]
            words = _to_words(data if self.rank == source else bytes(size))
            return _from_words(self.numbers(words)[source], size)
        (size,) = self.numbers([len(data)])[source]
        x = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if self.rank == source
            else torch.empty(size, device="cpu").byte()
        )
        dist.broadcast(x, source, group=self.group)
        return bytes(view_bytes(x))


class SharedMemory(LocalFolder):
    """A folder of each host's shared memory: `memory/fzero/HOST/RUN/...`."""

    is_shared = False

    def __init__(self, path: str, hosts: Hosts) -> None:
        super().__init__(path)
        self.hosts = hosts
        self.common_name = self.path.replace(f"/{hosts.host_of_rank[hosts.rank]}/", "/*/")

    @property
    def is_host_leader(self) -> bool:
        """Whether this rank is the first on its host, which writes the manifest there."""
        return self.hosts.leader(self.hosts.host_of_rank[self.hosts.rank]) == self.hosts.rank

    @classmethod
    def of(cls, memory: str, run: str, hosts: Hosts) -> "SharedMemory":
        """Return the folder of a run."""
        return cls(os.path.join(memory, "fzero", hosts.host_of_rank[hosts.rank], run), hosts)

    def subfolder(self, name: str) -> "SharedMemory":
        """Return the files of a folder in this one."""
        return SharedMemory(self._path_of(name), self.hosts)

    def exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: no other process knows the folder."""
        return contextlib.nullcontext()

    def write(self, name: str, parts: Iterable[Sequence[memoryview]]) -> None:
        """Write a new file, send it to the ranks that hold copies, and receive the files that this rank holds."""
        error: Exception | None = None
        try:
            super().write(name, parts)
        except Exception as e:  # raised later, because the others wait for a message
            error = e
        if self.hosts.group is not None:
            self._send_copies(name, is_complete=error is None)
        if error is not None:
            raise error

    def _send_copies(self, name: str, is_complete: bool) -> None:
        nonce, ranks = name.split("-")[0], len(self.hosts.host_of_rank)
        sends = [
            x for receiver in self.hosts.receivers() for x in self._send_file(name if is_complete else None, receiver)
        ]
        for sender in self.hosts.senders():
            self._receive_file(data_name(nonce, sender, ranks), sender)
        for work, _ in sends:
            work.wait()

    def _send_file(self, name: str | None, receiver: int) -> list[tuple[Any, torch.Tensor]]:
        """Send a file to a rank: its size, and then its pages. For None send the size 0 alone."""
        size = 0 if name is None else os.path.getsize(self._path_of(name))
        messages = [torch.tensor([size], device="cpu")]
        if size and name is not None:
            messages += torch.from_file(self._path_of(name), size=size, dtype=torch.uint8).split(PAGE_BYTES)
        return [(dist.isend(x, receiver, group=self.hosts.group), x) for x in messages]

    def _receive_file(self, name: str, source: int) -> None:
        """Receive a file from a rank."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(size, source, group=self.hosts.group)
        self.make()
        with open(self._path_of(f".{name}.tmp"), "wb") as f:
            for offset in range(0, int(size), PAGE_BYTES):
                page = torch.empty(min(PAGE_BYTES, int(size) - offset), dtype=torch.uint8, device="cpu")
                dist.recv(page, source, group=self.hosts.group)
                f.write(view_bytes(page))
        if int(size):
            os.rename(self._path_of(f".{name}.tmp"), self._path_of(name))

    # Finding files after a restart.

    def newest(self, steps: Sequence[int], name: Any) -> int | None:
        """Return the newest step whose files are all on some host. All ranks call it.

        Args:
            steps: the steps that have a folder on this host.
            name: returns the name of a step's folder.
        """
        latest = sorted(steps)[-_MAX_NEWEST_STEPS:]
        all_numbers = self.hosts.numbers([*latest, *[-1] * (_MAX_NEWEST_STEPS - len(latest))])
        candidates = sorted({n for numbers in all_numbers for n in numbers if n >= 0}, reverse=True)
        return next((n for n in candidates if self.subfolder(name(n)).manifest() is not None), None)

    def manifest(self) -> bytes | None:
        """Return this folder's manifest if each of its files is on some host; else None. All ranks call it.

        A host that was away may have the manifest of an earlier try of the same step, so several may be looked at.
        """
        try:
            data = super().get(MANIFEST)
            parse_manifest(data)
        except (OSError, CheckpointError):
            data = b""
        first_ranks: dict[
            tuple[int, ...], int
        ] = {}  # the length and checksum of each manifest -> the first rank that has it
        for rank, numbers in enumerate(self.hosts.numbers([len(data), zlib.crc32(data)])):
            if numbers[0]:
                first_ranks.setdefault(tuple(numbers), rank)
        for rank in first_ranks.values():
            data_there = self.hosts.broadcast(data, rank)
            is_present = [any(x) for x in zip(*self._files_of_ranks(parse_manifest(data_there)), strict=True)]
            if all(is_present):
                return data_there
        return None

    def _files_of_ranks(self, manifest: Manifest) -> list[list[int]]:
        """Return, for each rank, which files its host has."""
        pairs = zip(manifest.names, manifest.files, strict=True)
        return self.hosts.numbers([int(self.size(name) == file.size) for name, file in pairs])

    def get(self, name: str) -> bytes:
        """Read a small file; the manifest is read from any host that has it. All ranks call it."""
        data = self.manifest() if name == MANIFEST else super().get(name)
        if data is None:
            raise DamagedError(f"{self.path!r}: no host has {name}, or a file that it names is on no host")
        return data

    def fetch(self, manifest: Manifest, writers: Iterable[int]) -> None:
        """Copy the files that this host's ranks read from hosts that have them. All ranks call it."""
        if self.hosts.group is None:
            return
        local = set(writers)
        needs = self.hosts.numbers([int(r in local) for r in range(len(manifest.files))])
        files_of_rank = self._files_of_ranks(manifest)
        for i, name in enumerate(manifest.names):
            source = next(r for r, is_there in enumerate(files_of_rank) if is_there[i])
            for host in dict.fromkeys(self.hosts.host_of_rank):
                leader = self.hosts.leader(host)
                ranks = [r for r, h in enumerate(self.hosts.host_of_rank) if h == host]
                if files_of_rank[leader][i] or not any(needs[r][i] for r in ranks):
                    continue
                if self.hosts.rank == source:
                    for work, _ in self._send_file(name, leader):
                        work.wait()
                if self.hosts.rank == leader:
                    self._receive_file(name, source)
        self.hosts.numbers([0])  # a barrier: all files have arrived

    def move_to(self, ranks: int) -> None:
        """Copy all files onto the hosts of the first ranks, unless one of these has them. All ranks call it."""
        data = self.manifest()
        if data is None:
            return
        manifest, own_rank = parse_manifest(data), self.hosts.rank
        is_on_host = [any(is_there) for is_there in zip(*self._files_of_ranks(manifest)[:ranks], strict=True)]
        self.fetch(manifest, [i for i, is_there in enumerate(is_on_host) if not is_there and i % ranks == own_rank])
        if own_rank < ranks and self.is_host_leader:
            self.put(MANIFEST, data)
