"""Faults in where ranks are, and in how they run: fzero/ranks, and lockstep in fzero/axes."""

from tests.mutants.mutant import HALF, STEP, Mutant

MEET, LAUNCH = ("tests/ranks/test_handshake.py",), ("tests/ranks/test_launch.py",)
SWITCHED, TORCH = ("tests/axes/test_lockstep_state.py",), ("tests/_torch/test_torch.py",)
MESH = ("tests/ranks/test_mesh.py",)

MUTANTS = [
    Mutant(
        "only the first hello is answered",
        "ranks/_launch.py",
        "if answered.get(rank) != hello:",
        "if rank not in answered:",
        MEET,
    ),
    Mutant("who arrived in another world has arrived", "ranks/_launch.py", "{world}/arrived/", "fzero/arrived/", MEET),
    Mutant("each rank has its own clock", "ranks/_launch.py", "2 * timeout", "timeout / 2", MEET),
    Mutant(
        "worlds share what is in the store",
        "ranks/_launch.py",
        "PrefixStore(shake_hands(store, world.rank, world.size, left), store)",
        "(shake_hands(store, world.rank, world.size, left), store)[1]",
        ("tests/ranks/test_restart.py",),
    ),
    Mutant("a fork is a rank", "ranks/_launch.py", "!= os.getpid():", "== 0:", LAUNCH),
    Mutant("ranks beyond the world", "ranks/_launch.py", "if rank >= size:", "if False:", LAUNCH),
    Mutant("alone is not heard", "ranks/_mesh.py", "(alone or given) if", "given if", MESH),
    Mutant("alone need not divide", "ranks/_mesh.py", "product != alone:", "False:", MESH),
    Mutant("an axis may be two", "ranks/_mesh.py", "if not name.isidentifier():", "if not name:", MESH),
    Mutant("nan seconds", "ranks/_launch.py", "if not 0 < timeout < 1e9:", "if timeout <= 0 or timeout >= 1e9:", MESH),
    Mutant("any device", "ranks/_launch.py", 'if device != "cuda":', "if False:", MESH),
    Mutant(
        "the world for the data-parallel ranks",
        "data/_batch_plan.py",
        "names, shared = mesh.names(axis), ",
        "names, shared = mesh.axis_names, ",
        HALF,
    ),
    Mutant("stages have batches", "data/_batch_plan.py", "if name not in shared]", "]", HALF),
    Mutant("tp never counts", "data/_batch_plan.py", '*(["tp"] if axis is None else [])', '"tp"', HALF),
    Mutant("axes apart have one name", "data/_batch_plan.py", "list(mesh.names(apart))", "shared", HALF),
    Mutant(
        "results are not compared", "ranks/_spmd.py", "if not lockstep.same(", "if False and not lockstep.same(", STEP
    ),
    Mutant(
        "diverging calls meet",
        "axes/lockstep.py",
        "if len({g.run.waiting[r].what for r in g.members}) > 1:",
        "if False:",
        STEP,
    ),
    Mutant(
        "what a rank sets stays on",
        "_torch/state.py",
        "put_settings({name: self.outside[name] for name in self.own})",
        "pass",
        SWITCHED,
    ),
    Mutant("a rank loses what it has set", "_torch/state.py", "put_settings(self.own)", "pass", SWITCHED),
    Mutant(
        "hooks are the caller's only",
        "_torch/state.py",
        "_push_saved_tensors_default_hooks(*hooks)",
        "_saved_tensors_hooks_enable()",
        SWITCHED,
    ),
    Mutant("modes outlive their rank", "_torch/state.py", "_python_dispatch._pop_mode()", "pass", SWITCHED),
    Mutant(
        "a thread counts as it did", "_torch/state.py", "if torch.get_num_threads() != threads:", "if False:", SWITCHED
    ),
    Mutant("no level is kept", "axes/_run.py", "over.wait()", "pass", SWITCHED),
    Mutant("a fork has its parent's threads", "axes/_run.py", "here = os.getpid()", "here = 0", SWITCHED),
    Mutant("the first who ends ends the silence", "_torch/levels.py", "if not _SILENT:", "if True:", TORCH),
]
