"""The comparison of split sequences with other systems: its goals, and a tiny run of those that need nothing else."""

import json
import pathlib

import pytest

from benchmarks.context import goals
from benchmarks.peers.row import Row
from benchmarks.tensor import check_losses
from tests.distributed.launch import world


def row(system: str, variant: str, seconds: float, processor: float, peak: int) -> Row:
    return Row(system, 3, variant, "8k", 1, 2, state=1, peak=peak, seconds=[seconds], processor=[processor])


def test_goals_are_ratios_to_the_best_peer_of_each_kind():
    ours, quick = row("fzero", "ring", 2.0, 3.0, 60), row("Ulysses+FSDP2", "", 4.0, 3.0, 100)
    idle, lean = row("DeepSpeed", "Ulysses", 5.0, 2.0, 100), row("context_parallel", "alltoall", 8.0, 6.0, 80)
    results = {v.goal: (v.ratio, v.met) for v in goals([ours, quick, idle, lean])}
    assert results == {
        "time: ring / Ulysses+FSDP2": (0.5, True),
        "processor: ring / DeepSpeed Ulysses": (1.5, False),
        "peak: ring / context_parallel alltoall": (0.75, True),
    }
    assert goals([ours]) == []


@pytest.mark.slow
def test_a_tiny_model_is_measured_on_split_sequences(tmp_path: pathlib.Path):
    """torch's own ring on the CPU's kernel trains as fzero does."""
    pytest.importorskip("ninja")
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    out, systems = tmp_path / "rows.json", ["fzero-3-ring", "context_parallel"]
    words = ["benchmarks.context_systems", str(out), "--config", "toy", "--rounds", "2", "--peaks", "1"]
    done = world(2, "benchmarks/measure.py", *words, "--systems", *systems)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [Row(**row) for row in json.loads(out.read_text())]
    assert len(rows) == 3 and all(len(r.processor) == 2 for r in rows)
    check_losses(rows)
