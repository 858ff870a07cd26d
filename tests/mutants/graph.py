"""Faults in fzero/graph, but for its passes and its run."""

from tests.mutants.changes import (
    after,
    always,
    bare,
    becomes,
    constant,
    dropped,
    in_symbol,
    negated,
    never,
    returns,
    skipped,
    swapped,
)
from tests.mutants.mutant import (
    DONATION,
    IN_PLACE,
    JIT,
    JIT_ON_GLOO,
    LENGTHS,
    LIVE_RANGES,
    LOOP_PLANS,
    LOOPS,
    OPS,
    PASS_MANAGER,
    SLICE_OF_GATHER,
    SLOW_JIT_ON_GLOO,
    UNROLLED,
    Fault,
    File,
    on_processes,
)

LONE_COLLECTIVES = ("tests/graph/passes/test_lone_collectives.py",)
FUSED = ("tests/graph/passes/test_fused.py",)
RECAST = ("tests/graph/passes/test_recast.py",)
COLLECTOR = ("tests/graph/test_collector.py",)
CARRY = ("tests/graph/passes/test_carry.py",)
PLAN = ("tests/graph/test_plan.py",)
SUBGRAPHS = ("tests/graph/planning/test_subgraphs.py",)
ANY_LENGTH = ("tests/graph/test_any_length.py",)
CASTS = ("tests/graph/trace/test_casts.py",)
WRITES = ("tests/graph/trace/test_in_place.py",)
WORKSPACE = ("tests/graph/planning/memory/test_workspaces.py",)
ALLOCATOR = ("tests/graph/planning/memory/test_caching_allocator.py",)

BUCKETS = ("tests/graph/passes/test_collectives.py",)
OVERWRITE = ("tests/graph/passes/test_overwrite.py",)
ORDER = ("tests/graph/passes/test_schedule.py",)


JIT_DONATION = ("tests/graph/test_jit_donation.py",)

