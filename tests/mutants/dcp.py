"""Faults in fzero/checkpoint/dcp.py, and in the command."""

from tests.mutants.changes import bare, becomes, never, skipped
from tests.mutants.mutant import Fault, File

DCP = ("tests/checkpoint/test_dcp.py",)
COMMAND = ("tests/checkpoint/test_command.py",)

MUTANTS = [
    *File("checkpoint/dcp.py", DCP).faults(
        Fault("a checkpoint of DCP is overwritten", "save.prepare", never("existing")),
        Fault("the names of DCP are ours", "load.prepare", becomes("name", "None")),
    ),
    *File("checkpoint/_inspect.py", COMMAND).faults(
        Fault(
            "differences are counted in bytes",
            "_compare",
            (becomes("z.numel()", "-1"), becomes("-1", "1", at="2 of 2")),
        ),
        Fault("the largest difference is the last one's", "_compare", bare("max(B, A, key=C)")),
        Fault("an export keeps the dtype", "_leaves", bare("A.to(B(C, D))")),
    ),
    *File("checkpoint/__main__.py", COMMAND).faults(
        Fault("damage is no failure", "_verify", skipped("A += 1")),
    ),
]
