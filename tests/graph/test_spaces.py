"""Two memories in one graph: no operation mixes them, moves are planned, and results stay where they belong."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph

import fzero
from fzero import optim, tree
from fzero.collectives._spaces import to_device, to_host
from fzero.graph.ir import is_input
from fzero.graph.ir._memory_spaces import SpaceError, check_spaces, on_host
from fzero.sharding._boxes import Shard, is_box
from fzero.sharding._pieces import spaces
from fzero.sharding._spec import _ALIGN_ELEMENTS
from tests.graph.helpers import LAYERS, ROWS, WIDTH, loss_of, params_of
from tests.helpers import LEAST
from tests.helpers import cases as few
from tests.optim.offloading import Row, by_path, normal, train_step_of

RATIOS = (0, 0.3, 0.5, 0.8, 1)
# bytes of an element that crosses, down and up; decay reads the parameter, whose own copy only masters keep there
WIDTHS = {"masters": (2, 2), "clip before": (2, 2), "float32": (8, 4), "no decay": (4, 4)}


@functools.cache
def make_plan(
    name: str, ratio: Any, stage: int = 2, update: str = "host", k: int = 1, world_size: int = 2, batch: int = 4
) -> fzero.graph.Plan:
    """One rank's plan, from meta tensors; of no offload for the ratio None."""
    row, mesh = ROWS[name], fzero.mesh(dp=2)
    optimizer = row.make((lambda p: p) if ratio is None else (lambda p: optim.offload(p, ratio, update)), None)
    step = fzero.shard(train_step_of(optimizer, row, k, loss_of), stage, mesh)
    state = step.init(params_of(), optimizer)
    tokens = mesh.split(torch.empty(2 * batch, WIDTH, device="meta"))
    return fzero.plan(fzero.jit(step, backend="fx"), *state, tokens, world_size=world_size)


def count_moved(plan: fzero.graph.Plan, kind: str) -> int:
    return sum([t.bytes * t.times for t in plan.transfers if t.kind == kind])


