"""Faults in fzero/graph/run."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, in_symbol, never, skipped, swapped
from tests.mutants.mutant import (
    JIT_ON_GLOO,
    LENGTHS,
    LOOP_PLANS,
    LOOPS,
    SLICE_OF_GATHER,
    SLOW_JIT_ON_GLOO,
    UNROLLED,
    Fault,
    File,
)

ARRIVING = ("tests/graph/run/test_loop.py",)
COMPILE = ("tests/graph/test_compile.py",)
SUBGRAPHS = ("tests/graph/planning/test_subgraphs.py",)
BORDERS = ("tests/graph/run/test_borders.py",)
FALLBACK = ("tests/graph/run/test_fallback.py",)

PROGRAM = ("tests/graph/run/test_program.py",)


MUTANTS = [
    *File("graph/planning/_subgraphs.py", SUBGRAPHS).faults(
        Fault(
            "a block's gradient is scaled in the previous block's segment",
            "split_into_subgraphs",
            skipped("A.move_to_readers(B)"),
        ),
        Fault(
            "chunks are compiled together",
            "_Boundaries.begins_subgraph",
            never("A not in (None, B)"),
        ),
        Fault("a node that reads an overwritten value is moved later", "_may_run_later", never("A(B) in C")),
        Fault(
            "a node is moved later although its operands are larger than its result",
            "_may_run_later",
            (swapped("<=", ">="), becomes("A(*B(C))", "0")),
        ),
        Fault(
            "a scalar is overwritten before its readers",
            "_SubgraphBuilder.scalar_subgraph_for",
            never("A.target is B", at="2 of 2"),
        ),
        Fault("the slices of micro-batches are made within segments", "argument_parts", constant(1, 99), SUBGRAPHS),
        Fault(
            "one segment writes memory that it reads by another argument",
            "_Boundaries.begins_subgraph",
            never("_overwrites_unseen(A, B)"),
            SLICE_OF_GATHER,
        ),
        Fault(
            "scalars are computed in the loops that read them",
            "read_by_kernels",
            (never("A in B"), in_symbol("split_into_subgraphs", never("A in scalars"))),
        ),
        Fault(
            "each unit's scalars are a group of their own",
            "_SubgraphBuilder.scalar_subgraph_for",
            becomes("bisect_left(A, B)", "-1"),
        ),
        Fault("a count is written before it is read", "_overwrites_for", always("A.target is not B")),
    ),
    *File("graph/loop/_loop_function.py", LOOPS).faults(
        Fault("pending sums of a loop start at 1", "_pending_zeros", becomes("-0.0", "1.0"), SLOW_JIT_ON_GLOO),
        Fault("pending sums of a loop start at 0.0, not at -0.0", "_pending_zeros", becomes("-0.0", "0.0"), ARRIVING),
        Fault("pending sums of a loop start in the default dtype", "_pending_zeros", dropped("dtype=A"), ARRIVING),
        Fault(
            "the last iteration is left out",
            "loop_function.run",
            becomes("range(A.iterations)", "range(A.iterations - 1)"),
            UNROLLED,
        ),
        Fault("every iteration reads the first part", "loop_function.run", becomes("A * B.size", "0"), UNROLLED),
        Fault("every iteration writes the first row", "_write_rows", becomes("iteration", "0")),
        Fault(
            "every iteration has the number 0",
            "loop_function.run",
            becomes("torch.tensor(A, device='cpu')", "torch.tensor(0)"),
        ),
        Fault("a row is held for one more iteration", "loop_function.run", skipped("del A"), LOOP_PLANS),
    ),
    *File("graph/run/_auto_backend.py", COMPILE).faults(
        Fault('backend "auto" waits for an import', "_Auto._load_segments", dropped("not A(B)")),
        Fault(
            'backend "auto" loads all segments within one step', "_Auto._load_segments", dropped("time.monotonic() < A")
        ),
        Fault(
            'backend "auto" changes over before all segments are loaded',
            "_Auto._switch_if_all_can",
            never("self.pending", at="2 of 2"),
        ),
        Fault(
            "one rank changes to compiled code before the others",
            "_Auto._switch_if_all_can",
            becomes("all", "any"),
            JIT_ON_GLOO,
        ),
        Fault(
            "a rank does not ask the others whether they have compiled",
            "_Auto._switch_if_all_can",
            never("A and self.B.distributed"),
            JIT_ON_GLOO,
        ),
        Fault(
            'backend "auto" does not check compiled code before it uses it',
            "_Auto._load_segments",
            becomes("A(code, B)", "B(code)"),
        ),
    ),
    *File("graph/run/_program.py", PROGRAM).faults(
        Fault("a register is freed before its last use", "_instruction_registers", bare("[*B.ins, *A]")),
    ),
    *File("graph/run/_segment.py", SUBGRAPHS).faults(
        Fault("the factor of a clip is computed again in each loop", "make_segment", dropped("*A(B, C)")),
        Fault("an update reads the narrow parameter, not the master", "make_segment", skipped("A(B)")),
        Fault("the addition of another parameter's update is dropped", "_rounded_operand", dropped("A[1] is not B[0]")),
        Fault("scalars are compiled", "make_segment", never("A >= {*B}")),
        Fault(
            "blocks are compiled once for each place of a layer norm's mean",
            "make_segment",
            becomes("_items_first(A)", "A"),
        ),
        Fault(
            "an addition with alpha= counts as a rounded master", "_operation_operands", dropped("'alpha' in A.kwargs")
        ),
    ),
    *File("graph/run/_segment_compiler.py", COMPILE).faults(
        Fault("two processes compile one segment at once", "_segment_lock", constant(False, True)),
        Fault(
            "a segment that another process compiles is not loaded",
            "compile_all",
            (
                never("len(A) == len(B)"),
                becomes("pending = busy", "pending = busy if len(busy) < len(pending) else []"),
            ),
        ),
        Fault("no progress is printed without a terminal", "progress", bare("B(A, C, D)")),
        Fault(
            "progress is printed for a quick compilation",
            "_announce_compilation",
            becomes("A.start()", "console.print(text)"),
        ),
        Fault("the shortest segment is compiled first", "compile_all", bare("-A")),
        Fault(
            "a GPU's segment is loaded only when the CPU's vector instructions are known",
            "can_load",
            becomes("A.on_cpu", "True"),
        ),
        Fault(
            "an error of the compiler is shown whole",
            "first_line",
            becomes("str(A).splitlines()", "[str(A)]"),
            FALLBACK,
        ),
    ),
    *File("graph/run/_workers.py", COMPILE).faults(
        Fault(
            "a worker does not end with the process that started it",
            "_compile_segments",
            becomes("threading.Thread(..., target=A)", "threading.Thread(..., target=print)"),
        ),
        Fault(
            "a worker stops at a segment that does not compile",
            "_compile_segments",
            becomes("lambda A: B(A, C[A.name])", "compile_and_mark"),
        ),
        Fault("each rank takes all cores", "_spare_cores", becomes("max(A, 1)", "min(1, A, 1)")),
    ),
    *File("graph/run/_executable.py", BORDERS).faults(
        Fault(
            "an argument with other strides is not copied to the traced strides",
            "_with_traced_layouts.run",
            becomes("for A in B: ...", "for A in (): ..."),
        ),
        Fault("a write goes into a copy and not into the argument", "_with_traced_layouts.run", skipped("A(B, C)")),
        Fault("a view of other strides fails in uncompiled code", "_REPLACEMENTS", dropped("**A", at="2 of 2")),
    ),
    *File("graph/run/_fallback.py", FALLBACK).faults(
        Fault("the check of compiled code ignores strides", "check_outputs", dropped("not have_equal_strides(A, B)")),
        Fault("the check of compiled code ignores dtypes", "_is_like", dropped("A.dtype == B.dtype")),
        Fault(
            "the check of compiled code draws random numbers",
            "check_outputs",
            becomes("with A, torch.no_grad(): ...", "with torch.no_grad(): ..."),
        ),
        Fault("an error of the operations is blamed on the compiler", "check_outputs", always("A(code) is not None")),
        Fault("non-finite results of compiled code are accepted", "check_outputs", skipped("A(code, B)")),
        Fault(
            "non-finite results that the operations also give are refused",
            "_check_finite",
            becomes("~A(B) & A(C)", "~A(B)"),
        ),
        Fault(
            "one rank runs a segment uncompiled and the others do not",
            "all_refusals",
            always("A is None or not A.distributed"),
            JIT_ON_GLOO,
        ),
        Fault("strict=True does not raise", "notify", never("strict")),
    ),
    *File("graph/run/_lengths.py", LENGTHS).faults(
        Fault(
            "code for all lengths is used at a length at which its sizes differ",
            "Lengths.choose_template",
            dropped("A.B(C, D)"),
        ),
        Fault(
            "code for all lengths is used at a length at which its branches do not hold",
            "Lengths.choose_template",
            bare("A and B(C)"),
        ),
        Fault(
            "calls that differ in several sizes count as two lengths",
            "Lengths.call_length",
            becomes("len(A) != 1 or B", "not A"),
        ),
        Fault(
            "ranks do not agree on code for all lengths", "for_all_lengths", becomes("mesh", "None"), SLOW_JIT_ON_GLOO
        ),
        Fault("the lengths of plans are not remembered", "for_all_lengths", skipped("A.B(shapes)")),
    ),
]
