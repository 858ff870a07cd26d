"""The list of passes: its order, what schedules share, and the dump of what each pass made."""

import itertools
import math
import os
import pathlib
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.fx import Graph

import fzero
from fzero import optim
from fzero.graph import _entry, _pass_manager, passes
from fzero.graph._candidates import ScheduleOptions, candidates
from fzero.graph._pass_manager import PASSES, PassContext, PassManager, PassSettings
from fzero.graph._schedule_options import FITTING
from fzero.graph.ir import GATHER_INTO, check_order, copy_graph
from fzero.graph.passes import schedule
from fzero.graph.passes.scheduling._schedule import Orders
from fzero.graph.planning.memory._live_ranges import device_live_bytes, live_bytes, live_ranges, peak_bytes
from tests.graph.graphs import Chain, build_chain, chains, lines
from tests.helpers import cases, either, examples, mlp_batch, mlp_loss, mlp_params, train_step_for


def test_the_list_of_passes_has_every_pass_once():
    assert [row.apply for row in PASSES].count(schedule) == 1
    assert Counter([row.name for row in PASSES]) == Counter(passes.__all__)
    on_loops = [row.runs_on_loops for row in PASSES]
    assert on_loops == sorted(on_loops)  # bodies are scheduled before
    assert all(row.apply is getattr(passes, row.name) for row in PASSES)


LAST = "schedule.txt"


def one_after_the_other(graph: Graph, settings: PassSettings, context: PassContext) -> Graph:
    """Run each row of the table on the graph of the row before; no two schedules share anything."""
    for row in PASSES:
        arguments = row.arguments(settings, context)
        graph = graph if arguments is None else row.apply(graph, *arguments)
    return graph


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("drop_lone_collectives", "hoist"),  # a gather over one rank is nothing to hoist, to repeat or to join
        ("keep_on_host", "regather"),  # it is `regather` that decides how long parameters stay
        ("regather", "bucket"),  # a coalesced gather is not repeated
        ("recompute", "donate"),  # operations write in place from `donate` on
        ("recast", "donate"),
        ("move_early", "donate"),
        ("donate", "gather_into"),  # the writes into leaves that gathers replace
        ("gather_into", "slice_of_gather"),
        ("donate", "cat_into"),
        ("cat_into", "mark_fused"),  # a part that is written is stored
        ("mark_fused", "schedule"),  # the schedule counts no bytes of marked values
        ("schedule", "carry"),
    ],
)
def test_a_pass_comes_after_the_pass_that_it_builds_on(first, second):
    names = [row.name for row in PASSES]
    assert names.index(first) < names.index(second)


def pass_settings() -> st.SearchStrategy[PassSettings]:
    reuse, size = st.sampled_from((0, 64, math.inf)), st.sampled_from((0, 100, 1 << 20))
    ahead, room = st.sampled_from((0, 1, FITTING)), st.sampled_from((0, 300, 1000))
    choice = st.booleans()
    return st.builds(
        PassSettings,
        recompute=choice,
        max_reuse_bytes=reuse,
        bucket_bytes=size,
        prefetch=ahead,
        in_flight=st.integers(0, 1),
        across_iterations=choice,
        prefetch_budget=room,
        recast=choice,
        send_early=choice,
    )


PLAIN = PassSettings(recompute=False, max_reuse_bytes=math.inf, bucket_bytes=0)
SHARDED = Chain(2, (4, 4, 4, 4), 5, 3, False, False, False, False, False, False)
REPLICATED = SHARDED._replace(stage=1)