def elements(world_size: int = 2) -> int:
    return sum([-(-x.numel() // world_size) for x in tree.tensors(params_of())])


ROWS_AND_UPDATES = [
    ("masters", "host"),
    ("clip before", "host"),
    ("masters", "device"),
    ("float32", "host"),
    ("no decay", "host"),
]
cases = pytest.mark.parametrize("name,update", ROWS_AND_UPDATES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,update,stage",
    few([("masters", "device", 2)], [(*r, s) for r in ROWS_AND_UPDATES for s in (0, 2, 3)]),
)
def test_the_devices_peak_falls_with_the_ratio_and_the_hosts_rises(name, update, stage):
    plans = [make_plan(name, ratio, stage, update) for ratio in RATIOS]
    device, host = ([plan.peak_of(space) for plan in plans] for space in ("device", "host"))
    assert device == sorted(device, reverse=True) and device[-1] < device[0], device
    assert host == sorted(host) and host[0] == 0 < host[-1], host
    state = (8 if name in ("float32", "no decay") else 12) * elements(1 if stage == 0 else 2)
    saved = [plans[0].argument_bytes - plan.argument_bytes for plan in plans]
    for ratio, bytes_ in zip(RATIOS, saved, strict=True):
        assert abs(bytes_ - ratio * state) <= 12 * _ALIGN_ELEMENTS, (ratio, bytes_, state)


@pytest.mark.slow
@pytest.mark.parametrize("name,update", few([("clip before", "host")], ROWS_AND_UPDATES))
@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_offloaded_element_crosses_once_a_step(name, update, stage, k):
    """It crosses in its own dtype, however many micro-batches; updated on the device it is the state that crosses."""
    widths = WIDTHS[name] if update == "host" else (12, 12)
    for ratio in (0.3, 1):
        plan = make_plan(name, ratio, stage, update, k)
        for kind, width in zip(("to_host", "to_device"), widths, strict=True):
            wanted, crossed = ratio * elements(1 if stage == 0 else 2) * width, count_moved(plan, kind)
            assert wanted - width <= crossed <= wanted + width * _ALIGN_ELEMENTS, (ratio, kind, crossed, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("stage", few([3], [1, 2]))
def test_without_a_share_of_the_host_the_plan_is_that_of_the_optimizer(stage):
    for update in ("host", "device"):
        mine, expected = make_plan("clip before", 0, stage, update), make_plan("clip before", None, stage)
        assert [o[:1] + o[1:2] + o[3:] for o in mine.operations] == [
            o[:1] + o[1:2] + o[3:] for o in expected.operations
        ]
        assert [r[:4] + r[5:] for r in mine.ranges] == [r[:4] + r[5:] for r in expected.ranges]
        assert mine.transfers == () and mine.peak_of("host") == 0 and "host" not in str(mine)


@pytest.mark.slow
def test_a_plan_of_another_world_cuts_the_pieces_again():
    """A share is kept, no number of elements: so a plan of 2 simulated ranks serves for 8."""
    for ratio in (0.5, by_path, 1):
        few, many = make_plan("masters", ratio), make_plan("masters", ratio, world_size=8)
        assert len(many.transfers) == len(few.transfers) > 0
        grains = 2 * _ALIGN_ELEMENTS * 2 * LAYERS  # two units a layer
        for kind in ("to_host", "to_device"):
            assert abs(count_moved(few, kind) - 4 * count_moved(many, kind)) <= 4 * grains, (ratio, kind)
    assert count_moved(make_plan("masters", 1, world_size=8), "to_host") == 2 * elements(8)


def test_a_plan_lists_transfers_and_the_live_bytes_of_each_memory():
    plan = make_plan("masters", 0.5)
    assert plan.live == plan.live_in("device") and plan.peak_bytes == plan.peak_of("device")
    assert "on the host" in repr(plan) and f"{len(plan.transfers)} transfers" in str(plan)
    assert {t.kind for t in plan.transfers} == {"to_host", "to_device"}
    for t in plan.transfers:
        assert t.kind in plan.operations[t.position].target
    assert {r.space for r in plan.ranges} == {"device", "host"}
    for space in ("gpu", "", None):
        with pytest.raises(ValueError, match='expected "device" or "host"'):
            plan.live_in(space)


def test_an_operation_on_both_memories_is_refused_with_its_line():
    def f(x: torch.Tensor) -> torch.Tensor:
        y = to_host(x)
        return x * y  # mixed

    with pytest.raises(
        SpaceError, match=r"aten\.mul\.Tensor at .*test_spaces.py:\d+ is given .*in host memory and argument 0"
    ):
        fzero.jit(f, backend="fx")(torch.ones(3))


def test_a_collective_of_the_hosts_values_is_refused():
    mesh = fzero.mesh(dp=2)
    program = mesh.spmd(lambda x: fzero.collectives.psum(to_host(x), "dp"))
    step = fzero.jit(program, backend="fx")
    with pytest.raises(
        SpaceError, match=r"test_spaces.py:\d+ is given .*in host memory, where ranks do not communicate"
    ):
        fzero.plan(step, fzero.PerRank(torch.ones(2, 3)), world_size=2)


def test_python_numbers_combine_with_tensors_of_either_memory():
    """A count, a rate, a table that a step captures."""
    table = torch.tensor([1.0, 2.0, 3.0])

    def f(x: torch.Tensor, rate: torch.Tensor) -> Any:
        return to_device(to_host(x) * rate * table, "cpu") + x * rate * table

    x, rate = torch.ones(3), torch.tensor(0.5)
    assert torch.equal(fzero.jit(f, backend="fx")(x, rate), f(x, rate))


def test_a_scalar_tensor_of_the_device_may_not_meet_host_memory():
    with pytest.raises(SpaceError, match="in host memory and"):
        fzero.jit(lambda x: to_host(x) * x.sum(), backend="fx")(torch.ones(3))


@pytest.mark.parametrize("clip_first", [False, True])
def test_an_optimizer_that_hides_a_norm_is_found_by_its_line(clip_first):
    def hidden(grads: Any, state: Any, params: Any = None) -> Any:
        total = sum([x.square().sum() for x in tree.tensors(grads)])
        return tree.map(lambda g: g / (1 + total), grads), state  # the line

    clip = optim.Optimizer(lambda params: (), hidden, exact_on_shards=True)
    momentum = optim.sgd(0.1, momentum=0.9)
    row = Row(lambda o, p: optim.chain(clip, o(momentum)) if clip_first else o(optim.chain(clip, momentum)))
    optimizer = row.make(lambda p: optim.offload(p, 0.5), None)
    step = fzero.shard(train_step_of(optimizer, row, 1, loss_of), 0, fzero.mesh(dp=2))
    state = step.init(params_of(), optimizer)
    args = (*state, step.mesh.split(torch.empty(8, WIDTH, device="meta")))
    if clip_first:
        assert fzero.jit(step, backend="fx").plan(*args).transfers
        return
    with pytest.raises(SpaceError, match=r"test_spaces.py:\d+ .*before optim\.offload"):
        fzero.jit(step, backend="fx").plan(*args)


@st.composite
def graphs(draw: Any) -> Graph:
    """A graph of additions and moves over arguments of both memories; some of its additions are mixed."""
    graph, results = Graph(), []
    for i in range(draw(st.integers(1, 3))):
        x = graph.placeholder(f"x{i}")
        x.meta = {"val": torch.ones(2), "space": draw(st.sampled_from(["device", "host"]))}
        results.append(x)
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["add", "down", "up"]))
        a, b = (draw(st.sampled_from(results)) for _ in range(2))
        if kind == "add":
            n = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
        elif kind == "down":
            n = graph.call_function(torch.ops.fzero.to_host.default, (a,))
        else:
            n = graph.call_function(torch.ops.fzero.to_device.default, (a, torch.device("cpu")))
        n.meta = {"val": torch.ones(2)}
        results.append(n)
    graph.output((results[-1],))
    return graph


@settings(max_examples=60)
@given(graphs())
def test_spaces_follow_moves_and_a_mixed_operation_is_always_found(graph):
    """Compared with walking the graph by hand: each value's memory, or whether there is a mixed operation."""
    memory: dict[Any, str] = {}
    mixed = False
    for n in graph.nodes:
        of = {memory[a] for a in n.all_input_nodes}
        if is_input(n):
            memory[n] = n.meta["space"]
        elif "to_host" in str(n.target) or "to_device" in str(n.target):
            memory[n] = "host" if "to_host" in str(n.target) else "device"
        elif n.op == "call_function":
            mixed = mixed or len(of) > 1
            memory[n] = next(iter(of))
    if mixed:
        with pytest.raises(SpaceError, match=r"aten\.add\.Tensor at no known line is given"):
            check_spaces(graph)
    else:
        check_spaces(graph)
        assert on_host(graph.nodes) == {n for n, space in memory.items() if space == "host"}


def addresses(values: Any) -> dict[str, set[int]]:
    results: dict[str, set[int]] = {"device": set(), "host": set()}
    for box in tree.flatten(values, is_box)[0]:
        if isinstance(box, Shard):
            for space, x in zip(spaces(box), box.pieces, strict=True):
                results[space] |= {x.data_ptr()} if x.numel() else set()
    return results


@pytest.mark.parametrize("update", ["host", "device"])
@pytest.mark.parametrize("stage", [0, 3])
def test_results_are_written_into_arguments_of_their_own_memory(stage, update):
    """The pieces are of one size, so that each would fit the other's place."""
    row = Row(lambda o, p: o(optim.adam(0.1)))
    params = {"w": normal((256,))}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (p["w"] * x.mean()).square().sum()

    optimizer = row.make(lambda p: optim.offload(p, 0.5, update), None)
    step = fzero.shard(train_step_of(optimizer, row, 1, loss), stage, fzero.mesh(dp=2))
    state = list(step.init(params, optimizer))
    jitted = fzero.jit(step, backend="fx", **LEAST)
    before = addresses(state[1])
    assert len(before["host"]) == len(before["device"]) == 2
    *state, _ = jitted(*state, step.mesh.split(torch.ones(4)))
    assert addresses(state[1]) == before


def test_a_result_of_another_path_takes_only_its_own_memory():
    state = optim.offload(optim.sgd(0.1, momentum=0.9), 0.5).init({"w": normal((128,))})
    before = addresses(state)

    def add_one(state: Any) -> Any:
        return {"other": tree.map(lambda x: x + 1, state.momentum["w"])}

    after = addresses(fzero.jit(add_one, donate=0, backend="fx")(state))
    assert after["host"] <= before["host"] and after["device"] <= before["device"] and after == before
