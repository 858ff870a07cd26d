"""`make gpu` is rehearsed: all its code runs on the CUDA without a GPU, at toy size."""

import re
import subprocess
import sys

import pytest

from benchmarks.gpu.__main__ import PARTS
from tests.cuda import processes


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_rehearsal_of_make_gpu_fails_nowhere(ranks, tmp_path):
    """With two ranks each is a process with a GPU of its own, under torchrun.

    The ranks of `make cuda` exchange no values, by which DeepSpeed's would agree, so there its part is left out.
    """
    parts = [part.name for part in PARTS if ranks == 1 or part.name != "peers"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--toy", "--backends", "eager", "fx"]
    command += ["--gpus", str(ranks), "--parts", *parts, "--out", str(tmp_path / "gpu.md")]
    env = {**processes.variables(), "LD_PRELOAD": "", "LD_LIBRARY_PATH": ""}
    done = subprocess.run(
        command, cwd=processes.ROOT, env=env, capture_output=True, text=True, timeout=processes.SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"## {part.capitalize()}" in text for part in parts)
    assert re.search(r" 0 wrong, 0 failed, [03] left out", text)  # three rows are DeepSpeed's, which may not be there
