"""Private torch APIs about waits: a wait for another rank ends early, and its error is that of a connection."""

import pytest
import torch

from fzero._torch.release import is_connection_error
from tests.distributed.launch import world

WAITS = """
import sys, threading, time, torch
import torch.distributed as dist
from fzero._torch.release import is_connection_error, release_waits
dist.init_process_group("gloo")
group, rank, x = dist.new_group([0, 1]), dist.get_rank(), torch.ones(5)
dist.all_reduce(x, group=group)
if rank == 1:
    sys.stdin.read() or time.sleep(3)
    sys.exit()
waits = {
    "all_reduce": lambda: dist.all_reduce(x, group=group),
    "recv": lambda: dist.recv(x, 1, group=group),
    "functional": lambda: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
    ),
    "barrier": lambda: dist.barrier(),
    "store": lambda: store.get("never"),
}
store = torch.distributed.distributed_c10d._get_default_store()
threading.Timer(0.3, release_waits, [store]).start()
start = time.monotonic()
for name, wait in waits.items():
    try:
        wait()
    except RuntimeError as error:
        print(name, is_connection_error(error), time.monotonic() - start < 2)
"""


def test_ranks_in_a_collective_are_released_by_a_closed_connection():
    """The first waits when they are released; the others find the connections closed."""
    done = world(2, "-c", WAITS)
    lines = [f"{name} True True" for name in ("all_reduce", "recv", "functional", "barrier", "store")]
    assert done.stdout.splitlines() == lines, done


@pytest.mark.parametrize("error", [ValueError("gloo/transport"), RuntimeError("shape '[3]' is invalid"), OSError()])
def test_only_errors_of_a_connection_count_as_connection_errors(error):
    assert not is_connection_error(error)
    assert is_connection_error(torch.distributed.DistNetworkError("broken pipe"))


THREE = """
import threading, time, torch
import torch.distributed as dist
from fzero._torch.release import release_waits
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(5)
dist.all_reduce(x)
store = torch.distributed.distributed_c10d._get_default_store()
if rank == 0:
    time.sleep(3)  # it is cut off: it neither answers nor closes its connections
elif rank == 2:
    release_waits(store)
else:
    time.sleep(0.5)  # the connection to rank 2, the next one, is closed by now
    threading.Timer(0.3, release_waits, [store]).start()
    start = time.monotonic()
    try:
        dist.recv(x, 0)
    except RuntimeError as error:
        print(time.monotonic() - start < 2)
"""


def test_a_wait_is_released_although_another_connection_is_closed():
    done = world(3, "-c", THREE)
    assert done.stdout == "True\n", done
