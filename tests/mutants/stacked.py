"""Faults in what knows that blocks are stacked by rank: checkpoints, optimizers, evaluation, tools."""

from tests.mutants.changes import always, bare, becomes, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File, on_processes

CHECKPOINT = ("tests/checkpoint/test_pipelines.py",)
TOOLS = ("tests/parallel/pipeline/test_tools.py",)
OUTPUTS = ("tests/parallel/pipeline/test_outputs.py",)
ERRORS = ("tests/parallel/pipeline/test_errors.py",)
PLAN = ("tests/parallel/pipeline/test_plan.py",)
OPTIMIZERS = ("tests/parallel/pipeline/test_equivalence.py", "-k", "optimizers_see")
NN = ("tests/nn/test_module_pipeline.py", "-k", "hugging")
TESTING = ("tests/test_testing.py", "-k", "pipelined")
PROCESSES = on_processes("pipeline")

MUTANTS = [
    *File("parallel/pipeline/_model_checks.py", ERRORS).faults(
        Fault("a state of a stacked list is not stacked", "map_blocks", becomes("A(B)(C(B))", "B[name]"), TOOLS),
    ),
    *File("parallel/pipeline/_pipeline_split.py", ERRORS).faults(
        Fault(
            "the items of a stacked list are listed by rank, not by row",
            "PipelineSplit.stacked",
            bare("tuple(zip(*A, strict=True))"),
        ),
        Fault("leaves need not be stacked", "PipelineSplit.__call__", never("A.shape[0] != B(self.axis)")),
    ),
    *File("sharding/units/_units.py", CHECKPOINT).faults(
        Fault("the spec of a stacked list has no items", "_make_unit", becomes("A.get(B)", "None")),
    ),
    *File("zero/_call_checks.py", ERRORS).faults(
        Fault("blocks that another schedule stacked are accepted", "_check_stacked", never("A != B.C")),
    ),
    *File("parallel/pipeline/_pipeline.py", OUTPUTS).faults(
        Fault("pipeline stages may get different batches", "Pipeline._run_on_ranks", bare("B(batch, A)"), ERRORS),
        Fault("outputs keep a graph", "Pipeline.outputs.outputs", becomes("with torch.no_grad(): ...", "if True: ...")),
        Fault("outputs returns the loss's values", "Pipeline.outputs", bare("replace(A, last=B)")),
    ),
    *File("sharding/_stacked_items.py", TOOLS).faults(
        Fault("a list whose name has the same ending is taken", "subtree_prefix", bare("f'.{A}'"), CHECKPOINT),
        Fault("a stacked block's path is its slot, not its number", "path_on_rank", becomes("A.B(C)", "B")),
        Fault(
            "every rank's block has the first rank's number",
            "path_on_rank",
            becomes("A[B[0].axis]", "0 * A[B[0].axis]"),
        ),
    ),
    *File("checkpoint/layout/_unit_parts.py", CHECKPOINT).faults(
        Fault(
            "each row of a stacked leaf has the first item's name",
            "list_unit_parts",
            becomes("(A, False)", "(any_index, False)"),
        ),
        Fault(
            "the value of an idle slot is saved as a leaf of its own",
            "list_unit_parts",
            becomes("(A, True)", "(A, False)"),
        ),
        Fault("the copies of a tied leaf are saved several times", "list_unit_parts", never("is_copy")),
        Fault("the split of a stacked leaf in a checkpoint is one dimension off", "list_unit_parts", bare("A - 1")),
        Fault("blocks are saved in the ranks' order", "in_tree_order.sort_key", becomes("A.B", "0", at="4 of 5")),
        Fault("a list with another name is accepted", "list_unit_parts", never("item is None")),
    ),
    *File("checkpoint/layout/_ranges.py", CHECKPOINT).faults(
        Fault(
            "every rank holds all checkpoint groups",
            "TreeLayout.local_span",
            (swapped("!=", "<"), becomes("coordinate", "0", at="1 of 2")),
        ),
        Fault("copies of a leaf are written too", "TreeLayout.owned_pieces", becomes("self.A[B].C", "()")),
        Fault(
            "copies of a leaf are counted in the size of a file",
            "TreeLayout._count_written",
            becomes("A - sum(B)", "A - 0 * sum(B)"),
        ),
        Fault(
            "pipeline stages count as replicas of a block",
            "TreeLayout.replicated_axes",
            dropped("*[A for A, B in C.D]"),
        ),
        Fault("stage 0 writes every block", "TreeLayout._chunk_owners", dropped("*A")),
        Fault("a copy's group counts as the leaf's own", "TreeLayout.home", dropped("A not in B.C")),
    ),
    *File("checkpoint/layout/_manifest.py", CHECKPOINT).faults(
        Fault("every manifest has version 2", "Manifest.text", always("any(A.B for A in C.D)")),
    ),
    *File("checkpoint/layout/_parse_manifest.py", CHECKPOINT).faults(
        Fault("a coordinate beyond the axis is accepted", "_check_group", becomes("A < B[C]", "A >= 0")),
        Fault("a copy of no leaf is accepted", "_check_group", becomes("set(A.B)", "set()")),
        Fault("a leaf with copies only is accepted", "_build_manifest", dropped("A not in B.C")),
    ),
    *File("checkpoint/layout/_json_values.py", CHECKPOINT).faults(
        Fault("a None in place of another rank's blocks is not kept", "_value_like", never("A(B.get(C))")),
    ),
    *File("checkpoint/_load.py", CHECKPOINT).faults(
        Fault("a None in `like` counts as a leaf that must be saved", "_leaf_texts", dropped("A in B or not C(x)")),
        Fault(
            "a saved None counts as a leaf that `like` must have", "_leaf_texts", always("not A(B.values.get(C, 0))")
        ),
    ),
    *File("checkpoint/dcp/_leaf_names.py", CHECKPOINT).faults(
        Fault(
            "the keys of DCP are those of the rank's slots",
            "_keys_in_full_list",
            becomes("A.B", "keys[depth]", at="3 of 3"),
        ),
    ),
    *File("nn/_module_pipeline.py", NN).faults(
        Fault("a pipeline's parameter keeps its path", "ModulePipeline.name.find_name", returns("path")),
    ),
    *File("sharding/elements/_leaf_ids.py", OPTIMIZERS).faults(
        Fault(
            "a mask gets the shape of all stacked blocks, not of one block",
            "abstract.full_leaves",
            becomes("A.B if C else A.D", "A.B if C else A.full_shapes"),
        ),
    ),
    *File("optim/_norms.py", OPTIMIZERS).faults(
        Fault("the norm of a stacked leaf is of all ranks' blocks", "_leaf_norms", never("A.B", at="1 of 2")),
        Fault("a mean is over all ranks' blocks", "_leaf_norms", dropped("not A.B")),
    ),
    *File("parallel/pipeline/_ticks.py", OUTPUTS).faults(
        Fault(
            "outputs are taken from the first pipeline stage",
            "outputs_by_ticks",
            becomes("last_rank", "0", at="2 of 2"),
        ),
    ),
    *File("zero/_evaluate.py", OUTPUTS).faults(
        Fault(
            "evaluate sums over the pipeline stages",
            "evaluate.totals",
            becomes("A((B, C(D)), E.F)", "A((B, C(D)), E.axis)"),
        ),
        Fault(
            "predict returns a row for each pipeline stage",
            "_example_axes",
            becomes("step.A if B else C", "step.axis if B else C"),
        ),
    ),
    *File("zero/_sharded_step.py", OUTPUTS).faults(
        Fault(
            "the batch is split over a pipeline's stages",
            "ShardedStep.data_axes",
            becomes("set(A).difference(B)", "set(A)"),
        ),
    ),
    *File("graph/_one_rank.py", PLAN).faults(
        Fault(
            "a planned batch differs by pipeline stage",
            "one_rank_tree.convert",
            becomes("A(part, B.C, B.D)", "A(part)"),
        ),
    ),
    *File("sharding/_layouts.py", TOOLS).faults(
        Fault("a table of layouts leaves out stacked blocks' numbers", "_describe_split", never("A.B")),
    ),
    *File("testing.py", TESTING).faults(
        Fault("assert_equivalent does not unstack parameters", "assert_equivalent.gather_full", always("A is None")),
    ),
    *File("graph/run/_executable.py", PROCESSES).faults(
        Fault(
            "a profile is blind to tensors that the graph takes over",
            "make_operations_executable",
            (
                becomes("A = B(graph)", "A, graph = (graph, B(graph))"),
                becomes("A(source, owned)", "A(graph, owned)"),
                skipped("graph = A(source)"),
            ),
        ),
    ),
]
