"""Faults in fzero/data and fzero/metrics, and in evaluation."""

from tests.mutants.mutant import Mutant

DATA, METRICS = ("tests/data",), ("tests/metrics",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "training-2")

MUTANTS = [
    Mutant(
        "all ranks load the first rows", "data/_load.py", "first = self.mesh.index(names) * rows", "first = 0", ON_GLOO
    ),
    Mutant(
        "each rank has a length of its own",
        "data/_load.py",
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
    Mutant("each rank loads all rows", "data/_load.py", "indices[first : first + rows]", "indices", ON_GLOO),
    Mutant("epochs have one order", "data/_batches.py", 'f"{self.seed}/{epoch}"', 'f"{self.seed}"', DATA),
    Mutant("seeds have one order", "data/_batches.py", 'f"{self.seed}/{epoch}"', 'f"{epoch}"', DATA),
    Mutant(
        "an epoch begins anew", "data/_batches.py", "            if of != epoch:", "            if epoch < 0:", DATA
    ),
    Mutant("a run goes on at the beginning", "data/_batches.py", "range(start, stop)", "range(stop - start)", DATA),
    Mutant("draws are the user's", "data/_load.py", "generator=torch.Generator(),", "generator=None,", DATA),
    Mutant(
        "the last batch is short",
        "data/_once.py",
        "for i in range(start, start + global_batch)]",
        "for i in range(start, min(start + global_batch, length))]",
        DATA,
    ),
    Mutant("what fills up counts", "data/_once.py", "min(global_batch, length - start)", "global_batch", DATA),
    Mutant("all ranks are the first", "stages/_evaluate.py", " + axis_index(step.data_axes) * b", "", DATA),
    Mutant("filled rows are measured", "stages/_evaluate.py", "torch.where(real, x, 0)", "x", DATA),
    Mutant("filled rows have weight", "stages/_evaluate.py", "torch.where(real, weights, 0)", "weights", DATA),
    Mutant("sums are in half precision", "stages/_evaluate.py", "x.sum(dtype=wide)", "x.sum()", DATA),
    Mutant("a mean of means", "data/_mean.py", "tree.map(torch.add, sums, now)", "now", DATA),
    Mutant(
        "metrics of other steps are lost",
        "metrics/_log.py",
        "_on_host(self._kept), []",
        "_on_host(self._kept[-1:]), []",
        METRICS,
    ),
    Mutant(
        "each step waits", "metrics/_log.py", "x.detach() if isinstance(x, torch.Tensor) else x", "x.tolist()", METRICS
    ),
    Mutant(
        "what is left is not written",
        "metrics/_log.py",
        "            self.flush()\n        finally",
        "            pass\n        finally",
        METRICS,
    ),
    Mutant("what is no number is told each time", "metrics/_log.py", "self._told.add(name)", "pass", METRICS),
    Mutant("one metric is told", "metrics/_log.py", "name not in self._told", "not self._told", METRICS),
    Mutant("lines are repeated", "metrics/_writers.py", "        if step < first:", "        if True:", METRICS),
    Mutant("TensorBoard shows both", "metrics/_writers.py", ", purge_step=rows[0][0]", "", METRICS),
]
