"""benchmarks/gpu.py at toy size on a CPU: it must not rot while no GPU is at hand."""

import re

import pytest

from tests.distributed.launch import python


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert-large", "vit-g"])
def test_a_toy_run_shows_less_memory_at_each_stage(model):
    pytest.importorskip("ninja")
    options = ["--toy", "--device", "cpu", "--backend", "fx", "--rounds", "2"]
    done = python("benchmarks/gpu.py", "--models", model, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [
        re.split(r" *\| *", line)[1:-1] for line in done.stdout.splitlines() if re.match(r"\| (bert|vit)-\S+ \|", line)
    ]
    assert [r[:2] for r in rows] == [[model, s] for s in ("plain", "0", "1", "2", "3")]
    formula, peak = ([float(r[i]) for r in rows[1:]] for i in (2, 4))
    assert all(f < p for f, p in zip(formula, peak, strict=True))
    assert formula[3] == pytest.approx(formula[0] / 8, rel=0.05, abs=0.06)
    assert peak == sorted(peak, reverse=True) and peak[3] < peak[0] / 2
    assert "missed" not in done.stdout
