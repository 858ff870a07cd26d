"""Faults in fzero's other folders and files."""

from tests.mutants.mutant import HALF, JIT, STEP, TEXTS, WRITES, Mutant

MUTANTS = [
    Mutant("a tie breaks in tree.map", "tree.py", "if key not in done:", "if True:"),
    Mutant("an axis leaks", "axes/scope.py", "_SCOPES.stack.pop()", "pass"),
    Mutant("results need no check", "axes/replicated.py", "if not message:", "if True:", ("tests/test_errors.py",)),
    Mutant(
        "vmap hides a write",
        "_torch/levels.py",
        "x = unwrapped(x)  # only",
        "pass  # only",
        WRITES,
    ),
    Mutant(
        "steps are recorded for ever",
        "stages/_sharded_step.py",
        "return x.detach() if own else x",
        "return x",
        ("tests/stages/test_parameters_with_grad.py",),
    ),
    Mutant(
        "graphs are cut between steps",
        "stages/_sharded_step.py",
        "and x.is_leaf and",
        "and",
        ("tests/stages/test_parameters_with_grad.py",),
    ),
    Mutant("jit lets a step write into its shards", "stages/_checks.py", "or not is_tracing():", "or True:", WRITES),
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
        'wide._placed("params", params, ',
        'wide._placed("params", precision.cast(params() if callable(params) else params), ',
        HALF,
    ),
    Mutant(
        "norms are narrowed", "precision.py", "return self.master if self.full", "return self.param if self.full", HALF
    ),
    Mutant(
        "the world for the data-parallel ranks",
        "ranks/_batch_plan.py",
        "names = mesh.names(axis)",
        "names = mesh.axis_names",
        HALF,
    ),
    Mutant(
        "results are not compared", "ranks/spmd.py", "if not lockstep.same(", "if False and not lockstep.same(", STEP
    ),
    Mutant(
        "diverging calls meet", "axes/lockstep.py", "if len({call.what for call, _ in calls}) > 1:", "if False:", STEP
    ),
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
    Mutant("texts of two rounds are mixed", "ranks/texts.py", "_ROUNDS[topic] += 1", "_ROUNDS[topic] = 1", TEXTS),
    Mutant("texts of two topics are mixed", "ranks/texts.py", "fzero/{topic}/", "fzero/", TEXTS),
]
