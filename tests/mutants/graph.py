"""Faults in fzero/graph, but for its run."""

from tests.mutants.changes import (
    after,
    always,
    bare,
    becomes,
    before,
    constant,
    dropped,
    elsewhere,
    negated,
    never,
    returns,
    skipped,
    swapped,
)
from tests.mutants.mutant import DONATION, GRAPH, IN_PLACE, JIT, OPS, PASS_MANAGER, Fault, File

RECORDER = ("tests/_torch/test_recorder.py",)
GRAPHS = ("tests/_torch/test_graphs.py",)
LONE_COLLECTIVES = ("tests/graph/test_lone_collectives.py",)
FUSED = ("tests/graph/test_fused.py",)
RECAST = ("tests/graph/test_recast.py",)
COLLECTOR = ("tests/graph/test_collector.py",)
CARRY = ("tests/graph/test_carry.py",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "jit-2")
BUFFERS = ("tests/_torch/test_buffers.py",)
COMPILE = ("tests/graph/test_compile.py",)
PLAN = ("tests/graph/test_plan.py",)
LOOPS = ("tests/graph/test_loops.py",)
SLICE_OF_GATHER = ("tests/graph/test_slice_of_gather.py",)
GROUPS = ("tests/graph/run/test_groups.py",)
ANY_LENGTH = ("tests/graph/test_any_length.py",)
DECISIONS = ("tests/_torch/test_decisions.py",)
LENGTHS = ("tests/graph/run/test_lengths.py",)
BORDERS = ("tests/graph/run/test_borders.py",)
CASTS = ("tests/graph/trace/test_casts.py",)
WRITES = ("tests/graph/trace/test_in_place.py",)
WORKSPACE = ("tests/graph/test_workspace.py",)

