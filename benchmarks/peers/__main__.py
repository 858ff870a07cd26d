"""Measure all systems on 2 and 4 ranks, judge and write: python -m benchmarks.peers [options of measure]; `make bench`.

Two hours on 2 cores. The peers come with `pip install -e '.[bench]'`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Launch the measurement once for each number of ranks, then the report."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"{ranks}.json") for ranks in (2, 4)]
        for ranks, file in zip((2, 4), files, strict=True):
            launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            measure = ["-m", "benchmarks.peers.measure", file, *sys.argv[1:]]
            subprocess.run([*words, *launch, *measure], cwd=ROOT, env=environment, check=True)
        subprocess.run([*words, "benchmarks.peers.report", *files, "--write"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
