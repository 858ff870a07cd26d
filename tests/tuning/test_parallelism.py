"""Tensor and pipeline parallelism in the planner: rows are those of the fullest rank, and pasted calls run."""

import functools
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fzero
from fzero import tuning
from fzero.parallel.schedules import NAMES, schedule
from fzero.tuning import CPU, H100, Configuration, ConfigurationTable
from fzero.tuning._page import Case, html_page
from fzero.tuning._recipe import recipe
from fzero.tuning._row import PlanSummary, ScheduleCost, make_row
from fzero.tuning._search_space import TuneOptions, make_search_space
from fzero.tuning.models import PRESETS
from fzero.tuning.models._steps import _weight_decay_mask
from fzero.tuning.search._configuration_planner import ConfigurationPlanner, _find_fullest_ranks
from fzero.tuning.search._extrapolation import choose_depths
from tests.helpers import cases, either
from tests.tuning.helpers import TINY
from tests.tuning.spaces import WIDTH, apply_block, make_step

ASKED: dict[str, Any] = {"world_size": 8, "global_batch": 64, "machine": CPU, "micro_batches": (8,), "remat": (False,)}
SPACE = make_search_space(
    TuneOptions(8, 64, (1, 3), (8,), (False,), ("bfloat16",), (0.0,), (1,), (1, 2), (1, 2, 4), ("1f1b", "gpipe"))
)


def test_planned_layouts_are_all_that_multiply_to_the_world_size():
    places = {(c.ranks, c.tp, c.pp, c.schedule) for c in SPACE}
    assert places == {
        (8, 1, 1, "1f1b"),
        (4, 2, 1, "1f1b"),
        *[(4, 1, 2, s) for s in ("1f1b", "gpipe")],
        *[(2, 2, 2, s) for s in ("1f1b", "gpipe")],
        *[(2, 1, 4, s) for s in ("1f1b", "gpipe")],
        *[(1, 2, 4, s) for s in ("1f1b", "gpipe")],
    }
    for c in SPACE:
        assert c.global_batch == 64 and c.world == 8 and c.accumulation == 64 // c.ranks // 8
        assert fzero.mesh(**c.axes).size == 8 and "tp" not in c.mean and ("pp" in c.mean) == (c.pp > 1)
    assert [*Configuration(1, 1, 1, ranks=8, ep=2, tp=2, pp=2).axes] == ["pp", "dp", "ep", "tp"]  # tp within a machine


FEW: dict[str, Any] = {**ASKED, "world_size": 4, "global_batch": 64, "stages": (1, 3), "tp": (1, 2), "pp": (1, 2)}


@dataclass(frozen=True)
class Kept:
    """The function that makes steps, with a key: so a row is planned once in a test."""

    cache_key: str = "places"

    def __call__(self, config: Configuration) -> Any:
        return make_step(config)


@pytest.fixture(scope="module")
def table() -> ConfigurationTable:
    return fzero.tune(make_step, **FEW, memory=1e12)


@functools.cache
def ranks_of(config: Configuration) -> list[fzero.graph.Plan]:
    """Plan a configuration on each rank along its pipeline."""
    step, *args = make_step(config)
    places = [{"pp": i} for i in range(config.pp)] if config.pp > 1 else [0]
    return [fzero.plan(step, *args, hardware=CPU.as_hardware(), rank=at) for at in places]


@pytest.mark.slow
def test_a_row_is_the_plan_of_the_fullest_rank(table):
    """Peak, kinds and bytes by axis are its own; the seconds are those of the slowest."""
    assert len(table.rows) == 8 and not table.skipped
    for row in table.rows[:: either(8, 1)]:
        plans = ranks_of(row.config)
        fullest = max(plans, key=lambda p: p.peak_bytes)
        assert row.peak_bytes == fullest.peak_bytes == plans[row.rank].peak_bytes and row.in_full
        assert row.device_bytes == {k: n for k in row.device_bytes if (n := fullest.live_of(k)[fullest.peak_at])}
        assert row.seconds == max(p.seconds for p in plans)
        moved = dict[str, float]()
        for x in (*plans[row.rank].collectives, *plans[row.rank].messages):
            moved[x.axis] = moved.get(x.axis, 0) + x.bytes * x.times
        assert row.traffic_bytes == moved
        axes = {axis for axes in moved for axis in axes.split(",")}
        assert axes - {"dp"} == {name for name in ("tp", "pp") if getattr(row.config, name) > 1}
        assert (len(plans[0].messages) > 0) == (row.config.pp > 1)


