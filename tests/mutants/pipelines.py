"""Faults in fzero/pipelines, in messages, and in a graph's phases."""

from tests.mutants.mutant import Mutant

LAWS = ("tests/parallel/pipeline/test_equivalence.py",)
PLAN = ("tests/parallel/pipeline/test_plan.py",)
ERRORS = ("tests/parallel/pipeline/test_errors.py",)
AXES = ("tests/parallel/pipeline/test_axes.py",)
MESSAGES = ("tests/collectives/test_messages.py",)
PROCESSES = ("tests/distributed/test_gloo.py::test_gloo_processes[pipeline-2]",)
DEPTH = "or self.depth not in (None, depth, counts)"

MUTANTS = [
    Mutant(
        "accumulation around draws the same masks again",
        "parallel/pipeline/_pipeline.py",
        "outer + number, key",
        "number, key",
        LAWS,
    ),
    Mutant(
        "the first block draws the masks of what comes first",
        "parallel/pipeline/_model.py",
        "random.fold_in(call.key, index + 1)",
        "random.fold_in(call.key, index)",
        LAWS,
    ),
    Mutant(
        "a table forgets the loss scale",
        "parallel/pipeline/_table.py",
        "scale = loss_scale_here()",
        "scale = None",
        LAWS,
    ),
    Mutant(
        "a loss scale stays in the gradients",
        "parallel/pipeline/_table.py",
        "total if self.scale is None else total / self.scale",
        "total",
        LAWS,
    ),
    Mutant(
        "a graph forgets the loss scale",
        "parallel/pipeline/_table.py",
        "seed_of(made, self.scale)",
        "seed_of(made, None)",
        PROCESSES,
    ),
    Mutant(
        "a total stays in half precision",
        "parallel/pipeline/_model.py",
        "total = total.to(torch.promote_types(total.dtype, torch.float32))",
        "total = total",
        LAWS,
    ),
    Mutant(
        "what has no use has a gradient",
        "parallel/pipeline/_ticks.py",
        "torch.where(condition, grad, torch.zeros_like(grad))",
        "grad",
        LAWS,
    ),
    Mutant("a bubble's block has a gradient", "parallel/pipeline/_ticks.py", "used = runs & (", "used = (", LAWS),
    Mutant("ties of blocks are parted", "parallel/pipeline/_checks.py", "if block != number:", "if False:", ERRORS),
    Mutant(
        "a negative number of blocks", "parallel/pipeline/_checks.py", "_is_count(n, 0)", "_is_count(n, -9)", ERRORS
    ),
    Mutant("idle places count", "sharding/_segments.py", "torch.where(unused, torch.zeros_like(x), x)", "x", LAWS),
    Mutant(
        "a permutation is every rank's",
        "graph/_agree.py",
        "len({*received, *sent}) <= 1 and sum(sent)",
        "True",
        PROCESSES,
    ),
    Mutant(
        "a micro-batch's gradient replaces the others",
        "parallel/pipeline/_table.py",
        "self.grads[place].add_(new)",
        "new",
        LAWS,
    ),
    Mutant(
        "gradients are handed out unscaled",
        "parallel/pipeline/_table.py",
        "(grad * total.to(grad.dtype))",
        "grad",
        LAWS,
    ),
    Mutant(
        "residuals are kept", "parallel/pipeline/_table.py", "self.pulls.pop((stage, m))", "self.pulls[stage, m]", LAWS
    ),
    Mutant(
        "the second half adds nothing",
        "parallel/pipeline/_table.py",
        "self._add(stage, self.halves.pop((stage, m)))",
        "pass",
        LAWS,
    ),
    Mutant(
        "sums keep the last total",
        "parallel/pipeline/_table.py",
        "[x + y for x, y in zip(",
        "[y for x, y in zip(",
        LAWS,
    ),
    Mutant(
        "a loss hands its gradients out again",
        "parallel/pipeline/_table.py",
        "grads, self.grads = self.grads, None",
        "grads = dict(self.grads)",
        ERRORS,
    ),
    Mutant(
        "the loss counts on all ranks",
        "parallel/pipeline/_ticks.py",
        "torch.where(here, a, torch.zeros_like(a))",
        "a",
        LAWS,
    ),
    Mutant(
        "weights count on all ranks",
        "parallel/pipeline/_ticks.py",
        "torch.where(here, w, torch.zeros_like(w))",
        "w",
        LAWS,
    ),
    Mutant(
        "bubbles take what arrived",
        "parallel/pipeline/_ticks.py",
        "(stage[k] <= 0) | (m < 0) | (m >= count)",
        "m < 0",
        LAWS,
    ),
    Mutant(
        "idle slots run",
        "parallel/pipeline/_ticks.py",
        "_where(index[slot] < 0, x, y)",
        "_where(index[slot] < -1, x, y)",
        LAWS,
    ),
    Mutant(
        "blocks of all ranks pass for one's own",
        "parallel/pipeline/_model.py",
        "w.shape[:1] != (1,)",
        "not w.ndim",
        ERRORS,
    ),
    Mutant(
        "ticks hand on what blocks make of it",
        "parallel/pipeline/_ticks.py",
        'check_handed_on("block", x, y)',
        "pass",
        ERRORS,
    ),
    Mutant("a tick too few", "parallel/pipeline/_ticks.py", "range(count + last)", "range(count + last - 1)", LAWS),
    Mutant(
        "blocks are told another number",
        "parallel/pipeline/_ticks.py",
        "index.clamp(min=0), call",
        "index.clamp(min=1), call",
        LAWS,
    ),
    Mutant(
        "the first stage alone uses the rest",
        "parallel/pipeline/_stages.py",
        "stage in (0, self.last)",
        "stage == 0",
        LAWS,
    ),
    Mutant(
        "blocks of another order",
        "parallel/pipeline/_model.py",
        "rows[r][place] = first[s] + j",
        "rows[r][place] = first[s] + len(slots[s]) - 1 - j",
        LAWS,
    ),
    Mutant(
        "blocks are unstacked rank by rank",
        "parallel/pipeline/_model.py",
        "tuple([found[b] for b in range(self.depth)])",
        "tuple(found.values())",
        LAWS,
    ),
    Mutant("idle slots are blocks", "parallel/pipeline/_model.py", "chunks[k][: counts[s]]", "chunks[k]", LAWS),
    Mutant(
        "all blocks draw one mask",
        "parallel/pipeline/_model.py",
        "random.fold_in(call.key, index + 1)",
        "call.key",
        LAWS,
    ),
    Mutant("ranks of a pipeline draw apart", "parallel/pipeline/_model.py", "if n != name])", "])", LAWS),
    Mutant(
        "micro-batches of a pipeline draw alike",
        "parallel/pipeline/_pipeline.py",
        "outer + number, key",
        "0 * number, key",
        LAWS,
    ),
    Mutant(
        "a part that does not divide",
        "parallel/pipeline/_model.py",
        "        if left:\n",
        "        if False:\n",
        ERRORS,
    ),
    Mutant("depth is not compared", "parallel/pipeline/_pipeline.py", DEPTH, "", ERRORS),
    Mutant(
        "the mean may leave the pipeline out",
        "parallel/pipeline/_pipeline.py",
        "not in [a.name for a in data_axes()]:",
        "in ():",
        ERRORS,
    ),
    Mutant(
        "blocks may change what they hand on",
        "parallel/pipeline/_stages.py",
        "structure != other or said[0] != said[1]",
        "False",
        ERRORS,
    ),
    Mutant(
        "stacked leaves shift no dimension",
        "parallel/pipeline/_checks.py",
        "dim + 1 if dim >= 0",
        "dim if dim >= 0",
        AXES,
    ),
    Mutant("a pipeline has data of its own", "parallel/pipeline/_checks.py", "return (self.axis,)", "return ()", LAWS),
    Mutant(
        "second derivatives by the table",
        "parallel/pipeline/_pipeline.py",
        "order is None or order > 1",
        "order is None",
        LAWS,
    ),
    Mutant("evaluation runs backward", "parallel/pipeline/_pipeline.py", "backward=order == 1", "backward=True", LAWS),
    # messages
    Mutant("a message is not kept", "axes/mailbox.py", "append(x.detach().clone())", "append(x.detach())", MESSAGES),
    Mutant("the last message goes first", "axes/mailbox.py", ".popleft()", ".pop()", MESSAGES),
    Mutant(
        "what nobody received is forgotten", "axes/lockstep.py", "    check_received(groups.values())\n", "", MESSAGES
    ),
    Mutant("another shape is taken", "axes/mailbox.py", "if x.shape != like.shape or", "if", MESSAGES),
    # phases of a graph
    Mutant(
        "sums of a stage are in another order",
        "graph/loop/_trace.py",
        "key=lambda pair: position[pair[1]]",
        "key=lambda pair: position[pair[0]]",
        PROCESSES,
    ),
    Mutant(
        "what a rank does not read is not gathered", "graph/loop/_trace.py", "*needed_by(turn.start), ", "", PROCESSES
    ),
    Mutant(
        "weights before what is sent",
        "graph/loop/_trace.py",
        "            sends_first(start)\n",
        "            pass\n",
        PLAN,
    ),
    Mutant("residuals are read once", "graph/loop/_run.py", "self.readers[what]]", "1]", PROCESSES),
    Mutant(
        "what is made anew is held",
        "graph/loop/_split.py",
        "                self.anew.add(n)\n",
        "                pass\n",
        PLAN,
    ),
    Mutant("a draw is made anew", "graph/loop/_split.py", " or is_random(n)", "", PLAN),
    Mutant(
        "plans forget what is in flight",
        "graph/loop/_memory.py",
        "self.now += block.size if not block.holders else 0",
        "pass",
        PLAN,
    ),
    Mutant(
        "plans forget messages",
        "graph/loop/_memory.py",
        "self.ready[value] = [self._hold(_Block(size)) for",
        "self.ready[value] = [_Block(size) for",
        PROCESSES,
    ),
    Mutant("a pipeline takes its work's time", "graph/loop/_memory.py", ".makespan", ".busy[0]", PLAN),
    Mutant(
        "a gather starts in another pass",
        "graph/passes/_schedule.py",
        "if n.target is BEGINS:",
        "if False:",
        PLAN,
    ),
    Mutant(
        "a unit stays between two passes",
        "graph/passes/_regather.py",
        "if order.passes[a] != order.passes[b]:",
        "if False:",
        PLAN,
    ),
    Mutant(
        "what a pass gathers is gathered once a step", "graph/passes/_hoist.py", " and loop.track is None", "", PLAN
    ),
    Mutant(
        "weights' gradients come before what goes on backward",
        "graph/loop/_rank_schedule.py",
        'other.kind == "I" and other.stage < self.stage',
        "False",
        PLAN,
    ),
    Mutant(
        "buckets pass the end of a phase",
        "graph/passes/_bucket.py",
        "return bisect_left(ends, one) == bisect_left(ends, other)",
        "return True",
        AXES,
    ),
    Mutant(
        "ranks compare their stages with all", "graph/_agree.py", 'place or "no pipeline"', '"no pipeline"', PROCESSES
    ),
    Mutant("every rank's plan is the first's", "graph/_one_rank.py", "dict(self.places).get(name, 0)", "0", PLAN),
]
