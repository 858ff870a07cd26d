"""fzero calibrate: what is measured goes to its constant, what is not says that it is assumed, and both are kept."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import tuning
from fzero.__main__ import main
from fzero.tuning import CPU, H100
from fzero.tuning.machines import _calibrate
from fzero.tuning.machines._calibrate import _fit_links
from fzero.tuning.machines._named_machines import _read_calibrated, save
from tests.distributed.launch import fork, free_port, rank_variables
from tests.tuning.helpers import machines


@pytest.fixture
def clock(monkeypatch):
    """A machine whose speeds are known."""
    half = torch.bfloat16
    monkeypatch.setattr(_calibrate, "product_speed", lambda dtype, *_: 8e12 if dtype == half else 2e12)
    monkeypatch.setattr(_calibrate, "copy_speed", lambda device, measure_seconds: 3e10)
    monkeypatch.setattr(_calibrate, "small_seconds", lambda dtype, *_: 2e-6 if dtype == half else 1e-6)


def test_each_measurement_of_calibrate_sets_its_constant(clock):
    machine = tuning.calibrate()
    assert (machine.flops, machine.float32_slowdown, machine.memory_bandwidth, machine.launch_seconds) == (
        8e12,
        4.0,
        3e10,
        2e-6,
    )
    assert (machine.host_link_bandwidth, machine.host_memory_bandwidth, machine.host_copy_bandwidth, machine.ranks) == (
        3e10,
        3e10,
        3e10,
        1,
    )
    assert (machine.kind, machine.link_bandwidth, machine.latency_seconds) == (
        "cpu",
        CPU.link_bandwidth,
        CPU.latency_seconds,
    )
    sources = {c.name: c.source for c in machine.constants()}
    measured = {name for name, source in sources.items() if source.startswith("measured")}
    assert measured == {
        "products of half precision",
        "products of float32 take",
        "memory of a device",
        "an operation, at least",
        "copies between a device and its host",
        "memory of a host",
    }
    assert sources["a collective, at least"].startswith("assumed, as for two cores, gloo")
    assert (
        "float16 reaches 0.25 times as much" in sources["products of half precision"]
        and "as given" not in sources.values()
    )
    assert torch.__version__ in machine.source and 1e8 < machine.device_bytes < 1e14


def test_calibrate_measures_this_machine_within_its_time():
    machine = tuning.calibrate(0.1)
    assert 1e8 < machine.flops < 1e15 and 1e7 < machine.memory_bandwidth < 1e13 and 1e-8 < machine.launch_seconds < 1e-2


@given(
    hop=st.floats(1e-6, 1e-3),
    latency=st.floats(1e-5, 1e-2),
    speed=st.floats(1e6, 1e12),
    ranks=st.integers(2, 64),
)
def test_calibrated_constants_reproduce_the_measurements(hop, latency, speed, ranks):
    total = ranks << 22
    small = latency + (ranks - 1) * hop
    large = small + total * (ranks - 1) / ranks / speed
    result = _fit_links(hop, small, large, total, ranks)
    if latency > 0.1 * small and large > small * 10 / 9:
        assert result == pytest.approx((speed, latency, hop, ranks))
    # whatever a busy machine has measured
    assert result.bandwidth > 0 and result.latency_seconds > 0 and result.hop_seconds > 0
    again = result.latency_seconds + (ranks - 1) * result.hop_seconds
    assert again == pytest.approx(small)


@given(machine=machines)
def test_a_calibrated_machine_is_read_as_it_was_stored(machine):
    machine = replace(machine, sources=(("flops", machine.flops, "measured"),), axis_bandwidths=(("dp", 1e9),))
    save(machine)
    assert _read_calibrated() == machine


@pytest.mark.slow
def test_ranks_measure_their_links_and_a_plan_takes_them(cache, capsys):
    port = free_port()
    variables = [{**rank_variables(r, 2, port), "XDG_CACHE_HOME": cache} for r in range(2)]
    done = fork(["-m", "fzero", "calibrate", "--seconds", "0.2"], variables)
    assert [d.returncode for d in done] == [0, 0], done
    assert "all_gather of 2 ranks of this machine" in done[0].stdout and not done[1].stdout
    machine = _read_calibrated()
    assert (
        machine.ranks == 2
        and machine.link_bandwidth != CPU.link_bandwidth
        and machine.hop_seconds != CPU.hop_seconds
        and machine.network_bandwidth == CPU.network_bandwidth
    )
    words = ["plan", "tests.tuning.spaces:make_step", "--world", "4", "--batch", "32", "--machine", "calibrated"]
    assert main([*words, "--memory", "1GiB", "--stages", "2", "--remat", "no", "--micro-batches", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert machine.name in said and "GB/s (measured: all_gather of 2 ranks of this machine)" in said


@pytest.mark.slow
def test_ranks_on_two_machines_measure_the_network_between_them(cache):
    port = free_port()
    variables = [{**rank_variables(r, 2, port), "LOCAL_WORLD_SIZE": 1, "XDG_CACHE_HOME": cache} for r in range(2)]
    done = fork(["-m", "fzero", "calibrate", "--seconds", "0.2"], variables)
    assert [d.returncode for d in done] == [0, 0], done
    machine = _read_calibrated()
    assert (
        machine.ranks == 1
        and machine.network_bandwidth != CPU.network_bandwidth
        and machine.network_hop_seconds != CPU.network_hop_seconds
    )
    assert machine.link_bandwidth == CPU.link_bandwidth and "2 ranks, one of each machine" in done[0].stdout


def test_planning_without_a_calibrated_machine_advises_calibrate(cache, capsys):
    with pytest.raises(ValueError, match="no machine is stored yet: run `fzero calibrate`"):
        fzero.tuning.watch(fzero.jit(lambda x: x), machine="calibrated")
    words = ["plan", "gpt2", "--world", "4", "--batch", "8", "--length", "16", "--machine", "calibrated"]
    assert main(words) == 2 and "no machine is stored yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ("", "{", "[]", '{"name": "x"}', json.dumps({"name": "x", "flops": -1}), '{"device_memory": 1}')
)
def test_an_unreadable_calibration_file_is_refused_with_a_remedy(cache, text):
    path = save(H100)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"calibrated.json cannot be read: .*Run `fzero calibrate` again"):
        _read_calibrated()


@pytest.mark.parametrize("seconds", (0, -1, True, "5"))
def test_calibrate_refuses_a_wrong_time(seconds):
    with pytest.raises(ValueError, match=r"seconds=.*: expected a number above 0"):
        tuning.calibrate(seconds)
    assert _calibrate._USABLE_SHARE < 1