@examples(5, 30)
@given(chains(), st.lists(pass_settings(), min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans())
@example(REPLICATED, [PLAIN], False, False, False)
def test_running_the_list_equals_running_its_passes_one_by_one(chain, all_settings, functional, by_itself, moves):
    """Whatever settings came before: what they share is no other graph."""
    sample = build_chain(chain)
    context = PassContext(
        tuple(sample.pairs),
        tuple(sample.donated),
        functional,
        (("g", 0),),
        moves,
        lone_groups=("g",) if by_itself else (),
        fuses=not functional,
    )
    pipeline = PassManager(sample.graph, context)
    for settings in all_settings:
        results = pipeline.run(settings)
        assert [p.row for p in results] == [*PASSES]
        last = results[-1].graph
        assert lines(last) == lines(one_after_the_other(sample.graph, settings, context))
        assert device_live_bytes(list(last.nodes)) == live_bytes(live_ranges(last), len(last.nodes))


def test_new_parameters_arrive_in_the_leaves_that_were_donated():
    """Donation comes first: this example tells the orders apart."""
    sample = build_chain(REPLICATED)
    results = PassManager(sample.graph, PassContext(tuple(sample.pairs), tuple(sample.donated))).run(PLAIN)
    gather_counts = {p.row.name: sum(n.target is GATHER_INTO for n in p.graph.nodes) for p in results}
    assert (gather_counts["in_place"], gather_counts["gather_into"], gather_counts["schedule"]) == (0, 3, 3)


@pytest.mark.parametrize("chain", [SHARDED, REPLICATED])
def test_settings_with_a_common_prefix_share_the_graphs_of_their_first_passes(chain, monkeypatch):
    ran: Counter[str] = Counter()

    def count_runs(row: _pass_manager.Pass) -> _pass_manager.Pass:
        def apply(graph: Graph, *arguments: Any) -> Graph:
            ran[row.name] += 1
            return row.apply(graph, *arguments)

        return row._replace(apply=apply)

    monkeypatch.setattr(_pass_manager, "PASSES", tuple(count_runs(row) for row in PASSES))
    sample = build_chain(chain)
    context = PassContext(tuple(sample.pairs), tuple(sample.donated))
    result = candidates(sample.graph, context, ScheduleOptions(recompute=False, memory_budget=10**9))
    reuses = len({c.pass_settings.max_reuse_bytes for c in result})
    assert reuses == (2 if chain.stage == 3 else 1)
    settings = result[0].pass_settings._replace(recast=True)  # candidates try it
    names = [row.name for row in PASSES if not row.runs_on_loops and row.arguments(settings, context) is not None]
    apart = {"hoist", *names[names.index("regather") :]}  # `max_reuse_bytes` sets both; here `hoist` changes nothing
    before = {name: reuses if name in apart else 1 for name in names}
    assert {"recast", "donate", "slice_of_gather", "schedule"} <= {*names}
    assert ran == before | {"schedule": len(result)}


def test_settings_of_a_pass_that_changes_nothing_share_the_later_passes():
    sample = build_chain(SHARDED._replace(stage=1))
    passes = PassManager(sample.graph, PassContext(tuple(sample.pairs), tuple(sample.donated)))
    one, other = (
        passes.schedule_with(PLAIN._replace(recompute=again, bucket_bytes=size))
        for again, size in ((False, 0), (True, 0))
    )
    assert not passes.changed_by(PLAIN._replace(recompute=True), "recompute") and one is other


def test_schedules_of_one_graph_share_its_analysis(monkeypatch):
    read: list[Graph] = []
    rows = {row.name: row for row in PASSES}
    shared = rows["schedule"]._replace(analyze=lambda graph: (read.append(graph), Orders(graph))[1])
    monkeypatch.setattr(_pass_manager, "PASSES", tuple([shared if row.name == "schedule" else row for row in PASSES]))
    sample = build_chain(SHARDED)
    passes = PassManager(sample.graph, PassContext(tuple(sample.pairs), tuple(sample.donated)))
    for ahead, flying in itertools.product((0, 1, FITTING), (0, 1)):
        settings = PLAIN._replace(max_reuse_bytes=0, prefetch=ahead, in_flight=flying, prefetch_budget=300)
        assert lines(passes.run(settings)[-1].graph) == lines(
            one_after_the_other(sample.graph, settings, passes.context)
        )
    assert len(read) == 1


def test_a_plan_shows_the_settings_of_the_passes():
    settings = PLAIN._replace(recompute=True, bucket_bytes=4, prefetch=FITTING, in_flight=1, prefetch_budget=17)
    assert settings.shown_in_plan() == {
        "recompute": True,
        "max_reuse_bytes": math.inf,
        "bucket_bytes": 4,
        "prefetch": FITTING,
        "in_flight": 1,
    }


@examples(4, 20)
@given(chains(stages=[3], sam=False))
def test_a_fitting_schedule_prefetches_within_the_peak_of_the_leanest(chain):
    sample = build_chain(chain)
    result = candidates(sample.graph, PassContext(tuple(sample.pairs), tuple(sample.donated)), ScheduleOptions())
    room = min(c.peak_bytes for c in result)
    fitting = [c for c in result if c.pass_settings.prefetch == FITTING]
    assert fitting and {c.pass_settings.prefetch_budget for c in fitting} == {room}
    assert min(c.peak_bytes for c in fitting if c.pass_settings.in_flight == 0) <= room


def make_sharded(stage: int = 3, n: int = 2) -> tuple[Any, tuple[Any, ...]]:
    opt = optim.adamw(1e-3)
    step = fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=fzero.mesh(dp=n))
    return step, (*step.init(mlp_params(), opt), step.mesh.split(mlp_batch(8)))


