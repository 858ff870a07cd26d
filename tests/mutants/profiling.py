"""Faults in fzero/profiling, in what it asks of a jitted step, and in tracebacks."""

from tests.mutants.mutant import Mutant

PROFILING = ("tests/observe",)

TRACEBACKS = ("tests/test_tracebacks.py",)

MUTANTS = [
    Mutant(
        "causes keep all frames",
        "_tracebacks.py",
        "error = error.__cause__ or error.__context__",
        "error = None",
        TRACEBACKS,
    ),
    Mutant(
        "tracebacks end in torch",
        "_tracebacks.py",
        "if is_users(trace.tb_frame.f_code.co_filename) else []",
        "",
        TRACEBACKS,
    ),
    Mutant(
        "faults of torch lose their frames",
        "_tracebacks.py",
        "is_fzeros(trace.tb_frame.f_code.co_filename)",
        "True",
        TRACEBACKS,
    ),
    Mutant(
        "answers keep frames",
        "_tracebacks.py",
        "if not through and not _is_answer(error, own)",
        "if not through",
        TRACEBACKS,
    ),
    Mutant(
        "faults of fzero lose their frames",
        "_tracebacks.py",
        "return raised and isinstance",
        "return raised or isinstance",
        TRACEBACKS,
    ),
    Mutant("no word is near", "_tracebacks.py", "known, 1)", "known, 0 + 1, 1.0)", TRACEBACKS),
    Mutant("frames are never shown", "_tracebacks.py", " or sys.flags.dev_mode", "", TRACEBACKS),
    Mutant(
        "torch logs what it raises",
        "_torch/tracing.py",
        'return "attempting to run meta" not in',
        'return "" in',
        TRACEBACKS,
    ),
    Mutant("a backward pass is its caller's", "_torch/recorder.py", "made or user_line()", "user_line()", PROFILING),
    Mutant(
        "a second forward pass is backward",
        "observe/_lines.py",
        '"forward" if place.forward else ""',
        '""',
        PROFILING,
    ),
    Mutant("the cheapest have colours", "observe/_profile.py", "-sums[name]", "sums[name]", PROFILING),
    Mutant("labels overlap", "observe/_profile.py", "if room >= 4", "if room >= 0", PROFILING),
    Mutant("loops are timed twice", "graph/run/_clock.py", " or n.name in self.loops", "", PROFILING),
    Mutant("a function is its outermost", "observe/_lines.py", "min(inside)[1]", "max(inside)[1]", PROFILING),
    Mutant("operations begin together", "observe/_lines.py", "start += r.seconds", "start += 0", PROFILING),
    Mutant(
        "all that is not backward is forward",
        "observe/_lines.py",
        '"update" if i > behind[-1]',
        '"forward" if i',
        PROFILING,
    ),
    Mutant(
        "operations in a graph are shown twice",
        "graph/run/_clock.py",
        "    with unwatched():",
        "    if True:",
        PROFILING,
    ),
    Mutant(
        "bars join over those above them",
        "observe/_profile.py",
        "_names(s)[: row + 1]",
        "_names(s)[row : row + 1]",
        PROFILING,
    ),
]