MUTANTS = [
    *File("graph/passes/_collectives.py", LONE_COLLECTIVES).faults(
        Fault("a result of one rank lies in an argument", "drop_lone_collectives", dropped("not A & {*B[C]}")),
        Fault("views lie where the gather was", "drop_lone_collectives", skipped("A(sorted(B, key=C.__getitem__))")),
        Fault("all collectives are over one rank", "_runs_over", dropped("A in B")),
    ),
    *File("graph/_entry.py", DONATION).faults(
        Fault("no group has one rank", "_groups_of_one", constant(1, 0), LONE_COLLECTIVES),
        Fault("operations are fused on fx", "_pass_context", always("A.backend == 'inductor'"), FUSED),
        Fault("what is handed on may not be shared", "_overwritten", returns("list(donated)")),
        Fault("leaves that change places may be shared", "_overwritten", (swapped("is", "in"), bare("A[i]"))),
        Fault("the captured are read when gone", "Entry.run", skipped("A(captured)")),
        Fault(
            "Inductor is given what overwrites",
            "_pass_context",
            (never("A.backend == 'inductor-whole'"), elsewhere("_trace_step", never("A.backend == 'inductor-whole'"))),
            ON_GLOO,
        ),
        Fault("a donated slot prints as if alive", "Entry._mark_boxes_donated", becomes("A | B | C", "A | C")),
    ),
    *File("graph/planning/_liveness.py", WORKSPACE).faults(
        Fault(
            "what is read by another loop is not stored",
            "unstored_values",
            becomes("A.get(B) == A[C]", "True or A[C]"),
            FUSED,
        ),
        Fault("a sum is no end of a loop", "unstored_values", becomes("A += B(C)", "A += 0"), FUSED),
        Fault("a product is no end of a loop", "unstored_values", becomes("not A(B) and not C(B)", "0"), FUSED),
        Fault("reductions cast nothing", "_cast_bytes", returns("0 and x.numel() * dtype.itemsize")),
        Fault("operands of two dtypes stay", "_promoted_bytes", never("A.dtype is not B")),
        Fault("what is compiled is copied", "workspace_bytes", never("A in B.meta")),
        Fault("a mean of halves is one of halves", "_cast_bytes", constant(2, 1)),
        Fault(
            "a GPU's kernels cast like a CPU's",
            "workspace_bytes",
            (
                becomes("not A or B", "not A or not A"),
                elsewhere("_promoted_bytes", becomes("any(A for B in operands)", "not operands")),
            ),
        ),
        Fault("a convolution lays nothing out anew", "workspace_bytes", returns("0", at="4 of 6")),
        Fault("operands of other turns take nothing", "_pending_ranges", never("A(B)", at="2 of 3"), CARRY),
        Fault("what a turn leaves counts twice", "_unlabeled_ranges", skipped("A[B] += 1"), ON_GLOO),
        Fault("a turn ends with what it leaves", "_completions", never("A.op == 'output'"), CARRY),
        Fault("sums are activations", "_kinds", bare("A or B in C or any(D in C for D in E)"), LOOPS),
        Fault("a collective holds nothing", "_last_uses", skipped("A += [] if B(C) else D.E(F(C))"), GRAPH),
        Fault("the peak forgets what kernels hold", "_unlabeled_ranges", returns("ranges"), GRAPH),
        Fault("a turn holds nothing", "_extra_ranges", becomes("A(loop)", "0"), LOOPS),
    ),
    *File("graph/_pass_manager.py", PASS_MANAGER).faults(
        Fault("marks are lost", "_description", dropped("A in B.meta"), FUSED),
        Fault("a loop takes its room twice", "_budget_in_body", bare("A - B(C)"), LOOPS),
        Fault("`jit` takes a schedule option that is not a number", "_Domain.checked", always("float(A) >= 0"), JIT),
        Fault("a pass is left out", "PASSES", dropped("A('in_place', B, C)")),
        Fault(
            "leaves are gathered into before they are donated",
            "PASSES",
            becomes(
                "(..., A('donate', B, C), ..., A('gather_into', D, E), ...)",
                "(..., ..., A('gather_into', D, E), A('donate', B, C), ...)",
            ),
        ),
        Fault("every choice runs every pass", "PassManager._after", always("key not in self.A")),
        Fault("choices share what differs", "PassManager._after", dropped("arguments")),
        Fault("graphs of one size are one", "_same", always("A(B) == A(C)")),
        Fault(
            "a loop's sums are not written",
            "PassManager.body",
            becomes("A.B(overwrites=C.D, donated=tuple(C.E))", "A.B(overwrites=(), donated=())"),
            LOOPS,
        ),
        Fault("a body has all the room", "_budget_in_body", bare("A - around"), LOOPS),
    ),
    *File("graph/passes/_listing.py", RECAST).faults(
        Fault(
            "an update goes leaf by leaf, operation by operation",
            "list_nodes",
            bare("[*A[-1].all_input_nodes, *A]"),
            FUSED,
        ),
        Fault("new states wait for the last gradient", "roles", skipped("A |= B(C, D, A)")),
        Fault("whatever waits is made late", "_waiting", dropped("A(B, C)")),
        Fault("what is made of arguments is kept", "_grows", dropped("A not in late")),
        Fault("numbers join what is apart", "_connected_parts", dropped("any(A.dim() for A in B(C))")),
        Fault("what is done waits for the others", "_append", skipped("A += [] if B else C(D, E, F)")),
        Fault("the schedule makes casts at once", "roles", never("A in B.meta")),
        Fault("updates wait for the end", "list_nodes", skipped("A(B, C)", at="1 of 4"), GRAPH),
        Fault("overwrite under a gather", "readers_of_overwritten", never("A(B)", at="3 of 4"), GRAPH),
        Fault("more in flight than asked", "_due_waits", never("len(A) > B.C"), GRAPH),
        Fault(
            "leaves arrive while the old ones are read",
            "readers_of_overwritten",
            becomes("A(n)", "n.target is COPY", at="1 of 7"),
            GRAPH,
        ),
        Fault(
            "only the last write waits for readers",
            "readers_of_overwritten",
            becomes("A.get(B, ())", "A.get(B, ())[-1:]"),
            SLICE_OF_GATHER,
        ),
        Fault("a write before its readers stays there", "rules_of", becomes("A(B, readers)", "B[:]"), SLICE_OF_GATHER),
    ),
    *File("graph/_ir.py", GRAPH).faults(
        Fault(
            "what waits for nothing comes early",
            "sort",
            (
                after("for A in B.nodes: ...", "order |= dict.fromkeys(after_needs(list(B.nodes), {}))"),
                becomes("[A]", "[A] if all(a in order for a in A.all_input_nodes) else []"),
            ),
        ),
        Fault("padding is not sent", "_full", never("A(B)")),
    ),
    *File("graph/passes/_rematerialize.py", RECAST).faults(
        Fault("what scales a gradient is not done again", "_from_narrow", never("A.target in B")),
        Fault(
            "a product of two gradients is made again",
            "_from_narrow",
            (becomes("len(A) != 1", "not A"), bare("(A,)"), becomes("node = A", "node = A[0]")),
        ),
        Fault("first uses are cast again, too", "recast", always("A[B] > A[C]")),
        Fault("casts to less are made again", "_widens", swapped("<", "!=")),
        Fault("small values are cast again", "recast", dropped("A(*B(C)) < D")),
        Fault("results are cast again", "recast", dropped("any(A.op == 'output' for A in B)")),
        Fault("a cast is of a value", "_widens", dropped("not A.all_input_nodes")),
        Fault("what is made again is made at once", "recast", becomes("A.meta[B]", "A.meta[B + B]")),
    ),
    *File("graph/_candidates.py", RECAST).faults(
        Fault("recast is kept wherever it changes something", "_with_recast", dropped("A.B < C.B")),
        Fault("recast is not asked for", "_with_recast", never("A.B is True")),
        Fault("recast is always tried", "_with_recast", never("A.B is False")),
        Fault("all schedules carry, it is said", "candidates", dropped("A(B.graph)"), CARRY),
        Fault(
            "what bodies reduce is not in flight",
            "candidates",
            becomes("(A(B) for C in D(E) for B in C.nodes)", "(A(B) for B in E.nodes)"),
            LOOPS,
        ),
    ),
    *File("graph/passes/_schedule.py", GRAPH).faults(
        Fault("prefetch one more", "next_gathers", constant(1, 2, at="3 of 3")),
        Fault("the graph's own order never stays", "Orders.leanest", never("max(A) < max(B)")),
        Fault("gathers start ahead without room", "fit_prefetches", becomes("A[B - 1] + C", "A[B - 1]")),
        Fault("what starts ahead is forgotten", "fit_prefetches", skipped("A[B:C] = [D + E for D in A[B:C]]")),
        Fault("nothing starts ahead", "fit_prefetches", skipped("A.setdefault(B[C], []).append(D)")),
        Fault(
            "what is in flight changes no order",
            "Orders.lean",
            becomes("self._lean[in_flight] = A", "self._lean[0] = self._lean[1] = A"),
            PASS_MANAGER,
        ),
    ),
    *File("graph/trace/_writes.py", IN_PLACE).faults(
        Fault(
            "writes into lists are not seen",
            "writes",
            becomes(
                "map_arg(A.args[B] if C else D, E.append)", "E += [x for x in A.args[B:B + 1] if isinstance(x, Node)]"
            ),
        ),
        Fault("gradients of arguments are not seen", "check_gradients", never("A.grad is not None")),
        Fault("operations of the user's own write unseen", "_check_operation", never("A(node) and B")),
        Fault("hidden statistics are not seen", "_check_operation", becomes("A(B) in C", "A(B) in ()")),
        Fault("writes into views are replaced in place", "_is_fresh", dropped("A[B][0] not in C"), WRITES),
        Fault("another dtype is written", "_replacement", always("A(B) == A(C.meta['val'])"), WRITES),
        Fault(
            "a value is read as it was before a write",
            "without_writes",
            (swapped("is not", "is"), becomes("a", "None", at="7 of 8")),
            WRITES,
        ),
        Fault("parts are written", "_base", bare("A or B(C)"), LOOPS),
        Fault("a write's places are not compared", "_replacement", never("A(B) != A(C)"), WRITES),
    ),
    *File("_torch/tracing.py", DONATION).faults(
        Fault("other memory is not seen", "_Assignments.__torch_function__", never("A == B"), IN_PLACE),
        Fault("copies take names that are taken", "graph_of", skipped("A._used_names.update(B)"), GRAPHS),
        Fault("capsules are not seen", "_holders", bare("A + B._use_count() - 1")),
        Fault("a base that is held is not seen", "_keeps_base", dropped("sys.getrefcount(A) <= B()")),
        Fault("a graph of a base is not seen", "_keeps_base", dropped("A <= B + 1")),
        Fault("anomaly mode reads stand-ins", "trace", becomes("False", "torch.is_anomaly_enabled()"), JIT),
    ),
    *File("graph/trace/_trace.py", CASTS).faults(
        Fault("another trace's values are constants", "_check_constants", never("A.op == 'get_attr'"), IN_PLACE),
        Fault("numbers in a loss are captured", "_lift_constants", bare("B(C, D) or A"), LOOPS),
        Fault("zeros of both signs are one number", "_literal", becomes("repr(A.tolist())", "A.sum().item()"), LOOPS),
        Fault("a cast back is not seen", "without_round_trips", becomes("A and not B and C", "False and C")),
        Fault("a rounded value stands for itself", "_holds_all", always("A and B != C")),
        Fault("a result shares an argument's memory", "without_round_trips", dropped("not is_result")),
        Fault("a view stays where it lay", "without_round_trips", becomes("A[1:]", "()")),
    ),
    *File("_torch/stand_ins.py", ("tests/_torch/test_stand_ins.py",)).faults(
        Fault("1 and True are one number", "_key", becomes("return A, B", "return B", at="2 of 2")),
        Fault("forms do not differ by strides", "_key", dropped("A.stride()")),
        Fault("forms do not differ by dtype", "_key", dropped("A.dtype")),
        Fault(
            "operands share no memory",
            "StandInCache.call",
            becomes("(A, B, C, D(E))", "(A, B, C, ())"),
        ),
        Fault("a view lies in new memory", "_form_of", becomes("A.get(storage_id(B))", "None")),
    ),
    *File("_torch/recorder.py", RECORDER).faults(
        Fault("zeros of forward mode stay", "REPLACEMENTS", dropped("A: torch.ops.aten.zeros.default"), IN_PLACE),
        Fault("stand-ins change with their tensors", "_track", bare("B(A)")),
        Fault("only the first of several results", "_record", becomes("enumerate(A)", "enumerate(A[:1])")),
        Fault("what the user notes is lost", "_record", dropped("**get_current_meta().get('custom', {})")),
        Fault("compounds are plain", "_is_plain", dropped("A.has_kernel_for_dispatch_key(B)")),
        Fault("shapes that depend on values are plain", "_is_plain", dropped("A & set(B.tags)")),
        Fault("make_fx records all", "OneNode.__call__", never("mode is not None")),
        Fault(
            "a plan takes the backward pass for the forward",
            "_source",
            (swapped("==", "!="), becomes("-1", "-2")),
            PLAN,
        ),
    ),
    *File("graph/_collector.py", COLLECTOR).faults(
        Fault("the collector stays off", "paused_collector", negated("A")),
        Fault("the collector runs on", "paused_collector", skipped("gc.disable()")),
    ),
    *File("graph/passes/_loops.py", CARRY).faults(
        Fault(
            "what is on its way is read before it arrives",
            "_wait_before",
            before("A.wait.replace_input_with(A.source, B)", "A.wait.replace_all_uses_with(B)"),
        ),
        Fault(
            "one reduction too many is on its way",
            "_carry_reductions",
            becomes("zip(A, B, strict=False)", "zip(A[-len(B):], B, strict=False)"),
        ),
        Fault("gradients with other readers are carried", "_chain", bare("len(A) == 1")),
        Fault(
            "what the last turn leaves is dropped",
            "_wait_after",
            skipped("A.replace_all_uses_with(B, delete_user_cb=C)"),
            ON_GLOO,
        ),
    ),
    *File("graph/planning/_cost.py", CARRY).faults(
        Fault("what is carried takes no time", "seconds", never("A(B) and not C")),
        Fault("the first turn waits for another", "seconds", dropped("not A")),
    ),
    *File("_donated.py", DONATION).faults(
        Fault("the donated keep their class", "donate_memory", skipped("A.__class__ = B")),
        Fault("a base keeps the memory", "donate_memory", never("A._is_view()")),
    ),
    *File("graph/trace/_donation.py", DONATION).faults(
        Fault("views of the donated are not seen", "_check_unshared", always("max(A) <= 1")),
        Fault("the captured are overwritten", "check_separate", dropped("*[A for A in B if C]")),
        Fault("write into shared memory", "_check_apart", never("A < B"), JIT),
    ),
    *File("zero/_sharded_step.py", ("tests/distributed/test_gloo.py", "-k", "training-2")).faults(
        Fault("ranks compare what a vmap has batched", "ShardedStep._should_check", dropped("A()")),
    ),
    *File("ranks/_spmd.py", JIT).faults(
        Fault("a vmap around the world breaks", "Spmd._by_vmap", dropped("is_outermost")),
    ),
    *File("graph/planning/_plan.py", ("tests/graph/test_plan.py",)).faults(
        Fault("every operation takes a workspace", "_workspace_bytes", dropped("A in PRODUCTS")),
    ),
    *File("graph/_agree.py", ("tests/graph/test_ops.py",)).faults(
        Fault("the numbers of GPUs differ", "_signature", bare("_DEVICE.sub(B, A)")),
    ),
    *File("graph/_agree.py", GRAPH).faults(
        Fault(
            "schedules in another order are taken for the same",
            "digest_of_order",
            becomes("names = A", "names: list[str] = []"),
        ),
        Fault("bodies are not compared", "signatures", dropped("*A(B.C, D)"), LOOPS),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault("hand on what is about to be overwritten", "donate.copy_if_donated", always("not A & set(B.C[D])")),
        Fault("hand out overwritten memory", "donate", bare("{*B, *A}")),
    ),
    *File("graph/passes/_rematerialize.py", GRAPH).faults(
        Fault("count a unit at each use", "_exceeds_reuse", always("A not in B")),
    ),
    *File("graph/passes/_collectives.py", GRAPH).faults(
        Fault("buckets across groups", "_can_join", dropped("A.args[1:] == B.args[1:]")),
        Fault("buckets without an end", "_join", becomes("sum(map(A, [*B[-1], C]))", "A(C)")),
        Fault("buckets of what waits for itself", "bucket.may_join", dropped("not A(B, C, D)")),
        Fault("a bucket's first for all", "_coalesce", becomes("i", "0", at="6 of 6")),
    ),
    *File("graph/trace/_arguments.py", JIT).faults(
        Fault("one trace for all numbers", "key_of", becomes("(type(A), B)", "(type(A), None)")),
        Fault(
            "a trace is shared with leaves that lie otherwise",
            "key_of",
            becomes("arguments.A", "()", at="6 of 8"),
            ON_GLOO,
        ),
        Fault(
            "a place in a chain is a repeated block",
            "blocks_of",
            becomes("range(len(A), -1, -1)", "range(len(A) + 1)"),
            GROUPS,
        ),
    ),
    *File("graph/passes/_rematerialize.py", GRAPH).faults(
        Fault("matrix products run again", "_repeats", becomes("A and B(C) and not D(C)", "A and not D(C)")),
    ),
    *File("graph/passes/_overwrite.py", SLICE_OF_GATHER).faults(
        Fault("each rank updates the first part", "slice_of_gather", becomes("A[str(B.args[2])]", "0")),
        Fault(
            "the order of leaves is not looked at", "_first_of_buffer", (swapped("!=", "=="), becomes("list(A)", "[]"))
        ),
        Fault("padding is taken for the unit's", "_first_of_buffer", dropped("fills")),
        Fault(
            "leaves of several buffers are taken for one", "_first_of_buffer", dropped("len({A(B) for B in C}) == 1")
        ),
        Fault("the old part is any concatenation in the buffer", "_lies_in", bare("B == C and A")),
    ),
    *File("graph/_storages.py", SLICE_OF_GATHER).faults(
        Fault(
            "arguments side by side count twice",
            "storages_in",
            becomes("A(B, C, D[C], input_storages)", "A(B, C, D[C], {})"),
        ),
    ),
    *File("_torch/modules.py", BUFFERS).faults(
        Fault("a buffer with a gap is one", "_buffer", never("A[B].storage_offset() != C")),
        Fault("a buffer need not be full", "_buffer", always("fills")),
        Fault("turned tensors fill a buffer", "_buffer", dropped("A[B].is_contiguous()")),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault("leaves arrive in another layout", "_have_same_bytes", dropped("dense")),
        Fault("what is read otherwise arrives in leaves", "_writes", bare("B and A")),
        Fault("every leaf begins with the unit", "_offset", becomes("A(B).C.storage_offset()", "0")),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault("a buffer that others read is summed in place", "in_place", dropped("A[B] == [C]")),
        Fault("an argument is summed in place", "in_place", dropped("A.producers[B].op == 'call_function'")),
        Fault("who reads a loop's sum copies it", "in_place", never("s in A"), LOOPS),
    ),
    *File("graph/_ops.py", OPS).faults(
        Fault("an empty buffer is made twice", "OPERATIONS", becomes("'empty_like': A | B", "'empty_like': A")),
        Fault("a maximum is called linear", "OPERATIONS", becomes("'amax': A", "'amax': A | LINEAR")),
        Fault(
            "to pad a shard is another step",
            "OPERATIONS",
            becomes("'constant_pad_nd': A | B | C | D | E", "'constant_pad_nd': A | C | D | E"),
        ),
        Fault("constants are made early", "OPERATIONS", becomes("'full': A | B | C | D", "'full': A | C | D")),
        Fault("a row is no operation", "OPERATIONS", constant("bucketize", "bucketise")),
    ),
    *File("graph/_dump.py", PASS_MANAGER).faults(
        Fault("a dump of another schedule", "dump", becomes("A.B(settings)", "A.B(PassSettings(True, 0, 0))")),
        Fault("a second trace is dumped over the first", "folder_of", never("traces")),
    ),
    *File("graph/loop/_insert_loops.py", LOOPS).faults(
        Fault(
            "a collective that nothing reads is kept",
            "_body",
            dropped("not A(B)"),
            ("tests/parallel/pipeline/test_plan.py",),
        ),
        Fault("sums begin at one", "_initial_sum", becomes("-0.0", "1.0")),
        Fault("sums begin at zero", "_initial_sum", becomes("-0.0", "0.0")),
        Fault("what a turn changes is moved out", "_hoist", never("A not in B and C")),
        Fault("what the first micro-batch leaves behind is every one's", "_compare", dropped("depends_on_first")),
        Fault(
            "results of micro-batches are not compared",
            "_compare",
            becomes("A is not B.get(C, C) or C in varying", "A is None"),
        ),
        Fault("the second pass draws, too", "_compare", becomes("reversed(A)", "reversed(second)")),
        Fault("sums begin contiguous", "_initial_sum", bare("(-B.stride(A), A)")),
    ),
    *File("graph/loop/_scan.py", LOOPS).faults(
        Fault("a mapped dimension stays in its place", "_mapped_first", always("A is None")),
    ),
    *File("graph/planning/_plan.py", LOOPS).faults(
        Fault("a plan counts one turn", "operations_of", becomes("A.iterations", "1")),
    ),
    *File("transforms/_value_and_grad.py", LOOPS).faults(
        Fault("a differentiated batch is a loop", "_is_a_loop", dropped("not set(A) & set(B.argnums)")),
        Fault("a derivative around micro-batches is of a loop", "_is_a_loop", dropped("not A()")),
    ),
    *File("graph/passes/_loops.py", LOOPS).faults(
        Fault("every unit stays from turn to turn", "hoist", dropped("sum(A.values()) - A[B] <= C")),
        Fault("no unit stays from turn to turn", "hoist", (swapped("<=", "<"), becomes("max_reuse_bytes", "0"))),
        Fault("a unit stays twice", "_units", bare("B.setdefault(C(A, D), A)")),
        Fault("what a turn gathers of its part is moved out", "_units", becomes("A[:B.C.D]", "A[:1]")),
    ),
    *File("_torch/compiler.py", COMPILE).faults(
        Fault("Inductor's cache is passed by", "_mode", dropped("shape_env=ShapeEnv()")),
        Fault("a worker compiles another key", "", becomes("copyreg.pickle", "str")),
        Fault(
            "Inductor is imported while Dynamo is",
            "_start_thread",
            skipped("A.import_module(B)"),
            ("tests/test_import.py",),
        ),
        Fault(
            "GCC merges scalars", "_gcc_workaround", becomes("return A", "return {}"), ("tests/_torch/test_torch.py",)
        ),
        Fault(
            "what is no C++ is not written again",
            "_compile",
            becomes("{**A, 'cpp.max_horizontal_fusion_size': 1}", "A"),
            ("tests/_torch/test_torch.py",),
        ),
        Fault("a result lies as it is made", "_with_strides_of", always("A or B(C, D)"), BORDERS),
        Fault("a view is a view of what lies otherwise", "_Reshaping.call_function", never("A in B"), BORDERS),
        Fault("padding fixes a length", "_AtLength.call_function", never("A is B.default"), LENGTHS),
    ),
    *File("graph/planning/_phases.py", PLAN).faults(
        Fault("updates are of the backward pass", "_phases", always("A in B", at="4 of 4")),
        Fault("a next micro-batch is backward", "_phases", never("A in B and C(A)")),
    ),
    *File("graph/planning/_views.py", PLAN).faults(
        Fault("blocks are not folded", "_fold", constant(1, 99)),
        Fault("a summary counts one turn", "_group_lines", bare("A * B.times"), LOOPS),
    ),
    *File("transforms/_accumulate.py", LOOPS).faults(
        Fault("numbers in aux are not compared", "_in_a_loop", skipped("A(B, C)")),
    ),
    *File("graph/_polynomials.py", LENGTHS).faults(
        Fault("a line goes before a square", "fit", skipped("A += B if C % D ** 2 == 0 else []")),
    ),
    *File("graph/_jit.py", LENGTHS).faults(
        Fault("a schedule of its own for each length", "Jitted._at_length", bare("A.B(schedule_options=C.D(E.F.G))")),
        Fault(
            "a plan elsewhere is the first length",
            "Jitted.with_options",
            returns("replace(self, _entries={}, **changes)"),
        ),
        Fault(
            "a budget is one length's",
            "Jitted._at_length",
            dropped("self.A.schedule_options.memory_budget is not None"),
            ANY_LENGTH,
        ),
        Fault("plain values are sizes", "Jitted._at_length", never("not A(B, C)"), ANY_LENGTH),
    ),
    *File("graph/_any_length.py", ANY_LENGTH).faults(
        Fault("a branch at another length is not seen", "AnyLength.entry", never("not self.A(B)")),
        Fault("captured tensors are the first length's", "_formula", never("not all(A(B, C) for C in D)")),
        Fault("what lies otherwise is like the rest", "AnyLength.entry", never("forms != A")),
        Fault("values keep their sizes", "_rewrite", becomes("A.get(id(val), val)", "val")),
        Fault("flops are those of another length", "_rewrite", skipped("A.meta.pop('flops', None)")),
        Fault(
            "a rank goes on without a trace alone", "AnyLength._find", never("A is not None and A.distributed"), ON_GLOO
        ),
        Fault(
            "lengths that decide otherwise are samples",
            "_formula_and_lengths",
            becomes("[A for A in B if C(A.length)]", "[*B]"),
        ),
        Fault("a name that follows the length is kept", "_TracedCall.structure", dropped("A.B", at="4 of 4")),
    ),
    *File("_torch/decisions.py", DECISIONS).faults(
        Fault("rounded sizes are polynomials", "_Operations._check", (swapped("or", "and"), bare("not A"))),
        Fault("a number is no decision", "_Operations.check_not_fixed", never("self.symbol in self.env.replacements")),
        Fault("a length of one is like others", "decisions.holds", dropped("A >= 2")),
        Fault("fractions are whole numbers", "_Operations._check", bare("torch.SymFloat | A")),
        Fault("whatever is divided leaves no rest", "_simplified", bare("B.C and A")),
        Fault(
            "a number that a substitute ignores may follow the length",
            "_Substitutes.__torch_function__",
            never("any(A for B in tree_leaves((C, D)))"),
        ),
        Fault("comparisons have no end", "_environment.Limited.evaluate_expr", never("len(self.guards) > A")),
    ),
]
