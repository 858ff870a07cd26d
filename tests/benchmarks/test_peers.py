"""The comparison with other systems, tiny: it must not rot. DeepSpeed is measured where it is installed."""

import json
import pathlib

import pytest

from benchmarks.peers.report import cells, check_losses, verdicts
from benchmarks.peers.row import Row, quartiles
from tests.distributed.launch import world


def row(system: str, stage: int, variant: str, seconds: float, peak: int, loss: float = 1.0) -> Row:
    return Row(system, stage, variant, "B", 1, 2, state=100, peak=peak, seconds=[seconds], losses=[loss])


def test_goals_are_ratios_to_the_best_of_a_peer():
    rows = [row("fzero", 3, "inductor", 2.0, 160), row("fzero", 3, "fx", 1.0, 1), row("FSDP2", 3, "reshard", 3.0, 300)]
    rows.append(row("FSDP2", 3, "reshard-compile", 2.5, 200))
    results = {v.goal: (v.ratio, v.met) for v in verdicts(rows)}
    assert results["peak: stage 3 / FSDP2"] == (0.8, True)
    assert results["above state: stage 3 / FSDP2"] == (0.6, True)
    assert results["time: stage 3 / FSDP2"] == (0.8, False)
    assert len(results) == 3  # nothing is said of what was not measured
    rows[0].life, rows[2].life, rows[3].life = 150, 400, 300
    results = {v.goal: (v.ratio, v.met) for v in verdicts(rows)}
    assert results["whole life: stage 3 / FSDP2"] == (0.5, True) and len(results) == 4


def test_a_difference_below_the_spread_of_the_runs_counts_as_equal():
    """The quartiles are those of the rounds' ratios: a slow round is slow for both."""
    ours, theirs = row("fzero", 0, "inductor", 0, 1), row("DDP", 0, "", 0, 1)
    theirs.seconds = [1.0, 2.0, 1.0, 4.0, 1.0]
    for ratios, said, met in (
        ([1.0, 1.2, 1.2, 1.1, 0.9], "within the spread", False),
        ([1.1, 1.2, 1.2, 1.1, 0.9], "missed", False),
        ([1.0, 1.0, 1.0, 1.1, 0.9], "met", True),
    ):
        ours.seconds = [r * t for r, t in zip(ratios, theirs.seconds, strict=True)]
        (actual,) = [v for v in verdicts([ours, theirs]) if v.goal == "time: stage 0 / DDP"]
        assert (actual.said, actual.met) == (said, met), ratios
        assert actual.spread == pytest.approx(quartiles(ratios))
    (peak,) = [v for v in verdicts([ours, theirs]) if v.goal.startswith("peak")]
    assert peak.spread is None and peak.said == "met"


def test_peers_whose_losses_differ_from_fzeros_are_refused():
    rows = [row("fzero", 3, "fx", 1.0, 1), row("DDP", 0, "", 1.0, 1, loss=1.001)]
    with pytest.raises(ValueError, match=r"at step 0 DDP-0- has loss 1\.001, and fzero-3-fx 1\.0"):
        check_losses([rows[0], rows[1]])
    check_losses(rows[:1])


SYSTEMS = ("fzero-0-fx", "fzero-2-fx", "fzero-3-fx", "DDP", "Zero", "FSDP2-2-keep", "FSDP2-3-reshard")
SENT = {"fzero-0": 2, "fzero-2": 3, "DDP-0": 2, "FSDP2-3": 6}  # in bytes of the parameters


@pytest.mark.slow
def test_a_tiny_model_is_measured_beside_the_peers(tmp_path: pathlib.Path):
    """The bytes sent are those of README's table of costs, also in the peers' rows; memory falls with the stage."""
    pytest.importorskip("ninja")
    options = ["--models", "tiny", "--micro-batches", "2", "--rounds", "2", "--systems", *SYSTEMS]
    out = tmp_path / "rows.json"
    done = world(2, "-m", "benchmarks.peers.measure", str(out), *options, "--eager-peers")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {f"{r['system']}-{r['stage']}": Row(**r) for r in json.loads(out.read_text())}
    assert len(rows) == len(SYSTEMS)
    check_losses(rows.values())
    peaks = [r.peak for name, r in sorted(rows.items()) if name.startswith("fzero")]
    assert peaks == sorted(peaks, reverse=True) and all(r.peak > r.state for r in rows.values())
    psi = rows["fzero-0"].state // 3  # bytes of the parameters
    for name, times in ((name, times) for name, times in SENT.items() if name in rows):
        assert rows[name].sent == pytest.approx(times * psi, rel=0.02), name
    assert all(len(cells(r)) == 11 and len(r.seconds) == 2 for r in rows.values())
    assert all(r.life > 0.9 * r.peak for r in rows.values())  # of other steps, in which threads meet otherwise
