"""Faults in the profiles of fzero/observe, in what they ask of a jitted step, and in tracebacks."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, swapped
from tests.mutants.mutant import Fault, File

PROFILING = ("tests/observe",)
TRACEBACKS = ("tests/test_tracebacks.py",)

MUTANTS = [
    *File("_tracebacks.py", TRACEBACKS).faults(
        Fault("causes keep all frames", "_chain", becomes("A.__cause__ or A.__context__", "None")),
        Fault("tracebacks end in torch", "_user_frames", always("A(B.tb_frame.f_code.co_filename)")),
        Fault("faults of torch lose their frames", "_is_message", always("A(B.tb_frame.f_code.co_filename)")),
        Fault("answers keep frames", "UserFrames.__exit__", bare("A and not B(C, D)")),
        Fault("faults of fzero lose their frames", "_is_message", swapped("is_from_fzero and A", "or")),
        Fault(
            "no word is ranks_per_machine",
            "_nearest",
            becomes("difflib.get_close_matches(A, B, 1)", "difflib.get_close_matches(A, B, 0 + 1, 1.0)"),
        ),
        Fault("frames are never shown", "UserFrames.__exit__", dropped("sys.flags.dev_mode")),
    ),
    *File("_torch/tracing.py", TRACEBACKS).faults(
        Fault("torch logs what it raises", "_unlogged.keep", returns("'' in record.getMessage()")),
    ),
    *File("_torch/recorder.py", PROFILING).faults(
        Fault("a backward pass is its caller's", "_source", bare("B or A")),
    ),
    *File("observe/_lines.py", PROFILING).faults(
        Fault("a second forward pass is backward", "spans.after", never("A.B", at="2 of 2")),
        Fault("a function is its outermost", "function_at", becomes("min", "max")),
        Fault("operations begin together", "_place_spans", becomes("A += B.C", "A += 0")),
        Fault(
            "all that is not backward is forward", "_place_spans", (bare("A > B[-1]"), constant("update", "forward"))
        ),
    ),
    *File("observe/_profile.py", PROFILING).faults(
        Fault("the cheapest have colours", "_colours_of_top", bare("-A")),
        Fault("labels overlap", "label", constant(4, 0)),
        Fault("bars join over those above them", "bars", becomes("A(B)[:C + 1]", "A(B)[C:C + 1]")),
    ),
    *File("graph/run/_clock.py", PROFILING).faults(
        Fault("loops are timed twice", "_TimedInterpreter.run_node", dropped("A.name in self.loops")),
        Fault("operations in a graph are shown twice", "record_time", becomes("with A(): ...", "if True: ...")),
    ),
]
