"""Hosts on this machine: network namespaces, and a link between them that can be cut, slowed or made to lose packets.

Each host is a network namespace with one TUN device. A thread carries the packets between the devices, so that a fault
of the link is a rule in Python and needs no module of the kernel but `tun`.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Hosts", "Rule", "missing"]

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_QUEUE = 0.5  # seconds of packets that a slow link holds; it drops the rest


@dataclass
class Rule:
    """The treatment of the packets of one direction by the link.

    Attributes:
        loss: the share of packets that are lost; 1.0 cuts the link.
        delay: how long each packet takes, in seconds.
        rate: bytes a second.
    """

    loss: float = 0.0
    delay: float = 0.0
    rate: float = float("inf")


def missing() -> str:
    """Return what this machine lacks for hosts; "" if nothing."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "Linux"
    if os.geteuid() != 0:
        return "the rights of root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "the device /dev/net/tun"
    name = f"fz{os.getpid()}x"
    try:
        done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except FileNotFoundError:
        return "the command ip"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces ({done.stderr.strip()})" if done.returncode else ""


class Hosts:
    """Some hosts and the link between them: `with Hosts(2) as hosts:`."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self.rules = {(i, j): Rule() for i in range(count) for j in range(count) if i != j}
        self._names = [f"fz{os.getpid()}n{i}" for i in range(count)]
        self._rng, self._over = random.Random(seed), threading.Event()
        self._devices: list[int] = []
        self._link = threading.Thread(target=self._carry, daemon=True)

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"10.77.0.{host + 1}"

    def set(self, rule: Rule, source: int | None = None, target: int | None = None) -> None:
        """Set the rule for packets from a host to another; None stands for each host."""
        for i, j in self.rules:
            if source in (None, i) and target in (None, j):
                self.rules[i, j] = rule

    def enter(self, host: int) -> None:
        """Move this process to a host. Call it in a process that was forked for this."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._names[host]}") as f:
            if libc.setns(f.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        name = f"host-{host}".encode()
        if libc.unshare(_CLONE_NEWUTS) or libc.sethostname(name, len(name)):
            raise OSError(ctypes.get_errno(), "sethostname")
        for device in self._devices:
            os.close(device)
        os.environ["GLOO_SOCKET_IFNAME"] = "fz0"

    def __enter__(self) -> "Hosts":
        for i, name in enumerate(self._names):
            _ip("netns", "add", name)
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._devices.append(device)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "link", "set", name, "name", "fz0")
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "fz0")
            _ip("-n", name, "link", "set", "fz0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._link.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._link.join()
        for device in self._devices:
            os.close(device)
        for name in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def _carry(self) -> None:
        """Carry packets until the hosts end."""
        waiting: list[tuple[float, int, int, bytes]] = []  # a heap: when a packet arrives, its number, to whom
        free: dict[tuple[int, int], float] = {}  # when a slow direction can take the next packet
        number = 0
        while not self._over.is_set():
            pause = 0.05 if not waiting else min(max(waiting[0][0] - time.monotonic(), 0), 0.05)
            for device in select.select(self._devices, [], [], pause)[0]:
                source = self._devices.index(device)
                for packet in _packets(device):
                    target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                    rule = self.rules.get((source, target))
                    if rule is None or self._rng.random() < rule.loss:
                        continue
                    now = time.monotonic()
                    begin = max(free.get((source, target), now), now)
                    if begin - now > _QUEUE:
                        continue
                    free[source, target] = begin + len(packet) / rule.rate
                    number += 1
                    heapq.heappush(waiting, (free[source, target] + rule.delay, number, target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # its queue is full: the packet is lost
                    os.write(self._devices[target], packet)


def _packets(device: int) -> Any:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            yield os.read(device, 65536)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
