"""Faults in fzero/parallel/pipeline, in messages, and in a graph's regions."""

from tests.mutants.changes import always, bare, becomes, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File, on_processes

LAWS = ("tests/parallel/pipeline/test_equivalence.py",)
PLAN = ("tests/parallel/pipeline/test_plan.py",)
ERRORS = ("tests/parallel/pipeline/test_errors.py",)
AXES = ("tests/parallel/pipeline/test_axes.py",)
MESSAGES = ("tests/collectives/test_messages.py",)
PROCESSES = on_processes("pipeline")

MUTANTS = [
    *File("parallel/pipeline/_pipeline.py", LAWS).faults(
        Fault("micro-batches around a pipeline draw the same masks", "Pipeline._run_on_ranks.make_call", bare("B + A")),
        Fault(
            "every micro-batch of a pipeline draws the same masks",
            "Pipeline._run_on_ranks.make_call",
            becomes("A + B", "0 * B"),
        ),
        Fault(
            "the number of blocks is not compared with depth=",
            "Pipeline._block_counts",
            dropped("self.A not in (None, A, B)"),
            ERRORS,
        ),
        Fault(
            "stacked blocks pass for blocks where no mesh is given",
            "Pipeline.unstack.unstack_blocks",
            never("self.A not in (None, B)"),
            ERRORS,
        ),
        Fault(
            "a step may average over axes without the pipeline's",
            "Pipeline._run_on_ranks",
            becomes("self.axis not in [A.name for A in B()]", "self.axis in ()"),
            ERRORS,
        ),
    ),
    *File("parallel/pipeline/_model.py", LAWS).faults(
        Fault("the first block and the layers before it draw the same masks", "Model.run_block", bare("A + 1")),
        Fault("the loss is summed in half precision", "Model.run_last", bare("at_least_float32(A)")),
        Fault(
            "the stacked blocks of all ranks are accepted as one rank's",
            "_own_part",
            becomes("A.shape[:1] != (1,)", "not A.ndim"),
            ERRORS,
        ),
        Fault("every block draws the same mask", "Model.run_block", bare("B.C(A, D + 1)")),
        Fault("the ranks of a pipeline draw different numbers", "call_without_axis", dropped("A != B")),
        Fault(
            "a batch that does not divide into micro-batches is accepted",
            "take_micro_batch.part",
            never("remainder"),
            ERRORS,
        ),
    ),
    *File("parallel/pipeline/_block_placement.py", LAWS).faults(
        Fault(
            "the blocks of a pipeline stage are placed in reverse",
            "place_blocks",
            becomes("A[B] + C", "A[B] + len(block_slots[B]) - 1 - C"),
        ),
        Fault(
            "blocks are unstacked in the ranks' order, not in the model's",
            "BlockPlacement.positions",
            becomes("[A[B] for B in range(self.C)]", "A.values()"),
        ),
        Fault("idle slots count as blocks", "place_blocks", bare("A[:B[C]]")),
    ),
    *File("parallel/pipeline/_execution.py", LAWS).faults(
        Fault("a schedule's table is used although the gradient is differentiated", "run_on_ranks", dropped("A > 1")),
        Fault("an evaluation runs the backward pass", "run_on_ranks", always("A == 1")),
        Fault("a schedule's table ignores the loss scale", "_run_table", becomes("A = B()", "A = None")),
    ),
    *File("parallel/pipeline/_rank_recorder.py", LAWS).faults(
        Fault(
            "a jitted pipeline ignores the loss scale",
            "RankRecorder._record_stage",
            becomes("A(B, self.C)", "A(B, None)"),
            on_processes("pipeline", slow=True),
        ),
    ),
    *File("parallel/pipeline/_rank_executor.py", LAWS).faults(
        Fault(
            "gradients of a table are not divided by the loss scale",
            "RankExecutor.scaled_grads",
            always("self.A is None", at="2 of 2"),
        ),
        Fault("a micro-batch's gradient replaces the others", "RankExecutor._add_grads", bare("self.grads[B].add_(A)")),
        Fault(
            "gradients of a table ignore the outer derivative", "RankExecutor.scaled_grads", bare("A * B.to(A.dtype)")
        ),
        Fault(
            "residuals are kept after the backward pass",
            "RankExecutor._run_backward",
            becomes("self.vjp_fns.pop((A, B))", "self.vjp_fns[A, B]"),
        ),
        Fault(
            "the weight half of a backward pass adds no gradient",
            "RankExecutor._run_action",
            skipped("self.A(stage, B)"),
        ),
        Fault("the total is the last micro-batch's", "RankExecutor._run_forward", bare("B + A")),
        Fault(
            "gradients are kept after they are returned",
            "RankExecutor.scaled_grads",
            (bare("(A, self.grads)"), becomes("(self.grads, None)", "dict(self.grads)")),
            ERRORS,
        ),
    ),
    *File("parallel/pipeline/_ticks.py", LAWS).faults(
        Fault(
            "an unused input of a block has a gradient", "_MaskGradient.backward", bare("torch.where(condition, A, B)")
        ),
        Fault("a block that runs in a bubble has a gradient", "_run_chunk", bare("is_active & A")),
        Fault("the loss is summed over all pipeline stages", "run_ticks", becomes("torch.where(is_last, a, A)", "a")),
        Fault(
            "the weights of the loss are summed over all pipeline stages",
            "run_ticks",
            becomes("torch.where(is_last, w, A)", "w"),
        ),
        Fault("the first stage reads a received value", "_run_stages", becomes("in_bubble | A", "in_bubble")),
        Fault("an idle slot runs a block", "_run_chunk", becomes("number < 0", "number < -1")),
        Fault("the ticks do not check what a block returns", "_run_chunk", skipped("A('block', B, C)"), ERRORS),
        Fault("the last tick is left out", "_run_stages", becomes("range(A + B)", "range(A + B - 1)")),
        Fault("a block gets the next block's number", "_run_chunk", becomes("A.clamp(min=0)", "A.clamp(min=1)")),
    ),
    *File("parallel/pipeline/_model_checks.py", ERRORS).faults(
        Fault("a tie between blocks is not refused", "check_untied", never("block != A")),
        Fault("a negative number of blocks", "check_depth", becomes("A >= 0", "A >= -9")),
    ),
    *File("parallel/pipeline/_pipeline_split.py", ERRORS).faults(
        Fault("the split of a stacked leaf is one dimension off", "PipelineSplit.__call__", bare("A + 1"), AXES),
        Fault("a batch is split over a pipeline's axis", "PipelineSplit.pipeline_axes", dropped("self.axis"), LAWS),
    ),
    *File("sharding/elements/_leaf_ids.py", LAWS).faults(
        Fault("the values of idle slots count in a norm", "_zero_unused_items", returns("x", at="2 of 2")),
    ),
    *File("graph/_trace_agreement.py", PROCESSES).faults(
        Fault(
            "ranks that differ in a permutation count as disagreeing",
            "_describe_exchange",
            always("len({*A, *B}) <= 1 and sum(B)"),
        ),
        Fault(
            "ranks of different pipeline stages compare their graphs",
            "_compare_ranks",
            becomes("A or 'no pipeline'", "'no pipeline'"),
        ),
    ),
    *File("parallel/pipeline/_stage_functions.py", LAWS).faults(
        Fault(
            "only the first stage uses the leaves outside the blocks",
            "PipelineStages.uses",
            (swapped("in", "=="), becomes("(0, self.A)", "0")),
        ),
    ),
    *File("parallel/pipeline/_value_specs.py", LAWS).faults(
        Fault("a block may return a tensor of another form", "check_output", never("A != B or C[0] != C[1]"), ERRORS),
    ),
    *File("axes/lockstep.py", MESSAGES).faults(
        Fault("a message is sent without a copy", "send", bare("A().clone", at="2 of 2")),
        Fault("messages are received in reverse", "receive", becomes("A.messages[B].popleft", "A.messages[B].pop")),
        Fault("a message of another shape is accepted", "receive", dropped("A.shape != B.shape")),
        Fault("a message that nobody received is not reported", "run", skipped("A(B.values())")),
    ),
    *File("graph/loop/_insert_loops.py", PROCESSES).faults(
        Fault(
            "the sums of a pipeline's iteration are not in the order of their additions",
            "_find_iteration",
            becomes("A[1]", "A[0]"),
        ),
        Fault("a gather that this rank does not read is dropped from its graph", "_make_body", dropped("*A(B.C)")),
    ),
    *File("graph/passes/_send_early.py", PLAN).faults(
        Fault("the messages of an iteration are not sent first", "send_early", never("A[0].args[0] == 'B'")),
    ),
    *File("graph/_pass_manager.py", PLAN).faults(
        Fault("every pipeline sends early", "PASSES", becomes("() if A.send_early or B.C else None", "()")),
        Fault(
            "a schedule that splits backward passes sends late",
            "PassManager.body",
            becomes("A.splits_backward", "False"),
        ),
    ),
    *File("graph/_candidates.py", PLAN).faults(
        Fault("sending early is never tried", "_may_send_early", returns("False")),
    ),
    *File("graph/loop/_pipeline_function.py", PROCESSES).faults(
        Fault("a residual is freed after its first reader", "_Iterations.run", becomes("self.readers[A]", "1")),
    ),
    *File("graph/loop/_split.py", PLAN).faults(
        Fault("a value that is recomputed is also kept", "_RegionSplitter.__init__", skipped("self.duplicates.add(A)")),
    ),
    *File("graph/loop/_loop_memory.py", PLAN).faults(
        Fault("plans forget what is in flight", "_RankWalk._retain", skipped("self.A += B")),
        Fault("plans forget messages", "_RankWalk.run", becomes("self.A(B(C))", "B(C)"), PROCESSES),
        Fault(
            "the seconds of a pipeline leave out its bubbles", "pipeline_seconds", becomes("A.makespan", "A.busy[0]")
        ),
    ),
    *File("graph/passes/scheduling/_prefetches.py", PLAN).faults(
        Fault("a gather starts ahead in another region of a pipeline", "next_gathers", never("A.target is B")),
    ),
    *File("graph/passes/_regather.py", PLAN).faults(
        Fault(
            "a unit stays gathered between two regions of a pipeline",
            "_exceeds_reuse",
            never("A.region_index[B] != A.region_index[C]"),
        ),
    ),
    *File("graph/passes/_hoist.py", PLAN).faults(
        Fault(
            "the gathers of a pipeline's regions are moved out of the loop",
            "_loop_nodes",
            dropped("A.rank_schedule is None"),
        ),
    ),
    *File("graph/loop/_rank_schedule.py", PLAN).faults(
        Fault(
            "the weight half of a backward pass comes before the input half",
            "LoopRegion.precedes",
            never("other.kind == 'I' and A"),
        ),
    ),
    *File("graph/passes/_bucket.py", AXES).faults(
        Fault("a bucket joins collectives of two regions", "bucket.together", returns("True")),
    ),
    *File("graph/_one_rank.py", PLAN).faults(
        Fault("every rank's plan is the first rank's", "_PlannedDeviceMesh.get_local_rank", returns("0")),
    ),
]
