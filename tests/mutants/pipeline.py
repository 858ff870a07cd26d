"""Faults in fzero/parallel/pipeline, in messages, and in a graph's phases."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

LAWS = ("tests/parallel/pipeline/test_equivalence.py",)
PLAN = ("tests/parallel/pipeline/test_plan.py",)
ERRORS = ("tests/parallel/pipeline/test_errors.py",)
AXES = ("tests/parallel/pipeline/test_axes.py",)
MESSAGES = ("tests/collectives/test_messages.py",)
PROCESSES = ("tests/distributed/test_gloo.py::test_gloo_processes[pipeline-2]",)

MUTANTS = [
    *File("parallel/pipeline/_pipeline.py", LAWS).faults(
        Fault("accumulation around draws the same masks again", "Pipeline._run.call_of", bare("B + A")),
        Fault("micro-batches of a pipeline draw alike", "Pipeline._run.call_of", becomes("A + B", "0 * B")),
        Fault("depth is not compared", "Pipeline._counts", dropped("self.A not in (None, A, B)"), ERRORS),
        Fault(
            "the mean may leave the pipeline out",
            "Pipeline._run",
            becomes("self.axis not in [A.name for A in B()]", "self.axis in ()"),
            ERRORS,
        ),
    ),
    *File("parallel/pipeline/_model.py", LAWS).faults(
        Fault("the first block draws the masks of what comes first", "Model.run_block", bare("A + 1")),
        Fault("a total stays in half precision", "Model.run_last", bare("A.to(torch.promote_types(A.dtype, B))")),
        Fault(
            "blocks of all ranks pass for one's own", "_own_part", becomes("A.shape[:1] != (1,)", "not A.ndim"), ERRORS
        ),
        Fault("blocks of another order", "place_blocks", becomes("A[B] + C", "A[B] + len(slots[B]) - 1 - C")),
        Fault(
            "blocks are unstacked rank by rank",
            "BlockPlacement.slot_of_block",
            becomes("[A[B] for B in range(self.C)]", "A.values()"),
        ),
        Fault("idle slots are blocks", "place_blocks", bare("A[:B[C]]")),
        Fault("all blocks draw one mask", "Model.run_block", bare("B.C(A, D + 1)")),
        Fault("ranks of a pipeline draw apart", "without_axis", dropped("A != B")),
        Fault("a part that does not divide", "micro_batch_of.part", never("remainder"), ERRORS),
    ),
    *File("parallel/pipeline/_execution.py", LAWS).faults(
        Fault("second derivatives by the table", "run_on_ranks", dropped("A > 1")),
        Fault("evaluation runs backward", "run_on_ranks", always("A == 1")),
        Fault("a table forgets the loss scale", "run_table", becomes("A = B()", "A = None")),
        Fault(
            "a loss scale stays in the gradients", "_RowExecutor.scaled_grads", always("self.A is None", at="2 of 2")
        ),
        Fault("a graph forgets the loss scale", "RowRecorder._stage", becomes("A(B, self.C)", "A(B, None)"), PROCESSES),
        Fault("a micro-batch's gradient replaces the others", "_RowExecutor._add", bare("self.grads[B].add_(A)")),
        Fault("gradients are handed out unscaled", "_RowExecutor.scaled_grads", bare("A * B.to(A.dtype)")),
        Fault(
            "residuals are kept", "_RowExecutor._backward", becomes("self.vjp_fns.pop((A, B))", "self.vjp_fns[A, B]")
        ),
        Fault("the second half adds nothing", "_RowExecutor._act", skipped("self.A(stage, B)")),
        Fault("sums keep the last total", "_RowExecutor._forward", bare("B + A")),
        Fault(
            "a loss hands its gradients out again",
            "_RowExecutor.scaled_grads",
            (bare("(A, self.grads)"), becomes("(self.grads, None)", "dict(self.grads)")),
            ERRORS,
        ),
    ),
    *File("parallel/pipeline/_execution.py", LAWS).faults(
        Fault("what has no use has a gradient", "_MaskGradient.backward", bare("torch.where(condition, A, B)")),
        Fault("a bubble's block has a gradient", "_run_stages", bare("is_active & A")),
        Fault("the loss counts on all ranks", "run_ticks", becomes("torch.where(is_last, a, A)", "a")),
        Fault("weights count on all ranks", "run_ticks", becomes("torch.where(is_last, w, A)", "w")),
        Fault("bubbles take what arrived", "_run_stages", bare("(B[C] <= 0) | A | (D >= E)")),
        Fault("idle slots run", "_run_stages", becomes("A[B] < 0", "A[B] < -1")),
        Fault("ticks hand on what blocks make of it", "_run_stages", skipped("A('block', B, C)"), ERRORS),
        Fault("a tick too few", "_run_stages", becomes("range(A + B)", "range(A + B - 1)")),
        Fault("blocks are told another number", "_block", constant(0, 1)),
    ),
    *File("parallel/pipeline/_checks.py", ERRORS).faults(
        Fault("ties of blocks are parted", "check_untied", never("block != A")),
        Fault("a negative number of blocks", "check_depth", becomes("A(B, 0)", "A(B, -9)")),
        Fault("stacked leaves shift no dimension", "PipelineSplit.__call__", bare("A + 1"), AXES),
        Fault("a pipeline has data of its own", "PipelineSplit.pipeline_axes", dropped("self.axis"), LAWS),
    ),
    *File("sharding/_segments.py", LAWS).faults(
        Fault("idle slots count", "_zero_unused_items", returns("x", at="2 of 2")),
    ),
    *File("graph/_agree.py", PROCESSES).faults(
        Fault("a permutation is every rank's", "_permuted", always("len({*A, *B}) <= 1 and sum(B)")),
        Fault("ranks compare their stages with all", "agree", becomes("A or 'no pipeline'", "'no pipeline'")),
    ),
    *File("parallel/pipeline/_stages.py", LAWS).faults(
        Fault("the first stage alone uses the rest", "Stages.uses", (swapped("in", "=="), becomes("(0, self.A)", "0"))),
        Fault("blocks may change what they hand on", "check_same_form", never("A != B or C[0] != C[1]"), ERRORS),
    ),
    *File("axes/lockstep.py", MESSAGES).faults(
        Fault("a message is not kept", "send", bare("A().clone", at="2 of 2")),
        Fault("the last message goes first", "receive", becomes("A.messages[B].popleft", "A.messages[B].pop")),
        Fault("another shape is taken", "receive", dropped("A.shape != B.shape")),
        Fault("what nobody received is forgotten", "run", skipped("A(B.values())")),
    ),
    *File("graph/loop/_insert_loops.py", PROCESSES).faults(
        Fault("sums of a stage are in another order", "_iteration_of", becomes("A[1]", "A[0]")),
        Fault("what a rank does not read is not gathered", "_body", dropped("*A(B.C)")),
        Fault("weights before what is sent", "insert_loops", skipped("A(start)"), PLAN),
    ),
    *File("graph/loop/_run.py", PROCESSES).faults(
        Fault("residuals are read once", "_Iterations.run", becomes("self.readers[A]", "1")),
    ),
    *File("graph/loop/_split.py", PLAN).faults(
        Fault("what is made anew is held", "_PhaseSplitter.__init__", skipped("self.duplicates.add(A)")),
        Fault("a draw is made anew", "_PhaseSplitter.__init__", becomes("A(B) or C(B) or D(B)", "A(B) or C(B)")),
    ),
    *File("graph/loop/_memory.py", PLAN).faults(
        Fault("plans forget what is in flight", "_RowWalk._retain", skipped("self.A += B")),
        Fault("plans forget messages", "_RowWalk.run", becomes("self.A(B(C))", "B(C)"), PROCESSES),
        Fault("a pipeline takes its work's time", "pipeline_seconds", becomes("A.makespan", "A.busy[0]")),
    ),
    *File("graph/passes/_schedule.py", PLAN).faults(
        Fault("a gather starts in another pass", "next_gathers", never("A.target is B")),
    ),
    *File("graph/passes/_rematerialize.py", PLAN).faults(
        Fault("a unit stays between two passes", "_exceeds_reuse", never("A.passes[B] != A.passes[C]")),
    ),
    *File("graph/passes/_loops.py", PLAN).faults(
        Fault("what a pass gathers is gathered once a step", "_loops", dropped("A.rank_schedule is None")),
    ),
    *File("graph/loop/_rank_schedule.py", PLAN).faults(
        Fault(
            "weights' gradients come before what goes on backward", "Phase.precedes", never("other.kind == 'I' and A")
        ),
    ),
    *File("graph/passes/_collectives.py", AXES).faults(
        Fault("buckets pass the end of a phase", "bucket.together", returns("True")),
    ),
    *File("graph/_one_rank.py", PLAN).faults(
        Fault("every rank's plan is the first's", "_PlannedDeviceMesh.get_local_rank", returns("0")),
    ),
]
