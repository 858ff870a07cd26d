"""Faults in fzero/sharding."""

from tests.mutants.changes import bare, becomes, before, constant, dropped, in_symbol, never, returns
from tests.mutants.mutant import AXES, HALF, LAWS, LIVE_RANGES, WRITES, Fault, File

FLAT = ("tests/sharding/maps/test_flat.py",)
RECORDER = ("tests/_torch/test_recorder.py",)


MUTANTS = [
    *File("sharding/_boxes.py", ("tests/sharding/test_boxes.py",)).faults(
        Fault("a slot has the shape of its unit's first leaf", "_ShardedLeaf.shape", becomes("self.index", "0")),
        Fault(
            "a shard's dtype is its parameter's, not its data's", "Shard.dtype", becomes("self.pieces[0]", "self.spec")
        ),
        Fault(
            "full_numel counts the rank's parts of split leaves",
            "Shard.full_numel",
            becomes("self.A.B", "self.A.shapes"),
        ),
        Fault(
            "a shard keeps its origin after its data changes",
            "Shard",
            (
                before("class A(...): ...", "_LAST: dict = {}"),
                in_symbol("Shard.__init__", becomes("A is None", "_LAST.setdefault(spec_id, A) is None")),
                in_symbol("Shard.__init__", becomes("A(B, C(D))", "A(_LAST[spec_id], C(D))")),
                in_symbol("make_box", becomes("A(B, spec_id)", "A(B, spec_id, _LAST.get(spec_id))")),
            ),
            LAWS,
        ),
        Fault(
            "a shard keeps its origin after an in-place write",
            "Shard.origin",
            never("self._origin.A != B(self.data)"),
            WRITES,
        ),
    ),
    *File("sharding/maps/_flat.py", FLAT).faults(
        Fault("a flat unit has no padding", "flatten_leaves", never("A")),
        Fault(
            "padding of a flat unit is not zero",
            "flatten_by_copies",
            becomes("A.narrow(B, C, D).zero_()", "A.narrow(B, C, D).fill_(7)"),
        ),
        Fault("views of a stand-in ignore its offset", "_view_by_strides", becomes("A.storage_offset()", "0")),
    ),
    *File("sharding/maps/_unit_dtypes.py", HALF).faults(
        Fault("gradients are summed in their own dtype", "wire_dtype", becomes("spec.A.B", "x.dtype")),
    ),
    *File("graph/run/_executable.py", FLAT).faults(
        Fault("the executor flattens a unit as the trace recorded it", "_REPLACEMENTS", dropped("A: B")),
    ),
    *File("graph/ir/_storages.py", LIVE_RANGES).faults(
        Fault(
            "every item of a tuple has the first item's storage",
            "_item_storages",
            becomes("(A.B[C][D],)", "(A.B[C][0],)"),
        ),
    ),
    *File("_torch/recorder.py", RECORDER).faults(
        Fault("constants are recorded as data", "_as_nodes", dropped("A.B is not None")),
        Fault(
            "a constant keeps its value when data is written into it",
            "_forget_constants",
            never("A.B is not None and C(A.B) in D"),
        ),
        Fault(
            "the items of a result are numbered without None",
            "_record_node",
            becomes("enumerate(A)", "enumerate([y for y in A if y is not None])"),
        ),
        Fault("other traces record one node, too", "OneNode.__call__", bare("A and B is not None")),
    ),
    *File("sharding/_spec.py").faults(
        Fault("the length of a shard leaves out the padding", "Spec.shard_numel", returns("self.numel // self.ranks")),
    ),
    *File("_torch/levels.py", ("tests/_torch/test_torch.py",)).faults(
        Fault(
            "a storage is identified by an address that may be reused",
            "version_key",
            becomes("A(B, StorageWeakRef(C))", "A(B, C._cdata)"),
        ),
    ),
    *File("_torch/running_transforms.py", ("tests/_torch/test_torch.py",)).faults(
        Fault("ranks exchange messages while AOTAutograd traces them", "is_tracing", dropped("_in_aot()")),
    ),
    *File("sharding/elements/_leaf_ids.py").faults(
        Fault("the global norm is not summed over the ranks", "global_norm", bare("B(A, axes)")),
        Fault(
            "an optimizer's sums of masters have the dtype of the parameters",
            "abstract.full_leaves",
            becomes("unit.shard.dtype", "spec.dtype"),
            tests=("tests/test_precision.py",),
        ),
        Fault("padding counts in the global norm", "zero_padding", becomes("A < B", "A < B + 9")),
        Fault("a tied leaf counts twice in the global norm", "global_norm", becomes("A[id(B)]", "A[len(A)]")),
    ),
    *File("sharding/units/_units.py").faults(
        Fault("tied leaves are stored twice", "assign_units", never("A.B(C) in D")),
        Fault(
            "every leaf is split along dimension 0",
            "_make_unit",
            becomes("A(B, C, dim=D[E][C])", "A(B, C, dim=0)"),
            AXES,
        ),
    ),
    *File("sharding/maps/_unit_maps.py").faults(
        Fault("a unit is reduced over its axes in the wrong order", "_apply_rows", bare("A[::-1]"), AXES),
    ),
    *File("sharding/maps/_flat_rows.py").faults(
        Fault(
            "a simulated rank gets the next rank's shard",
            "_uniform_partition",
            becomes("rearrange(A(B(C), D), E, n=F)", "rearrange(A(B(C), D), E, n=F).roll(1, 0)"),
        ),
        Fault(
            "a process gets the next rank's shard",
            "",
            becomes("A(B(C), D, E.F, E.size)", "A(B(C), D, (E.F + 1) % E.size, E.size)"),
            ("tests/distributed",),
        ),
        Fault(
            "a simulated gather reverses the ranks", "_all_ranks_gather", becomes("A(B, C[0])", "A(B, C[0]).flip(0)")
        ),
        Fault(
            "the transpose of gather is partition, without a sum",
            "",
            constant("reduce_scatter", "partition", at="1 of 4"),
        ),
        Fault("gradients of stage 0 are not summed", "_all_ranks_sum", becomes("A.sum(0, dtype=B(C, A))", "A[0]")),
        Fault(
            "parameters are gathered in the dtype of sums",
            "_cast_to_gather",
            becomes("A.to(B(C, A))", "A.to(wire_dtype(C, A))"),
            HALF,
        ),
    ),
]
