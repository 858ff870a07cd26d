"""Faults in how fzero/observe finds values that are not finite."""

from tests.mutants.changes import always, bare, becomes, never, returns, skipped
from tests.mutants.mutant import Fault, File, on_processes

DEBUG = ("tests/observe",)
ON_GLOO = on_processes("training")

MUTANTS = [
    *File("observe/_value_graph.py", DEBUG).faults(
        Fault(
            "infinities are followed as if they were nan",
            "_walk_back",
            becomes("[A for A, B in C(D, E) if B or not F]", "[A for A, _ in C(D, E)]"),
        ),
        Fault(
            "the last non-finite value is reported, not the first",
            "_sort_by_time",
            returns("sorted(nodes, key=lambda n: _find_cause(graphs, n).order, reverse=True)"),
        ),
        Fault(
            "the rank that received a non-finite value is blamed",
            "_find_parents",
            never("A.collective is not None"),
            ON_GLOO,
        ),
    ),
    *File("observe/_nonfinite_tracker.py", DEBUG).faults(
        Fault("the range of a tensor leaves infinities out", "_format_tensor", never("(A := B(C))")),
        Fault(
            "an infinity that a mask makes on purpose is blamed",
            "NonFiniteTracker._value_cause",
            never("any(A for B in operation.C)"),
        ),
        Fault("the tracker keeps tensors alive", "NonFiniteTracker._record_early_read", bare("B(A.name, [], [], [])")),
        Fault(
            "an overwritten tensor keeps its old cause",
            "NonFiniteTracker._record_results",
            skipped("for A, B in C:\n    self.D(A)"),
        ),
        Fault(
            "a comparison of simulated ranks is not recorded",
            "NonFiniteTracker.record_operation",
            becomes("A and self.size > 1 and not B()", "False and not B()"),
        ),
        Fault(
            "a sum over ranks that overflows is blamed on one rank",
            "NonFiniteTracker._value_cause",
            never("A.collective", at="1 of 2"),
        ),
    ),
    *File("observe/_nonfinite.py", DEBUG).faults(
        Fault("ranks do not gather their reports", "_gather_graphs", always("A is None or not A.distributed"), ON_GLOO),
    ),
    *File("observe/_nonfinite_leaves.py", DEBUG).faults(
        Fault(
            "padding of a unit is searched for non-finite values",
            "_locate_in_unit",
            skipped("A = A[..., :max(B.numel - C, 0)]"),
        ),
        Fault(
            "a report names the first leaf of a unit, whichever is non-finite",
            "_locate_in_unit",
            becomes("A(B.C, D, E, F)", "A(B.C, 0, E, F)"),
        ),
        Fault("every rank reports rank 0's part", "_nonfinite_leaves_of_box", becomes("x[A]", "x[0]")),
    ),
    *File("_torch/call_site.py", DEBUG).faults(
        Fault(
            "an operation of the backward pass has the line being run, not its forward line",
            "current_call_site",
            always("in_backward"),
        ),
        Fault("an operation within a user's backward has its forward line", "current_call_site", never("in_backward")),
    ),
]
