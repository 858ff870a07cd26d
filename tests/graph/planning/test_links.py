"""What a collective link_seconds: where its ranks are, the steps of its ring, the slowest link on its way."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.graph.planning._collective_seconds import _find_route
from fzero.graph.planning._hardware import Hardware

# an operation link_seconds no time; within a machine of 8 a rank sends 100 bytes a second, and 10 to others
HARDWARE = Hardware(
    "cuda",
    1e30,
    1e30,
    link_bandwidth=100,
    latency_seconds=5,
    launch_seconds=0,
    network_bandwidth=10,
    ranks_per_machine=8,
    hop_seconds=0.25,
    network_hop_seconds=2,
)
NUMBERS = 1024  # of a rank
KINDS = {
    "all_gather": lambda x: fzero.collectives.all_gather(x, "dp"),
    "all_reduce": lambda x: fzero.collectives.psum(x, "dp"),
    "reduce_scatter": lambda x: fzero.collectives.psum_scatter(x, "dp"),
    "all_to_all": lambda x: fzero.collectives.all_to_all(x, "dp"),
    "broadcast": lambda x: fzero.collectives.broadcast(x, "dp"),
}


def link_seconds(kind: str, hardware: Hardware = HARDWARE, **axes: int) -> float:
    """Plan one collective over dp, of which each rank gives 1,024 float32."""
    mesh = fzero.mesh(**dict.fromkeys(axes, 1))
    step = fzero.shard(lambda p, x: (p, fzero.PerRank(KINDS[kind](x))), stage=0, mesh=mesh, axis="dp")
    args = {"w": torch.empty(1, device="meta")}, mesh.split(torch.empty(NUMBERS, device="meta"))
    plan = fzero.plan(step, *args, world_size=axes, hardware=hardware)
    assert [c.kind for c in plan.collectives] == [kind]
    return plan.seconds


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(sizes=sizes, ranks_per_machine=st.sampled_from([1, 2, 3, 4, 8, math.inf]), data=st.data())
def test_the_route_of_a_collective_is_that_of_the_first_ranks_group(sizes, ranks_per_machine, data):
    """The coordinates of all ranks tell it: those that differ from the first along the named axes alone."""
    mesh = tuple(zip("abc", sizes, strict=False))
    axes = data.draw(st.lists(st.sampled_from([name for name, _ in mesh]), min_size=1, unique=True))
    coordinates = list(itertools.product(*[range(n) for n in sizes]))
    group = [
        rank
        for rank, at in enumerate(coordinates)
        if all(x == 0 or name in axes for x, (name, _) in zip(at, mesh, strict=True))
    ]
    machines = [0 if ranks_per_machine == math.inf else rank // ranks_per_machine for rank in group]
    assert _find_route(tuple(axes), mesh, ranks_per_machine) == (len(group), machines.count(0), len(set(machines)))


BYTES = 4 * NUMBERS
CASES: dict[str, tuple[str, dict[str, int], float]] = {
    # kind, the mesh, what it link_seconds beside the latency of 5: steps, then bytes
    "a ring in a machine": ("all_gather", {"dp": 8}, 7 * 0.25 + 8 * BYTES * 7 / 8 / 100),
    "a ring through eight machines": (
        "all_gather",
        {"dp": 64},  # 8 ways out of a machine are 80 bytes a second
        56 * 0.25 + 7 * 2 + 64 * BYTES * 63 / 64 / 80,
    ),
    "a ring of one rank a machine": (
        "all_gather",
        {"dp": 8, "tp": 8},  # tp is within the machine, and dp across
        7 * 2 + 8 * BYTES * 7 / 8 / 10,
    ),
    "a ring of two ranks a machine": (
        "reduce_scatter",
        {"dp": 4, "tp": 4},
        2 * 0.25 + 1 * 2 + BYTES * 3 / 4 / 20,
    ),
    "all of it twice": ("all_reduce", {"dp": 8}, 2 * 7 * 0.25 + 2 * BYTES * 7 / 8 / 100),
    "a tree of many machines": (
        "all_reduce",
        {"dp": 1024},  # 7 steps within a machine and 7 between 128, twice; no ring of 896 and 127
        2 * (7 * 0.25 + 7 * 2) + 2 * BYTES * 1023 / 1024 / 80,
    ),
    "to all within a machine": ("all_to_all", {"dp": 8}, 0.25 + BYTES * 7 / 8 / 100),
    "to all, over the own way out": ("all_to_all", {"dp": 64}, 2 + BYTES * 56 / 64 / 10),
    "to all from one": ("broadcast", {"dp": 4}, 3 * 0.25 + BYTES / 100),
}


@pytest.mark.parametrize("name", CASES)
def test_seconds_of_a_collective_equal_hand_computed_ones(name):
    kind, axes, expected = CASES[name]
    assert link_seconds(kind, **axes) == pytest.approx(5 + expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_takes_longer_over_more_ranks_and_the_latency_over_one(kind):
    times = [link_seconds(kind, dp=n) for n in (1, 2, 8, 16, 1024)]
    assert times[0] == 5 and all(a <= b for a, b in itertools.pairwise(times)) and times[1] < times[3]
    if kind != "all_to_all":  # whose bytes for others are what counts
        slow = HARDWARE._replace(link_bandwidth=1e30, network_bandwidth=1e30)
        assert link_seconds(kind, slow, dp=1024) > link_seconds(kind, slow, dp=16) > link_seconds(kind, slow, dp=8)


def test_a_link_that_was_given_counts_along_its_axis():
    hardware = HARDWARE._replace(axis_bandwidths=(("dp", 50.0),))
    assert link_seconds("all_gather", hardware, dp=8) == pytest.approx(5 + 7 * 0.25 + 7 * BYTES / 50)
    assert link_seconds("all_gather", hardware, dp=64) == pytest.approx(5 + 56 * 0.25 + 7 * 2 + 63 * BYTES / 50)
    assert link_seconds("all_to_all", hardware, dp=64) == pytest.approx(5 + 2 + BYTES * 63 / 64 / 50)
    assert link_seconds("all_gather", HARDWARE._replace(axis_bandwidths=(("tp", 1.0),)), dp=8) == link_seconds(
        "all_gather", dp=8
    )


def test_jit_compares_schedules_as_before_where_no_machine_is_named():
    """Without one the ranks are in one machine, and latency does not grow."""
    mesh = fzero.mesh(dp=4)
    step = fzero.shard(lambda p, x: (p, fzero.collectives.pmean(x)), stage=0, mesh=mesh)
    args: Any = {"w": torch.empty(1, device="meta")}, mesh.split(torch.empty(4096, device="meta"))
    few, many = (fzero.plan(step, *args, world_size=n).seconds for n in (4, 1024))
    assert few == many
