"""Making a mesh: what is refused, wherever it is, and what -1 means."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.ranks._launch import World, find_device
from tests.distributed.launch import rank_variables

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such device": (
        {"device": "gpu"},
        ValueError,
        r'device=\'gpu\': expected "cpu", since torch sees no accelerator here; leave device out to use',
    ),
    "a GPU by number": ({"device": "cuda:7"}, ValueError, r"device='cuda:7': expected .* LOCAL_RANK"),
    "no GPU": (
        {"device": "cuda"},
        ValueError,
        r"device='cuda': expected \"cpu\", since torch sees no accelerator here",
    ),
    "a device that is not a string": ({"device": 0}, ValueError, r'device=0: expected "cpu"'),
    "no name": ({"": 2}, ValueError, r"axis '': the name of an axis is a Python name, such as 'dp'"),
    "a name of two axes": ({"dp,ep": 2}, ValueError, r"axis 'dp,ep': the name of an axis is a Python name"),
    "a name with a line's end": ({"dp\n": 2}, ValueError, r"axis 'dp\\n': the name of an axis is a Python name"),
    "no time": ({"timeout": 0}, ValueError, r"timeout=0: expected seconds, above 0 and below 1e9"),
    "time that is over": ({"timeout": -1.0}, ValueError, r"timeout=-1.0: expected seconds, above 0"),
    "for ever": ({"timeout": math.inf}, ValueError, r"timeout=inf: expected seconds, above 0 and below 1e9"),
    "not a time": ({"timeout": math.nan}, ValueError, r"timeout=nan: expected seconds"),
    "time in words": ({"timeout": "5 min"}, TypeError, r"timeout='5 min': expected a number of seconds"),
    "time as a bool": ({"timeout": True}, TypeError, r"timeout=True: expected a number of seconds"),
    "a mistyped argument": (
        {"dp": -1, "simulated_rank": 4},
        TypeError,
        r"simulated_rank=4: did you mean simulated_ranks=",
    ),
    "another": ({"dp": 4, "devices": 1}, TypeError, r"devices=1: did you mean device="),
    "nobody alone": (
        {"dp": -1, "simulated_ranks": 0},
        ValueError,
        r"simulated_ranks=0: expected at least one rank to simulate",
    ),
    "a bool alone": (
        {"dp": -1, "simulated_ranks": True},
        TypeError,
        r"simulated_ranks=True: expected an int, the number of ranks",
    ),
    "a float alone": ({"dp": -1, "simulated_ranks": 4.0}, TypeError, r"simulated_ranks=4.0: expected an int"),
    "no axis to fill": (
        {"dp": 2, "tp": 2, "simulated_ranks": 4},
        ValueError,
        r"dp=2, tp=2, simulated_ranks=4, but no axis is -1: pass dp=-1, or leave out simulated_ranks",
    ),
    "never alone": (
        {"dp": -1, "simulated_ranks": 4, "simulate": False},
        ValueError,
        r"simulate=False and simulated_ranks=4 contradict",
    ),
}


@pytest.mark.parametrize("launched", [False, True], ids=["alone", "launched"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_argument_is_refused_before_anything_starts(monkeypatch, name, launched):
    axes, error, message = REFUSED[name]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for key, value in (rank_variables(0, 2, 1) if launched else {}).items():
        monkeypatch.setenv(key, str(value))
    arguments = axes if {"dp", "", "dp,ep", "dp\n"} & set(axes) else {"dp": 2, **axes}
    with pytest.raises(error, match=message):
        fzero.mesh(**arguments)
    assert not torch.distributed.is_initialized()


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two accelerators, of which torch's current one is the second."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


def test_the_error_for_a_missing_gpu_says_how_many_there_are(two_gpus):
    names: list[Any] = ["cuda:7", "xpu", 0]
    for device in names:
        with pytest.raises(
            ValueError, match=f'device={device!r}: expected "cpu" or "cuda", since torch sees 2 devices'
        ):
            fzero.mesh(dp=2, device=device)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_simulated_ranks_lie_on_this_processs_accelerator(two_gpus, simulate):
    mesh = fzero.mesh(dp=2, simulate=simulate)
    assert mesh.device == torch.device("cuda", 1) == fzero.mesh(dp=2, device="cuda").device
    assert repr(mesh).endswith(", cuda:1)")
    stays = fzero.mesh(dp=2, simulate=simulate, device="cpu")
    assert stays.device == torch.device("cpu") and "cpu" not in repr(stays)


def test_a_process_takes_the_accelerator_of_its_local_rank(two_gpus, monkeypatch):
    world = World(rank=5, size=8, local_rank=3, address="host:1")
    assert find_device(None, world) == find_device("cuda", world) == torch.device("cuda", 1)
    assert find_device(None, world._replace(local_rank=0)) == torch.device("cuda", 0)
    assert find_device("cpu", world) == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    assert find_device(None, world) == torch.device("cpu")  # torch's processes do not communicate on it
    assert find_device(None, None) == torch.device("mps", 1)


@pytest.mark.parametrize("config", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:gloo"])
def test_a_mesh_uses_the_device_of_an_existing_process_group(two_gpus, monkeypatch, config):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: config)
    world = World(rank=0, size=8, local_rank=0, address="")
    expected = (
        torch.device("cuda", 1) if "nccl" in config else torch.device("cpu")
    )  # the group's user chose the current
    assert find_device(None, world) == expected
    assert find_device("cuda", world) == torch.device("cuda", 1)


def test_an_axis_that_does_not_divide_the_world_is_refused():
    with pytest.raises(ValueError, match="dp=-1, tp=3, simulated_ranks=8: 8 is not divisible by 3"):
        fzero.mesh(dp=-1, tp=3, simulated_ranks=8)
    with pytest.raises(ValueError, match="dp=-1, tp=8, simulated_ranks=4: 4 is not divisible by 8"):
        fzero.mesh(dp=-1, tp=8, simulated_ranks=4)


@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 5), st.data())
def test_the_size_of_minus_one_times_the_others_is_the_world(rest, left, data):
    """Alone as in a world, for any place of the axis that is -1."""
    place = data.draw(st.integers(0, len(rest)))
    sizes: dict[str, Any] = {f"a{i}": size for i, size in enumerate([*rest[:place], -1, *rest[place:]])}
    ranks = left * math.prod(rest)
    mesh = fzero.mesh(**sizes, simulated_ranks=ranks)
    assert mesh.simulated and mesh.size == ranks and dict(mesh.shape)[f"a{place}"] == left
    assert fzero.mesh(**sizes, simulated_ranks=ranks, simulate="lockstep").shape == mesh.shape
    assert fzero.mesh(**sizes).size == math.prod(rest)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("axis", [(), []])
def test_a_batch_that_is_split_over_no_axis_is_that_of_all_ranks(simulate, axis):
    mesh = fzero.mesh(pp=2, simulate=simulate)
    batch = {"x": torch.arange(3)}  # it need not divide
    shared = mesh.split(batch, axis)
    assert not isinstance(shared, fzero.PerRank) and torch.equal(shared["x"], batch["x"])
    assert mesh.spmd(lambda batch: batch["x"].sum())(shared) == 3
    with pytest.raises(ValueError, match="names no axis"):
        mesh.local(batch, axis)
