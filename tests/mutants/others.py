"""Faults in fzero's other folders and files."""

from tests.mutants.mutant import DONATION, HALF, JIT, OWN, TEXTS, WRITES, Mutant

MUTANTS = [
    Mutant(
        "Dynamo is imported with fzero",
        "_torch/dynamo.py",
        "import importlib.abc\n",
        "import importlib.abc\nimport torch._dynamo\n",
        ("tests/test_import.py",),
    ),
    Mutant(
        "Dynamo is not told",
        "_torch/dynamo.py",
        "            module.allow_in_graph(f)",
        "            pass",
        ("tests/test_import.py",),
    ),
    Mutant("a tie breaks in tree.map", "tree.py", "if key not in done:", "if True:"),
    Mutant("an axis leaks", "axes/_scope.py", "_SCOPES.stack.pop()", "pass"),
    Mutant("results need no check", "axes/_replicated.py", "if not message:", "if True:", ("tests/test_errors.py",)),
    Mutant(
        "vmap hides a write",
        "_torch/levels.py",
        "x = unwrapped(x)  # only",
        "pass  # only",
        WRITES,
    ),
    Mutant(
        "steps are recorded for ever",
        "zero/_checks.py",
        "return x.detach() if own else x",
        "return x",
        ("tests/zero/test_parameters_with_grad.py",),
    ),
    Mutant(
        "graphs are cut between steps",
        "zero/_checks.py",
        "and x.is_leaf and",
        "and",
        ("tests/zero/test_parameters_with_grad.py",),
    ),
    Mutant("a process forgets what is its own", "axes/_replicated.py", "if axis.name in known:", "if False:", OWN),
    Mutant("jit lets a step write into its shards", "zero/_checks.py", "or not is_tracing():", "or True:", WRITES),
    Mutant(
        "late reduction",
        "_torch/levels.py",
        "if not is_tracing() and",
        "if False and",
        ("tests/transforms/test_memory.py",),
    ),
    Mutant(
        "masters start rounded",
        "zero/_sharded_step.py",
        'wide._placed("params", params, ',
        'wide._placed("params", precision.cast(params() if callable(params) else params), ',
        HALF,
    ),
    Mutant(
        "norms are narrowed",
        "optim/_precision.py",
        "return self.master if self.full",
        "return self.param if self.full",
        HALF,
    ),
    Mutant(
        "random numbers are constants",
        "_torch/tracing.py",
        "quiet, _mode_of(fakes), _without_values(), ",
        "quiet, _without_values(), ",
        JIT,
    ),
    Mutant(
        "donate the batch",
        "zero/_sharded_step.py",
        "i in self.params or (i < len(results) and is_like(x, results[i]))",
        "True",
        JIT,
    ),
    Mutant("keep the old tensors", "_donated.py", "    x.data = _nothing(x.dtype, x.device)\n", "", DONATION),
    Mutant("texts of two rounds are mixed", "ranks/_agreement.py", "_ROUNDS[topic] += 1", "_ROUNDS[topic] = 1", TEXTS),
    Mutant("texts of two topics are mixed", "ranks/_agreement.py", "fzero/{topic}/", "fzero/", TEXTS),
]