MUTANTS = [
    *File("graph/_entry.py", ("tests/graph/test_jit.py", "-k", "without_memory")).faults(
        Fault("tensors without memory are said to share it", "Entry.run", skipped("A.check_real()")),
    ),
    *File("graph/_entry.py", DONATION).faults(
        Fault("collectives over one rank are not dropped", "_one_rank_groups", constant(1, 0), LONE_COLLECTIVES),
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
        Fault("a call does not check that captured tensors are still alive", "Entry.run", skipped("A(constants)")),
        Fault(
            '"inductor-whole" gets graphs with in-place writes',
            "_pass_context",
            (never("A.backend == 'inductor-whole'"), in_symbol("_trace_step", never("A.backend == 'inductor-whole'"))),
            SLOW_JIT_ON_GLOO,
        ),
        Fault(
            "a slot of a donated box prints as if it were alive",
            "Entry._mark_boxes_donated",
            becomes("A | B | C", "A | C"),
        ),
    ),
    *File("graph/planning/memory/_live_ranges.py", WORKSPACE).faults(
        Fault("operands of other iterations take no memory", "_pending_ranges", never("A(B)", at="2 of 3"), CARRY),
        Fault(
            "what an iteration leaves behind is counted twice",
            "_unlabeled_ranges",
            skipped("A[B] += 1"),
            SLOW_JIT_ON_GLOO,
        ),
        Fault(
            "an iteration's unfinished reductions end with the iteration",
            "_completed_collectives",
            never("A.op == 'output'"),
            CARRY,
        ),
        Fault(
            "the input of a collective is freed before it completes",
            "_last_uses",
            skipped("used_storages += A.read_by(B(C))"),
            LIVE_RANGES,
        ),
        Fault("a kernel's workspace is not in the peak", "_unlabeled_ranges", returns("ranges"), OVERWRITE),
        Fault("a loop's iterations take no memory", "_extra_ranges", becomes("A(loop)", "0"), LOOP_PLANS),
    ),
    *File("graph/planning/memory/_storage_kinds.py", WORKSPACE).faults(
        Fault(
            "sums of gradients are listed as activations",
            "_find_kind",
            bare("A or B in C or any(D in C for D in E)"),
            LOOP_PLANS,
        ),
    ),
    *File("graph/planning/memory/_workspaces.py", WORKSPACE).faults(
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
                in_symbol("_promoted_bytes", becomes("any(A for B in operands)", "not operands")),
            ),
        ),
        Fault("the copy of a convolution's operand is not counted", "workspace_bytes", returns("0", at="4 of 6")),
    ),
    *File("graph/planning/_fused_values.py", WORKSPACE).faults(
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
    ),
    *File("graph/_pass_manager.py", PASS_MANAGER).faults(
        Fault(
            "the mark of a fused node is not compared", "_are_alike", dropped("(A in B.meta) == (A in C.meta)"), FUSED
        ),
        Fault(
            "the budget of a loop's body counts the body's own peak as memory around it",
            "_budget_in_body",
            bare("A - B(C)"),
            LOOP_PLANS,
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
            "a pass is run again for settings that do not change it",
            "PassManager._apply_cached",
            always("key not in self.A"),
        ),
        Fault("passes with different arguments share a result", "PassManager._apply_cached", dropped("arguments")),
        Fault("two graphs with equally many nodes count as equal", "_are_equal", becomes("all(A)", "True")),
        Fault(
            "the body of a loop does not overwrite its sums",
            "PassManager.body",
            becomes("A.B(..., overwrites=C.D, donated=tuple(C.E))", "A.B(..., overwrites=(), donated=())"),
            LOOP_PLANS,
        ),
        Fault(
            "the budget of a loop's body ignores the memory outside the loop",
            "_budget_in_body",
            bare("A - around"),
            LOOP_PLANS,
        ),
    ),
    *File("graph/_schedule_options.py", JIT).faults(
        Fault("`jit` takes a schedule option that is not a number", "_Domain.validated", always("float(A) >= 0")),
    ),
    *File("graph/ir/_node_order.py", BUCKETS).faults(
        Fault(
            "a node whose operands come later is listed at the end",
            "sort_graph",
            (
                after("for A in B.nodes: ...", "order |= dict.fromkeys(sort_by_needs(list(B.nodes), {}))"),
                becomes("[A]", "[A] if all(a in order for a in A.all_input_nodes) else []"),
            ),
        ),
    ),
    *File("graph/ir/_collective_sizes.py", BUCKETS).faults(
        Fault("a collective's bytes leave out the padding", "_full_size", never("A(B)"), OVERWRITE),
    ),
    *File("graph/_candidates.py", RECAST).faults(
        Fault("recast is kept wherever it changes something", "_add_recast", dropped("A.B < C.B")),
        Fault("recast=True is ignored", "_add_recast", never("A.B is True")),
        Fault("recast=False is ignored", "_add_recast", never("A.B is False")),
        Fault(
            "candidates that carry no reduction across iterations are listed as if they did",
            "_add_carried",
            dropped("A(B.graph)"),
            CARRY,
        ),
        Fault(
            "in_flight is not tried for reductions within loops",
            "candidates",
            becomes("(A(B) for C in D(E) for B in C.nodes)", "(A(B) for B in E.nodes)"),
            CARRY,
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
        Fault(
            "a write into a part of a tensor does not count as a write into the tensor",
            "_view_base",
            bare("A or B(C)"),
            LOOPS,
        ),
    ),
    *File("graph/trace/_replace_writes.py", IN_PLACE).faults(
        Fault("writes into views are replaced in place", "_is_fresh", dropped("A[B][0] not in C"), WRITES),
        Fault(
            "a write of another dtype keeps its dtype", "_pure_counterpart", always("A(B) == A(C.meta['val'])"), WRITES
        ),
        Fault(
            "a value is read as it was before a write",
            "replace_writes",
            (swapped("is not", "is"), becomes("a", "None", at="7 of 8")),
            WRITES,
        ),
        Fault("a write of another size is not refused", "_pure_counterpart", never("A(B) != A(C)"), WRITES),
    ),
    *File("graph/trace/_trace.py", CASTS).faults(
        Fault("a value of another trace is not refused", "_check_constants", never("A.op == 'get_attr'"), IN_PLACE),
        Fault("numbers that a loss makes count as captured tensors", "_lift_constants", bare("B(C, D) or A"), LOOPS),
        Fault("0.0 and -0.0 become one constant", "_literal_key", becomes("repr(A.tolist())", "A.sum().item()"), LOOPS),
        Fault(
            "a cast and its cast back are not removed",
            "_erase_round_trips",
            becomes("A and not B and C", "False and C"),
        ),
        Fault("a cast that rounds is removed with its cast back", "_holds_all", always("A and B != C")),
        Fault("a result shares an argument's memory", "_erase_round_trips", dropped("not is_result")),
        Fault("a view is not moved behind its new source", "_erase_round_trips", becomes("A[1:]", "()")),
    ),
    *File("graph/_collector.py", COLLECTOR).faults(
        Fault("the garbage collector stays off after a trace", "pause_collector", negated("A")),
        Fault("the garbage collector runs during a trace", "pause_collector", skipped("gc.disable()")),
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
        Fault("arguments that overlap in memory are not refused", "_check_apart", never("A < B"), JIT_DONATION),
    ),
    *File("zero/_sharded_step.py", on_processes("training")).faults(
        Fault("ranks compare values that a vmap batches", "ShardedStep._should_check", dropped("vmaps()")),
    ),
    *File("ranks/_spmd.py", JIT).faults(
        Fault("a vmap around a simulated mesh fails", "Spmd._run_by_vmap", dropped("is_outermost")),
    ),
    *File("graph/planning/_plan.py", ("tests/graph/test_plan.py",)).faults(
        Fault("every operation takes a workspace", "_workspace_bytes", dropped("A in _PRODUCTS")),
    ),
    *File("graph/planning/memory/_caching_allocator.py", ALLOCATOR).faults(
        Fault("free blocks beside each other stay apart", "_Pool.release", never("A is not None and A.free")),
        Fault("what is left of a large block is always given back", "_Pool.allocate", becomes("A > _MB", "A >= 512")),
        Fault(
            "a segment that can grow keeps its free end unused",
            "_Pool._grow_segment",
            never("A is not None and A.free"),
        ),
        Fault(
            "the block that can grow is taken before others", "_Pool._best_fit", never("self.expandable and A and B")
        ),
        Fault("blocks are as large as what was asked for", "_Allocator.allocate", bare("max(_round_up(A, B), C)")),
        Fault("storages are freed before their operation's others are made", "simulate_allocator", constant(2, 1)),
    ),
    *File("graph/_trace_agreement.py", ("tests/graph/test_ops.py",)).faults(
        Fault("ranks with different GPU indices disagree on the graph", "_node_signature", bare("_DEVICE.sub(B, A)")),
    ),
    *File("graph/_trace_agreement.py", ORDER).faults(
        Fault(
            "the order of operations is not in a schedule's digest",
            "_collective_order_digest",
            becomes("names = A", "names: list[str] = []"),
        ),
        Fault("loop bodies are not compared between the ranks", "_node_signatures", dropped("*A(B.C, D)"), LOOP_PLANS),
    ),
    *File("graph/trace/_call_arguments.py", JIT).faults(
        Fault(
            "the path of a state's leaf is matched from its longest suffix",
            "block_numbers",
            becomes("range(len(A), -1, -1)", "range(len(A) + 1)"),
            SUBGRAPHS,
        ),
    ),
    *File("graph/trace/_call_key.py", JIT).faults(
        Fault("numbers are not in the key of a trace", "call_key", becomes("(type(A), B)", "(type(A), None)")),
        Fault(
            "strides are not in the key of a trace",
            "call_key",
            becomes("arguments.A", "()", at="6 of 8"),
            JIT_ON_GLOO,
        ),
    ),
    *File("graph/ir/_storages.py", SLICE_OF_GATHER).faults(
        Fault(
            "arguments in one buffer count twice",
            "storages_in",
            becomes("A(B, C, D[C], input_storages)", "A(B, C, D[C], {})"),
        ),
    ),
    *File("graph/ir/_ops.py", OPS).faults(
        Fault("a random draw may be repeated in the backward pass", "is_known_cheap", dropped("not A(B)")),
        Fault("an empty buffer is made twice", "_OPERATIONS", becomes("'empty_like': A | B", "'empty_like': A")),
        Fault("amax counts as a linear operation", "_OPERATIONS", becomes("'amax': A", "'amax': A | _LINEAR")),
        Fault(
            "constant_pad_nd lacks a trait in the table of operations",
            "_OPERATIONS",
            becomes("'constant_pad_nd': A | B | C | D | E", "'constant_pad_nd': A | C | D | E"),
        ),
        Fault(
            "full is no factory in the table of operations",
            "_OPERATIONS",
            becomes("'full': A | B | C | D", "'full': A | C | D"),
        ),
        Fault("an entry of the table names no operation of torch", "_OPERATIONS", constant("bucketize", "bucketise")),
    ),
    *File("graph/_dump.py", PASS_MANAGER).faults(
        Fault(
            "a dump shows other settings than the chosen ones",
            "dump",
            becomes("A.B(settings)", "A.B(PassSettings(recompute=True, max_reuse_bytes=0, bucket_bytes=0))"),
        ),
        Fault("a second trace is dumped over the first", "dump_folder", never("traces")),
        Fault(
            "a dump keeps the files of an earlier one", "dump", becomes("[_TRACED, *[A.name for A in B]]", "[_TRACED]")
        ),
    ),
    *File("graph/loop/_insert_loops.py", LOOPS).faults(
        Fault(
            "a collective that nothing reads is kept",
            "_make_body",
            dropped("not A(B)"),
            ("tests/parallel/pipeline/test_plan.py",),
        ),
        Fault("sums of a loop start at 1", "_add_initial_sum", becomes("-0.0", "1.0")),
        Fault("sums of a loop start at 0.0, not at -0.0", "_add_initial_sum", becomes("-0.0", "0.0")),
        Fault(
            "a value that changes by iteration is moved out of the loop",
            "_hoist_slices",
            never("A not in B and C"),
            UNROLLED,
        ),
        Fault(
            "a value that depends on the first micro-batch counts as equal in all",
            "_match_nodes",
            dropped("depends_on_first"),
            UNROLLED,
        ),
        Fault(
            "results of micro-batches are not compared",
            "_match_nodes",
            becomes("A is not B.get(C, C) or C in varying", "A is None"),
            UNROLLED,
        ),
        Fault(
            "random draws of the second recording stay in the graph",
            "_remove_second_run",
            becomes("not A.users", "not A.users and not is_random(A)"),
        ),
        Fault("sums of a loop do not have the strides of what is added", "_add_initial_sum", bare("(-B.stride(A), A)")),
    ),
    *File("graph/loop/_loop_marks.py", LOOPS).faults(
        Fault("a mapped dimension stays in its place", "_mapped_first", always("A is None")),
    ),
    *File("graph/planning/_plan.py", LOOP_PLANS).faults(
        Fault("a plan counts one iteration of a loop", "_list_operations", becomes("A.iterations", "1")),
    ),
    *File("transforms/_value_and_grad.py", UNROLLED).faults(
        Fault("a differentiated batch is a loop", "_is_a_loop", dropped("not set(A) & set(B.argnums)")),
        Fault("micro-batches inside another derivative become a loop", "_is_a_loop", dropped("not A()")),
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
        Fault("a summary lists each block on a line of its own", "_fold_names", constant(1, 99)),
        Fault("a summary counts one iteration's collectives", "_group_lines", bare("A * B.times"), LOOP_PLANS),
    ),
    *File("transforms/_accumulate.py", UNROLLED).faults(
        Fault("numbers in aux are not compared", "_record_iteration", skipped("A(B, C)")),
    ),
    *File("graph/_polynomials.py", LENGTHS).faults(
        Fault(
            "a size that grows with the square of the length is not fitted",
            "_fit_polynomial",
            skipped("A.append(Polynomial(0, 0, B))"),
        ),
    ),
    *File("graph/ir/_node_order.py", PASS_MANAGER).faults(
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
            "Jitted._find_entry_at_length",
            bare("A.B(schedule_options=C.D(E.F.G))"),
        ),
        Fault(
            "a step with other options remembers the lengths of the old one",
            "Jitted.with_options",
            becomes("Jitted(A, B)", "Jitted(A, B, _lengths=self._lengths, _any_length=self._any_length)"),
        ),
        Fault(
            "with a memory_budget, the schedule of the first length is used for all",
            "Jitted._find_entry_at_length",
            dropped("self.A.schedule_options.memory_budget is not None"),
            ANY_LENGTH,
        ),
        Fault(
            "calls that differ in a plain value count as other lengths",
            "Jitted._find_entry_at_length",
            never("not A(B, C)"),
            ANY_LENGTH,
        ),
    ),
    *File("graph/_any_length.py", ANY_LENGTH).faults(
        Fault("a branch that a new length takes otherwise is not checked", "AnyLength.entry", never("not self.A(B)")),
        Fault(
            "tensors captured at different lengths need not be equal",
            "_fit_calls",
            never("not all(A(B, C) for C in D)"),
        ),
        Fault("arguments with other strides use the code of the first strides", "AnyLength.entry", never("sizes != A")),
        Fault(
            "ranks do not agree on whether a length needs a trace",
            "AnyLength._find_formula",
            never("A is not None and A.distributed"),
            SLOW_JIT_ON_GLOO,
        ),
        Fault(
            "lengths that take another branch are used to fit the sizes",
            "_formula_and_lengths",
            becomes("[A for A in B if C(A.length)]", "[*B]"),
        ),
        Fault("a path with the length in its name is kept", "_TracedCall.structure", dropped("A.B", at="4 of 4")),
    ),
    *File("graph/_length_formula.py", ANY_LENGTH).faults(
        Fault(
            "stand-ins keep the sizes of the first length", "_copy_with_numbers", becomes("A.get(id(val), val)", "val")
        ),
        Fault("flops are those of the first length", "_copy_with_numbers", skipped("A.meta.pop('flops', None)")),
    ),
]
