"""Faults in where ranks are, and in how they run: fzero/ranks, and lockstep in fzero/axes."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, in_symbol, never, skipped, swapped
from tests.mutants.mutant import STEP, Fault, File

MEET = ("tests/ranks/test_handshake.py",)
LAUNCH = ("tests/ranks/test_launch.py",)
SWITCHED = ("tests/axes/test_lockstep_state.py",)
TORCH = ("tests/_torch/test_torch.py",)
MESH = ("tests/ranks/test_mesh.py",)

BATCH_PLAN = ("tests/data/test_batch_plan.py",)

MUTANTS = [
    *File("ranks/_launch.py", MEET).faults(
        Fault(
            "two worlds share keys of the store",
            "_open_store",
            becomes("PrefixStore(A, store)", "(A, store)[1]"),
            ("tests/ranks/test_restart.py",),
        ),
        Fault(
            "a forked process counts as the rank",
            "join",
            (swapped("!=", "==", at="2 of 2"), becomes("A == os.getpid()", "A == 0")),
            LAUNCH,
        ),
        Fault("a rank at or above the world's size is accepted", "find_world", never("A >= B"), LAUNCH),
        Fault(
            "a timeout of nan is accepted",
            "check_timeout",
            becomes("not 0 < A < 1000000000.0", "A <= 0 or A >= 1000000000.0"),
            MESH,
        ),
    ),
    *File("ranks/_rendezvous.py", MEET).faults(
        Fault("only the first hello is answered", "_answer_hello", becomes("A.get(B) != C", "B not in A")),
        Fault(
            "the arrivals of an earlier world count",
            "_await_ranks",
            (
                becomes("f'{A}/arrived/{B}'", "f'fzero/arrived/{B}'"),
                in_symbol("_as_other_rank", becomes("f'{A}/arrived/{B}'", "f'fzero/arrived/{B}'")),
            ),
        ),
        Fault("the log does not say who has not come", "_await_ranks", never("absent and not has_warned and A")),
        Fault("another rank gives up before rank 0 does", "_await_outcome", always("newest == sign and A")),
        Fault("a late rank is not waited for", "_await_ranks", becomes("last_arrival if A else now", "last_arrival")),
        Fault(
            "a rank that never comes is waited for",
            "store_patience",
            becomes("max(A, _MIN_PATIENCE_SECONDS)", "timeout"),
        ),
        Fault("a wait in a dark store has no bound", "_wait_for", becomes("value.result(patience)", "value.result()")),
    ),
    *File("ranks/_mesh_shape.py", MESH).faults(
        Fault("simulated_ranks= is ignored", "fill_shape", bare("B or A")),
        Fault("simulated ranks need not divide", "fill_shape", never("A != simulated_ranks")),
        Fault("a misspelled argument of mesh becomes an axis", "check_axes", constant(0.85, 1.0)),
        Fault("an axis name may have a comma", "check_axes", bare("A.isidentifier()")),
    ),
    *File("data/_batch_plan.py", BATCH_PLAN).faults(
        Fault("a batch plan counts all ranks as data-parallel", "_data_axes", becomes("A.B(axis)", "A.axis_names")),
        Fault("a batch plan counts model axes as data-parallel", "_data_axes", dropped("A not in B")),
        Fault("a batch plan never counts an axis named tp", "_data_axes", becomes("('pp',)", "('pp', 'tp')")),
        Fault("model_axes= is ignored", "_data_axes", becomes("A.B(model_axes)", "('pp', 'tp')[: 1 + (axis is None)]")),
    ),
    *File("ranks/_spmd.py", STEP).faults(
        Fault(
            "ranks in lockstep do not compare their plain results",
            "_combine_ranks",
            becomes("not A.B(C, D[1][E])", "False and not A.B(C, D[1][E])"),
        ),
    ),
    *File("axes/lockstep.py", STEP).faults(
        Fault(
            "ranks in lockstep that call different collectives are not stopped", "_compute_for_all", never("len(A) > 1")
        ),
    ),
    *File("_torch/state.py", SWITCHED).faults(
        Fault(
            "a rank's saved-tensor hooks are not kept",
            "_with_saved_tensor_hooks",
            becomes("A._push_saved_tensors_default_hooks(*B)", "A._saved_tensors_hooks_enable()"),
        ),
        Fault(
            "a rank's modes stay on after the rank ends",
            "_with_operation_modes",
            skipped("_python_dispatch._pop_mode()"),
        ),
        Fault(
            "a rank's thread does not take over the number of threads",
            "thread_state.inherit",
            never("torch.get_num_threads() != A"),
        ),
    ),
    *File("_torch/process_state.py", SWITCHED).faults(
        Fault(
            "a setting of torch that a rank changes stays changed",
            "RankSettings.undo",
            skipped("A({B: self.C[B] for B in self.D})"),
        ),
        Fault(
            "a rank's settings of torch are not restored when it goes on", "RankSettings.apply", skipped("A(self.B)")
        ),
    ),
    *File("axes/_rank_threads.py", SWITCHED).faults(
        Fault(
            "a rank ends while others still use its forward-mode level", "_hold_forward_level.wait", skipped("A.wait()")
        ),
        Fault("a forked process uses its parent's threads", "process_threads", becomes("os.getpid()", "0")),
    ),
    *File("_torch/running_transforms.py", TORCH).faults(
        Fault("vmap's warnings return when the first thread ends", "quiet_vmap_fallback", always("not A")),
    ),
]
