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
from tests.mutants.mutant import DONATION, GRAPH, IN_PLACE, JIT, OPS, PASS_MANAGER, Fault, File, on_processes

RECORDER = ("tests/_torch/test_recorder.py",)
GRAPHS = ("tests/_torch/test_graphs.py",)
LONE_COLLECTIVES = ("tests/graph/test_lone_collectives.py",)
FUSED = ("tests/graph/test_fused.py",)
RECAST = ("tests/graph/test_recast.py",)
COLLECTOR = ("tests/graph/test_collector.py",)
CARRY = ("tests/graph/test_carry.py",)
ON_GLOO, SLOW_ON_GLOO = on_processes("jit"), on_processes("jit", slow=True)
BUFFERS = ("tests/_torch/test_buffers.py",)
COMPILE = ("tests/graph/test_compile.py",)
PLAN = ("tests/graph/test_plan.py",)
LOOPS = ("tests/graph/test_loops.py",)
SLICE_OF_GATHER = ("tests/graph/test_slice_of_gather.py",)
SUBGRAPHS = ("tests/graph/run/test_subgraphs.py",)
ANY_LENGTH = ("tests/graph/test_any_length.py",)
DECISIONS = ("tests/_torch/test_decisions.py",)
LENGTHS = ("tests/graph/run/test_lengths.py",)
BORDERS = ("tests/graph/run/test_borders.py",)
CASTS = ("tests/graph/trace/test_casts.py",)
WRITES = ("tests/graph/trace/test_in_place.py",)
WORKSPACE = ("tests/graph/test_workspace.py",)

