"""Faults in where ranks are, and in how they run: fzero/ranks, and lockstep in fzero/axes."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, elsewhere, never, skipped, swapped
from tests.mutants.mutant import HALF, STEP, Fault, File

MEET = ("tests/ranks/test_handshake.py",)
LAUNCH = ("tests/ranks/test_launch.py",)
SWITCHED = ("tests/axes/test_lockstep_state.py",)
TORCH = ("tests/_torch/test_torch.py",)
MESH = ("tests/ranks/test_mesh.py",)

MUTANTS = [
    *File("ranks/_launch.py", MEET).faults(
        Fault("only the first hello is answered", "_answer", becomes("A.get(B) != C", "B not in A")),
        Fault(
            "who arrived in another world has arrived",
            "_as_rank_0",
            (
                becomes("f'{A}/arrived/{B}'", "f'fzero/arrived/{B}'"),
                elsewhere("_as_other_rank", becomes("f'{A}/arrived/{B}'", "f'fzero/arrived/{B}'")),
            ),
        ),
        Fault("each rank has its own clock", "_as_other_rank", becomes("2 * A", "A / 2")),
        Fault(
            "worlds share what is in the store",
            "_open_store",
            becomes("PrefixStore(A, store)", "(A, store)[1]"),
            ("tests/ranks/test_restart.py",),
        ),
        Fault(
            "a fork is a rank",
            "join",
            (swapped("!=", "==", at="2 of 2"), becomes("A == os.getpid()", "A == 0")),
            LAUNCH,
        ),
        Fault("ranks beyond the world", "find_world", never("A >= B"), LAUNCH),
        Fault("nan seconds", "check_timeout", becomes("not 0 < A < 1000000000.0", "A <= 0 or A >= 1000000000.0"), MESH),
    ),
    *File("ranks/_mesh.py", MESH).faults(
        Fault("alone is not heard", "fill_shape", bare("B or A")),
        Fault("simulated ranks need not divide", "fill_shape", never("A != simulated_ranks")),
        Fault("a mistyped argument is an axis", "check_axes", constant(0.85, 1.0)),
        Fault("an axis may be two", "check_axes", bare("A.isidentifier()")),
    ),
    *File("data/_batch_plan.py", HALF).faults(
        Fault("the world for the data-parallel ranks", "_data_axes", becomes("A.B(axis)", "A.axis_names")),
        Fault("stages have batches", "_data_axes", dropped("A not in B")),
        Fault("tp never counts", "_data_axes", becomes("['pp', *A]", "['pp', 'tp']")),
        Fault("model axes have one name", "_data_axes", becomes("list(A.B(C))", "shared")),
    ),
    *File("ranks/_spmd.py", STEP).faults(
        Fault("results are not compared", "_combined", becomes("not A.B(C, D[1][E])", "False and not A.B(C, D[1][E])")),
    ),
    *File("axes/lockstep.py", STEP).faults(
        Fault("diverging calls meet", "_compute_for_all", never("len(A) > 1")),
    ),
    *File("_torch/state.py", SWITCHED).faults(
        Fault("what a rank sets stays on", "RankSettings.undo", skipped("A({B: self.C[B] for B in self.D})")),
        Fault("a rank loses what it has set", "RankSettings.apply", skipped("A(self.B)")),
        Fault(
            "hooks are the caller's only",
            "_with_saved_tensor_hooks",
            becomes("A._push_saved_tensors_default_hooks(*B)", "A._saved_tensors_hooks_enable()"),
        ),
        Fault("modes outlive their rank", "_with_operation_modes", skipped("_python_dispatch._pop_mode()")),
        Fault("a thread counts as it did", "thread_state.inherit", never("torch.get_num_threads() != A")),
    ),
    *File("axes/_run.py", SWITCHED).faults(
        Fault("no level is kept", "_hold_forward_level.wait", skipped("A.wait()")),
        Fault("a fork has its parent's threads", "process_threads", becomes("os.getpid()", "0")),
    ),
    *File("_torch/levels.py", TORCH).faults(
        Fault("the first who ends ends the silence", "quiet_vmap_fallback", always("not A")),
    ),
]
