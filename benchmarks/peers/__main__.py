"""Measure all systems on 2 and 4 ranks, judge and write: python -m benchmarks.peers [options]; `make bench`.

Two hours on 2 cores. The peers come with `pip install -e '.[bench]'`. Something small, which leaves results/ alone:

python -m benchmarks.peers --no-write --ranks 2 --models tiny --micro-batches 1 --systems fzero-3-fx FSDP2 --rounds 2
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.options import choose, measured_options

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Launch the measurement once for each number of ranks, then the report."""
    parser = argparse.ArgumentParser(
        "benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="of which each is a process; default 2 4")
    parser.add_argument(
        "--no-write", action="store_true", help="only print; by default benchmarks/results/ is replaced"
    )
    measured_options(parser)
    args = parser.parse_args()
    choose(args.systems, args.eager_peers)  # before anything is launched
    options = without_ours(sys.argv[1:])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"{ranks}.json") for ranks in args.ranks]
        for ranks, file in zip(args.ranks, files, strict=True):
            launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            measure = ["-m", "benchmarks.peers.measure", file, *options]
            subprocess.run([*words, *launch, *measure], cwd=ROOT, env=environment, check=True)
        command = ["--command", " ".join(["python -m benchmarks.peers", *sys.argv[1:]])]
        write = [] if args.no_write else ["--write"]
        subprocess.run([*words, "benchmarks.peers.report", *files, *command, *write], cwd=ROOT, check=True)


def without_ours(words: list[str]) -> list[str]:
    """Leave out the options that the measurement does not know."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", nargs="+")
    parser.add_argument("--no-write", action="store_true")
    return parser.parse_known_args(words)[1]


if __name__ == "__main__":
    main()
