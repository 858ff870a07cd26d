"""Faults in fzero's other folders and files."""

from tests.mutants.mutant import HALF, JIT, REMAT, STEP, Mutant

MUTANTS = [
    Mutant("a tie breaks in tree.map", "tree.py", "if key not in done:", "if True:"),
    Mutant("an axis leaks", "axes/scope.py", "_SCOPES.stack.pop()", "pass"),
    Mutant("results need no check", "axes/replicated.py", "if not message:", "if True:", ("tests/test_errors.py",)),
    Mutant(
        "late reduction",
        "_torch/__init__.py",
        "if not is_tracing() and",
        "if False and",
        ("tests/transforms/test_memory.py",),
    ),
    Mutant(
        "masters start rounded",
        "stages/_sharded_step.py",
        "wide._init(params, opt)",
        "wide._init(precision.cast(params() if callable(params) else params), opt)",
        HALF,
    ),
    Mutant(
        "norms are narrowed", "precision.py", "return self.master if self.full", "return self.param if self.full", HALF
    ),
    Mutant("one module for all ranks", "nn/__init__.py", "if not in_lockstep():", "if True:", STEP),
    Mutant(
        "random numbers are constants",
        "_torch/__init__.py",
        "_compiling(), _mode_of(fakes):",
        "_compiling():",
        JIT,
    ),
    Mutant(
        "donate the batch",
        "stages/_sharded_step.py",
        "i in self.params or (i < len(results) and _alike(x, results[i]))",
        "True",
        JIT,
    ),
    Mutant("keep the old tensors", "_donated.py", "    x.data = x.new_empty(0)\n", "", JIT),
    Mutant(
        "remat updates statistics twice",
        "nn/_blocks.py",
        "name: buffers[name].clone()",
        "name: buffers[name]",
        REMAT,
    ),
]
