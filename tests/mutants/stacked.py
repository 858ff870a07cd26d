"""Faults in what knows that blocks are stacked by rank: checkpoints, optimizers, evaluation, tools."""

from tests.mutants.mutant import Mutant

CHECKPOINT = ("tests/checkpoint/test_pipelines.py",)
TOOLS, OUTPUTS = ("tests/parallel/pipeline/test_tools.py",), ("tests/parallel/pipeline/test_outputs.py",)
ERRORS, PLAN = ("tests/parallel/pipeline/test_errors.py",), ("tests/parallel/pipeline/test_plan.py",)
OPTIMIZERS = ("tests/parallel/pipeline/test_equivalence.py", "-k", "optimizers_see")
NN, TESTING = ("tests/nn/test_pipeline.py", "-k", "hugging"), ("tests/test_testing.py", "-k", "pipelined")
PROCESSES = ("tests/distributed/test_gloo.py::test_gloo_processes[pipeline-2]",)

MUTANTS = [
    # which block is where
    Mutant(
        "items are told by rank", "parallel/pipeline/_checks.py", "tuple(zip(*by_rank, strict=True))", "by_rank", ERRORS
    ),
    Mutant("blocks have no numbers", "sharding/_units.py", "stacks.get(name)", "None", CHECKPOINT),
    Mutant(
        "leaves need not be stacked",
        "parallel/pipeline/_checks.py",
        "leaf.shape[0] != axis_size(self.axis)",
        "False",
        ERRORS,
    ),
    Mutant("another schedule's blocks will do", "zero/_checks.py", "if wanted != s.stacked:", "if False:", ERRORS),
    Mutant(
        "each stage may have a batch",
        "parallel/pipeline/_pipeline.py",
        "check_shared(batch, axis := ",
        "(axis := ",
        ERRORS,
    ),
    Mutant("states are stacked as they are", "parallel/pipeline/_checks.py", "type_of(x)(f(x))", "x[name]", TOOLS),
    # checkpoints
    Mutant(
        "a list whose name ends alike is taken",
        "sharding/_stacked.py",
        'path.endswith(f".{own}")',
        "path.endswith(own)",
        CHECKPOINT,
    ),
    Mutant(
        "each row is of the first item",
        "checkpoint/_holdings.py",
        "else (number, False)",
        "else (some, False)",
        CHECKPOINT,
    ),
    Mutant("idle slots are leaves", "checkpoint/_holdings.py", "(some, True) if", "(some, False) if", CHECKPOINT),
    Mutant(
        "copies of tied leaves are several", "checkpoint/_holdings.py", "is_copy and any(", "False and any(", CHECKPOINT
    ),
    Mutant("tp cuts another dimension", "checkpoint/_holdings.py", "[dim - 1 for dim", "[dim for dim", CHECKPOINT),
    Mutant(
        "blocks come by rank", "checkpoint/_holdings.py", "(first[o.list], o.number,", "(first[o.list], 0,", CHECKPOINT
    ),
    Mutant("a list by another name", "checkpoint/_holdings.py", "if item is None:", "if False:", CHECKPOINT),
    Mutant("each rank holds all groups", "checkpoint/_cut.py", "rank) != place for", "rank) < 0 for", CHECKPOINT),
    Mutant("copies are written", "checkpoint/_cut.py", "skipped=self.groups[g].copies", "skipped=()", CHECKPOINT),
    Mutant("copies take room", "checkpoint/_cut.py", "return x - sum(", "return x - 0 * sum(", CHECKPOINT),
    Mutant("stages share a block", "checkpoint/_cut.py", "*[name for name, _ in group.at])", ")", CHECKPOINT),
    Mutant("a block is written by stage 0", "checkpoint/_cut.py", "(others, j), *here)", "(others, j))", CHECKPOINT),
    Mutant(
        "a copy is a leaf's home", "checkpoint/_cut.py", "            if place not in group.copies\n", "", CHECKPOINT
    ),
    Mutant("all is version 2", "checkpoint/_manifest.py", " if any(g.at for g in cut.groups) else 1", "", CHECKPOINT),
    Mutant("places beyond the axis", "checkpoint/_manifest.py", "place < mesh[axis]", "place >= 0", CHECKPOINT),
    Mutant("copies of nothing", "checkpoint/_manifest.py", "set(group.copies) <= set(", "set() <= set(", CHECKPOINT),
    Mutant("a leaf may be copies alone", "checkpoint/_manifest.py", "if place not in g.copies]", "]", CHECKPOINT),
    Mutant("None is a leaf", "checkpoint/_load.py", "if path in theirs or not is_none(x)]", "]", CHECKPOINT),
    Mutant(
        "None is saved as a leaf",
        "checkpoint/_load.py",
        "or not is_none(saved.values.get(p, 0))",
        "or True",
        CHECKPOINT,
    ),
    Mutant("None of other blocks", "checkpoint/_manifest.py", "is_none(saved.get(path)):", "False:", CHECKPOINT),
    Mutant("dcp's keys are the rank's", "checkpoint/dcp.py", "origin.number, *keys", "keys[at], *keys", CHECKPOINT),
    Mutant("a parameter keeps its path", "nn/_pipeline.py", "return names[path]", "return path", NN),
    # optimizers
    Mutant("masks see ranks", "sharding/_segments.py", "known.item_shapes)]", "known.whole_shapes)]", OPTIMIZERS),
    Mutant("a norm of all ranks' blocks", "optim/_norms.py", "split if s.stacked]", "split if False]", OPTIMIZERS),
    Mutant("a mean over all ranks' blocks", "optim/_norms.py", "if not s.stacked])", "])", OPTIMIZERS),
    # evaluation
    Mutant("stage 0 has the outputs", "parallel/pipeline/_ticks.py", "source=home)", "source=0)", OUTPUTS),
    Mutant("outputs keep a graph", "parallel/pipeline/_pipeline.py", "with torch.no_grad():", "if True:", OUTPUTS),
    Mutant(
        "outputs of the loss", "parallel/pipeline/_pipeline.py", "replace(self.model, last=last)", "self.model", OUTPUTS
    ),
    Mutant("sums over the stages", "zero/_evaluate.py", "weight)), step.data_axes)", "weight)), step.axis)", OUTPUTS),
    Mutant("a row a stage", "zero/_evaluate.py", "(x, step.data_axes)", "(x, step.axis)", OUTPUTS),
    Mutant("stages have data", "zero/_sharded_step.py", "if name not in self.rules.apart", "", OUTPUTS),
    # tools
    Mutant("a planned batch differs by stage", "graph/_one_rank.py", "PerRank(own, x.axes)", "PerRank(own)", PLAN),
    Mutant("a block's path is the rank's", "sharding/_stacked.py", "else item.path(number)", "else path", TOOLS),
    Mutant(
        "all blocks are the first", "sharding/_stacked.py", "item.numbers[places[", "item.numbers[0 * places[", TOOLS
    ),
    Mutant("a table without numbers", "sharding/_layouts.py", "if s.stacked else None", "if False else None", TOOLS),
    Mutant(
        "dense trees are compared with stacked ones",
        "testing.py",
        "values if pipeline is None",
        "values if True",
        TESTING,
    ),
    Mutant(
        "a profile knows nothing of what is taken",
        "graph/run/_compiled.py",
        "    source = copied(graph)\n    _take(source, owned)\n    graph = copied(source)\n",
        "    source, graph = graph, copied(graph)\n    _take(graph, owned)\n",
        PROCESSES,
    ),
]
