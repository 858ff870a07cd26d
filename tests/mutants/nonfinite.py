"""Faults in how fzero/observe finds values that are not finite."""

from tests.mutants.changes import always, bare, becomes, never, returns, skipped
from tests.mutants.mutant import Fault, File

DEBUG = ("tests/observe",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "training-2")

MUTANTS = [
    *File("observe/_value_graph.py", DEBUG).faults(
        Fault("ranges leave infinities out", "_format_tensor", never("(A := B(C))")),
        Fault("a mask is blamed", "NonFiniteTracker._origin", never("any(A for B in operation.C)")),
        Fault(
            "infinities are nan", "_ends", becomes("[A for A, B in C(D, E) if B or not F]", "[A for A, _ in C(D, E)]")
        ),
        Fault("tensors are kept alive", "NonFiniteTracker._record_early_read", bare("B(A.name, [], [], [])")),
        Fault(
            "memory is never written over", "NonFiniteTracker._record_results", skipped("for A, B in C:\n    self.D(A)")
        ),
        Fault(
            "the first of many is the last",
            "_in_time",
            returns("sorted(nodes, key=lambda n: _origin(graphs, n).order, reverse=True)"),
        ),
        Fault(
            "one rank returns for all",
            "NonFiniteTracker.after",
            becomes("A and self.size > 1 and not B()", "False and not B()"),
        ),
        Fault("an overflowing sum is one rank's", "NonFiniteTracker._origin", never("A.collective", at="1 of 2")),
        Fault("who received is blamed", "_parents", never("A.collective is not None"), ON_GLOO),
    ),
    *File("observe/_nonfinite.py", DEBUG).faults(
        Fault("padding is a result", "_in_unit", skipped("A = A[..., :max(B.numel - C, 0)]")),
        Fault("the first leaf of a unit is named", "_in_unit", becomes("A(B.C, D, E, F)", "A(B.C, 0, E, F)")),
        Fault("all parts are rank 0's", "_parts", becomes("x[A]", "x[0]")),
        Fault("ranks report for themselves", "_gather_graphs", always("A is None or not A.distributed"), ON_GLOO),
    ),
    *File("_torch/watched.py", DEBUG).faults(
        Fault("a backward pass has the caller's line", "current_call_site", always("in_backward")),
        Fault("a backward of one's own has the caller's line", "current_call_site", never("in_backward")),
    ),
]
