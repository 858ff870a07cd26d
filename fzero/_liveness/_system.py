"""The system's view of a rank: what its processes use, whether data is under way, and whether it sleeps.

A rank that uses nothing does not get on by itself, even if it wakes up now and then. Only Linux tells; elsewhere every
rank counts as busy. Standard library only.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

if __package__:
    from fzero._liveness._cut_links import Link
else:  # in the process of a heartbeat, without the package
    from _cut_links import Link  # pyright: ignore

__all__ = ["ProcessMonitor"]

_DISK_BYTES_PER_SECOND = 1e8  # as much as a second of a processor counts
_NETWORK_BYTES_PER_SECOND = 1e6
_PROBE_TIMER = 4  # the timer of a connection whose peer does not read
_REQUEST, _REPLY_SIZE = struct.Struct("=IHHIIBBBBI48x"), 1 << 17
_DIAG_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY, of the kernel's protocol sock_diag, as the four below
_NETLINK_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_NETLINK_DONE = 3  # NLMSG_DONE
_NETLINK_ERROR = 2  # NLMSG_ERROR
_DIAG_INFO = 2  # INET_DIAG_INFO
_CONNECTED_STATES = 0xFFFFFFFF & ~(1 << 10)  # all states of a connection but listening


class _Usage(NamedTuple):
    """The work of a rank's processes until a moment.

    Attributes:
        state: the state of its process, such as "S" for asleep, "T" for stopped, "D" for a wait for a disk.
        seconds: seconds of processors; of waits for a disk, and of data under way; weighed by
            `_DISK_BYTES_PER_SECOND` and `_NETWORK_BYTES_PER_SECOND`.
        is_whole: whether the system tells all of it: the children and the connections, too.
        silent: the connections whose data nobody acknowledges, and for how many seconds.
    """

    state: str
    seconds: float
    is_whole: bool
    silent: Mapping[Link, float] = MappingProxyType({})


class _TcpConnection(NamedTuple):
    """A TCP connection.

    Attributes:
        is_sending: whether data is under way to a peer that can take it.
        size: how many bytes came or were acknowledged until now.
        acknowledged: how many of them were acknowledged.
        link: its addresses and ports.
    """

    is_sending: bool
    size: int
    acknowledged: int
    link: Link


class ProcessMonitor:
    """Adds up what a process and its children use, all but this process.

    Data that is under way counts as work for `patience` seconds without an acknowledgment, since a lost packet is sent
    again after longer and longer pauses.
    """

    def __init__(self, pid: int, patience: float) -> None:
        self._pid, self._patience, self._seconds, self._looked_at = pid, patience, 0.0, 0.0
        self._counters: dict[object, float] = {}
        self._acknowledged: dict[int, tuple[int, float]] = {}  # of a connection that sends: how much, and since when

    def sample(self, now: float) -> _Usage:
        """Look at the processes, at a time in seconds."""
        since, self._looked_at = now - self._looked_at, now
        try:
            state, _ = _read_process_state(f"/proc/{self._pid}/stat")
        except (OSError, ValueError, IndexError):
            return _Usage("D", 0.0, False)
        processes, is_whole = _descendants(self._pid)
        states, inodes = set[str](), set[int]()
        for pid in processes:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                self._add_seconds(("processor", pid), _read_process_state(f"/proc/{pid}/stat")[1])
                self._add_seconds(("disk", pid), _disk_bytes(pid) / _DISK_BYTES_PER_SECOND)
                states |= {
                    _read_process_state(f"/proc/{pid}/task/{task}/stat")[0] for task in os.listdir(f"/proc/{pid}/task")
                }
                inodes |= set(_socket_inodes(pid))
        try:
            sockets = {inode: tcp for inode, tcp in _tcp_sockets().items() if inode in inodes}
        except (OSError, ValueError, struct.error):
            sockets, is_whole = {}, False
        for inode, tcp in sockets.items():
            self._add_seconds(("network", inode), tcp.size / _NETWORK_BYTES_PER_SECOND)
        silent = self._silent_links(sockets, now)
        if "D" in states or any(seconds <= self._patience for seconds in silent.values()):
            self._seconds += since
        return _Usage(state, self._seconds, is_whole, silent)

    def links(self) -> set[Link]:
        """Return the connections of the processes, as far as the system tells them."""
        inodes = set[int]()
        for pid in _descendants(self._pid)[0]:
            with contextlib.suppress(OSError):
                inodes |= set(_socket_inodes(pid))
        try:
            return {tcp.link for inode, tcp in _tcp_sockets().items() if inode in inodes}
        except (OSError, ValueError, struct.error):
            return set()

    def _silent_links(self, sockets: Mapping[int, _TcpConnection], now: float) -> dict[Link, float]:
        """Return the connections with data under way, and for how long nobody has acknowledged any of it."""
        acknowledged_before, self._acknowledged = self._acknowledged, {}
        for inode, tcp in sockets.items():
            if tcp.is_sending:
                size, since = acknowledged_before.get(inode, (-1, now))
                self._acknowledged[inode] = (tcp.acknowledged, since if size == tcp.acknowledged else now)
        return {sockets[inode].link: now - since for inode, (_, since) in self._acknowledged.items()}

    def _add_seconds(self, name: object, value: float) -> None:
        self._seconds += max(value - self._counters.get(name, 0.0), 0.0)
        self._counters[name] = value


def _read_process_state(path: str) -> tuple[str, float]:
    """Return the state of a process or thread, and its seconds of a processor."""
    with open(path) as f:
        fields = f.read().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _disk_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as f:
        values = dict(line.split(": ") for line in f.read().splitlines())
        return int(values["read_bytes"]) + int(values["write_bytes"])
    return 0


def _descendants(pid: int) -> tuple[list[int], bool]:
    """Return a process and its descendants, all but this process; and whether the system tells all of them."""
    pids, is_whole = [pid], True
    for parent in pids:  # grows
        tasks: list[str] = []
        with contextlib.suppress(OSError):
            tasks = os.listdir(f"/proc/{parent}/task")
        for task in tasks:
            try:
                with open(f"/proc/{parent}/task/{task}/children") as f:
                    pids += [int(x) for x in f.read().split() if int(x) != os.getpid()]
            except OSError:
                is_whole &= not os.path.exists(f"/proc/{parent}/task/{task}")
    return pids, is_whole


def _socket_inodes(pid: int) -> Iterator[int]:
    """Yield the inodes of a process's sockets."""
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if name.startswith("socket:["):
                yield int(name[8:-1])


