"""The command: `python -m fzero plan MODEL`, or `fzero plan MODEL`."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if nothing fits, 2 for a wrong argument."""
    from fzero.tuning.command import run

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
