"""Faults in fzero/data, in the metrics of fzero/observe, and in evaluation."""

from tests.mutants.changes import always, bare, becomes, dropped, skipped
from tests.mutants.mutant import Fault, File, on_processes

DATA = ("tests/data",)
METRICS = ("tests/observe",)
ON_GLOO = on_processes("training")

MUTANTS = [
    *File("data/_batches.py", DATA).faults(
        Fault(
            "every epoch has the same order", "Batches._epoch_order", becomes("f'{self.seed}/{A}'", "f'{self.seed}'")
        ),
        Fault("every seed gives the same order", "Batches._epoch_order", becomes("f'{self.seed}/{A}'", "f'{A}'")),
        Fault(
            "an epoch that was stopped midway starts from its beginning",
            "Batches._batches_from",
            becomes("A != B", "B < 0"),
        ),
        Fault("a resumed run starts from batch 0", "Batches._batches_from", becomes("range(A, B)", "range(B - A)")),
    ),
    *File("data/_loading.py", DATA).faults(
        Fault(
            "every rank loads the first rows of the batch",
            "BatchTarget.local_indices",
            becomes("self.A.index(B) * C", "0"),
            ON_GLOO,
        ),
        Fault(
            "each rank pads to the length of its own rows",
            "load_batches.local_examples",
            becomes("pad.A(B)", "pad.A(target.local_indices(B))"),
            ON_GLOO,
        ),
        Fault("each rank loads the whole batch", "BatchTarget.local_indices", bare("A[B:B + C]"), ON_GLOO),
        Fault(
            "loading a batch draws from the user's generator", "load_batches", becomes("torch.Generator('cpu')", "None")
        ),
        Fault(
            "an error of a data set shows torch's loader",
            "_box_each",
            becomes("UserFrames()", "__import__('contextlib').nullcontext()"),
            ("tests/test_tracebacks.py",),
        ),
    ),
    *File("data/_padding.py", DATA).faults(
        Fault(
            "padded positions have valid labels, so they count in the loss",
            "Padding._pad",
            becomes("self.fill.get(A, 0)", "0"),
        ),
        Fault(
            "the mask does not hide padding",
            "Padding.pad_example",
            becomes("torch.arange(A, device='cpu') < B", "torch.arange(A) < A"),
        ),
        Fault("a batch is padded to its shortest example", "Padding.padded_length", becomes("max", "min")),
        Fault(
            "the lengths that pad most are chosen",
            "_choose_best_buckets",
            becomes("(A[:, None] + B).min", "(A[:, None] + B).max"),
        ),
        Fault("the chances of a batch's length are those of one example", "_bucket_probabilities", bare("A ** B")),
    ),
    *File("data/_epoch.py", DATA).faults(
        Fault("the last batch is not filled up", "epoch", becomes("A + B", "min(A + B, length)")),
        Fault("rows that fill up the last batch count", "epoch", bare("min(A, B - start)")),
        Fault("the mean of batches ignores their sizes", "mean", bare("B.C(torch.add, D, A)")),
    ),
    *File("data/_prefetch.py", ("tests/data/test_prefetch.py",)).faults(
        Fault("a batch is made before its values are computed", "_copy_ahead", skipped("stream.wait_stream(A)")),
        Fault("a batch is used before it is copied", "_copy_ahead", skipped("current.wait_event(event)")),
    ),
    *File("zero/_evaluate.py", ("tests/errors/test_first_hour.py",)).faults(
        Fault("more rows are measured than a batch has", "evaluate.totals", dropped("maximum=A")),
    ),
    *File("zero/_evaluate.py", DATA).faults(
        Fault(
            "every rank of an evaluation takes the first rank's rows", "evaluate.totals", bare("A + B(C, device=E) * D")
        ),
        Fault(
            "rows that fill up a batch are measured in an evaluation",
            "evaluate.totals",
            becomes("torch.where(A, x, 0)", "x"),
        ),
        Fault(
            "rows that fill up a batch have a weight in an evaluation",
            "evaluate.totals",
            becomes("torch.where(A, weights, 0)", "weights"),
        ),
        Fault("an evaluation sums in half precision", "_sum_examples", dropped("dtype=A")),
    ),
    *File("observe/_metrics.py", METRICS).faults(
        Fault(
            "flush writes the last step only", "MetricsLog.flush", becomes("A(self._pending)", "A(self._pending[-1:])")
        ),
        Fault(
            "a logged metric is read at once, so each step waits for the device",
            "_metrics_by_path",
            becomes("A.detach() if B else A", "A.tolist()"),
        ),
        Fault("closing the log does not write pending metrics", "MetricsLog.__exit__", skipped("self.A()")),
        Fault(
            "a nan metric is reported at each step", "MetricsLog._report_nonfinite", skipped("self._reported.add(A)")
        ),
        Fault(
            "only the first nan metric is reported",
            "MetricsLog._report_nonfinite",
            becomes("A not in self._reported", "not self._reported"),
        ),
    ),
    *File("observe/_writers.py", METRICS).faults(
        Fault("a resumed log repeats lines", "_lines_before", always("A < B")),
        Fault(
            "TensorBoard shows the lines of a run before and after it resumes",
            "_TensorBoard.__call__",
            dropped("purge_step=A[0][0]"),
        ),
    ),
]