MUTANTS = [
    *File("graph/_entry.py", ("tests/graph/test_jit.py", "-k", "without_memory")).faults(
        Fault("tensors without memory are said to share it", "Entry.run", skipped("A.check_real()")),
    ),
    *File("_torch/accelerator.py", ("tests/graph/test_autocast.py",)).faults(
        Fault("a graph casts again where it runs", "without_autocast", never("torch.is_autocast_enabled(A)")),
        Fault(
            "gradients of a weight used twice are summed in half precision",
            "without_autocast_cache",
            skipped("torch.set_autocast_cache_enabled(False)"),
        ),
        Fault(
            "autocast's cache stays off",
            "without_autocast_cache",
            skipped("torch.set_autocast_cache_enabled(cached)"),
        ),
    ),
    *File("graph/passes/_collectives.py", LONE_COLLECTIVES).faults(
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
    *File("graph/_entry.py", DONATION).faults(
        Fault("collectives over one rank are not dropped", "_groups_of_one", constant(1, 0), LONE_COLLECTIVES),
        Fault(
            'the plan of backend "fx" assumes fused operations',
            "_pass_context",
            always("A.backend == 'inductor'"),
            FUSED,
        ),
        Fault(
            "a donated argument that is a result as it is counts as overwritten",
            "_reused_tensors",
            returns("list(donated)"),
        ),
        Fault(
            "an argument that is returned at another position counts as unchanged",
            "_reused_tensors",
            (swapped("is", "in"), bare("A[i]")),
        ),
        Fault("a call does not check that captured tensors are still alive", "Entry.run", skipped("A(captured)")),
        Fault(
            '"inductor-whole" gets graphs with in-place writes',
            "_pass_context",
            (never("A.backend == 'inductor-whole'"), elsewhere("_trace_step", never("A.backend == 'inductor-whole'"))),
            SLOW_ON_GLOO,
        ),
        Fault(
            "a slot of a donated box prints as if it were alive",
            "Entry._mark_boxes_donated",
            becomes("A | B | C", "A | C"),
        ),
    ),
    *File("graph/planning/_live_ranges.py", WORKSPACE).faults(
        Fault(
            "a value that another loop reads counts as not stored",
            "unstored_values",
            becomes("A.get(B) == A[C]", "True or A[C]"),
            FUSED,
        ),
        Fault(
            "a sum counts as fused into the loop that reads it",
            "unstored_values",
            becomes("A += B(C)", "A += 0"),
            FUSED,
        ),
        Fault(
            "a matrix product counts as fused into the loop that reads it",
            "unstored_values",
            becomes("not A(B) and not C(B)", "0"),
            FUSED,
        ),
        Fault(
            "the workspace of a reduction's cast is not counted",
            "_cast_bytes",
            returns("0 and x.numel() * dtype.itemsize"),
        ),
        Fault("the workspace of a promoted operand is not counted", "_promoted_bytes", never("A.dtype is not B")),
        Fault("an operation inside a compiled segment counts a copy", "workspace_bytes", never("A in B.meta")),
        Fault("the cast of a half-precision mean is not counted", "_cast_bytes", constant(2, 1)),
        Fault(
            "a GPU's workspace is counted like a CPU's",
            "workspace_bytes",
            (
                becomes("not A or B", "not A or not A"),
                elsewhere("_promoted_bytes", becomes("any(A for B in operands)", "not operands")),
            ),
        ),
        Fault("the copy of a convolution's operand is not counted", "workspace_bytes", returns("0", at="4 of 6")),
        Fault("operands of other iterations take no memory", "_pending_ranges", never("A(B)", at="2 of 3"), CARRY),
        Fault(
            "what an iteration leaves behind is counted twice", "_unlabeled_ranges", skipped("A[B] += 1"), SLOW_ON_GLOO
        ),
        Fault(
            "an iteration's unfinished reductions end with the iteration",
            "_completions",
            never("A.op == 'output'"),
            CARRY,
        ),
        Fault(
            "sums of gradients are listed as activations",
            "_kinds",
            bare("A or B in C or any(D in C for D in E)"),
            LOOPS,
        ),
        Fault(
            "the input of a collective is freed before it completes",
            "_last_uses",
            skipped("A += [] if B(C) else D.E(F(C))"),
            GRAPH,
        ),
        Fault("a kernel's workspace is not in the peak", "_unlabeled_ranges", returns("ranges"), GRAPH),
        Fault("a loop's iterations take no memory", "_extra_ranges", becomes("A(loop)", "0"), LOOPS),
    ),
    *File("graph/_pass_manager.py", PASS_MANAGER).faults(
        Fault(
            "the mark of a fused node is not compared", "_are_alike", dropped("(A in B.meta) == (A in C.meta)"), FUSED
        ),
        Fault(
            "the budget of a loop's body counts the body's own peak as memory around it",
            "_budget_in_body",
            bare("A - B(C)"),
            LOOPS,
        ),
        Fault("a pass is left out", "PASSES", dropped("A('in_place', B, C)")),
        Fault(
            "gather_into runs before donate",
            "PASSES",
            becomes(
                "(..., A('donate', B, C), ..., A('gather_into', D, E), ...)",
                "(..., ..., A('gather_into', D, E), A('donate', B, C), ...)",
            ),
        ),
        Fault(
            "a pass is run again for settings that do not change it", "PassManager._after", always("key not in self.A")
        ),
        Fault("passes with different arguments share a result", "PassManager._after", dropped("arguments")),
        Fault("two graphs with equally many nodes count as equal", "_same", becomes("all(A)", "True")),
        Fault(
            "the body of a loop does not overwrite its sums",
            "PassManager.body",
            becomes("A.B(..., overwrites=C.D, donated=tuple(C.E))", "A.B(..., overwrites=(), donated=())"),
            LOOPS,
        ),
        Fault(
            "the budget of a loop's body ignores the memory outside the loop",
            "_budget_in_body",
            bare("A - around"),
            LOOPS,
        ),
    ),
    *File("graph/_schedule_options.py", PASS_MANAGER).faults(
        Fault("`jit` takes a schedule option that is not a number", "_Domain.validated", always("float(A) >= 0"), JIT),
    ),
    *File("graph/passes/_listing.py", RECAST).faults(
        Fault(
            "an update is not listed depth first",
            "list_nodes",
            bare("[*A[-1].all_input_nodes, *A]"),
            FUSED,
        ),
        Fault("values that wait for the last gradient are not scheduled late", "roles", skipped("A |= B(C, D, A)")),
        Fault("every value that waits is scheduled late", "_waiting", dropped("A(B, C)")),
        Fault("late operands count as memory that a value frees", "_grows", dropped("A not in late")),
        Fault("0-d values join independent updates", "_connected_parts", dropped("any(A.dim() for A in B(C))")),
        Fault("nodes that become ready are not listed at once", "_append", skipped("A += [] if B else C(D, E, F)")),
        Fault("a cast that was made again is scheduled early", "roles", never("A in B.meta")),
        Fault("updates run at the end of the step", "list_nodes", skipped("A(B, C)", at="1 of 4"), GRAPH),
        Fault(
            "an argument is overwritten while a gather reads it",
            "readers_of_overwritten",
            never("A(B)", at="3 of 4"),
            GRAPH,
        ),
        Fault("more reductions are in flight than in_flight= allows", "_due_waits", never("len(A) > B.C"), GRAPH),
        Fault(
            "a gather writes into leaves that are still read",
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
        Fault(
            "a write stays before the readers of the overwritten value",
            "order_rules",
            becomes("A(B, readers)", "B[:]"),
            SLICE_OF_GATHER,
        ),
    ),
    *File("graph/_ir.py", GRAPH).faults(
        Fault(
            "a node whose operands come later is listed at the end",
            "sort_graph",
            (
                after("for A in B.nodes: ...", "order |= dict.fromkeys(after_needs(list(B.nodes), {}))"),
                becomes("[A]", "[A] if all(a in order for a in A.all_input_nodes) else []"),
            ),
        ),
        Fault("a collective's bytes leave out the padding", "_full", never("A(B)")),
    ),
    *File("graph/passes/_rematerialize.py", RECAST).faults(
        Fault("recast does not repeat the scaling of a gradient", "_from_narrow", never("A.target in B")),
        Fault(
            "recast repeats a product of two gradients",
            "_from_narrow",
            (becomes("len(A) != 1", "not A"), bare("(A,)"), becomes("node = A", "node = A[0]")),
        ),
        Fault("recast repeats the cast before its first use", "recast", always("A[B] > A[C]")),
        Fault("recast repeats a cast to a narrower dtype", "_widens", swapped("<", "!=")),
        Fault("small values are cast again", "recast", dropped("A(*B(C)) < D")),
        Fault("recast repeats the cast of a result", "recast", dropped("any(A.op == 'output' for A in B)")),
        Fault("recast takes an operation without operands for a cast", "_widens", dropped("not A.all_input_nodes")),
        Fault("a repeated cast is not marked to be made late", "recast", becomes("A.meta[B]", "A.meta[B + B]")),
    ),
    *File("graph/_candidates.py", RECAST).faults(
        Fault("recast is kept wherever it changes something", "_with_recast", dropped("A.B < C.B")),
        Fault("recast=True is ignored", "_with_recast", never("A.B is True")),
        Fault("recast=False is ignored", "_with_recast", never("A.B is False")),
        Fault(
            "candidates that carry no reduction across iterations are listed as if they did",
            "candidates",
            dropped("A(B.graph)"),
            CARRY,
        ),
        Fault(
            "in_flight is not tried for reductions within loops",
            "candidates",
            becomes("(A(B) for C in D(E) for B in C.nodes)", "(A(B) for B in E.nodes)"),
            LOOPS,
        ),
    ),
    *File("graph/passes/_schedule.py", GRAPH).faults(
        Fault("one gather more than prefetch= starts ahead", "next_gathers", constant(1, 2, at="3 of 3")),
        Fault("the graph's own order is never kept, even if it holds less", "Orders.leanest", never("max(A) < max(B)")),
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
        Fault(
            "the order of in_flight=0 is used for in_flight=1",
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
        Fault("writes of a user's own operation are not refused", "_check_operation", never("A(node) and B")),
        Fault(
            "writes of batch norm's statistics are not refused", "_check_operation", becomes("A(B) in C", "A(B) in ()")
        ),
        Fault("writes into views are replaced in place", "_is_fresh", dropped("A[B][0] not in C"), WRITES),
        Fault("a write of another dtype keeps its dtype", "_replacement", always("A(B) == A(C.meta['val'])"), WRITES),
        Fault(
            "a value is read as it was before a write",
            "replace_writes",
            (swapped("is not", "is"), becomes("a", "None", at="7 of 8")),
            WRITES,
        ),
        Fault(
            "a write into a part of a tensor does not count as a write into the tensor",
            "_base",
            bare("A or B(C)"),
            LOOPS,
        ),
        Fault("a write of another size is not refused", "_replacement", never("A(B) != A(C)"), WRITES),
    ),
    *File("_torch/tracing.py", DONATION).faults(
        Fault(
            "`.data =` with other memory is not refused", "_Assignments.__torch_function__", never("A == B"), IN_PLACE
        ),
        Fault("a copied graph may use a name twice", "graph_of", skipped("A._used_names.update(B)"), GRAPHS),
        Fault("a reference from C++ to a tensor is not counted", "_holders", bare("A + B._use_count() - 1")),
        Fault("a view's base that Python holds is not seen", "_keeps_base", dropped("sys.getrefcount(A) <= B()")),
        Fault("a view's base that autograd holds is not seen", "_keeps_base", dropped("A <= B + 1")),
        Fault("anomaly mode stays on during a trace", "trace", becomes("False", "torch.is_anomaly_enabled()"), JIT),
    ),
    *File("graph/trace/_trace.py", CASTS).faults(
        Fault("a value of another trace is not refused", "_check_constants", never("A.op == 'get_attr'"), IN_PLACE),
        Fault("numbers that a loss makes count as captured tensors", "_lift_constants", bare("B(C, D) or A"), LOOPS),
        Fault("0.0 and -0.0 become one constant", "_literal", becomes("repr(A.tolist())", "A.sum().item()"), LOOPS),
        Fault(
            "a cast and its cast back are not removed",
            "erase_round_trips",
            becomes("A and not B and C", "False and C"),
        ),
        Fault("a cast that rounds is removed with its cast back", "_holds_all", always("A and B != C")),
        Fault("a result shares an argument's memory", "erase_round_trips", dropped("not is_result")),
        Fault("a view is not moved behind its new source", "erase_round_trips", becomes("A[1:]", "()")),
    ),
    *File("_torch/stand_ins.py", ("tests/_torch/test_stand_ins.py",)).faults(
        Fault("1 and True share a cache entry of stand-ins", "_key", becomes("return A, B", "return B", at="2 of 2")),
        Fault("stand-ins with different strides share a cache entry", "_key", dropped("A.stride()")),
        Fault("stand-ins with different dtypes share a cache entry", "_key", dropped("A.dtype")),
        Fault(
            "whether operands share memory is not in the key of the cache of stand-ins",
            "StandInCache.call",
            becomes("(A, B, C, D(E))", "(A, B, C, ())"),
        ),
        Fault("a cached stand-in of a view has memory of its own", "_form_of", becomes("A.get(storage_id(B))", "None")),
        Fault(
            "an alias of a stand-in is on the meta device", "alias_of", becomes("A.fake_device", "torch.device('meta')")
        ),
        Fault(
            "a function runs anew for stand-ins of known forms",
            "StandInCache.call",
            becomes("isinstance(A, B) and C", "not isinstance(A, B) or C"),
        ),
        Fault(
            "forms of stand-ins are shared by default dtypes",
            "StandInCache.call",
            becomes("_SHARED[A]", "_SHARED[torch.float32]"),
        ),
        Fault("a cached stand-in lets its data be read", "_made", becomes("A._allow_unsafe_data_ptr_access", "True")),
    ),
    *File("_torch/recorder.py", RECORDER).faults(
        Fault(
            "the efficient zeros of forward mode are recorded",
            "REPLACEMENTS",
            dropped("A: torch.ops.aten.zeros.default"),
            IN_PLACE,
        ),
        Fault("a stand-in is not copied when it is recorded", "_track", bare("B(A)")),
        Fault("only the first of several results is recorded", "_record", becomes("enumerate(A)", "enumerate(A[:1])")),
        Fault("the user's annotations of nodes are lost", "_record", dropped("**get_current_meta().get('custom', {})")),
        Fault("a compound operation counts as a plain one", "_is_plain", dropped("A.has_kernel_for_dispatch_key(B)")),
        Fault(
            "an operation whose shape depends on values is recorded as a plain one",
            "_is_plain",
            dropped("A & set(B.tags)"),
        ),
        Fault("an operation meant as one node is recorded as its parts", "OneNode.__call__", never("mode is not None")),
        Fault(
            "a node of the backward pass has the line being run, not its forward line",
            "_source",
            (swapped("==", "!="), becomes("-1", "-2")),
            PLAN,
        ),
    ),
    *File("graph/_collector.py", COLLECTOR).faults(
        Fault("the garbage collector stays off after a trace", "paused_collector", negated("A")),
        Fault("the garbage collector runs during a trace", "paused_collector", skipped("gc.disable()")),
    ),
    *File("graph/passes/_loops.py", CARRY).faults(
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
        Fault("a reduction whose result others read is carried across iterations", "_chain", bare("len(A) == 1")),
        Fault(
            "the reductions of the last iteration are not added",
            "_wait_after",
            skipped("A.replace_all_uses_with(B, delete_user_cb=C)"),
            SLOW_ON_GLOO,
        ),
    ),
    *File("graph/planning/_clocks.py", CARRY).faults(
        Fault("a carried collective takes no time in the cost model", "estimate_seconds", never("A(B) and not C")),
        Fault(
            "the first iteration waits for a collective that was never started", "estimate_seconds", dropped("not A")
        ),
    ),
    *File("_donated.py", DONATION).faults(
        Fault("a donated tensor can be read", "donate_memory", skipped("A.__class__ = B")),
        Fault("donation does not free the memory of a view's base", "donate_memory", never("A._is_view()")),
    ),
    *File("graph/trace/_donation.py", DONATION).faults(
        Fault("a view of a donated tensor is not refused", "_find_shared", never("max(A) > 1")),
        Fault("memory that a thread releases at once is refused", "_check_unshared", always("time.monotonic() > A")),
        Fault(
            "a captured tensor may share memory with a donated one", "check_separate", dropped("*[A for A in B if C]")
        ),
        Fault("arguments that overlap in memory are not refused", "_check_apart", never("A < B"), JIT),
    ),
    *File("zero/_sharded_step.py", on_processes("training")).faults(
        Fault("ranks compare values that a vmap batches", "ShardedStep._should_check", dropped("vmaps()")),
    ),
    *File("ranks/_spmd.py", JIT).faults(
        Fault("a vmap around a simulated mesh fails", "Spmd._by_vmap", dropped("is_outermost")),
    ),
    *File("graph/planning/_plan.py", ("tests/graph/test_plan.py",)).faults(
        Fault("every operation takes a workspace", "_workspace_bytes", dropped("A in PRODUCTS")),
    ),
    *File("graph/_trace_agreement.py", ("tests/graph/test_ops.py",)).faults(
        Fault("ranks with different GPU indices disagree on the graph", "_signature", bare("_DEVICE.sub(B, A)")),
    ),
    *File("graph/_trace_agreement.py", GRAPH).faults(
        Fault(
            "the order of operations is not in a schedule's digest",
            "digest_of_order",
            becomes("names = A", "names: list[str] = []"),
        ),
        Fault("loop bodies are not compared between the ranks", "signatures", dropped("*A(B.C, D)"), LOOPS),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault(
            "a donated argument that is returned is not copied before it is overwritten",
            "donate.copy_if_donated",
            always("not A & set(B.C[D])"),
        ),
        Fault("a result may lie in an argument that is already reused", "donate", bare("{*B, *A}")),
    ),
    *File("graph/passes/_rematerialize.py", GRAPH).faults(
        Fault("re-gathering counts a unit's bytes at each use", "_exceeds_reuse", always("A not in B")),
    ),
    *File("graph/passes/_collectives.py", GRAPH).faults(
        Fault(
            "a bucket joins collectives of different process groups", "_can_join", dropped("A.args[1:] == B.args[1:]")
        ),
        Fault("a bucket grows beyond bucket_bytes", "_groups", becomes("sum(map(A, [*B[-1], C]))", "A(C)")),
        Fault("a bucket joins a collective with one that depends on it", "bucket.may_join", dropped("not A(B, C, D)")),
        Fault("every member of a bucket gets the first member's result", "_coalesce", becomes("i", "0", at="6 of 6")),
    ),
    *File("graph/trace/_call_arguments.py", JIT).faults(
        Fault("numbers are not in the key of a trace", "call_key", becomes("(type(A), B)", "(type(A), None)")),
        Fault(
            "strides are not in the key of a trace",
            "call_key",
            becomes("arguments.A", "()", at="6 of 8"),
            ON_GLOO,
        ),
        Fault(
            "the path of a state's leaf is matched from its longest suffix",
            "block_numbers",
            becomes("range(len(A), -1, -1)", "range(len(A) + 1)"),
            SUBGRAPHS,
        ),
    ),
    *File("graph/passes/_rematerialize.py", GRAPH).faults(
        Fault("recompute repeats matrix products", "_repeats", becomes("A and B(C) and not D(C)", "A and not D(C)")),
        Fault("an item of a tuple counts as live while another item is", "_viewed", becomes("A(B) and not C", "A(B)")),
    ),
    *File("graph/passes/_cat_into.py", ("tests/graph/test_cat_into.py",)).faults(
        Fault("a part that is read elsewhere is written too", "_are_exclusive", never("len(made.users) > 1 or A")),
        Fault("all parts are written at the start", "_write_parts", becomes("A[x]", "0", at="2 of 2")),
        Fault("parts are written where memory is fuller before", "cat_into", dropped("_lowers_peak(A, B, C)")),
        Fault("cheap parts are written between a compiler's kernels", "_are_exclusive", dropped("fuses and A")),
    ),
    *File("graph/passes/_overwrite.py", SLICE_OF_GATHER).faults(
        Fault(
            "every rank takes the first part of a gathered buffer", "slice_of_gather", becomes("A[str(B.args[2])]", "0")
        ),
        Fault(
            "leaves in another order count as a buffer",
            "_first_of_buffer",
            (swapped("!=", "=="), becomes("list(A)", "[]")),
        ),
        Fault("any padding counts as the unit's padding", "_first_of_buffer", dropped("fills")),
        Fault(
            "leaves of several buffers count as one buffer", "_first_of_buffer", dropped("len({A(B) for B in C}) == 1")
        ),
        Fault("a concatenation that ends elsewhere counts as the old part", "_lies_in", bare("B == C and A")),
    ),
    *File("graph/_storages.py", SLICE_OF_GATHER).faults(
        Fault(
            "arguments in one buffer count twice",
            "storages_in",
            becomes("A(B, C, D[C], input_storages)", "A(B, C, D[C], {})"),
        ),
    ),
    *File("_torch/modules.py", BUFFERS).faults(
        Fault("leaves with a gap between them count as a buffer", "_buffer", never("A[B].storage_offset() != C")),
        Fault("leaves that do not fill their storage count as a buffer", "_buffer", always("fills")),
        Fault("transposed leaves count as a buffer", "_buffer", dropped("A[B].is_contiguous()")),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault("a gather writes into a leaf that is not contiguous", "_have_same_bytes", dropped("dense")),
        Fault("a gather whose buffer others read writes into leaves", "_writes", bare("B and A")),
        Fault("every leaf is written at the unit's first element", "_offset", becomes("A(B).C.storage_offset()", "0")),
    ),
    *File("graph/passes/_overwrite.py", GRAPH).faults(
        Fault("a sum overwrites a buffer that others read", "in_place", dropped("A[B] == [C]")),
        Fault("a sum overwrites an argument", "in_place", dropped("A.producers[B].op == 'call_function'")),
        Fault("a loop's sum is copied before it is read", "in_place", never("s in A"), LOOPS),
    ),
    *File("graph/_ops.py", OPS).faults(
        Fault("an empty buffer is made twice", "OPERATIONS", becomes("'empty_like': A | B", "'empty_like': A")),
        Fault("amax counts as a linear operation", "OPERATIONS", becomes("'amax': A", "'amax': A | LINEAR")),
        Fault(
            "constant_pad_nd lacks a trait in the table of operations",
            "OPERATIONS",
            becomes("'constant_pad_nd': A | B | C | D | E", "'constant_pad_nd': A | C | D | E"),
        ),
        Fault(
            "full is no factory in the table of operations",
            "OPERATIONS",
            becomes("'full': A | B | C | D", "'full': A | C | D"),
        ),
        Fault("an entry of the table names no operation of torch", "OPERATIONS", constant("bucketize", "bucketise")),
    ),
    *File("graph/_dump.py", PASS_MANAGER).faults(
        Fault(
            "a dump shows other settings than the chosen ones",
            "dump",
            becomes("A.B(settings)", "A.B(PassSettings(recompute=True, max_reuse_bytes=0, bucket_bytes=0))"),
        ),
        Fault("a second trace is dumped over the first", "dump_folder", never("traces")),
        Fault(
            "a dump keeps the files of an earlier one", "dump", becomes("[TRACED, *[A.name for A in B]]", "[TRACED]")
        ),
    ),
    *File("graph/loop/_insert_loops.py", LOOPS).faults(
        Fault(
            "a collective that nothing reads is kept",
            "_body",
            dropped("not A(B)"),
            ("tests/parallel/pipeline/test_plan.py",),
        ),
        Fault("sums of a loop start at 1", "_initial_sum", becomes("-0.0", "1.0")),
        Fault("sums of a loop start at 0.0, not at -0.0", "_initial_sum", becomes("-0.0", "0.0")),
        Fault("a value that changes by iteration is moved out of the loop", "_hoist", never("A not in B and C")),
        Fault(
            "a value that depends on the first micro-batch counts as equal in all",
            "_compare",
            dropped("depends_on_first"),
        ),
        Fault(
            "results of micro-batches are not compared",
            "_compare",
            becomes("A is not B.get(C, C) or C in varying", "A is None"),
        ),
        Fault(
            "random draws of the second recording stay in the graph",
            "_compare",
            becomes("reversed(A)", "reversed(second)"),
        ),
        Fault("sums of a loop do not have the strides of what is added", "_initial_sum", bare("(-B.stride(A), A)")),
    ),
    *File("graph/loop/_scan.py", LOOPS).faults(
        Fault("a mapped dimension stays in its place", "_mapped_first", always("A is None")),
    ),
    *File("graph/planning/_plan.py", LOOPS).faults(
        Fault("a plan counts one iteration of a loop", "list_operations", becomes("A.iterations", "1")),
    ),
    *File("transforms/_value_and_grad.py", LOOPS).faults(
        Fault("a differentiated batch is a loop", "_is_a_loop", dropped("not set(A) & set(B.argnums)")),
        Fault("micro-batches inside another derivative become a loop", "_is_a_loop", dropped("not A()")),
    ),
    *File("graph/passes/_loops.py", LOOPS).faults(
        Fault("every unit stays gathered between iterations", "hoist", dropped("sum(A.values()) - A[B] <= C")),
        Fault(
            "no unit stays gathered between iterations", "hoist", (swapped("<=", "<"), becomes("max_reuse_bytes", "0"))
        ),
        Fault("the bytes of a unit that stays gathered count twice", "_units", bare("B.setdefault(C(A, D), A)")),
        Fault(
            "the gather of a value that changes by iteration is moved out of the loop",
            "_units",
            becomes("A[:B.C.D]", "A[:1]"),
        ),
    ),
    *File("_torch/compiler.py", COMPILE).faults(
        Fault("Inductor's cache is not used", "_mode", dropped("shape_env=ShapeEnv()")),
        Fault(
            "a GPU's code waits for the CPU's vector instructions",
            "_compile",
            always("all(A.device.type == 'cpu' for A in B if C)"),
        ),
        Fault("a worker's cache key differs from the step's", "", becomes("copyreg.pickle", "str")),
        Fault(
            "Inductor is imported on a thread before Dynamo's import has ended",
            "_start_thread",
            skipped("A.import_module(B)"),
            ("tests/test_import.py",),
        ),
        Fault(
            "the workaround for GCC 11 and 12 is off",
            "_gcc_workaround",
            becomes("return A", "return {}"),
            ("tests/_torch/test_torch.py",),
        ),
        Fault(
            "code that is not valid C++ is compiled again with the same settings",
            "_compile",
            becomes("{**A, 'cpp.max_horizontal_fusion_size': 1}", "A"),
            ("tests/_torch/test_torch.py",),
        ),
        Fault(
            "the result of a segment does not have the traced strides",
            "_with_strides_of",
            always("A or B(C, D)"),
            BORDERS,
        ),
        Fault("a view is taken of a tensor with other strides", "_Reshaping.call_function", never("A in B"), BORDERS),
        Fault(
            "padding by a length fixes that length in the code",
            "_AtLength.call_function",
            never("A is B.default"),
            LENGTHS,
        ),
    ),
    *File("graph/planning/_phases.py", PLAN).faults(
        Fault("operations of the update are in the backward phase", "_find_phases", always("A in B", at="4 of 4")),
        Fault(
            "the forward pass of the next micro-batch is in the backward phase",
            "_find_phases",
            never("A in B and C(A)"),
        ),
    ),
    *File("graph/planning/_views.py", PLAN).faults(
        Fault("a summary lists each block on a line of its own", "_fold", constant(1, 99)),
        Fault("a summary counts one iteration's collectives", "_group_lines", bare("A * B.times"), LOOPS),
    ),
    *File("transforms/_accumulate.py", LOOPS).faults(
        Fault("numbers in aux are not compared", "_in_a_loop", skipped("A(B, C)")),
    ),
    *File("graph/_polynomials.py", LENGTHS).faults(
        Fault(
            "a size that grows with the square of the length is not fitted",
            "fit",
            skipped("A += B if C % D ** 2 == 0 else []"),
        ),
    ),
    *File("graph/_ir.py", PASS_MANAGER).faults(
        Fault("an operation may come before its argument", "check_order", never("not A.issuperset(B)")),
    ),
    *File("graph/_jit.py", PASS_MANAGER).faults(
        Fault(
            "a plan in given settings has the schedule that was chosen before", "Jitted.plan_as", bare("A.B(C).plan")
        ),
        Fault("a plan in given settings traces the step again", "Jitted.plan_as", always("A is None")),
    ),
    *File("graph/_jit.py", LENGTHS).faults(
        Fault(
            "each length of a batch gets a schedule of its own",
            "Jitted._at_length",
            bare("A.B(schedule_options=C.D(E.F.G))"),
        ),
        Fault(
            "a step with other options remembers the lengths of the old one",
            "Jitted.with_options",
            becomes("Jitted(A, B)", "Jitted(A, B, _lengths=self._lengths, _any_length=self._any_length)"),
        ),
        Fault(
            "with a memory_budget, the schedule of the first length is used for all",
            "Jitted._at_length",
            dropped("self.A.schedule_options.memory_budget is not None"),
            ANY_LENGTH,
        ),
        Fault(
            "calls that differ in a plain value count as other lengths",
            "Jitted._at_length",
            never("not A(B, C)"),
            ANY_LENGTH,
        ),
    ),
    *File("graph/_any_length.py", ANY_LENGTH).faults(
        Fault("a branch that a new length takes otherwise is not checked", "AnyLength.entry", never("not self.A(B)")),
        Fault(
            "tensors captured at different lengths need not be equal", "_formula", never("not all(A(B, C) for C in D)")
        ),
        Fault("arguments with other strides use the code of the first strides", "AnyLength.entry", never("forms != A")),
        Fault("stand-ins keep the sizes of the first length", "_rewrite", becomes("A.get(id(val), val)", "val")),
        Fault("flops are those of the first length", "_rewrite", skipped("A.meta.pop('flops', None)")),
        Fault(
            "ranks do not agree on whether a length needs a trace",
            "AnyLength._find",
            never("A is not None and A.distributed"),
            SLOW_ON_GLOO,
        ),
        Fault(
            "lengths that take another branch are used to fit the sizes",
            "_formula_and_lengths",
            becomes("[A for A in B if C(A.length)]", "[*B]"),
        ),
        Fault("a path with the length in its name is kept", "_TracedCall.structure", dropped("A.B", at="4 of 4")),
    ),
    *File("_torch/decisions.py", DECISIONS).faults(
        Fault("a rounded size is fitted by a polynomial", "_Operations._check", (swapped("or", "and"), bare("not A"))),
        Fault(
            "a comparison that fixes the length is ignored",
            "_Operations.check_not_fixed",
            never("self.symbol in self.env.replacements"),
        ),
        Fault("a length of 1 uses the code of other lengths", "decisions.holds", dropped("A >= 2")),
        Fault("a fractional size counts as a whole number", "_Operations._check", bare("torch.SymFloat | A")),
        Fault("every division of sizes counts as exact", "_simplified", bare("B.C and A")),
        Fault(
            "a number that a substitute ignores may follow the length",
            "_Substitutes.__torch_function__",
            never("any(A for B in tree_leaves((C, D)))"),
        ),
        Fault(
            "the number of comparisons has no limit",
            "_environment.Limited.evaluate_expr",
            never("len(self.guards) > A"),
        ),
    ),
]
