"""Faults in fzero/hf."""

from tests.mutants.mutant import Mutant

HF = ("tests/checkpoint/test_hf.py",)
PROCESSES = ("tests/distributed/test_gloo.py", "-k", "checkpoint-2")

MUTANTS = [
    Mutant(
        "a file's data begins at its header",
        "checkpoint/hf/_read.py",
        "tuple(shape), base + start)",
        "tuple(shape), start)",
        HF,
    ),
    Mutant(
        "a tied leaf is written for each name",
        "checkpoint/hf/_read.py",
        "places.setdefault(cut.number[path], []).append(path)",
        "places[len(places)] = [path]",
        HF,
    ),
    Mutant(
        "a leaf is read as the bytes of another dtype",
        "checkpoint/hf/_read.py",
        "source.dtype == part.to.dtype and",
        "",
        HF,
    ),
    Mutant(
        "a leaf is written as the bytes of its own dtype",
        "checkpoint/hf/_write.py",
        "if to.dtype == x.dtype:",
        "if True:",
        HF,
    ),
    Mutant(
        "files get their names before all ranks have written",
        "checkpoint/hf/_write.py",
        "all_or_none(what, lambda: _write_own(files, planned, nonce, held), mesh)",
        "_write_own(files, planned, nonce, held)",
        PROCESSES,
    ),
    Mutant("shapes in a folder are believed", "checkpoint/hf/_read.py", "stored[name].shape != leaf.shape or", "", HF),
    Mutant("names in an index lead out", "checkpoint/hf/_read.py", 'any(c in name for c in "/\\\\\\0")', "False", HF),
    Mutant(
        "two values of a tie are one", "checkpoint/hf/_read.py", "if not _is_read(", "if False and not _is_read(", HF
    ),
    Mutant(
        "an old index leads to files of two models", "checkpoint/hf/_write.py", "set(names) & set(there)", "False", HF
    ),
    Mutant("tensors share bytes", "checkpoint/hf/_read.py", "check(start == end,", "check(True,", HF),
]
