"""Faults in the sharded step, in what makes its trees, and in how ranks compare them."""

from tests.mutants.changes import (
    always,
    bare,
    becomes,
    before,
    constant,
    dropped,
    elsewhere,
    never,
    returns,
    skipped,
    swapped,
)
from tests.mutants.mutant import Fault, File

BUILD = ("tests/zero/test_build.py",)
AGREEMENT = ("tests/ranks/test_agreement.py",)
PARTITION = ("tests/zero/test_partition.py",)
ERRORS = ("tests/test_errors.py",)
SIDE_BY_SIDE = ("tests/zero/test_side_by_side.py",)
SHARDED_STEP = ("tests/zero/test_sharded_step.py",)

MUTANTS = [
    *File("zero/_checks.py", ERRORS).faults(
        Fault(
            "a chain's state is taken for parameters",
            "_is_state",
            returns("False", at="1 of 2"),
            ("tests/test_errors.py", "-k", "swapped"),
        ),
        Fault("torch.optim runs", "check_no_torch_optimizer", never("isinstance(A, torch.optim.B)")),
        Fault("a module for parameters", "check_params", never("isinstance(A[B], torch.nn.Module)")),
    ),
    *File("ranks/_spmd.py", ("tests/test_errors.py", "-k", "shape_error")).faults(
        Fault("a shape error does not say that it counts ranks", "Spmd.__call__", swapped(">", "<")),
    ),
    *File("zero/_build.py", SIDE_BY_SIDE).faults(
        Fault(
            "every leaf lies where the unit begins",
            "in_unit_buffers",
            becomes("A(B, C.D[E], C.F[E])", "A(B, 0, C.F[E])"),
        ),
        Fault("tied leaves come apart", "in_unit_buffers", always("A not in B")),
        Fault("all old leaves live on", "in_unit_buffers", skipped("A.clear()")),
        Fault("replicated leaves are the caller's", "build", always("A and B == C[0]"), BUILD),
        Fault("donated leaves are copied", "build", never("may_keep"), BUILD),
        Fault("a unit on two devices", "_check_one_device", never("A != B[0]"), BUILD),
        Fault("like= is not compared", "_check_like", never("(tuple(A.shape), A.dtype) != B"), PARTITION),
        Fault("tied leaves may differ", "_check_tied", never("A is not B"), PARTITION),
        Fault("ties are lost", "build", always("A not in copies"), PARTITION),
    ),
    *File("zero/_sharded_step.py", BUILD).faults(
        Fault("a state without memory", "ShardedStep._make_state", never("not any(A.is_meta for A in B.C(D))")),
        Fault(
            "stage 0 lays leaves side by side",
            "ShardedStep._partition_within",
            always("self.layout.A"),
            SIDE_BY_SIDE,
        ),
        Fault(
            "results have a graph",
            "ShardedStep.init",
            (
                becomes("with A, torch.no_grad(): ...", "with A: ..."),
                elsewhere("ShardedStep.partition", becomes("with A, torch.no_grad(): ...", "with A: ...")),
            ),
        ),
        Fault(
            "results of inference mode",
            "ShardedStep.init",
            (
                becomes("with A, torch.no_grad(): ...", "with torch.no_grad(): ..."),
                elsewhere(
                    "ShardedStep.partition", becomes("with A, torch.no_grad(): ...", "with torch.no_grad(): ...")
                ),
            ),
        ),
        Fault("like= of another mesh", "ShardedStep.partition", skipped("A(B, self.C)"), PARTITION),
        Fault("a state shares the parameters' memory", "ShardedStep.init", bare("copy_aliases(A, B)"), SHARDED_STEP),
    ),
    *File("ranks/_agreement.py", AGREEMENT).faults(
        Fault("order is not in the checksum", "checksum", constant(2, 0)),
        Fault("blocks may change places", "_FACTOR", constant(747796405, 1)),
        Fault(
            "one block counts", "_fold", becomes("torch.add(A, B, alpha=C, out=B)", "torch.add(A, B, alpha=0, out=B)")
        ),
        Fault("a lazy conjugate is read as it lies", "_blocks", dropped("not (A.is_conj() or A.is_neg())")),
    ),
    *File("sharding/_flat.py", AGREEMENT).faults(
        Fault(
            "a strided tensor is copied whole", "elements", before("if A.is_contiguous(): ...", "A = A.contiguous()")
        ),
        Fault("the last row is left out", "_slices", never("A * B < C")),
    ),
    *File("zero/_source.py", BUILD).faults(
        Fault("a module's weights are drawn anew", "source_of", always("A(B)", at="1 of 2")),
        Fault("donated views are kept", "LeafSupply.run", dropped("owns_storage")),
        Fault("donated inference tensors are kept", "LeafSupply.run", dropped("not A.is_inference()")),
        Fault("leaves are held to the end", "LeafSupply.run", skipped("self.A[B] = None")),
        Fault("what differs by rank is shared", "supply_of", becomes("torch.clone", "lambda v: v"), PARTITION),
    ),
    *File("zero/_source.py", BUILD).faults(
        Fault("half a module is drawn", "is_on_meta", never("A and B")),
    ),
    *File("zero/_bytes.py", PARTITION).faults(
        Fault("all ranks' bytes", "state_bytes", bare("A // B")),
    ),
    *File("zero/_stages.py", ERRORS).faults(
        Fault("stage True", "check_stage", never("isinstance(A, bool)")),
    ),
    *File("optim/_base.py", ERRORS).faults(
        Fault("torch.optim in init", "as_optimizer", skipped("A(B, C)")),
    ),
    *File("sharding/_units.py", SHARDED_STEP).faults(
        Fault("units are sharded over no axis", "shard_axes", never("axes")),
    ),
]
