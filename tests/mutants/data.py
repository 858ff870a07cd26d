"""Faults in fzero/data, in the metrics of fzero/observe, and in evaluation."""

from tests.mutants.changes import always, bare, becomes, dropped, skipped
from tests.mutants.mutant import Fault, File

DATA = ("tests/data",)
METRICS = ("tests/observe",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "training-2")

MUTANTS = [
    *File("data/_batches.py", DATA).faults(
        Fault(
            "all ranks load the first rows", "BatchTarget.local_indices", becomes("self.A.index(B) * C", "0"), ON_GLOO
        ),
        Fault(
            "each rank has a length of its own",
            "load_batches.local_examples",
            becomes("pad.A(B)", "pad.A(target.local_indices(B))"),
            ON_GLOO,
        ),
        Fault("each rank loads all rows", "BatchTarget.local_indices", bare("A[B:B + C]"), ON_GLOO),
        Fault("epochs have one order", "Batches._order", becomes("f'{self.seed}/{A}'", "f'{self.seed}'")),
        Fault("seeds have one order", "Batches._order", becomes("f'{self.seed}/{A}'", "f'{A}'")),
        Fault("an epoch begins anew", "Batches._from", becomes("A != B", "B < 0")),
        Fault("a run goes on at the beginning", "Batches._from", becomes("range(A, B)", "range(B - A)")),
        Fault("draws are the user's", "load_batches", becomes("torch.Generator('cpu')", "None")),
    ),
    *File("data/_padding.py", DATA).faults(
        Fault("padding counts in the loss", "Padding._pad", becomes("self.fill.get(A, 0)", "0")),
        Fault(
            "padding is seen", "Padding.example", becomes("torch.arange(A, device='cpu') < B", "torch.arange(A) < A")
        ),
        Fault("batches are as long as their first", "Padding.length_of", becomes("max", "min")),
        Fault(
            "the last length is chosen first", "_best_buckets", becomes("(A[:, None] + B).min", "(A[:, None] + B).max")
        ),
        Fault("a batch is one example", "_chances", bare("A ** B")),
    ),
    *File("data/_batches.py", DATA).faults(
        Fault("the last batch is short", "once", becomes("A + B", "min(A + B, length)")),
        Fault("what fills up counts", "once", bare("min(A, B - start)")),
        Fault("a mean of means", "mean", bare("B.C(torch.add, D, A)")),
    ),
    *File("zero/_evaluate.py", DATA).faults(
        Fault("all ranks are the first", "evaluate.totals", bare("A + B(C.D) * E")),
        Fault("filled rows are measured", "evaluate.totals", becomes("torch.where(A, x, 0)", "x")),
        Fault("filled rows have weight", "evaluate.totals", becomes("torch.where(A, weights, 0)", "weights")),
        Fault("sums are in half precision", "_sum", dropped("dtype=A")),
    ),
    *File("observe/_metrics.py", METRICS).faults(
        Fault(
            "metrics of other steps are lost", "MetricsLog.flush", becomes("A(self._pending)", "A(self._pending[-1:])")
        ),
        Fault("each step waits", "_by_path", becomes("A.detach() if B else A", "A.tolist()")),
        Fault("what is left is not written", "MetricsLog.__exit__", skipped("self.A()")),
        Fault("what is no number is told each time", "MetricsLog._report_nonfinite", skipped("self._reported.add(A)")),
        Fault(
            "one metric is told",
            "MetricsLog._report_nonfinite",
            becomes("A not in self._reported", "not self._reported"),
        ),
        Fault("lines are repeated", "_lines_before", always("A < B")),
        Fault("TensorBoard shows both", "_TensorBoard.__call__", dropped("purge_step=A[0][0]")),
    ),
]
