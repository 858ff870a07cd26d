"""The cost model's clocks: the device's, in whose order its copies stand, and the host's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero.graph.planning._cost import HARDWARE, Hardware, estimate_seconds
from tests.helpers import examples

X = torch.ones(4)  # 16 bytes
# an operation of the device takes 1 s, a copy 1 s, and one of the host of 32 bytes 4 s
DEVICE = Hardware("gpu", flops=1e30, memory=1e30, link=1e30, latency=0, launch=1, host=8, host_link=16)


def traced(f: Any) -> Graph:
    graph = make_fx(f, tracing_mode="fake")(X).graph
    next(iter(graph.nodes)).meta["space"] = "device"
    return graph


def down_up(x: torch.Tensor) -> torch.Tensor:
    below = fzero.collectives.to_host(x.sin())
    return fzero.collectives.to_device(below * 2, "cpu") + x.cos().tan()


def test_both_compute_at_once_if_the_device_is_given_its_work_first():
    def filled(x: torch.Tensor) -> torch.Tensor:
        below = fzero.collectives.to_host(x.sin())
        z = x.cos().tan()
        return fzero.collectives.to_device(below * 2, "cpu") + z

    # 2 down, 6 on the host, 7 up, then three of the device
    assert estimate_seconds(traced(down_up), hardware=DEVICE) == 10
    assert estimate_seconds(traced(filled), hardware=DEVICE) == 8


def test_what_stays_on_the_host_is_part_of_the_step():
    def f(x: torch.Tensor) -> Any:
        below = fzero.collectives.to_host(x.view(2, 2)).view(4)
        first, second = below * 2, below * 3
        return first, second, x.sin()

    assert estimate_seconds(traced(f), hardware=DEVICE) == 1 + 4 + 4


def test_where_both_are_one_there_is_one_clock():
    # operations, of which two are copies
    assert estimate_seconds(traced(down_up)) == pytest.approx(7 * HARDWARE["cpu"].launch)
    apart = DEVICE._replace(host=0, host_link=0)
    assert estimate_seconds(traced(down_up), hardware=apart) == 4  # without those of the host, and without the copies


speeds = st.floats(1, 1e3)


@examples(40, 100)
@given(host=speeds, link=speeds, slower=st.floats(0.1, 1))
def test_a_slower_host_or_link_makes_no_step_faster(host, link, slower):
    graph = traced(down_up)

    def takes(host: float, link: float) -> float:
        return estimate_seconds(graph, hardware=DEVICE._replace(host=host, host_link=link))

    assert takes(host * slower, link) >= takes(host, link) and takes(host, link * slower) >= takes(host, link)
