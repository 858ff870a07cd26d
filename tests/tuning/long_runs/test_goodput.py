"""goodput: simulated runs agree with formulas where formulas exist, and with what was published."""

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fzero import tuning
from fzero.tuning import Reliability
from fzero.tuning.command import run
from fzero.tuning.long_runs._simulated_run import _USEFUL, LOSSES, SimulatedRun
from tests.helpers import cases, either

HOUR = 3600.0
STEP = "tests.tuning.spaces:make_step"


def test_without_failures_goodput_loses_only_the_time_of_saves():
    result = tuning.goodput(1.0, 8, Reliability(math.inf, save_seconds=10), save_every_seconds=90, days=1, samples=2)
    assert result.share.median == pytest.approx(0.9) and result.failures == 0
    assert result.losses["saves"] == pytest.approx(0.1) and sum(result.losses.values()) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "save,restart,every", cases([(100.0, 500.0, 1400.0), (10.0, 0.0, 200.0)], [(30.0, 2000.0, 5000.0)])
)
def test_the_goodput_under_failures_follows_dalys_formula(save, restart, every):
    """The expected time of a run whose restarts may fail too, FGCS 22 (2006), equation 13."""
    mtbf = 10_000.0
    what_fails = Reliability(mtbf * 1000, save_seconds=save, detection_seconds=0, restart_seconds=restart)
    result = tuning.goodput(1.0, 1000, what_fails, save_every_seconds=every, days=1000, samples=8)
    expected = every / (mtbf * math.exp(restart / mtbf) * math.expm1((every + save) / mtbf))
    assert result.share.median == pytest.approx(expected, rel=0.01)
    assert result.failures == pytest.approx(1000 * 86400 / mtbf, rel=0.02)


def test_the_simulated_best_save_interval_is_near_the_formulas():
    result = tuning.goodput(0.5, 1000, Reliability(1e8, save_seconds=20), days=300, samples=12)
    assert result.formula_seconds == pytest.approx(tuning.save_interval(1e5, 20))
    assert 0.5 * result.formula_seconds <= result.save_every_seconds <= 2 * result.formula_seconds
    shares = [x.median for x in result.by_interval.values()]
    assert max(shares) > shares[0] and max(shares) > shares[-1]  # it lies between too often and too seldom


@pytest.mark.parametrize("save", [1.0, 100.0, 1000.0])
def test_the_formulas_save_interval_loses_least(save):
    """Of all times, by the exact expectation."""
    mtbf = 10_000.0
    best = max(range(10, 20_000, 10), key=lambda every: every / math.expm1((every + save) / mtbf))
    assert tuning.save_interval(mtbf, save) == pytest.approx(best, rel=0.03, abs=10)


@pytest.mark.slow
def test_a_failure_during_a_save_loses_that_save():
    """A failure before its end falls back to the save before, so each failure loses that much more."""
    what_fails = Reliability(1e7, save_seconds=1, detection_seconds=0, restart_seconds=0)
    soon, late = (
        tuning.goodput(
            1.0, 1000, replace(what_fails, commit_seconds=x), save_every_seconds=500, days=500, samples=either(4, 8)
        )
        for x in (0.0, 300.0)
    )
    assert late.losses["lost steps"] - soon.losses["lost steps"] == pytest.approx(0.03, rel=0.1)


def test_a_slow_device_slows_all_ranks():
    """One device is slow for an hour after a lifetime of ten, and steps then take half as long again."""
    what_fails = Reliability(math.inf, save_seconds=0, slow_mtbf_seconds=10 * HOUR, slow_factor=1.5, slow_seconds=HOUR)
    result = tuning.goodput(1.0, 1, what_fails, save_every_seconds=600, days=2000, samples=4)
    slow = 1 - math.exp(-0.1)  # the share of time in which one or more are
    assert result.losses["slow ranks"] == pytest.approx(slow / 3, rel=0.05)
    assert result.share.median == pytest.approx(1 - slow / 3, rel=0.01)


