"""Try the laws on random examples, with a seed that is printed. `make laws`, a part of `make test-all`.

`make test` tries the same examples on each run of the same code, so that main is green or red for everybody. That
hides a law that is false for other examples. A run with the same seed tries the same examples again.
"""

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Run the laws; returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laws", description=__doc__)
    parser.add_argument("--seed", type=int, help="that of an earlier run; random by default")
    asked, rest = parser.parse_known_args(words)
    seed = secrets.randbelow(2**32) if asked.seed is None else asked.seed
    print(f"laws: seed {seed}", flush=True)
    command = [sys.executable, "-m", "pytest", f"--hypothesis-seed={seed}", *(rest or ["tests"])]
    code = subprocess.call(command, env={**os.environ, "HYPOTHESIS_PROFILE": "random"})
    if code:
        print(
            f"laws: a run with seed {seed} failed. This repeats it: make laws ARGS='--seed {seed}'\n"
            f"and this one law: HYPOTHESIS_PROFILE=random python -m pytest -n0 --hypothesis-seed={seed} FILE::TEST\n"
            "Keep the example that hypothesis shows: by @example above the law, before you mend what is wrong."
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
