"""Faults in fzero/graph/passes."""

from tests.mutants.changes import always, bare, becomes, before, constant, dropped, never, skipped, swapped
from tests.mutants.mutant import (
    GRAPH,
    LIVE_RANGES,
    LOOP_PLANS,
    PASS_MANAGER,
    SLICE_OF_GATHER,
    SLOW_JIT_ON_GLOO,
    Fault,
    File,
)

LONE_COLLECTIVES = ("tests/graph/passes/test_lone_collectives.py",)
FUSED = ("tests/graph/passes/test_fused.py",)
RECAST = ("tests/graph/passes/test_recast.py",)
CARRY = ("tests/graph/passes/test_carry.py",)

BUCKETS = ("tests/graph/passes/test_collectives.py",)
OVERWRITE = ("tests/graph/passes/test_overwrite.py",)
RECOMPUTE = ("tests/graph/passes/test_recompute.py",)
REGATHER = ("tests/graph/passes/test_regather.py",)
ORDER = ("tests/graph/passes/test_schedule.py",)


AXIS_ORDER = ("tests/zero/test_axis_order.py",)

MUTANTS = [
    *File("graph/passes/_lone_collectives.py", LONE_COLLECTIVES).faults(
        Fault(
            "a result shares the argument's memory when its collective has one rank",
            "drop_lone_collectives",
            dropped("not is_handed_out"),
        ),
        Fault(
            "views of a dropped gather keep old stand-ins",
            "drop_lone_collectives",
            skipped("A(sorted(B, key=C.__getitem__))"),
        ),
        Fault("every collective is dropped as if its group had one rank", "_runs_over", dropped("A in B")),
    ),
    *File("graph/passes/scheduling/_listing.py", RECAST).faults(
        Fault(
            "an update is not listed depth first",
            "list_nodes",
            bare("[*A[-1].all_input_nodes, *A]"),
            FUSED,
        ),
        Fault(
            "nodes that become ready are not listed at once", "_append_node", skipped("ready += _ready_after(A, B, C)")
        ),
        Fault("updates run at the end of the step", "list_nodes", skipped("A(B, C)", at="1 of 4"), ORDER),
        Fault(
            "an argument is overwritten while a gather reads it",
            "readers_of_overwritten",
            never("A(B)", at="3 of 4"),
            GRAPH,
        ),
        Fault("more reductions are in flight than in_flight= allows", "_due_waits", never("len(A) > B.C"), ORDER),
        Fault(
            "a gather writes into leaves that are still read",
            "readers_of_overwritten",
            becomes("A(n)", "n.target is COPY", at="1 of 7"),
            OVERWRITE,
        ),
        Fault(
            "only the last write waits for readers",
            "readers_of_overwritten",
            becomes("A.get(B, ())", "A.get(B, ())[-1:]"),
            SLICE_OF_GATHER,
        ),
        Fault(
            "a write stays before the readers of the overwritten value",
            "order_rules",
            becomes("A(B, readers)", "B[:]"),
            SLICE_OF_GATHER,
        ),
    ),
    *File("graph/passes/scheduling/_node_roles.py", RECAST).faults(
        Fault(
            "values that wait for the last gradient are not scheduled late", "node_roles", skipped("A |= B(C, D, A)")
        ),
        Fault("every value that waits is scheduled late", "_waiting_nodes", dropped("A(B, C)")),
        Fault("late operands count as memory that a value frees", "_grows_memory", dropped("A not in late")),
        Fault("0-d values join independent updates", "_connected_parts", dropped("any(A.dim() for A in B(C))")),
        Fault("a cast that was made again is scheduled early", "node_roles", never("A in B.meta")),
    ),
    *File("graph/passes/_recast.py", RECAST).faults(
        Fault("recast does not repeat the scaling of a gradient", "_operations_from_narrow", never("A.target in B")),
        Fault(
            "recast repeats a product of two gradients",
            "_operations_from_narrow",
            (becomes("len(A) != 1", "not A"), bare("(A,)"), becomes("node = A", "node = A[0]")),
        ),
        Fault("recast repeats the cast before its first use", "recast", always("A[B] > A[C]")),
        Fault("recast repeats a cast to a narrower dtype", "_only_widens", swapped("<", "!=")),
        Fault("small values are cast again", "recast", dropped("A(*B(C)) < D")),
        Fault("recast repeats the cast of a result", "recast", dropped("any(A.op == 'output' for A in B)")),
        Fault(
            "recast takes an operation without operands for a cast", "_only_widens", dropped("not A.all_input_nodes")
        ),
        Fault("a repeated cast is not marked to be made late", "recast", becomes("A.meta[B]", "A.meta[B + B]")),
    ),
    *File("graph/passes/scheduling/_schedule.py", ORDER).faults(
        Fault("the graph's own order is never kept, even if it holds less", "Orders.leanest", never("max(A) < max(B)")),
        Fault(
            "the order of in_flight=0 is used for in_flight=1",
            "Orders.lean",
            becomes("self._lean[in_flight] = A", "self._lean[0] = self._lean[1] = A"),
            PASS_MANAGER,
        ),
    ),
    *File("graph/passes/scheduling/_prefetches.py", ORDER).faults(
        Fault("one gather more than prefetch= starts ahead", "next_gathers", constant(1, 2, at="3 of 3")),
        Fault(
            "a gather starts ahead although the budget does not allow it",
            "fit_prefetches",
            becomes("A[B - 1] + C", "A[B - 1]"),
        ),
        Fault(
            "the memory of a gather that starts ahead is not counted",
            "fit_prefetches",
            skipped("A[B:C] = [D + E for D in A[B:C]]"),
        ),
        Fault("nothing starts ahead", "fit_prefetches", skipped("A.setdefault(B[C], []).append(D)")),
    ),
    *File("graph/passes/_carry.py", CARRY).faults(
        Fault(
            "a carried reduction is read before its wait",
            "_wait_before",
            before("A.wait.replace_input_with(A.source, B)", "A.wait.replace_all_uses_with(B)"),
        ),
        Fault(
            "the wrong reductions are carried across iterations",
            "_carry_reductions",
            becomes("zip(A, B, strict=False)", "zip(A[-len(B):], B, strict=False)"),
        ),
        Fault(
            "a reduction whose result others read is carried across iterations", "_follow_chain", bare("len(A) == 1")
        ),
        Fault(
            "the reductions of the last iteration are not added",
            "_wait_after",
            skipped("A.replace_all_uses_with(B, delete_user_cb=C)"),
            SLOW_JIT_ON_GLOO,
        ),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault(
            "a donated argument that is returned is not copied before it is overwritten",
            "donate.copy_if_donated",
            always("not A & set(B.C[D])"),
        ),
        Fault("a result may lie in an argument that is already reused", "donate", bare("{*B, *A}")),
    ),
    *File("graph/passes/_regather.py", REGATHER).faults(
        Fault("re-gathering counts a unit's bytes at each use", "_exceeds_reuse", always("A not in B")),
    ),
    *File("graph/passes/_bucket.py", BUCKETS).faults(
        Fault(
            "a bucket joins collectives of different process groups", "_can_join", dropped("A.args[1:] == B.args[1:]")
        ),
        Fault("a bucket grows beyond bucket_bytes", "_consecutive_groups", becomes("sum(map(A, [*B[-1], C]))", "A(C)")),
        Fault(
            "a bucket joins a collective with one that depends on it",
            "bucket.may_join",
            dropped("not A(B, C, D)"),
        ),
        Fault(
            "every member of a bucket gets the first member's result",
            "_coalesce_group",
            becomes("i", "0", at="6 of 6"),
            LIVE_RANGES,
        ),
    ),
    *File("graph/passes/_recompute.py", RECOMPUTE).faults(
        Fault(
            "recompute repeats matrix products", "_is_repeatable", becomes("A and B(C) and not D(C)", "A and not D(C)")
        ),
        Fault(
            "an item of a tuple counts as live while another item is",
            "_viewed_value",
            becomes("A(B) and not C", "A(B)"),
        ),
    ),
    *File("graph/passes/_cat_into.py", ("tests/graph/passes/test_cat_into.py",)).faults(
        Fault("a part that is read elsewhere is written too", "_are_exclusive", never("len(producer.users) > 1 or A")),
        Fault("all parts are written at the start", "_write_parts", becomes("A[x]", "0", at="2 of 2")),
        Fault("parts are written where memory is fuller before", "cat_into", dropped("_lowers_peak(A, B, C)")),
        Fault("cheap parts are written between a compiler's kernels", "_are_exclusive", dropped("fuses and A")),
    ),
    *File("graph/passes/_gather_into.py", SLICE_OF_GATHER).faults(
        Fault(
            "every rank takes the first part of a gathered buffer", "slice_of_gather", becomes("A[str(B.args[2])]", "0")
        ),
        Fault(
            "leaves in another order count as a buffer",
            "_first_buffer_leaf",
            (swapped("!=", "=="), becomes("list(A)", "[]")),
        ),
        Fault("any padding counts as the unit's padding", "_first_buffer_leaf", dropped("fills")),
        Fault(
            "leaves of several buffers count as one buffer",
            "_first_buffer_leaf",
            dropped("len({A(B) for B in C}) == 1"),
        ),
        Fault("a concatenation that ends elsewhere counts as the old part", "_lies_in", bare("B == C and A")),
    ),
    *File("graph/passes/_gather_into.py", OVERWRITE).faults(
        Fault("a gather writes into a leaf that is not contiguous", "_have_same_bytes", dropped("dense")),
        Fault("a gather whose buffer others read writes into leaves", "_list_writes", bare("B and A")),
        Fault(
            "every leaf is written at the unit's first element",
            "_write_offset",
            becomes("A(B).C.storage_offset()", "0"),
        ),
    ),
    *File("graph/passes/_overwrite.py", OVERWRITE).faults(
        Fault("a sum overwrites a buffer that others read", "in_place", dropped("A[B] == [C]")),
        Fault("a sum overwrites an argument", "in_place", dropped("A.producers[B].op == 'call_function'")),
        Fault("a loop's sum is copied before it is read", "in_place", never("s in A"), LOOP_PLANS),
    ),
    *File("graph/ir/_nodes.py", AXIS_ORDER).faults(
        Fault("units pass between hosts in each iteration", "only_feeds", becomes("all(A)", "False")),
    ),
    *File("graph/ir/_node_work.py", AXIS_ORDER).faults(
        Fault(
            "a unit that was gathered over the hosts stays gathered within the host",
            "parameter_gathers",
            skipped("from_inputs.add(node)", at="2 of 2"),
        ),
    ),
    *File("graph/passes/_hoist.py", LOOP_PLANS).faults(
        Fault("every unit stays gathered between iterations", "hoist", always("total - A[B] <= C")),
        Fault(
            "no unit stays gathered between iterations", "hoist", (swapped("<=", "<"), becomes("max_reuse_bytes", "0"))
        ),
        Fault(
            "the bytes of a unit that stays gathered count twice", "_map_constants", bare("B.setdefault(C(A, D), A)")
        ),
        Fault(
            "the gather of a value that changes by iteration is moved out of the loop",
            "hoist",
            becomes("A[:B.C.D]", "A[:1]"),
        ),
        Fault(
            "the scales of codes pass between hosts in each iteration",
            "_repeated_scales",
            becomes("not only_feeds(A, is_maximum)", "False"),
            ("tests/sharding/maps/test_coded.py",),
        ),
        Fault("a part passes between hosts in each micro-batch", "hoist", skipped("_merge_parts(graph)"), AXIS_ORDER),
    ),
]