def test_the_traffic_of_a_layout_equals_a_formula(table):
    """A message is an activation. Along tp each block sums one forward, and one backward but the model's first."""
    activation = 8 * WIDTH * 2  # of a micro-batch, in bfloat16
    for row in table.rows:
        c = row.config
        blocks = 3 if c.pp == 1 else (2, 1)[row.rank]
        sums = 2 * blocks - (row.rank == 0)
        traffic = row.traffic_bytes
        assert traffic.get("pp", 0) == pytest.approx(c.accumulation * activation * (c.pp > 1), abs=100)
        assert traffic.get("tp", 0) == pytest.approx(2 * sums * c.accumulation * activation * (c.tp > 1), abs=100)


@pytest.mark.slow
def test_the_best_layout_equals_that_of_an_exhaustive_search(table):
    """It does so at each budget that a row just meets, and just does not."""
    results = [(row.config, max(p.peak_bytes for p in ranks_of(row.config)), row.seconds) for row in table.rows]
    writer = Kept()
    assert fzero.tune(writer, **FEW, memory=1e12).rows == table.rows
    for budget in sorted({n - less for _, n, _ in results for less in (0, 1)})[:: either(3, 1)]:
        tuned = fzero.tune(writer, **FEW, memory=budget)
        fits = [(seconds, n, str(c)) for c, n, seconds in results if n <= budget]
        assert {str(r.config) for r in tuned.fitting} == {c for _, _, c in fits}
        if fits:
            assert str(tuned.best().config) == min(fits)[2]
        for s in tuned.skipped:
            assert s.config.holds_no_less_than(s.smaller)
            assert (s.config.tp, s.config.pp) == (s.smaller.tp, s.smaller.pp)


@pytest.mark.slow
def test_a_table_of_layouts_does_not_depend_on_the_number_of_workers(table):
    again = fzero.tune(make_step, **FEW, memory=1e12, workers=2)
    assert str(again) == str(table) and again.to_json() == table.to_json()
    assert ConfigurationTable.from_json(table.to_json()).to_csv() == again.to_csv()


@pytest.mark.parametrize("name", NAMES)
def test_the_fullest_rank_is_one_of_those_that_are_planned(name):
    """They are the first, the last, and of those between the one with most in flight."""
    for pp, chunks in ((2, 8), (4, 4), (5, 12), (8, 16)):
        config = Configuration(1, 1, chunks, ranks=1, pp=pp, schedule=name)
        ranks = _find_fullest_ranks(config)
        made = fzero.parallel.schedules.schedule(name, pp, chunks, config.pipeline_stages)
        between = [made.in_flight(r) for r in range(1, pp - 1)]
        assert {0, pp - 1} <= {*ranks} and [*ranks] == sorted({*ranks})
        assert [made.in_flight(r) for r in ranks[1:-1]] == ([max(between)] if between else [])
    assert _find_fullest_ranks(Configuration(1, 1, 1)) == (0,)


def test_the_row_of_a_pipeline_has_the_seconds_of_its_slowest_rank():
    def digest(peak: float, seconds: float) -> PlanSummary:
        return PlanSummary({("a",): {"parameters": peak}}, {"pp": peak}, 0.0, peak, {(): ScheduleCost(peak, seconds)})

    row = make_row(Configuration(1, 1, 4, pp=4), {0: digest(9, 1.0), 1: digest(8, 2.0), 3: digest(7, 3.0)}, True)
    assert (row.peak_bytes, row.seconds, row.rank, row.traffic_bytes) == (9, 3.0, 0, {"pp": 9})


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ("gpipe", "interleaved", "zb"))
def test_no_rank_of_a_longer_pipeline_is_fuller(schedule):
    config = Configuration(1, 8, 8, ranks=1, depth=8, pp=4, schedule=schedule)
    row = ConfigurationPlanner(make_step, CPU)(config)
    plans = ranks_of(config)
    assert row.peak_bytes == max(p.peak_bytes for p in plans) and row.seconds == max(p.seconds for p in plans)


# Models of many blocks.


def test_models_of_few_blocks_keep_the_unevenness_of_pipeline_stages():
    def of(depth: int, **more: Any) -> Any:
        return choose_depths(Configuration(1, 1, 1, depth=depth, **more))

    assert of(32) == (4, 6, 8, 10) and of(33) == (3, 5, 7, 9) and of(14) == of(72, pp=8) == ()
    assert of(72, pp=4) == (16, 24, 32) and of(70, pp=4) == (14, 22, 30)
    assert of(72, pp=2, schedule="interleaved") == (16, 24, 32)
    assert choose_depths(Configuration(1, 1, 1, depth=32), is_uniform=True) == (4, 5, 6, 7, 8)
    assert choose_depths(Configuration(1, 1, 1, depth=33, pp=2), is_uniform=True) == (5, 7, 9, 11)