def table(folder: pathlib.Path) -> dict[str, list[str]]:
    rows = [line.split() for line in (folder / "peaks.txt").read_text().splitlines()[3:]]
    return {row[1]: row[2:] for row in rows}


@pytest.mark.parametrize("stage", cases((3,), [1]))
def test_a_dump_shows_each_pass_and_its_peak(stage, tmp_path):
    step, args = make_sharded(stage)
    folder = tmp_path / "deep" / "er"
    jitted = fzero.jit(step, dump=folder)
    (folder / "carry.txt").write_text("an earlier dump")
    plan, plain = fzero.plan(jitted, *args, world_size=4), fzero.plan(step, *args, world_size=4)
    assert str(plan) == str(plain)  # to look changes nothing
    rows = table(folder)
    titles = ["traced", *[row.name for row in PASSES]]
    assert list(rows) == titles
    left_out = {title for title in titles if rows[title][-2:] == ["left", "out"]}
    assert left_out == {
        *("drop_lone_collectives", "send_early", "keep_on_host", "recast", "move_early", "carry"),
        *([] if plan.settings["recompute"] else ["recompute"]),
    }
    assert {p.name for p in folder.iterdir()} == {"peaks.txt", *[f"{t}.txt" for t in titles if t not in left_out]}
    peaks = [int(rows[t][2].replace(",", "")) for t in titles]
    assert peaks[-1] == plan.peak_bytes and int(rows[titles[-1]][3]) == plan.peak_at
    text = (folder / LAST).read_text()
    lines = text.splitlines()[4:]
    assert [int(line.split()[1].replace(",", "")) for line in lines][: len(plan.live)] == plan.live
    assert f"peak {plan.peak_bytes:,} bytes" in text and "helpers.py:" in text
    assert "argument 0" in lines[0] and lines[-1].split(None, 2)[2].startswith("return (")
    gathers = [line for line in lines if "all_gather" in line.split("(")[0] and "wait" not in line]
    assert gathers and all("float64[" in line and "  # " in line for line in gathers)


def test_a_step_that_is_traced_again_is_dumped_beside_the_first(tmp_path):
    f = fzero.jit(lambda x: {"y": x.sin()}, backend="fx", dump=str(tmp_path))
    f(torch.ones(2))
    first = (tmp_path / "traced.txt").read_text()
    f(torch.ones(2))
    f(torch.ones(3))
    assert (tmp_path / "traced.txt").read_text() == first and "float32[2]" in first
    assert "float32[3]" in (tmp_path / "trace_2" / LAST).read_text()
    assert not (tmp_path / "trace_3").exists()


