"""Faults in fzero/data and fzero/observe, and in evaluation."""

from tests.mutants.mutant import Mutant

DATA, METRICS = ("tests/data",), ("tests/observe",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "training-2")

MUTANTS = [
    Mutant(
        "all ranks load the first rows",
        "data/_batches.py",
        "first = self.mesh.index(names) * rows",
        "first = 0",
        ON_GLOO,
    ),
    Mutant(
        "each rank has a length of its own",
        "data/_batches.py",
        "length = pad.length_of(indices)",
        "length = pad.length_of(place.own(indices))",
        ON_GLOO,
    ),
    Mutant("padding counts in the loss", "data/_padding.py", "self.fill.get(name, 0)", "0", DATA),
    Mutant(
        "padding is seen", "data/_padding.py", "torch.arange(length) < tokens", "torch.arange(length) < length", DATA
    ),
    Mutant(
        "batches are as long as their first", "data/_padding.py", "max(self.lengths[i]", "min(self.lengths[i]", DATA
    ),
    Mutant("the last length is chosen first", "data/_padding.py", ".min(0)", ".max(0)", DATA),
    Mutant(
        "a batch is one example", "data/_padding.py", "(total / len(lengths)) ** batch", "(total / len(lengths))", DATA
    ),
    Mutant("each rank loads all rows", "data/_batches.py", "indices[first : first + rows]", "indices", ON_GLOO),
    Mutant("epochs have one order", "data/_batches.py", 'f"{self.seed}/{epoch}"', 'f"{self.seed}"', DATA),
    Mutant("seeds have one order", "data/_batches.py", 'f"{self.seed}/{epoch}"', 'f"{epoch}"', DATA),
    Mutant(
        "an epoch begins anew", "data/_batches.py", "            if of != epoch:", "            if epoch < 0:", DATA
    ),
    Mutant("a run goes on at the beginning", "data/_batches.py", "range(start, stop)", "range(stop - start)", DATA),
    Mutant("draws are the user's", "data/_batches.py", "generator=torch.Generator(),", "generator=None,", DATA),
    Mutant(
        "the last batch is short",
        "data/_evaluation.py",
        "for i in range(start, start + global_batch)]",
        "for i in range(start, min(start + global_batch, length))]",
        DATA,
    ),
    Mutant("what fills up counts", "data/_evaluation.py", "min(global_batch, length - start)", "global_batch", DATA),
    Mutant("all ranks are the first", "zero/_evaluate.py", " + axis_index(step.data_axes) * b", "", DATA),
    Mutant("filled rows are measured", "zero/_evaluate.py", "torch.where(real, x, 0)", "x", DATA),
    Mutant("filled rows have weight", "zero/_evaluate.py", "torch.where(real, weights, 0)", "weights", DATA),
    Mutant("sums are in half precision", "zero/_evaluate.py", "x.sum(dtype=wide)", "x.sum()", DATA),
    Mutant("a mean of means", "data/_evaluation.py", "tree.map(torch.add, sums, now)", "now", DATA),
    Mutant(
        "metrics of other steps are lost",
        "observe/_metrics.py",
        "_on_host(self._kept), []",
        "_on_host(self._kept[-1:]), []",
        METRICS,
    ),
    Mutant(
        "each step waits",
        "observe/_metrics.py",
        "x.detach() if isinstance(x, torch.Tensor) else x",
        "x.tolist()",
        METRICS,
    ),
    Mutant(
        "what is left is not written",
        "observe/_metrics.py",
        "            self.flush()\n        finally",
        "            pass\n        finally",
        METRICS,
    ),
    Mutant("what is no number is told each time", "observe/_metrics.py", "self._told.add(name)", "pass", METRICS),
    Mutant("one metric is told", "observe/_metrics.py", "name not in self._told", "not self._told", METRICS),
    Mutant("lines are repeated", "observe/_metrics.py", "        if step < first:", "        if True:", METRICS),
    Mutant("TensorBoard shows both", "observe/_metrics.py", ", purge_step=rows[0][0]", "", METRICS),
]