def test_a_run_goes_on_without_a_lost_host():
    what_fails = Reliability(
        400 * HOUR, save_seconds=0, detection_seconds=0, restart_seconds=0, repair_seconds=4 * HOUR
    )
    result = tuning.goodput(1.0, 16, what_fails, save_every_seconds=1, days=3000, samples=4)
    absent = 16 / 400 * 4  # hosts that are missing on average, of two; never both at once
    assert result.losses["fewer ranks"] == pytest.approx(absent / 2, rel=0.08)
    spare = tuning.goodput(1.0, 16, replace(what_fails, repair_seconds=0), save_every_seconds=1, days=3000, samples=4)
    assert spare.share.median > 0.999


@pytest.mark.slow
def test_a_repaired_host_loses_no_work():
    """Its return costs a restart, and no steps: each failure loses as many as with a spare host."""
    what_fails = Reliability(160 * HOUR, save_seconds=10, restart_seconds=60, devices_lost=2)
    spare, repaired = (
        tuning.goodput(1.0, 16, replace(what_fails, repair_seconds=x), save_every_seconds=3000, days=2000, samples=4)
        for x in (0.0, HOUR)
    )
    assert repaired.losses["lost steps"] == pytest.approx(spare.losses["lost steps"], rel=0.1)
    assert repaired.losses["restart"] == pytest.approx(2 * spare.losses["restart"], rel=0.1)
    assert repaired.losses["fewer ranks"] == pytest.approx(0.1 / 8, rel=0.15)  # one of eight, a tenth of the time


def test_a_run_stands_still_without_its_only_replica():
    """The devices that a failure takes away are all of them, or a few more than they are."""
    for devices in (8, 12):
        what_fails = Reliability(
            devices * 24 * HOUR,
            save_seconds=0,
            detection_seconds=0,
            restart_seconds=0,
            repair_seconds=24 * HOUR,
            devices_lost=16,
        )
        result = tuning.goodput(1.0, devices, what_fails, save_every_seconds=1, days=3000, samples=4)
        assert result.mean == pytest.approx(0.5, rel=0.05) and result.losses["fewer ranks"] == pytest.approx(
            0.5, rel=0.05
        )
        assert result.failures == pytest.approx(1500, rel=0.05)  # a missing device does not fail


def test_two_slow_devices_cost_more_goodput_than_one():
    what_fails = Reliability(math.inf, save_seconds=0, slow_mtbf_seconds=HOUR, slow_factor=2.0, slow_seconds=HOUR)
    result = tuning.goodput(1.0, 1, what_fails, save_every_seconds=600, days=either(400, 1000), samples=4)
    assert result.losses["slow ranks"] == pytest.approx((1 - math.exp(-1)) / 2, rel=0.03)


@given(
    mtbf=st.floats(1e4, 1e8),
    save=st.floats(0, 200),
    commit=st.floats(0, 2000),
    times=st.tuples(st.floats(0, 500), st.floats(0, 2000), st.floats(0, 5000)),
    slow=st.tuples(st.floats(1e4, 1e8), st.floats(1, 3), st.floats(0, 5000)),
    devices=st.integers(1, 64),
    lost=st.integers(1, 70),
    every=st.floats(1, 5000),
    seed=st.integers(0, 99),
)
def test_every_second_of_a_simulated_run_is_counted_once(mtbf, save, commit, times, slow, devices, lost, every, seed):
    what_fails = Reliability(mtbf, save, commit, *times, *slow, lost)
    horizon = 200_000.0
    one = SimulatedRun(what_fails, devices, every, horizon, random.Random(seed)).simulate()
    assert sum(one.seconds.values()) == pytest.approx(horizon, rel=1e-6)
    assert all(one.seconds[name] >= -1e-6 for name in (_USEFUL, *LOSSES))
    assert one.seconds[_USEFUL] == pytest.approx(one.work_seconds, abs=1e-3)  # what the state contains at the end


def test_the_simulated_goodput_of_llama_3_matches_its_paper():
    """466 interruptions in 54 days on 16,384 GPUs, and over 90% effective time, arXiv:2407.21783, section 3.3.4."""
    what_fails = Reliability(54 * 86400 * 16384 / 466, save_seconds=4, commit_seconds=60, restart_seconds=300)
    result = tuning.goodput(6.3, 16384, what_fails, days=54, samples=8)
    assert result.failures == pytest.approx(466, rel=0.05)
    assert 0.9 < result.share.lower < result.share.upper < 0.95


def test_the_same_seed_draws_the_same_failures():
    what_fails = Reliability(1e6, save_seconds=5)
    first, again, other = (tuning.goodput(1.0, 100, what_fails, days=5, samples=4, seed=s) for s in (0, 0, 1))
    assert first == again and first != other


