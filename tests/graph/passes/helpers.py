"""The passes in jit's order, with settings drawn for them, and the laws of their results."""

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from torch.fx import Graph

from fzero.graph._pass_manager import PASSES
from fzero.graph.ir import is_collective, node_stand_ins
from fzero.graph.ir._collective_sizes import collective_kind
from fzero.graph.passes import (
    bucket,
    carry,
    donate,
    drop_lone_collectives,
    hoist,
    recast,
    recompute,
    regather,
    schedule,
    slice_of_gather,
)
from tests.graph.graphs import Chain, Sample, bits, run

PLACES = (("g", 0),)  # of the only rank in a world of equal ones
REUSES = (0, 16, 64, 96, math.inf)
BUCKETS = (0, 40, 100, 300, 1 << 20)


@st.composite
def settings_of_passes(draw: Any) -> dict[str, Any]:
    return {
        "reuse": draw(st.sampled_from(REUSES)),
        "bucket_bytes": draw(st.sampled_from(BUCKETS)),
        "prefetch": draw(st.integers(0, 2)),
        "in_flight": draw(st.integers(0, 2)),
        "limit": draw(st.sampled_from((math.inf, 0, 100, 300, 1000))),
        "donate": draw(st.booleans()),
        "passes": draw(st.sets(st.sampled_from([row.name for row in PASSES if row.name != "donate"]), min_size=1)),
    }


def selected_passes(sample: Sample, choices: dict[str, Any]) -> list[tuple[str, Any]]:
    """List the passes that `choices` selects, in jit's order."""
    with_arguments = {  # send_early sees no pipelines here: tests/parallel/pipeline/test_plan.py
        "drop_lone_collectives": lambda g: drop_lone_collectives(g, ("g", "h") if sample.n == 1 else ()),
        "hoist": lambda g: hoist(g, choices["reuse"]),
        "recompute": lambda g: recompute(g, 1),
        "regather": lambda g: regather(g, choices["reuse"]),
        "bucket": lambda g: bucket(g, choices["bucket_bytes"]),
        "recast": lambda g: recast(g, 1),
        "donate": lambda g: donate(g, sample.pairs, sample.donated),
        "slice_of_gather": lambda g: slice_of_gather(g, PLACES),
        "schedule": lambda g: schedule(g, choices["prefetch"], choices["in_flight"], choices["limit"]),
        "carry": lambda g: carry(g, 1),  # these have no loops: see test_carry.py
    }
    functions = {row.name: with_arguments.get(row.name, row.apply) for row in PASSES}
    assert {*with_arguments} <= {*functions}
    names = {*choices["passes"], *(["donate"] if choices["donate"] else [])}
    return [(row.name, functions[row.name]) for row in PASSES if row.name in names]


def apply_passes(sample: Sample, how: dict[str, Any]) -> Graph:
    graph = sample.graph
    for _, f in selected_passes(sample, how):
        graph = f(graph)
    return graph


def pairs_in_one_memory(results: Sequence[Any]) -> set[tuple[int, int]]:
    """List the pairs of results that lie in the same memory."""
    at = [None if x is None else x.untyped_storage().data_ptr() for x in results]
    return {(i, j) for i, x in enumerate(at) for j in range(i) if x is not None and x == at[j]}


def check_results(sample: Sample, graph: Graph, donated: bool, late: bool, expected: list[Any]) -> None:
    args = sample.args()
    out = run(graph, args, sample.n, late)
    assert [bits(x) for x in out] == expected
    assert pairs_in_one_memory(out) <= pairs_in_one_memory(run(sample.graph, sample.args(), sample.n))
    into = {j: i for i, j in sample.pairs} if donated else {}
    for j, (x, before) in enumerate(zip(args, sample.args(), strict=True)):
        assert bits(x) == (expected[into[j]] if j in into else bits(before))
    if donated:
        donated_memory = {args[j].untyped_storage().data_ptr() for j in sample.donated}
        for i, x in enumerate(out):
            if i in into.values():
                assert x is args[next(j for j, k in into.items() if k == i)]
            elif x is not None:
                assert x.untyped_storage().data_ptr() not in donated_memory


def members(graph: Graph) -> list[tuple[Any, ...]]:
    """List what each collective moves: those of a coalesced one by one."""
    results = []
    for n in graph.nodes:
        if is_collective(n):
            units = n.meta["unit"].split(" + ")
            assert len(units) == len(node_stand_ins(n))
            results += [
                (collective_kind(n), unit, tuple(x.shape), x.dtype, n.args[1:])
                for unit, x in zip(units, node_stand_ins(n), strict=True)
            ]
    return results


def donate_all(graph: Graph, chain: Chain) -> Graph:
    count = 2 * (len(chain.widths) - 1)
    return donate(graph, [(i, i) for i in range(count)], list(range(count)))
