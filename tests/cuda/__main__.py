"""Run the laws of the GPU, without one or on one, and write benchmarks/cuda.md.

python -m tests.cuda [pytest's arguments]       (`make cuda`)
"""

import subprocess
import sys

from tests.cuda import processes, report


def main() -> int:
    if not processes.is_here():
        print("this torch is built without CUDA; `make cuda` makes an environment with one", file=sys.stderr)
        return 2
    processes.variables()  # builds the runtime, which the tests' processes then find
    processes.MEASURED.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/cuda",
        "-n2",
        "--dist=loadfile",
        "-rxX",
        "-p",
        "no:cacheprovider",
        *sys.argv[1:],
    ]
    code = subprocess.run(command, cwd=processes.ROOT).returncode
    if not sys.argv[1:]:  # all laws were tried
        report.write()
    return code


if __name__ == "__main__":
    sys.exit(main())
