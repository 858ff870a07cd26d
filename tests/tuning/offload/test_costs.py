"""The cost model of offload: the published settings by hand, laws of its seconds, and steps by their plans."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import tuning
from fzero.graph.planning._plan import _Transfer
from fzero.tuning.offload._offload_costs import _ROWS
from tests.helpers import cases, either
from tests.tuning.helpers import machines
from tests.tuning.steps import maker, plan_step


def opt_13b() -> tuning.OffloadCosts:
    work = tuning.model_work(13e9, ranks=8, tokens=2048, overhead_bytes=10e9, name="OPT-13B")
    return tuning.offload_costs(work, tuning.A100)


def opt_30b() -> tuning.OffloadCosts:
    work = tuning.model_work(30e9, ranks=8, tokens=2048, overhead_bytes=16e9, name="OPT-30B")
    return tuning.offload_costs(work, tuning.H100)


@pytest.mark.parametrize(
    "costs,first,gigabytes,compute,deepspeed,ours,device,ratio_of_times",
    [(opt_13b(), 0.0, 36, 1.52, 3.52, 2.83, 2.60, 2.3), (opt_30b(), 0.04, 74, 1.23, 4.11, 3.11, 2.79, 3.1)],
    ids=["OPT-13B", "OPT-30B"],
)
def test_offload_costs_of_two_models_are_those_of_the_paper(
    costs, first, gigabytes, compute, deepspeed, ours, device, ratio_of_times
):
    assert costs.first_fit == first
    assert round(costs.device_bytes(first) / 1e9) == gigabytes
    assert round(costs.work.flops / costs.machine.flops, 2) == compute
    seconds = [round(costs.seconds(1, way), 2) for way in ("deepspeed", "host", "device")]
    assert seconds == pytest.approx([deepspeed, ours, device], abs=0.01)
    assert round(costs.speed_up("deepspeed"), 1) == ratio_of_times


def test_the_published_speed_ups_need_a_slower_host():
    """Of 3 and 6: hosts 1.8 and 3 times slower give them, the assumed speeds do not."""
    for costs, published, useful, slower in ((opt_13b(), 3, 102e9, 1.8), (opt_30b(), 6, 96e9, 3.0)):
        assert costs.speed_up("deepspeed") < published
        at = replace(
            costs.machine, host_memory_bandwidth=useful * 46 / 28
        )  # of 46 bytes that move, 28 are the update's own
        assert round(costs.machine.host_memory_bandwidth / at.host_memory_bandwidth, 1) == slower
        slow = tuning.offload_costs(costs.work, at)
        assert slow.seconds(1, "deepspeed") / slow.seconds(0.05, "deepspeed") == pytest.approx(published, rel=0.02)
    for share in (0.2, 0.5):
        for host in (1e8, 1e10, 1e12):
            costs = tuning.offload_costs(opt_30b().work, replace(tuning.H100, host_memory_bandwidth=host))
            assert costs.seconds(1, "deepspeed") / costs.seconds(share, "deepspeed") <= 1 / share + 1e-9


def test_an_update_on_the_host_moves_16_bytes_a_parameter():
    """Momentum, variance and master in float32, a gradient down and a parameter up: 10 B of them on 160 GB, or 8."""
    work = tuning.model_work(10e9, ranks=1, tokens=1, stage=2)
    assert work.host_bytes == (0, 160e9) and work.state_bytes == 120e9
    assert work.device_bytes == (160e9, 20e9)  # ZeRO-Offload's 2 bytes a parameter that stay
    eight = tuning.model_work(8e9, ranks=4, tokens=1, stage=2)
    assert 4 * eight.host_bytes[1] == 0.8 * 160e9


@pytest.mark.parametrize("stage,whole", [(1, (4, 4)), (2, (2, 2)), (3, (0, 0))])
def test_offload_costs_count_the_bytes_of_each_zero_stage(stage, whole):
    """4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N; what stays at ratio 1."""
    work = tuning.model_work(1e9, ranks=10, tokens=1, stage=stage)
    shares = {1: (12, 0), 2: (14, 0), 3: (16, 2)}[stage]
    assert work.device_bytes == pytest.approx([1e9 * w + 1e8 * s for w, s in zip(whole, shares, strict=True)])


works = st.builds(
    tuning.model_work,
    st.floats(1e6, 1e12),
    ranks=st.integers(1, 512),
    tokens=st.floats(1, 1e6),
    stage=st.integers(1, 3),
    remat=st.booleans(),
    units=st.integers(1, 200),
)
ratios = st.floats(0, 1)


@given(work=works, machine=machines, a=ratios, b=ratios, row=st.sampled_from(_ROWS))
@example(opt_30b().work, tuning.H100, 0.0, 1.0, ("host", "during"))
def test_offloaded_seconds_are_bounded_by_the_passes_and_the_update(work, machine, a, b, row):
    costs = tuning.offload_costs(work, machine)
    way, schedule = row
    compute, chain = work.flops / machine.flops, costs.chain_seconds(a, way)
    seconds = costs.seconds(a, way, schedule)
    update = work.update_bytes / machine.memory_bandwidth
    assert max(compute, chain) * (1 - 1e-9) <= seconds <= (compute + chain + update) * (1 + 1e-9)
    low, high = sorted([a, b])
    assert costs.chain_seconds(low, way) <= costs.chain_seconds(high, way)
    assert costs.device_bytes(low) >= costs.device_bytes(high) * (1 - 1e-9)
    assert costs.host_bytes(low) <= costs.host_bytes(high)


@given(work=works, machine=machines, ratio=ratios, faster=st.floats(1, 100))
def test_faster_offload_schedules_take_no_longer(work, machine, ratio, faster):
    costs = tuning.offload_costs(work, machine)

    def at(*row: str, of: Any = costs) -> float:
        return of.seconds(ratio, *row) * (1 + 1e-9)

    assert costs.seconds(ratio, "host") <= at("deepspeed")
    assert costs.seconds(ratio, "host", "across") <= at("host", "during") or work.units == 1
    assert costs.seconds(ratio, "host", "during") <= at("host", "after")
    assert costs.seconds(ratio, "device", "during") <= at("device", "after")
    for name in ("flops", "memory_bandwidth", "host_link_bandwidth", "host_memory_bandwidth", "host_copy_bandwidth"):
        better = tuning.offload_costs(work, replace(machine, **{name: faster * getattr(machine, name)}))
        for row in _ROWS:
            assert better.seconds(ratio, *row) <= at(*row), name


@given(work=works, machine=machines, parts=st.integers(1, 1000))
@example(opt_30b().work, tuning.H100, 1000)
@example(opt_30b().work, replace(tuning.H100, device_bytes=opt_30b().device_bytes(0.25)), 100)
def test_the_least_offload_ratio_that_fits_equals_exhaustive_search(work, machine, parts):
    costs = tuning.offload_costs(work, machine, parts)
    room = machine.device_bytes * (1 + 1e-9)
    fits = [k / parts for k in range(parts + 1) if costs.device_bytes(k / parts) <= room]
    assert costs.first_fit == (fits[0] if fits else None)
    for schedule in ("after", "across") if fits else ():  # the fastest of all does not fit, in one of the examples
        fastest = costs.fastest("host", schedule)
        assert fastest in fits
        best = min([costs.seconds(r, "host", schedule) for r in fits])
        assert costs.seconds(fastest, "host", schedule) <= best * (1 + 1e-9) + 1e-12


def test_offload_costs_equal_hand_computed_ones():
    """10 elements of 30 bytes; every speed is another."""
    work = tuning.OffloadWork("w", "", 10, 100, 25, (300, 100), (0, 160), 120, 20, 20, 4)
    machine = tuning.Machine("m", 10, 250, 60, 2, 40, 48, 2)
    costs = tuning.offload_costs(work, machine)
    assert work.update_bytes == 300 and costs.first_fit == 0.25
    assert costs.chain_seconds(1) == 15 + (10 + 10) / 4  # 300 bytes at half of 40; 20 bytes down, 20 up, at 2
    assert costs.chain_seconds(0.5, "deepspeed") == (460 / 20 + 20 / 4) / 2
    assert costs.chain_seconds(1, "device") == 60 * 1.5  # 120 bytes at 2; 240 at 24 take 10
    assert costs.seconds(0.5) == 10 + 10 and costs.seconds(0) == 10 + 5
    assert costs.seconds(1, "host", "during") == 2.5 + 20 + 7.5 / 4
    assert costs.seconds(1, "host", "across") == 20 and costs.seconds(0.1, "host", "across") == 10 + 4.5
    assert costs.seconds(0.01, "device") == 10 + 5  # the device updates all


# Steps by their plans.


@pytest.mark.slow
def test_the_offload_work_of_a_plan_equals_the_formulas():
    layers, width, ranks, tokens = 12, 128, 4, 64
    make_step = maker(layers, width, clip=True)
    planned_ = tuning.planned_work(make_step, world_size=ranks)
    formula = tuning.model_work(layers * width**2, ranks=ranks, tokens=tokens, stage=2, remat=False, units=layers)
    for name in ("elements", "state_bytes", "down_bytes", "up_bytes", "update_bytes"):
        assert getattr(planned_, name) == pytest.approx(getattr(formula, name), rel=1e-3), name
    assert planned_.units == pytest.approx(layers)
    # the first layer's input needs no gradient
    assert planned_.flops == pytest.approx(formula.flops * (1 - 1 / (3 * layers)), rel=1e-3)
    assert planned_.forward_flops == pytest.approx(formula.forward_flops, rel=1e-3)
    saved, by_formula = [w.device_bytes[0] - w.device_bytes[1] for w in (planned_, formula)]
    assert (
        12 / 14 * by_formula * 0.999 <= saved <= by_formula * 1.001
    )  # gradients count where they are all there at the peak
    # 14 bytes of each element, and the same of the unit that is updated: no more than 16
    assert 14 <= planned_.host_bytes[1] / planned_.elements <= 16


@pytest.mark.slow
@pytest.mark.parametrize("stage,clip", cases([(3, True)], [(2, False)]))
def test_between_its_ends_a_plans_peak_lies_on_a_line(stage, clip):
    work = tuning.planned_work(lambda r: plan_step(r, stage, clip))
    machine = replace(tuning.H100, device_bytes=sum(work.device_bytes) / 2)
    costs = tuning.offload_costs(work, machine)
    for ratio in either((0.4,), (0.2, 0.4, 0.6)):
        assert plan_step(ratio, stage, clip).peak_bytes == pytest.approx(costs.device_bytes(ratio), rel=0.03)
    result = tuning.offload_ratio(lambda r: plan_step(r, stage, clip), machine.device_bytes, parts=100)
    assert costs.first_fit == pytest.approx(result.ratio, abs=0.1)


def test_offloaded_activations_are_not_counted_as_updates():
    def with_others(ratio: float) -> fzero.graph.Plan:
        plan = plan_step(ratio)
        moves = [_Transfer(0, kind, 1000, 3) for kind in ("to_host", "to_device")]
        return replace(plan, transfers=(*plan.transfers, *moves))

    mine, expected = tuning.planned_work(with_others), tuning.planned_work(plan_step)
    assert (mine.down_bytes, mine.up_bytes) == (expected.down_bytes, expected.up_bytes)


# Text and pictures.


def test_offload_costs_print_their_assumptions_and_the_answer():
    said = str(opt_30b())
    for words in (
        "30 B parameters on 8 ranks at stage 3, 2,048 tokens a rank and step, 8 FLOPs a parameter and token with remat",
        "400 TFLOP/s, 74.4 GB at 2,600 GB/s, link 50 GB/s each way; host of 8 devices: 480 GB/s",
        "assumed: 40% of 989 TFLOP/s, 93% of 80 GB, 78% of 3,350 GB/s, 79% of PCIe 5 x16",
        "fits 74.4 GB from ratio 0.04. With all state offloaded, DeepSpeed's update takes 3.1 times as long",
    ):
        assert words in said, said
    assert re.search(r"^update, schedule +0 +0.04 +0.1 .* 1$", said, re.MULTILINE)
    assert re.search(r"^deepspeed, after +1.27 s .* 4.11 s$", said, re.MULTILINE)
    assert "first ratio that fits 0.04" in repr(opt_30b()) and "<img" in opt_30b()._repr_html_()


def test_offload_costs_of_a_model_that_fits_nowhere_say_so(tmp_path):
    costs = tuning.offload_costs(opt_30b().work, replace(tuning.H100, device_bytes=20e9))
    assert costs.first_fit is None and "no ratio fits 20.0 GB of the device" in str(costs)
    for ask in (costs.fastest, costs.speed_up):
        with pytest.raises(ValueError, match=r"OPT-30B fits 8 x H100 80 GB at no ratio: .* 23.5 GB of 20.0 GB"):
            ask()
    costs.plot(tmp_path / "none.png")
    opt_30b().plot(tmp_path / "costs.svg")
    assert (tmp_path / "none.png").stat().st_size > 1000
    assert "OPT-30B on 8 x H100 80 GB" in (tmp_path / "costs.svg").read_text()


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no ratio": (lambda: opt_30b().seconds(1.5), ValueError, r"ratio=1.5: expected a number from 0 to 1"),
    "a nan": (lambda: opt_30b().device_bytes(math.nan), ValueError, r"ratio=nan: expected a number from 0 to 1"),
    "no way": (
        lambda: opt_30b().seconds(1, "cpu"),
        ValueError,
        r'update=.cpu.: expected "host", "device" or "deepspeed"',
    ),
    "no schedule": (
        lambda: opt_30b().seconds(1, "device", "across"),
        ValueError,
        r"schedule='across': expected 'after' or 'during' with update='device'",
    ),
    "no work": (lambda: tuning.offload_costs(3, tuning.H100), TypeError, r"work=3: expected a fzero.tuning.OffloadW"),  # pyright: ignore
    "no machine": (
        lambda: tuning.offload_costs(opt_30b().work, "H100"),  # pyright: ignore
        TypeError,
        r"machine='H100': expected a fzero.tuning.Machine",
    ),
    "no parts": (lambda: tuning.offload_costs(opt_30b().work, tuning.H100, 0), ValueError, r"parts=0: expected an int"),
    "no link": (
        lambda: replace(tuning.H100, host_link_bandwidth=0),
        ValueError,
        r"Machine: host_link_bandwidth=0: expected a number above 0",
    ),
    "no ranks": (lambda: replace(tuning.H100, ranks=True), ValueError, r"Machine: ranks=True: expected a number"),
    "no parameters": (
        lambda: tuning.model_work(0, ranks=8, tokens=1),
        ValueError,
        r"num_params=0: expected a number above 0",
    ),
    "stage 0": (lambda: tuning.model_work(1, ranks=8, tokens=1, stage=0), ValueError, r"stage=0: expected 1, 2 or 3"),
    "no offload": (
        lambda: tuning.planned_work(lambda r: plan_step(0.0)),
        ValueError,
        r"make_step: its plan at ratio 1 holds no more state on the host than .* ratio 0: does it pass .* has a state",
    ),
    "updates on the device": (
        lambda: tuning.planned_work(lambda r: plan_step(r, update_on="device")),
        ValueError,
        r'make_step: its step updates on the device: use update_on="host", from which both costs follow',
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_offload_costs_are_refused(name):
    action, error, message = BAD[name]
    with pytest.raises(error, match=message):
        action()