def check_few_blocks(step: Any, config: Configuration) -> None:
    """Tell a row from few blocks, and hold it beside its plan."""
    planner = ConfigurationPlanner(step, H100)
    row = planner(config)
    full = planner(row)
    assert not row.in_full and full.in_full and (row.rank, row.settings) == (full.rank, full.settings)
    assert row.peak_bytes == pytest.approx(full.peak_bytes, rel=0.005)
    assert row.traffic_bytes == full.traffic_bytes and row.flops == full.flops
    assert row.seconds == pytest.approx(full.seconds, rel=0.005)


MANY = ({"tp": 2, "pp": 2}, {"pp": 2, "schedule": "zb"}, {"tp": 4})


@pytest.mark.slow
@pytest.mark.parametrize("places", MANY, ids=str)
def test_a_deep_pipeline_is_extrapolated_from_few_blocks(places):
    check_few_blocks(make_step, Configuration(3, 8, 4, ranks=2, depth=30, **places))


@pytest.mark.slow
def test_models_of_few_blocks_decide_on_carried_reductions_as_deep_ones():
    """With few blocks that takes more than 3% of the peak, and with many it does not."""
    check_few_blocks(make_step, Configuration(2, 1024, 4, ranks=4, depth=18))


@pytest.mark.slow
@pytest.mark.parametrize("places", MANY, ids=str)
def test_a_deep_pipelined_model_is_extrapolated_from_few_blocks(places, monkeypatch):
    """Of one with an embedding and a head, so that the ranks of its pipeline differ."""
    monkeypatch.setitem(PRESETS, "tiny", replace(TINY["causal"], width=256, kv_heads=4, mlp=1024, vocab=512, depth=30))
    check_few_blocks(tuning.model_step("tiny", length=64), Configuration(2, 2, 4, ranks=2, depth=30, **places))


def test_a_table_tells_layouts_and_bytes_by_axis(table):
    head = str(table).splitlines()[1].split()
    assert {"tp", "pp"} < {*head} and "schedule" not in head and head.count("over") == 3
    (line,) = [x for x in str(table).splitlines() if x.startswith("    3  8 x 8  no     bfloat16         0   2   2")]
    row = next(r for r in table.rows if (r.config.stage, r.config.tp, r.config.pp) == (3, 2, 2))
    assert f"{row.traffic_bytes['tp'] / 1e3:.1f} kB" in line and f"{row.traffic_bytes['pp'] / 1e3:.1f} kB" in line
    text = str(table).replace("\n", " ")
    assert any("tp times pp" in v.rule for v in table.rules()) and all(str(v) in text for v in table.rules())
    record = table.records()[-1]
    assert {"tp", "pp"} < {*record} and not {"ep", "schedule"} & {*record}
    said = json.loads(table.to_json())
    assert all({"tp", "pp"} < {*r["config"]} for r in said["rows"]) and "tp" in said["best"]["config"]
    assert ConfigurationTable.from_json(table.to_json()) == table


def test_the_page_of_a_plan_filters_by_layout(table):
    made = html_page([Case({"model": "x"}, table, make_step)])
    (data,) = json.loads(made.split('type="application/json">')[1].split("</script>")[0])["cases"]
    assert data["axes"] == ["tp", "pp"] and {(r["tp"], r["pp"]) for r in data["rows"]} == {
        (a, b) for a in (1, 2) for b in (1, 2)
    }
    assert data["rows"][0]["along"] == table.fitting[0].traffic_bytes and data["timeline"]["phases"]


RECIPES = [
    {"tp": 2},
    {"tp": 2, "remat": "matmuls", "accumulation": 2},
    {"pp": 2, "accumulation": 4},
    {"pp": 2, "accumulation": 4, "remat": True, "depth": 5, "schedule": "gpipe"},
    {"pp": 2, "accumulation": 4, "schedule": "interleaved", "remat": "matmuls"},
    {"tp": 2, "pp": 2, "accumulation": 2, "schedule": "zb", "offload": 0.5},
    {"tp": 2, "remat": "every-2", "accumulation": 2},
]


def test_the_lines_to_paste_name_the_stages_of_a_rank():
    config = replace(Configuration(2, 2, 4, ranks=2, depth=4, pp=2), schedule="interleaved")
    assert "stages_per_rank=2" in recipe(config) and "stages_per_rank" not in recipe(replace(config, schedule="1f1b"))
    assert "stages_per_rank=3" in recipe(replace(config, stages_per_rank=3))


