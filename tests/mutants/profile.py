"""Faults in the profiles of fzero/observe, in what they ask of a jitted step, and in tracebacks."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, swapped
from tests.mutants.mutant import Fault, File

PROFILING = ("tests/observe",)
TRACEBACKS = ("tests/test_tracebacks.py",)

MUTANTS = [
    *File("_tracebacks.py", TRACEBACKS).faults(
        Fault("causes keep all frames", "_error_chain", becomes("A.__cause__ or A.__context__", "None")),
        Fault("a traceback shows the frames of torch", "_user_frames", always("A(B.tb_frame.f_code.co_filename)")),
        Fault("an error inside torch loses its frames", "is_message", always("A(B.tb_frame.f_code.co_filename)")),
        Fault("a message about bad input keeps fzero's frames", "UserFrames.__exit__", bare("A and not B(C, D)")),
        Fault("an error inside fzero loses its frames", "is_message", swapped("is_from_fzero and A", "or")),
        Fault("python -X dev does not show fzero's frames", "UserFrames.__exit__", dropped("sys.flags.dev_mode")),
    ),
    *File("optim/checks/_shapes.py", TRACEBACKS).faults(
        Fault("an update's error shows frames of fzero", "checks_gradients", bare("api_boundary(A, B)")),
    ),
    *File("_torch/tracing.py", TRACEBACKS).faults(
        Fault("torch logs an error that it also raises", "_without_log.keep", returns("'' in record.getMessage()")),
    ),
    *File("_torch/recorder.py", PROFILING).faults(
        Fault("a node of the backward pass never has its own forward line", "_call_source", bare("B or A")),
        Fault("a module has the name of its class", "Stacks._name_within", never("A is B", at="2 of 2")),
        Fault("functions within a module are called its modules", "Stacks._call_names", never("isinstance(A, str)")),
        Fault("a stack holds what called the step", "Stacks.current", never("A == self.start")),
    ),
    *File("observe/_lines.py", PROFILING).faults(
        Fault("an operation of the forward pass has no phase", "record_spans.end_operation", never("A.forward")),
        Fault("a line belongs to the outermost function, not the innermost", "_function_at", becomes("min", "max")),
        Fault("operations of a profile all begin at zero", "_place_spans", becomes("A += B.C", "A += 0")),
        Fault(
            "a mark of the backward pass says forward",
            "_mark_functions.begin_operation",
            constant("backward", "forward or update"),
        ),
        Fault("the update counts as the forward pass", "_place_spans", constant("update", "forward")),
    ),
    *File("observe/_flame_chart.py", PROFILING).faults(
        Fault("a profile colours its cheapest lines", "_top_colours", bare("-A")),
        Fault("labels of narrow bars overlap", "_cut_label", constant(4, 0)),
        Fault("bars are joined across different callers", "_bars", becomes("A[0][: C + 1]", "A[0][C : C + 1]")),
    ),
    *File("graph/run/_clock.py", PROFILING).faults(
        Fault(
            "the operations of a loop are timed twice", "_TimedInterpreter.run_node", dropped("A.name in self.loops")
        ),
        Fault(
            "the operations of a recorded graph are shown twice",
            "record_time",
            becomes("with A(): ...", "if True: ..."),
        ),
    ),
]
