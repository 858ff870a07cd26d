"""Faults in what knows that blocks are stacked by rank: checkpoints, optimizers, evaluation, tools."""

from tests.mutants.changes import always, bare, becomes, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

CHECKPOINT = ("tests/checkpoint/test_pipelines.py",)
TOOLS = ("tests/parallel/pipeline/test_tools.py",)
OUTPUTS = ("tests/parallel/pipeline/test_outputs.py",)
ERRORS = ("tests/parallel/pipeline/test_errors.py",)
PLAN = ("tests/parallel/pipeline/test_plan.py",)
OPTIMIZERS = ("tests/parallel/pipeline/test_equivalence.py", "-k", "optimizers_see")
NN = ("tests/nn/test_pipeline.py", "-k", "hugging")
TESTING = ("tests/test_testing.py", "-k", "pipelined")
PROCESSES = ("tests/distributed/test_gloo.py::test_gloo_processes[pipeline-2]",)

MUTANTS = [
    *File("parallel/pipeline/_checks.py", ERRORS).faults(
        Fault("items are told by rank", "PipelineSplit.stacked", bare("tuple(zip(*A, strict=True))")),
        Fault("leaves need not be stacked", "PipelineSplit.__call__", never("A.shape[0] != B(self.axis)")),
        Fault("states are stacked as they are", "map_blocks", becomes("A(B)(C(B))", "B[name]"), TOOLS),
    ),
    *File("sharding/_units.py", CHECKPOINT).faults(
        Fault("blocks have no numbers", "_unit", becomes("A.get(B)", "None")),
    ),
    *File("zero/_checks.py", ERRORS).faults(
        Fault("another schedule's blocks will do", "_check_stacked", never("A != B.C")),
    ),
    *File("parallel/pipeline/_pipeline.py", OUTPUTS).faults(
        Fault("each stage may have a batch", "Pipeline._run", bare("B(batch, A)"), ERRORS),
        Fault("outputs keep a graph", "Pipeline.outputs.outputs", becomes("with torch.no_grad(): ...", "if True: ...")),
        Fault("outputs of the loss", "Pipeline.outputs", bare("replace(A, last=B)")),
    ),
    *File("sharding/_spec.py", TOOLS).faults(
        Fault("a list whose name ends alike is taken", "prefix_of", bare("f'.{A}'"), CHECKPOINT),
        Fault("a block's path is the rank's", "path_on_rank", becomes("A.B(C)", "B")),
        Fault("all blocks are the first", "path_on_rank", becomes("A[B[0].axis]", "0 * A[B[0].axis]")),
    ),
    *File("checkpoint/_local_tree.py", CHECKPOINT).faults(
        Fault("each row is of the first item", "parts_of", becomes("(A, False)", "(any_number, False)")),
        Fault("idle slots are leaves", "parts_of", becomes("(A, True)", "(A, False)")),
        Fault("copies of tied leaves are several", "parts_of", never("is_copy")),
        Fault("tp cuts another dimension", "parts_of", bare("A - 1")),
        Fault("blocks come by rank", "in_order.sort_key", becomes("A.B", "0", at="4 of 5")),
        Fault("a list by another name", "parts_of", never("item is None")),
    ),
    *File("checkpoint/_ranges.py", CHECKPOINT).faults(
        Fault(
            "each rank holds all groups",
            "TreeLayout.local_span",
            (swapped("!=", "<"), becomes("coordinate", "0", at="1 of 2")),
        ),
        Fault("copies are written", "TreeLayout.owned_pieces", becomes("self.A[B].C", "()")),
        Fault("copies take room", "TreeLayout._count_written", becomes("A - sum(B)", "A - 0 * sum(B)")),
        Fault("stages share a block", "TreeLayout.replicas", dropped("*[A for A, B in C.D]")),
        Fault("a block is written by stage 0", "TreeLayout.writers", dropped("*A", at="3 of 3")),
        Fault("a copy is a leaf's home", "TreeLayout.home", dropped("A not in B.C")),
    ),
    *File("checkpoint/_manifest.py", CHECKPOINT).faults(
        Fault("all is version 2", "Manifest.text", always("any(A.B for A in C.D)")),
        Fault("places beyond the axis", "_group", becomes("A < B[C]", "A >= 0")),
        Fault("copies of nothing", "_group", becomes("set(A.B)", "set()")),
        Fault("a leaf may be copies alone", "_manifest", dropped("A not in B.C")),
        Fault("None of other blocks", "_value_like", never("A(B.get(C))")),
    ),
    *File("checkpoint/_load.py", CHECKPOINT).faults(
        Fault("None is a leaf", "check_leaves", dropped("A in B or not C(x)")),
        Fault("None is saved as a leaf", "check_leaves", always("not A(B.values.get(C, 0))")),
    ),
    *File("checkpoint/dcp.py", CHECKPOINT).faults(
        Fault("dcp's keys are the rank's", "_of_item", becomes("A.B", "keys[at]", at="3 of 3")),
    ),
    *File("nn/_pipeline.py", NN).faults(
        Fault("a parameter keeps its path", "ModulePipeline.name.name", returns("path")),
    ),
    *File("sharding/_segments.py", OPTIMIZERS).faults(
        Fault("masks see ranks", "abstract.full_leaves", becomes("A.B if C else A.D", "A.B if C else A.full_shapes")),
    ),
    *File("optim/_norms.py", OPTIMIZERS).faults(
        Fault("a norm of all ranks' blocks", "_leaf_norms", never("A.B", at="1 of 2")),
        Fault("a mean over all ranks' blocks", "_leaf_norms", dropped("not A.B")),
    ),
    *File("parallel/pipeline/_execution.py", OUTPUTS).faults(
        Fault("stage 0 has the outputs", "outputs_by_ticks", becomes("last_rank", "0", at="2 of 2")),
    ),
    *File("zero/_evaluate.py", OUTPUTS).faults(
        Fault("sums over the stages", "evaluate.totals", becomes("A((B, C(D)), E.F)", "A((B, C(D)), E.axis)")),
        Fault("a row a stage", "predict.gathered_outputs", becomes("step.A", "step.axis")),
    ),
    *File("zero/_sharded_step.py", OUTPUTS).faults(
        Fault("stages have data", "ShardedStep.data_axes", dropped("A not in self.B.C")),
    ),
    *File("graph/_one_rank.py", PLAN).faults(
        Fault("a planned batch differs by stage", "one_rank_tree.convert", becomes("A(part, B.C)", "A(part)")),
    ),
    *File("sharding/_layouts.py", TOOLS).faults(
        Fault("a table without numbers", "_split", never("A.B")),
    ),
    *File("testing.py", TESTING).faults(
        Fault("dense trees are compared with stacked ones", "assert_equivalent.gather_full", always("A is None")),
    ),
    *File("graph/run/_compiled.py", PROCESSES).faults(
        Fault(
            "a profile knows nothing of what is taken",
            "run_operations",
            (
                becomes("A = B(graph)", "A, graph = (graph, B(graph))"),
                becomes("A(source, owned)", "A(graph, owned)"),
                skipped("graph = A(source)"),
            ),
        ),
    ),
]