@pytest.mark.slow
def test_a_schedule_may_name_the_stages_of_a_rank():
    """More stages leave a shorter bubble. Rows, tables and records name them."""
    options = {"world_size": 2, "global_batch": 2, "machine": "h100", "stages": (1,), "remat": (False,), "pp": (2,)}
    options |= {"micro_batches": (1,), "schedule": ("interleaved", "interleaved:4"), "depth": 8}
    table = fzero.tune(make_step, **options)
    two, four = (next(r for r in table.rows if r.config.pipeline_stages == n) for n in (2, 4))
    assert two.config.stages_per_rank is None and four.config.stages_per_rank == 4
    assert "by interleaved:4" in str(four.config) and "interleaved:4" in str(table)
    assert tuning.ConfigurationTable.from_json(table.to_json()).rows == table.rows

    def bubble(config: Configuration) -> float:
        return 1 - schedule(config.schedule, 2, config.accumulation, config.pipeline_stages).timing().efficiency

    assert bubble(four.config) < 0.6 * bubble(two.config)
    assert four.traffic_bytes["pp"] > two.traffic_bytes["pp"]


def test_a_table_of_all_axes_shows_every_digit(table):
    """However many columns it has: of axes, and of the bytes along each."""
    axes = {"ep": 2, "cp": 2, "tp": 2, "pp": 4, "schedule": "interleaved", "stages_per_rank": 4}
    names = ("dp", "dp,ep", "ep", "dp,cp", "cp", "tp", "pp", "dp,cp,tp")
    row = table.rows[0]
    large = replace(row, config=replace(row.config, **axes), traffic_bytes=dict.fromkeys(names, 123.4e9))
    text = str(replace(table, rows=(row, large), budget_bytes=1.0))
    assert "…" not in text and "over dp,cp,tp" in text and text.count("123.4 GB") == len(names)


def test_pipelines_of_other_stages_on_a_rank_are_not_compared():
    config = replace(Configuration(1, 1, 16, ranks=2, pp=4, depth=16), schedule="interleaved")
    assert config.holds_no_less_than(config) and not config.holds_no_less_than(replace(config, stages_per_rank=4))


@pytest.mark.parametrize("pp", [1, 2])
def test_weight_decay_of_a_planned_pipeline_leaves_norms_out(pp):
    """A pipeline stacks the blocks, so a norm's weight has two dimensions there."""
    norm, matrix = (torch.empty(*[4] * (pp > 1), *size, device="meta") for size in ((8,), (8, 8)))
    mask = _weight_decay_mask(Configuration(1, 1, 1, pp=pp))(
        {"blocks": {"norm": norm, "w": matrix}, "tokens": matrix[..., :8]}
    )
    assert mask == {"blocks": {"norm": False, "w": True}, "tokens": True}


@pytest.mark.parametrize("setting", ["interleaved:1", "1f1b:2", "interleaved:", "interleaved:x", "zbv:3"])
def test_a_schedule_does_not_take_any_number_of_stages(setting):
    options = {"world_size": 4, "global_batch": 16, "machine": "h100", "pp": (4,), "schedule": (setting,)}
    with pytest.raises(ValueError, match=f"'{setting}' is not allowed: expected names .* as in 'interleaved:4'"):
        fzero.tune(tuning.model_step("gpt2", length=64), **options)


