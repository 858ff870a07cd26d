"""What the system tells of a rank: what its processes use, what is under way on its connections, and its sleep."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from fzero._liveness._system import ProcessMonitor, _tcp_sockets
from tests.helpers import cases

PROGRAMS = {
    "sleeps": "import time; time.sleep(100)",
    "computes": "while True: pass",
    "polls": "import time\nwhile True: time.sleep(0.01)",
    "has a child that computes": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "has a thread that computes": "import threading, time\n"
    "threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start(); time.sleep(100)",
}


@pytest.mark.parametrize("what", cases(["sleeps", "polls", "has a child that computes"], PROGRAMS))
def test_the_cpu_time_tells_a_working_process_from_a_sleeping_one(what):
    process = subprocess.Popen([sys.executable, "-c", PROGRAMS[what]], start_new_session=True)
    try:
        time.sleep(0.5)
        system = ProcessMonitor(process.pid, 300.0)
        first = system.sample(0.0)
        time.sleep(0.7)
        last = system.sample(0.7)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (last.seconds - first.seconds > 0.05) == ("computes" in what)
    assert first.is_whole and last.is_whole


def test_a_process_that_is_gone_or_unknown_counts_as_busy():
    assert ProcessMonitor(2**22 + 1, 300.0).sample(0.0).state == "D"


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def inode(s: socket.socket) -> int:
    return os.fstat(s.fileno()).st_ino


def test_bytes_of_a_connection_are_counted_at_both_ends():
    one, other = connection()
    with one, other:
        system = ProcessMonitor(os.getpid(), 300.0)
        before, used = _tcp_sockets(), system.sample(0.0).seconds
        one.sendall(b"x" * 200_000)
        received = other.recv(200_000, socket.MSG_WAITALL)
        time.sleep(0.1)
        after = _tcp_sockets()
        for s in (one, other):
            assert after[inode(s)].size - before[inode(s)].size == len(received) == 200_000
            assert not after[inode(s)].is_sending
        assert system.sample(0.0).seconds - used > 0.39  # a megabyte counts as a second


def test_a_peer_that_does_not_read_is_no_sign_of_work():
    """Its buffers are full, and the rest waits at the sender: as for a rank that hangs."""
    one, other = connection()
    with one, other:
        one.setblocking(False)
        size = 0
        for _ in range(100):
            try:
                size += one.send(b"x" * 10**6)
            except BlockingIOError:
                time.sleep(0.02)
        assert not _tcp_sockets()[inode(one)].is_sending


def test_a_rank_whose_data_is_under_way_is_not_idle(monkeypatch):
    """Half of the time it is, for instance where packets are lost. A long time without any answer is not work."""
    one, other = connection()
    with one, other:
        system, actual = ProcessMonitor(os.getpid(), 300.0), _tcp_sockets()
        first, tcp = system.sample(0.0).seconds, actual[inode(one)]._replace(is_sending=True)
        monkeypatch.setattr("fzero._liveness._system._tcp_sockets", lambda: {inode(one): tcp})
        use = system.sample(100.0)
        assert use.seconds - first > 99 and use.silent == {tcp.link: 0.0}
        assert system.sample(250.0).silent == {tcp.link: 150.0}
        tcp = tcp._replace(acknowledged=tcp.acknowledged + 1)
        assert system.sample(300.0).silent == {tcp.link: 0.0}
        use = system.sample(500.0)
        assert use.silent == {tcp.link: 200.0}
        assert system.sample(650.0).seconds - use.seconds < 5  # this process's own work, of 150 s
        tcp = tcp._replace(is_sending=False)
        assert system.sample(660.0).silent == {}


def test_a_connection_has_the_same_link_from_both_ends():
    one, other = connection()
    with one, other:
        result = _tcp_sockets()
        link = result[inode(one)].link
        assert link == (*one.getsockname(), *one.getpeername())
        assert result[inode(other)].link == link.reversed()
        assert {link, link.reversed()} <= ProcessMonitor(os.getpid(), 300.0).links()