def test_without_a_dump_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fzero.jit(lambda x: x.sin(), backend="fx")(torch.ones(2))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_into_is_refused(tmp_path, monkeypatch):
    def step(x: torch.Tensor) -> torch.Tensor:
        return x

    file = tmp_path / "file"
    file.write_text("")
    for bad in (file, file / "folder"):
        with pytest.raises(ValueError, match=rf"dump='{bad}': {file}\S* is a file; expected the path of a folder"):
            fzero.jit(step, dump=bad)
    with pytest.raises(ValueError, match="dump='/proc/fzero/dump': the folder cannot be made: "):
        fzero.jit(step, dump="/proc/fzero/dump")
    for bad in (3, b"bytes", True):
        with pytest.raises(TypeError, match=rf"dump={bad!r}: expected the path of a folder"):
            fzero.jit(step, dump=bad)  # pyright: ignore
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=rf"dump='{tmp_path}': no permission to write into the folder"):
        fzero.jit(step, dump=tmp_path)


def test_a_dump_stays_where_the_step_was_jitted(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    jitted = fzero.jit(lambda x: x + 1, backend="fx", dump="graphs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    jitted(torch.ones(2))
    assert (tmp_path / "graphs" / "peaks.txt").exists()


def test_a_graph_without_operations_is_dumped(tmp_path):
    x = torch.ones(2)
    assert fzero.jit(lambda x: x, backend="fx", dump=tmp_path)(x) is not None
    assert peak_bytes_of(tmp_path / "peaks.txt") == {8}


def peak_bytes_of(path: pathlib.Path) -> set[int]:
    return {int(line.split()[4]) for line in path.read_text().splitlines()[3:]}


def test_the_peak_of_the_last_pass_is_the_candidates():
    sample = build_chain(SHARDED)
    context = PassContext(tuple(sample.pairs), tuple(sample.donated))
    for c in candidates(sample.graph, context, ScheduleOptions()):
        assert peak_bytes(PassManager(sample.graph, context).run(c.pass_settings)[-1].graph) == c.peak_bytes


@pytest.mark.parametrize("stage", cases((3,), [1]))
def test_a_plan_in_given_settings_traces_nothing_anew(stage, monkeypatch):
    opt = optim.adamw(1e-3)
    step = fzero.shard(train_step_for(mlp_loss, opt), stage, fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), opt), step.mesh.split(mlp_batch(8)))

    def text(plan: fzero.graph.Plan) -> str:
        return re.sub(r"test_pass_manager.py:\d+", "", plan.to_json())  # the line that plans

    ranks_step = fzero.graph.step_of_rank(step, *args, world_size=4)
    plan, jitted = ranks_step.plan(), ranks_step.step
    assert plan.rejected
    for other in plan.rejected[:: either(4, 1)]:
        untraced = jitted.with_options(schedule_options=ScheduleOptions.of(other.settings))
        anew = untraced.plan(*ranks_step.args)
        assert anew.settings == other.settings
        assert text(ranks_step.plan(other.settings)) == text(anew)
        assert text(ranks_step._replace(step=jitted.with_options()).plan(other.settings)) == text(anew)
    monkeypatch.setattr(_entry, "trace", None)  # nothing is traced from here on
    assert all(ranks_step.plan(other.settings).settings == other.settings for other in plan.rejected)
    assert ranks_step.plan() is plan


def test_an_operation_before_its_argument_is_refused():
    graph = copy_graph(build_chain(SHARDED).graph)
    check_order(graph)
    late = next(n for n in graph.nodes if n.op == "call_function" and n.users)
    next(iter(late.users)).append(late)
    with pytest.raises(AssertionError, match=f"before its argument {late.name}"):
        check_order(graph)


def test_an_argument_of_another_graph_is_refused():
    graph, other = copy_graph(build_chain(SHARDED).graph), copy_graph(build_chain(SHARDED).graph)
    node = next(n for n in graph.nodes if n.op == "call_function")
    argument = next(n for n in other.nodes if n.name == node.all_input_nodes[0].name)
    node.args = (argument, *node.args[1:])
    with pytest.raises(AssertionError, match=f"before its argument {argument.name}"):
        check_order(graph)
