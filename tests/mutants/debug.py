"""Faults in fzero/debug."""

from tests.mutants.mutant import Mutant

DEBUG = ("tests/debug",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "training-2")

MUTANTS = [
    Mutant(
        "ranges leave infinities out", "debug/_watch.py", "[str(kind)] if (kind := kind_of(x)) else []", "[]", DEBUG
    ),
    Mutant(
        "a mask is blamed", "debug/_watch.py", "any(not math.isfinite(x) for x in operation.numbers)", "False", DEBUG
    ),
    Mutant(
        "infinities are nan",
        "debug/_trail.py",
        "before = [other for other, holds in _parents(trails, node) if holds or not nan]",
        "before = [other for other, _ in _parents(trails, node)]",
        DEBUG,
    ),
    Mutant(
        "tensors are kept alive", "debug/_watch.py", "WatchedOperation(operation.name, [], [], [])", "operation", DEBUG
    ),
    Mutant("padding is a result", "debug/_leaves.py", "x = x[..., : max(known.numel - start, 0)]", "pass", DEBUG),
    Mutant(
        "the first leaf of a unit is named",
        "debug/_leaves.py",
        "own_path(box.spec, index, ",
        "own_path(box.spec, 0, ",
        DEBUG,
    ),
    Mutant(
        "all parts are rank 0's",
        "debug/_leaves.py",
        "x if mesh.distributed or not axes else x[row]",
        "x if mesh.distributed or not axes else x[0]",
        DEBUG,
    ),
    Mutant(
        "memory is never written over",
        "debug/_watch.py",
        "        for x, _ in found:\n            self._forget(x)",
        "",
        DEBUG,
    ),
    Mutant(
        "the first of many is the last",
        "debug/_trail.py",
        "key=lambda n: _birth(trails, n).order)",
        "key=lambda n: _birth(trails, n).order, reverse=True)",
        DEBUG,
    ),
    Mutant(
        "a backward pass has the caller's line",
        "_torch/watched.py",
        "line if called else _line_of(node) or line",
        "line",
        DEBUG,
    ),
    Mutant(
        "a backward of one's own has the caller's line",
        "_torch/watched.py",
        "line if called else _line_of(node) or line",
        "_line_of(node) or line",
        DEBUG,
    ),
    Mutant("one rank returns for all", "debug/_watch.py", 'name == "aten::equal" and self.size > 1', "False", DEBUG),
    Mutant(
        "an overflowing sum is one rank's",
        "debug/_watch.py",
        "tuple(range(self.size)) if place.collective else self._here()",
        "self._here()",
        DEBUG,
    ),
    Mutant("who received is blamed", "debug/_trail.py", "if made.meeting is not None:", "if False:", ON_GLOO),
    Mutant(
        "ranks report for themselves",
        "debug/_nonfinite.py",
        "if mesh is None or not mesh.distributed:\n        return [trail]",
        "if True:\n        return [trail]",
        ON_GLOO,
    ),
]
