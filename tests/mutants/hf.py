"""Faults in fzero/checkpoint/hf."""

from tests.mutants.changes import always, becomes, dropped, never
from tests.mutants.mutant import Fault, File, on_processes

HF = ("tests/checkpoint/test_hf.py",)
PROCESSES = on_processes("checkpoint")

MUTANTS = [
    *File("checkpoint/hf/_read.py", HF).faults(
        Fault(
            "a leaf is read without a cast, as bytes of another dtype",
            "_read_part",
            dropped("A.dtype == B.tensor.dtype"),
        ),
        Fault(
            "the shapes of a folder are not compared with the leaves", "_check_leaves", dropped("A[B].shape != C.shape")
        ),
        Fault(
            "two different values of a tied leaf are accepted",
            "_read_leaves",
            becomes("not A(B, C[D], E)", "False and not A(B, C[D], E)"),
        ),
    ),
    *File("checkpoint/hf/_named_leaves.py", HF).faults(
        Fault(
            "a tied leaf is written for each name",
            "named_leaves",
            becomes("A.setdefault(B.C[D], []).append(D)", "A[len(A)] = [D]"),
        ),
    ),
    *File("checkpoint/hf/_stored_tensors.py", HF).faults(
        Fault("the offset of a file's data leaves out the header", "_read_entry", becomes("A + start", "start")),
        Fault(
            "an index may name files outside its folder", "_read_weight_map", never("any(A in B for A in '/\\\\\\x00')")
        ),
        Fault("tensors of a file may overlap", "_read_header", always("A == end")),
    ),
    *File("checkpoint/hf/_write.py", HF).faults(
        Fault(
            "a leaf is written without a cast, as bytes of its own dtype", "_write_run", always("A.dtype == B.dtype")
        ),
        Fault(
            "files get their names before all ranks have written",
            "write",
            becomes("A(B, lambda: C(D, E, F, G), H)", "C(D, E, F, G)"),
            PROCESSES,
        ),
        Fault("an index of an older model is not refused", "_rename_files", never("set(A) & set(B)")),
    ),
]
