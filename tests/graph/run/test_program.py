"""The programs of executors: what the graph says, registers, and segments that repeat."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero.graph.passes import regather, schedule
from fzero.graph.run import _backends
from fzero.graph.run._backends import lower
from fzero.graph.run._program import Program, _SingleOperation, make_program
from fzero.graph.run._segment import Segment
from tests.graph.graphs import (
    World,
    bits,
    build,
    build_chain,
    chains,
    copy_to_world,
    run,
    samples,
    skip_compiler,
    specs,
)
from tests.graph.passes.helpers import apply_passes, settings_of_passes
from tests.helpers import examples


def in_a_world(program: Program, world: World) -> Program:
    targets = world.targets()
    new = [
        x._replace(target=targets.get(x.target, x.target)) if isinstance(x, _SingleOperation) else x
        for x in program.instructions
    ]
    return program._replace(instructions=new)


@examples(14, 100)
@given(samples(), settings_of_passes(), st.booleans())
def test_executors_compute_the_results_of_the_graph(make, how, late):
    sample = make()
    graph = apply_passes(sample, how)
    reference = sample.args()
    expected = [bits(x) for x in run(graph, reference, sample.n, late)]
    with pytest.MonkeyPatch.context() as patch:
        skip_compiler(patch)
        patch.setattr(_backends, "make_program", lambda g: in_a_world(make_program(g), World(sample.n, late)))
        for backend, g in (("fx", copy_to_world(graph, World(sample.n, late))), ("inductor", graph)):
            given_args = sample.args()
            box = list(given_args)
            out = lower(g, backend)(box)
            assert not box
            assert [bits(x) for x in out] == expected
            assert [bits(x) for x in given_args] == [bits(x) for x in reference]
            into = dict(sample.pairs) if how["donate"] else {}
            assert all(out[i] is given_args[j] for i, j in into.items())


@examples(13, 50)
@given(specs(local=True))
def test_local_graphs_are_one_segment_a_block(spec):
    sample = build(spec)
    expected = [bits(x) for x in run(sample.graph, sample.args(), sample.n)]
    assert [bits(x) for x in lower(sample.graph, "fx")(sample.args())] == expected
    with pytest.MonkeyPatch.context() as patch:
        skip_compiler(patch)
        assert [bits(x) for x in lower(sample.graph, "inductor")(sample.args())] == expected


class Reads(list):
    def __init__(self, registers: int) -> None:
        super().__init__([None] * registers)
        self.seen: list[int] = []

    def __getitem__(self, i: Any) -> Any:
        self.seen.append(i)
        return super().__getitem__(i)


@examples(13, 50)
@given(samples(), settings_of_passes())
def test_a_register_is_free_right_after_its_last_use(make, how):
    sample = make()
    program = make_program(apply_passes(sample, how))
    count = len(sample.shapes)
    held, freed, last = {*range(count)}, {}, {}
    for i, instruction in enumerate(program.instructions):
        if isinstance(instruction, Segment):
            ins, outs = instruction.ins, instruction.outs
        else:
            registers = Reads(program.register_count)
            instruction.arguments.values(registers)
            ins, outs = registers.seen, [instruction.out]
        assert held >= {*ins}
        assert not held & {*outs}
        assert len({*instruction.free}) == len(instruction.free)
        held = (held | {*outs}) - {*instruction.free}
        last |= dict.fromkeys([*ins, *outs], i)
        freed |= dict.fromkeys(instruction.free, i)
    survivors = {*range(count), *[r for r in program.results if r is not None]}
    assert held == survivors
    assert freed == {s: i for s, i in last.items() if s not in survivors}


@pytest.mark.slow
@examples(3, 12)
@given(chains(stages=[0, 3], sam=False))
def test_segments_to_compile_do_not_grow_with_the_blocks(chain):
    def distinct(depth: int) -> int:
        graph = schedule(regather(build_chain(chain._replace(widths=(4,) * (depth + 1))).graph, 0))
        return len({s.key for s in make_program(graph).instructions if isinstance(s, Segment)})

    assert distinct(6) == distinct(9)
