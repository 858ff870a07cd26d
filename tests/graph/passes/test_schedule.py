"""Laws of the order: what starts ahead, what is in flight, and the memory that it needs."""

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st
from torch.fx import Graph

from fzero.graph._trace_agreement import _collective_order_digest
from fzero.graph.ir import is_collective, is_gather, is_reduce_collective, is_wait, parameter_gathers, wait_start
from fzero.graph.ir._collective_sizes import full_bytes
from fzero.graph.ir._storages import storages
from fzero.graph.passes import regather, schedule
from fzero.graph.planning.memory._live_ranges import live_bytes, live_ranges, peak_bytes
from tests.graph import graphs
from tests.graph.graphs import Chain, build_chain, chains
from tests.graph.passes.helpers import donate_all
from tests.helpers import either, examples


@examples(10, 50)
@given(chains(stages=[3], sam=False), st.integers(0, 2), st.integers(0, 2))
def test_no_more_units_are_gathered_than_prefetched_and_one(chain, prefetch, in_flight):
    graph = schedule(donate_all(regather(build_chain(chain).graph, 0), chain), prefetch, in_flight)
    gathered = [r for r in live_ranges(graph) if r.kind == "gathered"]
    counts = live_bytes([r._replace(bytes=1) for r in gathered], len(graph.nodes))
    layers = len(chain.widths) - 1
    assert len(gathered) >= layers
    assert max(counts) <= prefetch + 1
    if prefetch and layers > prefetch:
        assert max(counts) == prefetch + 1


@examples(14, 100)
@given(chains(stages=[3], sam=False), st.integers(1, 3), st.integers(0, 1), st.sampled_from((0, 0.5, 1, 1.1, 1.3, 2)))
def test_gathers_start_ahead_only_where_memory_is_free(chain, prefetch, in_flight, part):
    graph = donate_all(regather(build_chain(chain).graph, 0), chain)
    lean, eager = (schedule(graph, k, in_flight) for k in (0, prefetch))
    limit = part * peak_bytes(lean)
    fitting = schedule(graph, prefetch, in_flight, limit)
    assert peak_bytes(fitting) <= max(limit, peak_bytes(lean))
    counts = [count_started_ahead(g) for g in (lean, fitting, eager)]
    assert counts == sorted(counts)
    if limit < min(live_bytes(live_ranges(lean), len(lean.nodes))):
        assert list(map(str, fitting.nodes)) == list(map(str, lean.nodes))
    if limit >= peak_bytes(lean) + prefetch * 2 * max(full_bytes(g) for g in parameter_gathers(graph)):
        assert list(map(str, fitting.nodes)) == list(map(str, eager.nodes))


def count_started_ahead(graph: Graph) -> int:
    """Count the gathers that start while another has yet to be waited for."""
    flying = ahead = 0
    for n in graph.nodes:
        ahead += is_gather(n) and flying > 0
        flying += is_gather(n)
        flying -= is_wait(n) and is_gather(wait_start(n))
    return ahead


def test_the_next_gather_starts_where_few_bytes_are_alive():
    """Activations pile up, so early in the forward pass and late in the backward pass there is room."""
    chain = Chain(2, (4,) * 7, 8, 3, False, False, False, False, False, False)
    graph = donate_all(regather(build_chain(chain).graph, 0), chain)
    lean, eager = schedule(graph), schedule(graph, 1)
    fitting = schedule(graph, 1, 0, peak_bytes(lean))
    assert peak_bytes(fitting) == peak_bytes(lean) < peak_bytes(eager)
    assert count_started_ahead(lean) == 0 < count_started_ahead(fitting) < count_started_ahead(eager)
    orders = [_collective_order_digest(x) for x in (lean, eager, schedule(graph, 1))]
    assert orders[0] != orders[1] == orders[2]  # ranks do not take one for the other
    for extra in range(0, 1000, either(50, 10)):  # several ahead share the room
        limit = peak_bytes(lean) + extra
        assert peak_bytes(schedule(graph, 3, 0, limit)) <= limit


@examples(13, 50)
@given(chains(stages=[3], sam=False))
def test_without_prefetch_a_gather_is_awaited_at_once(chain):
    """A gather starts when work needs it, and nothing but its wait and views lies in between."""
    graph = schedule(regather(build_chain(chain).graph, 0))
    nodes = list(graph.nodes)
    gathers = {*parameter_gathers(graph)}
    for i, n in enumerate(nodes):
        if n in gathers:
            assert is_wait(nodes[i + 1])
            assert nodes[i + 1].args[0] is n


@examples(13, 50)
@given(chains(stages=[0, 1, 3], sam=False), st.booleans())
def test_a_reduction_starts_before_the_next_gradient_is_packed(chain, donated):
    graph = build_chain(chain).graph
    graph = schedule(donate_all(graph, chain) if donated else graph)
    position = {n: i for i, n in enumerate(graph.nodes)}
    memory = storages(graph)
    reductions = [n for n in graph.nodes if is_reduce_collective(n)][:-1]  # the last is the loss's
    reductions = [n for n in reductions if n.meta["val"].dim()]
    assert len(reductions) >= len(chain.widths) - 2
    for earlier, later in itertools.pairwise(reductions):
        packed = memory.producers[memory.indices[later.args[0]][0]]
        assert position[earlier] < position[packed]
        wait = next(iter(earlier.users))
        assert position[wait] < position[packed]


@examples(14, 100)
@given(chains(sam=False), st.sampled_from((0, math.inf)), st.booleans())
@example(Chain(2, (6, 6, 6), 4, 1, False, False, False, True, True, False), 0, False)  # its own order holds less
def test_schedule_needs_no_more_memory_than_the_order_as_traced(chain, reuse, donated):
    graph = regather(build_chain(chain).graph, reuse)
    graph = donate_all(graph, chain) if donated else graph
    assert peak_bytes(schedule(graph)) <= peak_bytes(graph)


@examples(13, 50)
@given(chains(), st.integers(1, 2))
def test_no_more_collectives_are_in_flight_while_work_goes_on_than_asked(chain, in_flight):
    graph = schedule(build_chain(chain).graph, 0, in_flight)
    flying = 0
    counted = {n for n in graph.nodes if is_collective(n)} - {*parameter_gathers(graph)}
    for n in graph.nodes:
        flying += n in counted
        flying -= is_wait(n) and n.args[0] in counted
        assert n.target is not graphs.aten.mm.default or flying <= in_flight
    assert flying == 0