def _tcp_sockets() -> dict[int, _TcpConnection]:
    """Return all TCP connections of this machine, or of its network namespace, by the inode of their socket.

    Raises:
        OSError: if the system does not tell them.
    """
    sockets: dict[int, _TcpConnection] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as s:
        s.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            options = family, socket.IPPROTO_TCP, 1 << (_DIAG_INFO - 1), 0, _CONNECTED_STATES
            s.send(_REQUEST.pack(_REQUEST.size, _DIAG_BY_FAMILY, _NETLINK_DUMP, 1, 0, *options))
            for message in _netlink_messages(s):
                inode, tcp = _read_connection(message)
                sockets[inode] = tcp
    return sockets


def _netlink_messages(s: socket.socket) -> Iterator[bytes]:
    """Yield the parts of the kernel's answer."""
    while True:
        data = s.recv(_REPLY_SIZE)
        while data:
            size, kind = struct.unpack_from("=IH", data)
            if kind == _NETLINK_DONE:
                return
            if kind == _NETLINK_ERROR:
                raise OSError("the system does not tell its connections")
            yield data[16:size]
            data = data[(size + 3) & ~3 :]


def _read_connection(message: bytes) -> tuple[int, _TcpConnection]:
    """Read a message of the kernel: `struct inet_diag_msg`, then attributes, of which one is `struct tcp_info`."""
    timer, unsent, inode = message[2], *struct.unpack_from("=I4xI", message, 60)
    acknowledged, received, attributes = 0, 0, message[72:]
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        if kind == _DIAG_INFO and length >= 4 + 136:
            acknowledged, received = struct.unpack_from("=QQ", attributes, 4 + 120)
        attributes = attributes[(max(length, 4) + 3) & ~3 :]
    ports, (source, destination) = struct.unpack_from("!HH", message, 4), (message[8:24], message[24:40])
    link = Link(_format_address(message[0], source), ports[0], _format_address(message[0], destination), ports[1])
    return inode, _TcpConnection(unsent > 0 and timer != _PROBE_TIMER, acknowledged + received, acknowledged, link)


def _format_address(family: int, data: bytes) -> str:
    text = socket.inet_ntop(family, data[:4] if family == socket.AF_INET else data)
    return text.removeprefix("::ffff:")  # the same address, to a socket of either family
