"""Faults in fzero's other folders and files."""

from tests.mutants.changes import always, becomes, before, dropped, never, skipped
from tests.mutants.mutant import DONATION, GATHER_TEXTS, HALF, JIT, OWN, WRITES, Fault, File

MUTANTS = [
    *File("__init__.py", ("tests/test_import.py",)).faults(
        Fault("`import fzero` imports fzero.tuning as well", "", before("import importlib", "import fzero.tuning")),
    ),
    *File("_torch/on_import.py", ("tests/test_import.py",)).faults(
        Fault("Dynamo is imported with fzero", "", before("import importlib.abc", "import torch._dynamo")),
        Fault("Dynamo is not told", "_Loader.exec_module", skipped("A(module)", at="2 of 2")),
        Fault("optree is not told of boxes", "register_optree_node", skipped("A('optree', B)")),
    ),
    *File("tree.py").faults(
        Fault("a tie breaks in tree.map", "map", always("A not in B")),
    ),
    *File("axes/_scope.py").faults(
        Fault("an axis leaks", "call_in_scope", skipped("A.stack.pop()")),
    ),
    *File("axes/_replicated.py", ("tests/test_errors.py",)).faults(
        Fault("results need no check", "_Replicated.vmap", always("not A")),
        Fault("a process forgets what is its own", "check_inputs_replicated", never("A.name in B"), OWN),
    ),
    *File("_torch/levels.py", WRITES).faults(
        Fault("vmap hides a write", "version_key", skipped("A = B(A)")),
        Fault("late reduction", "raise_priority", never("not A()"), ("tests/transforms/test_memory.py",)),
    ),
    *File("zero/_checks.py", ("tests/zero/test_parameters_with_grad.py",)).faults(
        Fault("steps are recorded for ever", "as_value", never("is_grad_leaf")),
        Fault("graphs are cut between steps", "as_value", dropped("A.is_leaf")),
        Fault("jit lets a step write into its shards", "check_unwritten", always("not A()"), WRITES),
    ),
    *File("zero/_sharded_step.py", HALF).faults(
        Fault(
            "masters start rounded",
            "ShardedStep.init",
            becomes("A.B('params', C, D)", "A.B('params', optimizer.precision.cast(C() if callable(C) else C), D)"),
        ),
        Fault(
            "donate the batch", "ShardedStep.state_positions", always("A in self.B or A < len(C) and D(E, C[A])"), JIT
        ),
    ),
    *File("optim/_precision.py", HALF).faults(
        Fault("norms are narrowed", "Precision.dtype_of", becomes("self.master", "self.param")),
    ),
    *File("_torch/tracing.py", JIT).faults(
        Fault(
            "random numbers are constants",
            "trace",
            becomes("with A, B(), C, D(E), F(), G(): ...", "with A, B(), C, F(), G(): ..."),
        ),
    ),
    *File("_donated.py", DONATION).faults(
        Fault("keep the old tensors", "donate_memory", skipped("A.data = B(A.dtype, A.device)")),
    ),
    *File("ranks/_agreement.py", GATHER_TEXTS).faults(
        Fault("texts of two rounds are mixed", "gather_texts", becomes("A[B] += 1", "A[B] = 1")),
        Fault(
            "texts of two topics are mixed", "gather_texts", becomes("f'fzero/{A}/{B[A]}/{C}'", "f'fzero/{B[A]}/{C}'")
        ),
    ),
]
