"""Faults in the sharded step, in what makes its trees, and in how ranks compare them."""

from tests.mutants.changes import (
    always,
    bare,
    becomes,
    before,
    constant,
    dropped,
    in_symbol,
    never,
    skipped,
    swapped,
)
from tests.mutants.mutant import Fault, File

SOURCE = ("tests/zero/test_source.py",)
AGREEMENT = ("tests/ranks/test_agreement.py",)
PARTITION = ("tests/zero/test_partition.py",)
UNIT_BUFFERS = ("tests/zero/test_unit_buffers.py",)
SHARDED_STEP = ("tests/zero/test_sharded_step.py",)

SETUP, STAGE_ROWS = ("tests/errors/test_setup.py",), ("tests/zero/test_stages.py",)
CHANGED_TREES = ("tests/errors/test_changed_trees.py",)

MUTANTS = [
    *File("zero/_rerun.py", ("tests/zero/test_rerun.py",)).faults(
        Fault("a flipped bit in memory is not noticed", "_check_unwritten", never("is_other")),
        Fault("what the user writes is corruption", "_check_unwritten", dropped("record.version == x._version")),
        Fault("two runs are not compared", "run_and_compare", skipped("_check_same(A, B, C, D, E)")),
        Fault(
            "only the first call runs twice", "run_and_compare", becomes("history.calls % A == 0", "history.calls == 0")
        ),
        Fault("the second run overwrites the arguments", "run_and_compare", becomes("x.clone() if A else x", "x")),
        Fault("ranks swap no batches", "_swap_batches", always("axis is None")),
        Fault(
            "results that differ by rank stay swapped",
            "run_and_compare",
            becomes("_swap_batches(run(*A, **B), C, D)", "run(*A, **B)"),
        ),
        Fault("ranks swap along an axis of any size", "check_rerun", never("sizes.get(check.swap) != 2")),
        Fault("ranks swap whose gradients are summed at once", "check_rerun", never("A and ranks > 2 and B")),
        Fault("losses of more than two ranks are compared", "_stable_results", always("A or mesh.size == 2")),
        Fault(
            "the error comes on the rank alone whose bits differ",
            "_check_same",
            becomes("all_gather_numbers(A, mesh) if B else C", "C"),
        ),
    ),
    *File("zero/_setup_checks.py", ("tests/errors/test_first_hour.py",)).faults(
        Fault("a misspelt name of a split leaf trains on wrong sums", "check_splits", never("(unused := A)")),
        Fault("an axis over which nothing is split is silent", "check_splits", never("A > 1 and B")),
        Fault("axes that split leaves are reported too", "check_splits", becomes("{*A, *split, *B}", "{*A, *B}")),
    ),
    *File("zero/_setup_checks.py", SETUP).faults(
        Fault("a step with torch.optim is not refused", "check_train_step", never("isinstance(A, torch.optim.B)")),
        Fault("a jitted step is sharded, and runs eagerly", "check_train_step", never("isinstance(A, Jitted)")),
        Fault("a module is taken for a train step", "check_train_step", never("isinstance(A, torch.nn.Module)")),
    ),
    *File("zero/_call_checks.py", CHANGED_TREES).faults(
        Fault(
            "a forgotten state is not noticed",
            "_check_state_is_returned",
            becomes("all(A is B for C, D in E)", "True"),
        ),
        Fault(
            "a step that only reads its state is refused",
            "_check_state_is_returned",
            becomes("all(A is B for C, D in E)", "False"),
        ),
        Fault("a loss in the place of the parameters is not named", "_check_is_params", never("is_opt_state(A) or B")),
        Fault("a step without results is not named", "check_results", never("A is None")),
        Fault(
            "a module passed as parameters is not refused",
            "_check_one_params",
            never("isinstance(A, torch.nn.Module)"),
            SETUP,
        ),
    ),
    *File("zero/_call_checks.py", ("tests/errors/test_first_hour.py",)).faults(
        Fault("a batch of another dtype gets no note", "dtype_notes", never("A in B and C")),
    ),
    *File("parallel/pipeline/_model.py", ("tests/errors/test_first_hour.py",)).faults(
        Fault("a part of a pipeline that fails shows no arguments", "_call_part", never("not is_message(A, B)")),
    ),
    *File("parallel/pipeline/_model_checks.py", ("tests/errors/test_first_hour.py",)).faults(
        Fault("a block of other arguments is accepted", "_check_takes", skipped("A.bind(*B, **C)")),
    ),
    *File("optim/checks/_roles.py", ("tests/errors/test_layouts.py", "-k", "swapped")).faults(
        Fault(
            "a chain's state is taken for parameters",
            "is_opt_state",
            becomes("any(is_opt_state(A) for A in B)", "False"),
        ),
        Fault(
            "a state of an optimizer is taken for parameters", "is_opt_state", becomes("_is_optim_class(A)", "False")
        ),
    ),
    *File("zero/_sharded_step.py", ("tests/optim/test_optim.py", "-k", "advises_leafwise")).faults(
        Fault(
            "a state that differs by rank is not told from other errors",
            "ShardedStep._make_state",
            becomes("DiffersByRankError", "KeyError"),
        ),
    ),
    *File("ranks/_spmd.py", ("tests/errors/test_setup.py", "-k", "shape_error")).faults(
        Fault("a shape error does not say that it counts ranks", "Spmd.__call__", swapped(">", "<")),
    ),
    *File("ranks/_spmd.py", ("tests/axes/test_vmap_limits.py",)).faults(
        Fault(
            "an operation without a batching rule names no way to run it",
            "_is_vmap_error",
            dropped("'Batching rule not implemented' in A"),
        ),
    ),
    *File("zero/_unit_buffers.py", UNIT_BUFFERS).faults(
        Fault(
            "every leaf of a unit is copied to the buffer's start",
            "copy_to_unit_buffers",
            becomes("A(B, C.D[E], C.F[E])", "A(B, 0, C.F[E])"),
        ),
        Fault("tied leaves become two views of the buffer", "copy_to_unit_buffers", always("A not in B")),
        Fault("the old leaves of a unit are not freed one by one", "copy_to_unit_buffers", skipped("A.clear()")),
    ),
    *File("zero/_fill.py", SOURCE).faults(
        Fault("replicated leaves share the caller's memory", "fill_template", always("A and B == C[0]")),
        Fault("donated leaves are copied", "fill_template", never("owns_memory")),
        Fault("a unit with leaves on two devices is not refused", "_check_one_device", never("A != B[0]")),
        Fault("init unties tied replicated leaves", "_PlainCopies.put", always("A not in self.B"), PARTITION),
    ),
    *File("zero/_leaf_supply.py", PARTITION).faults(
        Fault("like= is not compared", "_check_like", never("(tuple(A.shape), A.dtype) != B")),
        Fault("leaves that are tied in like= may have different values", "_check_tied", never("A is not B")),
    ),
    *File("zero/_sharded_step.py", SOURCE).faults(
        Fault(
            "a state on the meta device is accepted",
            "ShardedStep._make_state",
            never("not any(A.is_meta for A in B.C(D))"),
        ),
        Fault(
            "stage 0 copies leaves into unit buffers",
            "ShardedStep._partition_within",
            always("self.layout.A"),
            UNIT_BUFFERS,
        ),
        Fault(
            "init returns tensors with an autograd graph",
            "ShardedStep.init",
            (
                becomes("with A, torch.no_grad(): ...", "with A: ..."),
                in_symbol("ShardedStep.partition", becomes("with A, torch.no_grad(): ...", "with A: ...")),
            ),
        ),
        Fault(
            "init returns inference tensors",
            "ShardedStep.init",
            (
                becomes("with A, torch.no_grad(): ...", "with torch.no_grad(): ..."),
                in_symbol(
                    "ShardedStep.partition", becomes("with A, torch.no_grad(): ...", "with torch.no_grad(): ...")
                ),
            ),
        ),
        Fault("like= of another mesh is accepted", "ShardedStep.partition", skipped("A(B, self.C)"), PARTITION),
        Fault(
            "the new state shares memory with the parameters",
            "ShardedStep.init",
            bare("tree.copy_shared(A, B)"),
            SHARDED_STEP,
        ),
    ),
    *File("ranks/_agreement.py", AGREEMENT).faults(
        Fault("the order of elements does not change the checksum", "checksum", constant(2, 0)),
        Fault("the order of blocks does not change the checksum", "_CHECKSUM_FACTOR", constant(747796405, 1)),
        Fault(
            "the checksum covers one block only",
            "_checksum_rows",
            becomes("torch.add(A, B, alpha=C, out=B)", "torch.add(A, B, alpha=0, out=B)"),
        ),
        Fault(
            "the checksum reads a lazy conjugate as it is stored",
            "_word_rows",
            dropped("not (A.is_conj() or A.is_neg())"),
        ),
    ),
    *File("sharding/elements/_element_ranges.py", AGREEMENT).faults(
        Fault(
            "a strided tensor is copied whole",
            "slice_elements",
            before("if A.is_contiguous(): ...", "A = A.contiguous()"),
        ),
        Fault("the last row of a strided tensor is left out", "_slices", never("A * B < C")),
    ),
    *File("zero/_source.py", SOURCE).faults(
        Fault("a module's weights are drawn anew", "make_source", always("A(B)", at="1 of 2")),
    ),
    *File("zero/_leaf_supply.py", SOURCE).faults(
        Fault("a donated view is kept, not copied", "_LeafSupply.iter_leaves", dropped("owns_storage")),
        Fault(
            "a donated inference tensor is kept, not copied", "_LeafSupply.iter_leaves", dropped("not A.is_inference()")
        ),
        Fault("init holds all leaves until its end", "_LeafSupply.iter_leaves", skipped("self.A[B] = None")),
        Fault(
            "PerRank values share the caller's memory", "make_supply", becomes("torch.clone", "lambda v: v"), PARTITION
        ),
    ),
    *File("zero/_traced_init.py", ("tests/zero/test_init.py",)).faults(
        Fault("a profiler is not started again after a trace", "_watch_seeds", skipped("restart()")),
    ),
    *File("zero/_module_params.py", SOURCE).faults(
        Fault("a module that is partly on the meta device is not refused", "is_on_meta", never("A and B")),
    ),
    *File("zero/_bytes.py", PARTITION).faults(
        Fault("state_bytes counts all ranks' bytes in a simulation", "state_bytes", bare("A // B")),
    ),
    *File("zero/_stages.py", SETUP).faults(
        Fault("stage=True is accepted", "check_stage", never("isinstance(A, bool)")),
    ),
    *File("zero/_stages.py", STAGE_ROWS).faults(
        Fault("two stages are one row", "_stage_table", never("A < stage")),
        Fault("a state that the stage never holds is accepted", "_stage_table", skipped("check_choice(A, B, choices)")),
    ),
    *File("zero/_sharded_step.py", STAGE_ROWS).faults(
        Fault(
            "gradients of sharded parameters are reduced for each micro-batch at any stage",
            "ShardedStep._abstract_boxes",
            becomes("self.layout.grads if sharded else 'each'", "'each'"),
        ),
    ),
    *File("optim/_base.py", SETUP).faults(
        Fault("init accepts an optimizer of torch.optim", "as_optimizer", skipped("A(B, C, D)")),
    ),
    *File("sharding/units/_units.py", SHARDED_STEP).faults(
        Fault("units are sharded over no axis", "shard_axes", never("axes")),
    ),
]
