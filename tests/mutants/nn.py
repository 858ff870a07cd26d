"""Faults in fzero/nn."""

from tests.mutants.mutant import REMAT, STEP, Mutant

WRITTEN = ("tests/nn/test_written.py",)

LEFT = ("tests/nn/test_left_behind.py",)

CLOSURES = ("tests/nn/test_closures.py",)

MUTANTS = [
    Mutant(
        "buffers are the module's own",
        "nn/_functional.py",
        "b.detach().clone() for",
        "b.detach() for",
        ("tests/nn/test_nn.py",),
    ),
    Mutant("an attribute's function reads the module", "nn/_closures.py", "m.__dict__[name] = y", "pass", CLOSURES),
    Mutant("a hook reads the module", "nn/_closures.py", "key: _follow(hook, memo) for", "key: hook for", CLOSURES),
    Mutant(
        "a rank reads another's module", "nn/_functional.py", "copy_module(self.module, shared)", "self.module", STEP
    ),
    Mutant("a default reads the module", "nn/_closures.py", "f.__name__, new[1],", "f.__name__, parts[1],", CLOSURES),
    Mutant("globals go unseen", "nn/_closures.py", 'i.opname == "LOAD_GLOBAL"', "False", CLOSURES),
    Mutant("one module for all ranks", "nn/_functional.py", "if not in_lockstep():", "if True:", STEP),
    Mutant(
        "remat updates statistics twice",
        "nn/_blocks.py",
        "name: buffers[name].clone()",
        "name: buffers[name]",
        REMAT,
    ),
    Mutant(
        "a gradient's hook is dropped",
        "nn/_functional.py",
        "for method in gradient_hooks(x):",
        "for method in []:",
        WRITTEN,
    ),
    Mutant(
        "a tensor in an attribute goes unseen",
        "nn/_written.py",
        "if ids - before.tensors.get(name, set())]",
        "if False]",
        WRITTEN,
    ),
    Mutant(
        "a list in an attribute goes unseen",
        "nn/_written.py",
        "elif isinstance(x, CONTAINERS):",
        "elif False:",
        WRITTEN,
    ),
    Mutant("a replaced parameter goes unseen", "nn/_written.py", "state[name] is not x:", "False:", WRITTEN),
    Mutant(
        "only the first call is looked at",
        "nn/_functional.py",
        "structure not in self._memory.seen",
        "not self._memory.seen",
        WRITTEN,
    ),
    Mutant("a trace leaves stand-ins behind", "nn/_functional.py", "traced=is_tracing()", "traced=False", LEFT),
    Mutant("weights outlive a call", "nn/_written.py", "for was in before:", "for was in ():", LEFT),
]