def test_a_plan_prints_the_goodput_of_its_best_row(capsys, tmp_path):
    words = f"{STEP} --world 8 --batch 8 --stages 1 --micro-batches 1 --remat yes --depth 1 --no-cache --workers 1"
    assert (
        run(["plan", *words.split(), "--mtbf", "40h", "--save-time", "2s", "--restart-time", "10min", "--days", "3"])
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "over 3 days on 8 devices, with 1" in out and "So a step takes" in out
    assert run(["plan", *words.split(), "--mtbf", "5s", "--days", "0.005"]) == 0
    assert "No step lasts: is 5 s the time between failures of one device?" in " ".join(capsys.readouterr().out.split())
    for text in ("40 fortnights", "1.5.2h"):
        with pytest.raises(SystemExit):
            run(["plan", *words.split(), "--mtbf", text])
        assert f"'{text}': expected a time such as 45000h" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options,message",
    [
        ("--save-time 5s", "--save-time needs --mtbf, the time between failures of one device"),
        ("--days 3", "--days needs --mtbf"),
        ("--mtbf 10h --days 0", "--days 0: expected a number above 0"),
        ("--mtbf 0", "device_mtbf_seconds=0.0: expected a number of seconds above 0"),
    ],
)
def test_wrong_options_are_refused_before_a_plan(options, message, capsys, monkeypatch):
    monkeypatch.setattr("fzero.tuning.command.tune", None)
    assert run(["plan", "gpt2", "--world", "8", "--batch", "8", "--length", "64", *options.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_replica_of_the_model_is_lost_as_a_whole(capsys):
    """Two hosts hold one pipeline, so no step runs while one is repaired."""
    words = f"{STEP} --world 16 --batch 16 --stages 1 --micro-batches 1 --remat yes --depth 4 --tp 4 --pp 4"
    words += " --workers 1 --mtbf 384h --repair-time 24h --days 100"
    assert run(["plan", *words.split()]) == 0
    share = float(re.search(r"goodput ([\d.]+)%", capsys.readouterr().out)[1])
    assert share == pytest.approx(50, abs=5)


def test_the_picture_of_goodput_has_the_formulas_line(tmp_path):
    result = tuning.goodput(1.0, 100, Reliability(1e6), days=2, samples=2)
    result.plot(tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").stat().st_size > 5000


BAD = {
    "no time between failures": (lambda: Reliability(0), "device_mtbf_seconds=0: expected a number of seconds above 0"),
    "a negative time": (
        lambda: Reliability(1.0, restart_seconds=-1),
        "restart_seconds=-1: expected a number of seconds of at least 0",
    ),
    "a slow device that is faster": (lambda: Reliability(1.0, slow_factor=0.5), "slow_factor=0.5: .* at least 1"),
    "a time in words": (lambda: Reliability(1.0, slow_seconds="1h"), "slow_seconds='1h': expected a number of seconds"),
    "an endless restart": (
        lambda: Reliability(1.0, restart_seconds=math.inf),
        "restart_seconds=inf: expected a number of seconds",
    ),
    "no time between failures in the formula": (
        lambda: tuning.save_interval(-5, 5),
        "run_mtbf_seconds=-5, save_seconds=5: expected",
    ),
    "a time between failures in words": (
        lambda: tuning.save_interval("1h", 5),
        "run_mtbf_seconds='1h', save_seconds=5: expected",
    ),
    "a time of a save in words": (
        lambda: tuning.save_interval(100, "5"),
        "run_mtbf_seconds=100, save_seconds='5': expected",
    ),
    "the mtbf of all devices": (
        lambda: tuning.goodput(18.2, 16384, Reliability(3 * HOUR)),
        "seconds between failures of one device; .* 16384 devices fail each 0.659 s",
    ),
    "no devices": (lambda: tuning.goodput(1.0, 0, Reliability(1.0)), "devices=0: expected an int"),
    "no time": (lambda: tuning.goodput(0.0, 1, Reliability(1.0)), "step_seconds=0.0: expected a number above 0"),
    "one sample": (lambda: tuning.goodput(1.0, 1, Reliability(1.0), samples=1), "samples=1: expected an int"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_goodput_are_refused(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()
