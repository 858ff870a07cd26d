"""Faults in fzero/debug."""

from tests.mutants.mutant import Mutant

DEBUG = ("tests/observe",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "training-2")

MUTANTS = [
    Mutant(
        "ranges leave infinities out", "observe/_trail.py", "[str(kind)] if (kind := kind_of(x)) else []", "[]", DEBUG
    ),
    Mutant(
        "a mask is blamed", "observe/_trail.py", "any(not math.isfinite(x) for x in operation.numbers)", "False", DEBUG
    ),
    Mutant(
        "infinities are nan",
        "observe/_trail.py",
        "before = [other for other, holds in _parents(trails, node) if holds or not nan]",
        "before = [other for other, _ in _parents(trails, node)]",
        DEBUG,
    ),
    Mutant(
        "tensors are kept alive",
        "observe/_trail.py",
        "WatchedOperation(operation.name, [], [], [])",
        "operation",
        DEBUG,
    ),
    Mutant("padding is a result", "observe/_nonfinite.py", "x = x[..., : max(known.numel - start, 0)]", "pass", DEBUG),
    Mutant(
        "the first leaf of a unit is named",
        "observe/_nonfinite.py",
        "own_path(box.spec, index, ",
        "own_path(box.spec, 0, ",
        DEBUG,
    ),
    Mutant(
        "all parts are rank 0's",
        "observe/_nonfinite.py",
        "x if mesh.distributed or not axes else x[row]",
        "x if mesh.distributed or not axes else x[0]",
        DEBUG,
    ),
    Mutant(
        "memory is never written over",
        "observe/_trail.py",
        "        for x, _ in found:\n            self._forget(x)",
        "",
        DEBUG,
    ),
    Mutant(
        "the first of many is the last",
        "observe/_trail.py",
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
    Mutant("one rank returns for all", "observe/_trail.py", 'name == "aten::equal" and self.size > 1', "False", DEBUG),
    Mutant(
        "an overflowing sum is one rank's",
        "observe/_trail.py",
        "tuple(range(self.size)) if place.collective else self._here()",
        "self._here()",
        DEBUG,
    ),
    Mutant("who received is blamed", "observe/_trail.py", "if made.meeting is not None:", "if False:", ON_GLOO),
    Mutant(
        "ranks report for themselves",
        "observe/_nonfinite.py",
        "if mesh is None or not mesh.distributed:\n        return [trail]",
        "if True:\n        return [trail]",
        ON_GLOO,
    ),
]
