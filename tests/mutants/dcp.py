"""Faults in fzero/checkpoint/dcp/, and in the command."""

from tests.mutants.changes import bare, becomes, dropped, never, skipped
from tests.mutants.mutant import Fault, File

DCP = ("tests/checkpoint/test_dcp.py",)
FUZZ = ("tests/checkpoint/test_fuzz.py", "-k", "dcp")
COMMAND = ("tests/checkpoint/test_command.py",)

MUTANTS = [
    *File("checkpoint/dcp/_save_load.py", DCP).faults(
        Fault("a save overwrites a checkpoint of DCP", "save.prepare", never("existing")),
        Fault("the argument `name` of dcp.load is ignored", "load.prepare", becomes("name", "None")),
    ),
    *File("_torch/dcp.py", FUZZ).faults(
        Fault(
            "metadata of DCP may name files outside its folder",
            "_check_metadata",
            dropped("not any(A in B for A in C)"),
        ),
        Fault("metadata of DCP sets attributes of classes", "_Unpickler.load_build", never("A or B")),
        Fault("a path in metadata of DCP doubles without end", "_joined_path", never("A > B")),
    ),
    *File("checkpoint/dcp/_metadata_reader.py", FUZZ).faults(
        Fault("as many bytes are read as metadata of DCP says", "CheckedReader.read_data", dropped("A + B > C")),
    ),
    *File("checkpoint/dcp/_leaf_names.py", FUZZ).faults(
        Fault(
            "a damaged key renames a part of a value",
            "_keys_below",
            dropped("'.'.join(map(str, A)) != B"),
        ),
    ),
    *File("checkpoint/_differences.py", COMMAND).faults(
        Fault(
            "diff counts the bytes that differ, not the elements",
            "_compare_leaves",
            (becomes("z.numel()", "-1"), becomes("-1", "1", at="2 of 2")),
        ),
        Fault("diff shows the last difference, not the largest", "_compare_leaves", bare("max(B, A, key=C)")),
    ),
    *File("checkpoint/_export_file.py", COMMAND).faults(
        Fault("an export ignores the dtype that was asked for", "_read_leaves", bare("A.to(B(C, D))")),
    ),
    *File("checkpoint/__main__.py", COMMAND).faults(
        Fault("verify exits with 0 when a checkpoint is damaged", "_run_verify", skipped("A += 1")),
    ),
]
