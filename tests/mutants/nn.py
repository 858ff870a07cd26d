"""Faults in fzero/nn."""

from tests.mutants.changes import always, bare, becomes, never, skipped
from tests.mutants.mutant import REMAT, STEP, Fault, File

WRITTEN = ("tests/nn/test_writes.py",)
LEFT = ("tests/nn/test_leftovers.py",)
CLOSURES = ("tests/nn/test_closures.py",)

MUTANTS = [
    *File("nn/_functional.py", STEP).faults(
        Fault("buffers are the module's own", "functional", bare("A().clone"), ("tests/nn/test_nn.py",)),
        Fault("a rank reads another's module", "Apply._own_module", bare("B(A, C)")),
        Fault("one module for all ranks", "Apply._own_module", always("not A()")),
        Fault("a gradient's hook is dropped", "_check_hooks", becomes("A(x)", "[]"), WRITTEN),
        Fault("only the first call is looked at", "Apply._run", becomes("A not in self.B.C", "not self.B.C"), WRITTEN),
        Fault("a trace leaves stand-ins behind", "Apply._run", becomes("A(B, traced=C())", "A(B, traced=False)"), LEFT),
    ),
    *File("nn/_copy.py", CLOSURES).faults(
        Fault("an attribute's function reads the module", "copy_module", skipped("A.__dict__[B] = C")),
        Fault("a hook reads the module", "copy_module", becomes("A(hook, B)", "hook")),
        Fault("a default reads the module", "_follow_function", becomes("A[1]", "parts[1]")),
        Fault("globals go unseen", "_globals_of", never("A.opname == 'LOAD_GLOBAL'")),
    ),
    *File("nn/_blocks.py", REMAT).faults(
        Fault("remat updates statistics twice", "_Forward.body", bare("A.clone()")),
    ),
    *File("nn/_copy.py", WRITTEN).faults(
        Fault("a tensor in an attribute goes unseen", "check_leftovers", never("A - B.C.get(D, set())")),
        Fault("a list in an attribute goes unseen", "tensors_in", never("isinstance(A, B)", at="2 of 3")),
        Fault("a replaced parameter goes unseen", "check_writes", never("A[B] is not C")),
        Fault("weights outlive a call", "restore_modules", becomes("before", "()"), LEFT),
    ),
]
