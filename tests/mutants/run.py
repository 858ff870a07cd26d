"""Faults in fzero/graph/run."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, elsewhere, never, skipped, swapped
from tests.mutants.mutant import GRAPH, JIT, Fault, File

ARRIVING = ("tests/graph/run/test_loop.py",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "jit-2")
COMPILE = ("tests/graph/test_compile.py",)
LOOPS = ("tests/graph/test_loops.py",)
SLICE_OF_GATHER = ("tests/graph/test_slice_of_gather.py",)
GROUPS = ("tests/graph/run/test_groups.py",)
LENGTHS = ("tests/graph/run/test_lengths.py",)
BORDERS = ("tests/graph/run/test_borders.py",)
FALLBACK = ("tests/graph/run/test_fallback.py",)

MUTANTS = [
    *File("graph/run/_groups.py", GROUPS).faults(
        Fault("gradients are scaled with the block before", "split_into_groups", skipped("A.move_to_readers(B)")),
        Fault("what was overwritten is read", "_may_run_later", never("A(B) in C")),
        Fault("what is larger is kept", "_may_run_later", (swapped("<=", ">="), becomes("A(*B(C))", "0"))),
        Fault("a scalar is written too early", "_GroupBuilder.scalar_group_for", never("A.target is B", at="2 of 2")),
        Fault("micro-batches cut inside", "parts_of_arguments", constant(1, 99), JIT),
        Fault(
            "a segment writes what it reads as another argument",
            "split_into_groups",
            never("A(B, C.D[-1])"),
            SLICE_OF_GATHER,
        ),
        Fault(
            "scalars in the loops that read them",
            "read_by_loops",
            (never("A in B"), elsewhere("split_into_groups", never("A in scalars"))),
        ),
        Fault("a unit's scalars by themselves", "_GroupBuilder.scalar_group_for", becomes("bisect_left(A, B)", "-1")),
        Fault("a count is written before it is read", "_overwrites_for", always("A.target is not B")),
    ),
    *File("graph/loop/_run.py", LOOPS).faults(
        Fault("the first turn finds ones", "_pending_zeros", becomes("-0.0", "1.0"), ON_GLOO),
        Fault("the first turn finds zeros", "_pending_zeros", becomes("-0.0", "0.0"), ARRIVING),
        Fault("the first turn finds float32", "_pending_zeros", dropped("dtype=A"), ARRIVING),
        Fault(
            "the last turn is left out", "loop_function.run", becomes("range(A.iterations)", "range(A.iterations - 1)")
        ),
        Fault("all turns have the first part", "loop_function.run", becomes("A * B.size", "0")),
        Fault("all rows are the first", "_write_rows", becomes("iteration", "0")),
        Fault(
            "all turns fold the same number",
            "loop_function.run",
            becomes("torch.tensor(A, device='cpu')", "torch.tensor(0)"),
        ),
        Fault("a row is kept for a turn", "loop_function.run", skipped("del A")),
    ),
    *File("graph/run/_backends.py", COMPILE).faults(
        Fault("a step waits for an import", "_Auto._load", dropped("not A()")),
        Fault("a step waits for all segments", "_Auto._load", dropped("time.monotonic() < A")),
        Fault("a step changes over before all is loaded", "_Auto._switch", never("self.pending", at="2 of 2")),
        Fault("a rank changes over alone", "_Auto._switch", becomes("all", "any"), ON_GLOO),
        Fault("a rank does not ask the others", "_Auto._switch", never("A and self.B.distributed"), ON_GLOO),
        Fault("auto proves nothing", "_Auto._load", becomes("A(code, B)", "B(code)")),
    ),
    *File("graph/run/_program.py", GRAPH).faults(
        Fault("free before use", "_registers_of", bare("[*B.ins, *A]")),
    ),
    *File("graph/run/_segment.py", GROUPS).faults(
        Fault("a clip's factor anew in each loop", "segment", dropped("*A(B, C)")),
        Fault("a narrow parameter is read", "segment", skipped("A(B)")),
        Fault("another parameter's step is left out", "_rounded", dropped("A[1] is not B[0]")),
        Fault("scalars are compiled", "segment", never("A >= {*B}")),
        Fault("a scaled step is a rounded master", "_operands", dropped("'alpha' in A.kwargs")),
    ),
    *File("graph/run/_compile.py", COMPILE).faults(
        Fault("two compile a segment at once", "_segment_lock", constant(False, True)),
        Fault(
            "what another compiles is left out",
            "compile_all",
            (
                never("len(A) == len(B)"),
                becomes("pending = busy", "pending = busy if len(busy) < len(pending) else []"),
            ),
        ),
        Fault("a wait is silent where there is no terminal", "progress", bare("B(A, C, D)")),
        Fault("what is quick is told", "_with_a_line", becomes("A.start()", "console.print(text)")),
        Fault("the shortest first", "compile_all", bare("-A")),
        Fault("an error shows torch's advice", "first_line", becomes("str(A).splitlines()", "[str(A)]"), FALLBACK),
    ),
    *File("graph/run/_workers.py", COMPILE).faults(
        Fault(
            "a worker outlives who started it",
            "work",
            becomes("threading.Thread(..., target=A)", "threading.Thread(..., target=print)"),
        ),
        Fault("a worker stops at an error", "work", becomes("lambda A: B(A, C[A.name])", "compiled")),
        Fault("each rank takes all cores", "spare_cores", becomes("max(A, 1)", "min(1, A, 1)")),
    ),
    *File("graph/run/_compiled.py", BORDERS).faults(
        Fault(
            "an argument lies as it comes", "with_traced_layouts.run", becomes("for A in B: ...", "for A in (): ...")
        ),
        Fault("a copy is written", "with_traced_layouts.run", skipped("A(B, C)")),
        Fault("a view is a view, uncompiled", "REPLACEMENTS", dropped("**A", at="2 of 2")),
    ),
    *File("graph/run/_fallback.py", FALLBACK).faults(
        Fault("a proof looks at no strides", "check_outputs", dropped("not A(B, C)")),
        Fault("a proof looks at no dtypes", "_form", dropped("A.dtype")),
        Fault("a proof draws", "check_outputs", becomes("with A, torch.no_grad(): ...", "with torch.no_grad(): ...")),
        Fault("a proof blames the compiler", "check_outputs", always("A(code) is not None")),
        Fault("garbage is no fault", "check_outputs", skipped("A(code, B)")),
        Fault("a logarithm of zero is a fault", "_check_finite", becomes("~A(B) & A(C)", "~A(B)")),
        Fault("a rank falls back alone", "all_refusals", always("A is None or not A.distributed"), ON_GLOO),
        Fault("strict is not asked", "notify", never("strict")),
    ),
    *File("graph/run/_lengths.py", LENGTHS).faults(
        Fault("a branch is guessed", "Lengths.template_of", dropped("A.B(C, D)")),
        Fault("what holds for one length is used for all", "Lengths.template_of", bare("A and B(C)")),
        Fault("any size is the length", "Lengths.length_of", becomes("len(A) != 1 or B", "not A")),
        Fault("a rank compiles for each length alone", "for_all_lengths", becomes("mesh", "None"), ON_GLOO),
        Fault("planned lengths teach nothing", "for_all_lengths", skipped("A.B(shapes)")),
    ),
]