@pytest.mark.parametrize("changed", cases([*RECIPES[1::2], RECIPES[-1]], RECIPES), ids=str)
def test_the_lines_to_paste_of_a_parallel_plan_run(changed):
    """They make the mesh and the step that were planned, and train as the whole model does."""
    config = replace(Configuration(2, 2, 1, precision="float32", ranks=2, depth=4), **changed)
    torch.manual_seed(0)
    params = {
        "blocks": [{"up": torch.randn(8, 16) / 4, "down": torch.randn(16, 8) / 4} for _ in range(config.depth or 4)],
        "table": torch.randn(8, 8),
    }

    def of(params: Any, x: Any) -> torch.Tensor:
        rest = {"table": fzero.gather(params["table"])}
        h = first(rest, x)
        blocks = names.get("blocks", (names["block"],))  # the forms of a block that alternate
        for i, p in enumerate(params["blocks"]):
            h = blocks[i % len(blocks)](p, h)
        return last(rest, h, x)

    def first(rest: Any, batch: Any) -> torch.Tensor:
        return batch @ rest["table"]

    def last(rest: Any, x: torch.Tensor, batch: Any) -> torch.Tensor:
        return (x @ rest["table"]).square().mean()

    names: dict[str, Any] = {"fzero": fzero, "torch": torch, "optim": fzero.optim, "block": apply_block, "loss_fn": of}
    names |= {"first": first, "last": last, "params": params}
    said = recipe(config).replace("dp=-1", f"dp={config.ranks}")
    exec(said, names)
    step, mesh = names["step"], names["mesh"]
    assert dict(mesh.shape) == config.axes and ("gather=False" in said) == (
        config.remat is not False and config.pp == 1
    )
    assert ("step.init" in said) == (config.pp > 1)
    state = (names["params"], names["opt_state"]) if config.pp > 1 else step.init(params, names["opt"])
    batch = torch.randn(config.global_batch, 8)
    (call,) = [line.removeprefix("# call step with ") for line in said.splitlines() if "call step with" in line]
    arguments = eval(call, {"mesh": mesh, "batch": batch})
    assert fzero.plan(step, *state, arguments).peak_bytes
    actual = step.step(*state, arguments)[2]  # without compiling it
    names["block"] = apply_block
    assert float(actual) == pytest.approx(float(of(params, batch)), rel=1e-5)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a tp that does not divide": ({"tp": (3,)}, r"tp=\(3,\): 3 is not allowed: expected ints that divide world_size=8"),
    "a pp of nothing": ({"pp": (0,)}, r"pp=\(0,\): 0 is not allowed"),
    "an unknown schedule": (
        {"schedule": ("gpip",)},
        r"schedule=\('gpip',\): 'gpip' is not allowed: expected names of 'gpipe', '1f1b'",
    ),
    "axes that do not make up the world": (
        {"tp": (4,), "pp": (1, 4)},
        r"tp=\(4,\), pp=\(1, 4\): no configuration has pp=4: world_size=8 is not a multiple of cp x tp x pp",
    ),
    "a batch that does not divide": (
        {"global_batch": 2, "micro_batches": (1,), "tp": (1, 2)},
        r"global_batch=2 does not divide over the 4 data-parallel ranks that world_size=8 has at least",
    ),
    "a batch that one layout cannot divide": (
        {"global_batch": 4, "micro_batches": (1,), "tp": (1, 2)},
        r"tp=\(1, 2\): no configuration has tp=1: global_batch=4 does not divide",
    ),
    "more stages than blocks": (
        {"pp": (1, 4), "depth": 3},
        r"no configuration has pp=4: a model of 3 blocks has fewer blocks than its pipeline has stages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_layouts_are_refused_by_tune(name):
    changed, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        fzero.tune(make_step, **{**ASKED, **changed})


def test_a_step_on_another_mesh_is_refused():
    def flat(config: Configuration) -> Any:
        return make_step(replace(config, tp=1))

    with pytest.raises(
        ValueError, match=r"returned a step on Mesh\(dp=4.*has tp=2: make the mesh with fzero.mesh\(\*\*"
    ) as error:
        fzero.tune(flat, **{**ASKED, "tp": (2,)})
    assert "while planning stage 3" in error.value.__notes__[0]


def test_a_pipeline_with_too_many_stages_is_named_by_its_axis():
    options = {"world_size": 4, "global_batch": 8, "machine": "h100", "pp": (4,), "schedule": ("interleaved:9",)}
    with pytest.raises(
        ValueError, match=r"pp=\(4,\): no configuration has pp=4: a model of 12 blocks has fewer blocks"
    ):
        fzero.tune(tuning.model_step("gpt2", length=64), **options, depth=12)


def test_heads_that_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY["causal"])
    step = tuning.model_step("tiny", length=16)
    for tp, what in ((8, "4 heads"), (4, "2 heads of keys and values")):
        with pytest.raises(ValueError, match=rf"tp={tp} does not divide the {what} of llama"):
            step(Configuration(1, 1, 1, tp=tp))
    with pytest.raises(
        ValueError, match=r"pp=2 by 'interleaved': llama has 2 blocks, fewer than the pipeline has stages"
    ):
        step(Configuration(1, 1, 4, pp=2, schedule="interleaved"))


def test_a_search_that_fits_nothing_advises_further_axes(table):
    with pytest.raises(ValueError, match=r"Try .*or cp=2, .* each sequence, or pp=2, a pipeline, or more ranks$"):
        replace(table, budget_bytes=1.0).best()
    one = replace(table, budget_bytes=1.0, rows=tuple([r for r in table.rows if r.config.tp == r.config.pp == 1]))
    with pytest.raises(ValueError, match=r"or tp=2, .* each matrix, or cp=2, .* or pp=2, a pipeline, or more"):
        one.best()
