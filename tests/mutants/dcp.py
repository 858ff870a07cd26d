"""Faults in fzero/dcp, and in the command."""

from tests.mutants.mutant import Mutant

DCP, COMMAND = ("tests/checkpoint/test_dcp.py",), ("tests/checkpoint/test_command.py",)

MUTANTS = [
    Mutant("a checkpoint of DCP is overwritten", "checkpoint/dcp.py", "        if there:", "        if False:", DCP),
    Mutant(
        "the names of DCP are ours",
        "checkpoint/dcp.py",
        "names = names_of(mine.cut, name)",
        "names = names_of(mine.cut, None)",
        DCP,
    ),
    Mutant("differences are counted in bytes", "checkpoint/_look.py", ".view(z.numel(), -1)", ".view(-1, 1)", COMMAND),
    Mutant(
        "the largest difference is the last one's",
        "checkpoint/_look.py",
        "max(largest, _largest(x[differ], y[differ]), key=_nan_last)",
        "_largest(x[differ], y[differ])",
        COMMAND,
    ),
    Mutant("an export keeps the dtype", "checkpoint/_look.py", "x.to(_dtype(leaf, dtype))", "x", COMMAND),
    Mutant("damage is no failure", "checkpoint/__main__.py", "            failed += 1\n", "", COMMAND),
]
