"""The command `python -m fzero.examples NAME`, which copies a ready program into the working folder."""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_HERE = Path(__file__).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Copy programs by their names; without a name list them all.

    Args:
        argv: the names; None for those of the command line.

    Returns:
        The exit code: 0; 1 if a file is in the way, which stays as it is; 2 for an unknown name.
    """
    names = [name.removesuffix(".py") for name in (sys.argv[1:] if argv is None else argv)]
    programs = _programs()
    if not names or names[0] in ("-h", "--help"):
        print("python -m fzero.examples NAME copies one of these programs into the working folder:\n")
        for name, path in programs.items():
            print(f"  {name:14}{_first_line(path)}")
        return 0
    if unknown := [name for name in names if name not in programs]:
        print(f"there is no program {unknown[0]!r}: expected one of {', '.join(programs)}", file=sys.stderr)
        return 2
    if existing := [f"{name}.py" for name in names if Path(f"{name}.py").exists()]:
        print(f"{existing[0]} exists here, and stays as it is: rename it, or go to another folder", file=sys.stderr)
        return 1
    for name in names:
        Path(f"{name}.py").write_bytes(programs[name].read_bytes())
        print(f"{name}.py: {_first_line(programs[name])}")
    return 0


def _programs() -> dict[str, Path]:
    """Return the files of the programs by name: a wheel has them in this package, a checkout beside it."""
    in_wheel = _HERE / "_programs"
    folder = in_wheel if in_wheel.is_dir() else _HERE.parent / "examples"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
