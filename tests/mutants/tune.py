"""Faults in fzero.tune: what a row says, what is skipped, what few blocks say of many, and the cost of a GPU."""

from tests.mutants.mutant import Mutant

TUNE, MODELS = ("tests/tuning/test_tune.py",), ("tests/tuning/test_models.py",)
COST, LINKS = ("tests/graph/test_cost.py",), ("tests/graph/test_links.py",)
RULES = ("tests/tuning/test_rules.py",)
PLACES = ("tests/tuning/test_places.py",)
CALIBRATE = ("tests/tuning/test_calibrate.py",)
WATCH, ALLOCATIONS = ("tests/tuning/test_watch.py",), ("tests/_torch/test_allocations.py",)
OTHERS, COMMAND = ("tests/tuning/test_others.py",), ("tests/tuning/test_command.py",)

MUTANTS = [
    Mutant("the budget is forgotten in the best", "tuning/_table.py", "r.peak_bytes <= self.budget]", "True]", TUNE),
    Mutant(
        "the best is the smallest",
        "tuning/_table.py",
        "key=lambda r: (r.seconds, r.peak_bytes))\n\n\ndef _parts",
        "key=lambda r: (r.peak_bytes, r.seconds))\n\n\ndef _parts",
        TUNE,
    ),
    Mutant("a frontier of all rows", "tuning/_table.py", "row.peak_bytes < found[-1].peak_bytes", "True", TUNE),
    Mutant(
        "what fits is skipped",
        "tuning/_search.py",
        "too_large[c] = row.at_least > budget",
        "too_large[c] = row.peak_bytes > 0.8 * budget",
        TUNE,
    ),
    Mutant(
        "nothing is skipped", "tuning/_search.py", "too_large[c] = row.at_least > budget", "too_large[c] = False", TUNE
    ),
    Mutant(
        "buffers are surely held",
        "tuning/_row.py",
        '("parameters", "optimizer state", "activations")',
        '("parameters", "optimizer state", "activations", "buffers", "gathered", "gradients")',
        TUNE,
    ),
    Mutant(
        "a larger micro-batch holds less",
        "tuning/_space.py",
        "self.micro_batch >= other.micro_batch",
        "self.micro_batch <= other.micro_batch",
        TUNE,
    ),
    Mutant("a higher stage holds more", "tuning/_space.py", "self.stage <= other.stage", "True", TUNE),
    Mutant("offload takes memory", "tuning/_space.py", "self.offload <= other.offload", "True", TUNE),
    Mutant(
        "micro-batches are not multiplied",
        "tuning/_space.py",
        "k, rest = divmod(self.global_batch // places.ranks, m)",
        "k, rest = 1, self.global_batch // places.ranks % m",
        TUNE,
    ),
    Mutant(
        "the batch is each rank's",
        "tuning/_space.py",
        "divmod(self.global_batch // places.ranks, m)",
        "divmod(self.global_batch, m)",
        TUNE,
    ),
    Mutant(
        "an odd micro-batch is left out without a word",
        "tuning/_space.py",
        "if asked.micro_batches is not None:",
        "if False:",
        TUNE,
    ),
    Mutant(
        "half precision for all",
        "tuning/_space.py",
        "Precision(param=DTYPES[self.precision])",
        "Precision(param=torch.bfloat16)",
        TUNE,
    ),
    Mutant("two blocks say what many take", "tuning/_measure.py", "1: (3, 5), 0: (4, 6)", "1: (1, 2), 0: (1, 2)", TUNE),
    Mutant(
        "the line is a step too steep",
        "tuning/_row.py",
        "(depth - few) / (more - few)",
        "(depth - few + 1) / (more - few)",
        TUNE,
    ),
    Mutant(
        "the schedule of few blocks stays",
        "tuning/_measure.py",
        "            if others:",
        "            if False:",
        TUNE,
    ),
    Mutant("no row is planned in full", "tuning/_search.py", "if not rough:", "if True:", TUNE),
    Mutant(
        "each device has the whole host",
        "tuning/_machines.py",
        "self.host_memory / self.ranks",
        "self.host_memory",
        TUNE,
    ),
    Mutant("the host's link is the usual", "tuning/_machines.py", "host_link=self.link", "host_link=5e10", TUNE),
    Mutant("the host's update is the device's", "graph/plan/_cost.py", "else _of_the_host(graph)", "else ()", COST),
    Mutant("the margin is forgotten", "tuning/_tune.py", "(usual if margin is None else margin)", "0", TUNE),
    Mutant("a GPU receives as gloo does", "graph/_entry.py", "if asked.device is not None:", "if False:", TUNE),
    Mutant("a GPU's plan has a CPU's seconds", "graph/_entry.py", "rejected, asked.device,", "rejected, None,", TUNE),
    Mutant(
        "the network is as fast as the machine's links",
        "graph/plan/_links.py",
        "device.link if m == 1 else min(device.link, near * device.network)",
        "device.link",
        LINKS,
    ),
    Mutant(
        "a machine has one way out",
        "graph/plan/_links.py",
        "min(device.link, near * device.network)",
        "device.network",
        LINKS,
    ),
    Mutant(
        "a thousand ranks are as near as eight", "graph/plan/_links.py", "    return ring\n", "    return 0\n", LINKS
    ),
    Mutant("the first axis changes fastest", "graph/plan/_links.py", "in reversed(mesh)", "in mesh", LINKS),
    Mutant("an all_reduce is one ring", "graph/plan/_links.py", "2 * min(ring, ", "min(ring, ", LINKS),
    Mutant("a tree is no shorter", "graph/plan/_links.py", "2 * min(ring, ", "2 * max(ring, ", LINKS),
    Mutant(
        "all to all share their ways out", "graph/plan/_links.py", "beyond / device.network", "beyond / near", LINKS
    ),
    Mutant("a link of any axis counts", "graph/plan/_links.py", " if name in names]", "]", LINKS),
    Mutant(
        "a changed constant keeps its source",
        "tuning/_machines.py",
        "known.get((name, value), ",
        "dict([(n, s) for n, _, s in self.sources]).get(name, ",
        TUNE,
    ),
    Mutant("links that were given are forgotten", "tuning/_machines.py", "links=self.links,", "", TUNE),
    Mutant("float32 is as fast as half", "graph/plan/_cost.py", "done *= device.slow", "pass", TUNE),
    Mutant("attention is free on a CPU", "graph/ir.py", "packet = ATTENTION.get(packet, packet)", "pass", TUNE),
    Mutant(
        "bytes of loops count once",
        "tuning/_row.py",
        "moved[c.axis] += c.bytes * c.times",
        "moved[c.axis] += c.bytes",
        TUNE,
    ),
    # models by name
    Mutant(
        "a tied head counts twice",
        "tuning/_models.py",
        "    if shape.tied:\n        return params |",
        "    if False:\n        return params |",
        MODELS,
    ),
    Mutant(
        "keys are as many as queries",
        "tuning/_models.py",
        "kv = (shape.kv_heads or shape.heads) * h",
        "kv = shape.heads * h",
        MODELS,
    ),
    Mutant(
        "one expert stands for all", "tuning/_models.py", "before = (count,) if count else ()", "before = ()", MODELS
    ),
    Mutant(
        "attention is always fused",
        "tuning/_forward.py",
        "attend = _explicit if explicit else _fused",
        "attend = _fused",
        MODELS,
    ),
    Mutant(
        "a head is as wide as its share",
        "tuning/_models.py",
        "return self.head or self.width // self.heads",
        "return self.width // self.heads",
        MODELS,
    ),
    Mutant("a long text is let through", "tuning/_steps.py", "0 < shape.positions < length", "False", MODELS),
    # what others say
    Mutant(
        "gradients are left out",
        "tuning/_others.py",
        "device = 4 * parameters + int(16",
        "device = 2 * parameters + int(16",
        OTHERS,
    ),
    Mutant("a host has all that the hosts have", "tuning/_others.py", "/ hosts * 1.5", "* 1.5", OTHERS),
    Mutant(
        "the largest layer is left out",
        "tuning/_others.py",
        "n, big = near * hosts, 4 * largest",
        "n, big = near * hosts, 0",
        OTHERS,
    ),
    # the command
    Mutant("a kilobyte is 1024 bytes", "tuning/_command.py", "1000**i", "1024**i", COMMAND),
    Mutant("nothing that fits is a success", "tuning/_command.py", "    return 1\n", "    return 0\n", COMMAND),
    Mutant(
        "the lines to paste gather at once",
        "tuning/_recipe.py",
        '", gather=False" if c.remat',
        '", gather=True" if c.remat',
        COMMAND,
    ),
    Mutant(
        "the lines to paste have another stage",
        "tuning/_recipe.py",
        "stage={c.stage}, mesh=fzero",
        "stage={c.stage + 2}, mesh=fzero",
        COMMAND,
    ),
    Mutant(
        "a timeline that misses the peak",
        "tuning/_page.py",
        "max(range(a, b), key=plan.live.__getitem__)",
        "a",
        COMMAND,
    ),
    Mutant("a script within the data ends the page", "tuning/_page.py", '.replace("</", "<\\\\/")', "", COMMAND),
    # while it trains
    Mutant(
        "what was there before is forgotten",
        "tuning/_readings.py",
        "taken.added_bytes + before",
        "taken.added_bytes",
        WATCH,
    ),
    Mutant("the first call is measured", "tuning/_watch.py", "traces > 0 and (", "(", WATCH),
    Mutant("the compiled call is not", "tuning/_watch.py", "(every or self._compiled)", "every", WATCH),
    Mutant("all calls have the last plan", "tuning/_watch.py", "if known is not None:", "if False:", WATCH),
    Mutant(
        "a machine's seconds are anyone's",
        "tuning/_watch.py",
        "self.step.plans(device)",
        "self.step.plans()",
        WATCH,
    ),
    Mutant("a device that is behind is waited for", "tuning/_watch.py", ".taken.is_over()", "", WATCH),
    Mutant("rows are written again", "tuning/_watch.py", "self._kept[count:], max", "self._kept, max", WATCH),
    Mutant("a hint is said each time", "tuning/_watch.py", "self._told.add(hint.name)", "pass", WATCH),
    Mutant(
        "the median is the worst",
        "tuning/_readings.py",
        "(median(found) for found in zip(",
        "(max(found) for found in zip(",
        WATCH,
    ),
    Mutant(
        "a GPU's peak is that of all time",
        "tuning/_meters.py",
        "torch.cuda.reset_peak_memory_stats(self._device)",
        "pass",
        WATCH,
    ),
    Mutant(
        "what is freed stays",
        "_torch/allocations.py",
        "held += event.cpu_memory_usage()",
        "held += max(event.cpu_memory_usage(), 0)",
        ALLOCATIONS,
    ),
    Mutant("the user's profiler is ended", "_torch/allocations.py", "if profiling():", "if False:", ALLOCATIONS),
    # what a machine reaches
    Mutant(
        "float32 is as much faster", "tuning/_calibrate.py", '"slow": (half / full,', '"slow": (full / half,', CALIBRATE
    ),
    Mutant("a copy only reads", "tuning/_stopwatch.py", "return 2 * 4 * a.numel()", "return -4 * a.numel()", CALIBRATE),
    Mutant(
        "a step of the ring counts twice",
        "tuning/_calibrate.py",
        "small - (ranks - 1) * hop, hop",
        "small, hop",
        CALIBRATE,
    ),
    Mutant(
        "a link's latency is in its speed",
        "tuning/_calibrate.py",
        "max(large - small, 0.1 * large)",
        "large",
        CALIBRATE,
    ),
    Mutant("what is assumed was measured", "tuning/_calibrate.py", 'f"assumed, as of', 'f"measured, as of', CALIBRATE),
    Mutant(
        "links between machines are those within",
        "tuning/_calibrate.py",
        "if near > 1:\n        groups",
        "if True:\n        groups",
        (*CALIBRATE, "-m", "slow or not slow"),
    ),
    Mutant(
        "a calibrated machine is a common one",
        "tuning/_named.py",
        "        return calibrated()",
        "        return MACHINES['cpu']",
        CALIBRATE,
    ),
    # experts of two kinds
    Mutant("any rule is kept", "tuning/_rules.py", "expected[0] is best, _why", "True, _why", RULES),
    Mutant(
        "the highest stage is an expert's",
        "tuning/_rules.py",
        "key=lambda r: r.config.stage)",
        "key=lambda r: -r.config.stage)",
        RULES,
    ),
    Mutant("settings of any micro-batch", "tuning/_rules.py", "if r.config.micro_batch == least)", "if True)", RULES),
    Mutant("all that fits is compared", "tuning/_rules.py", "if rest(r) == rest(asked.best)]", "]", RULES),
    Mutant(
        "a machine has no end", "tuning/_rules.py", "(r.config.ep > asked.near, -r.config.ep)", "-r.config.ep", RULES
    ),
    Mutant("a difference of nothing is a reason", "tuning/_rules.py", "if more < ALIKE:", "if False:", RULES),
    Mutant(
        "experts lie whole on each rank",
        "tuning/_steps.py",
        '[moe.split("experts")] if config.ep > 1',
        '[moe.split("experts")] if False',
        MODELS,
    ),
    Mutant(
        "experts that do not divide are split", "tuning/_steps.py", "if shape.experts[0] % config.ep or", "if", MODELS
    ),
    Mutant(
        "the lines to paste split no experts",
        "tuning/_recipe.py",
        "if c.ep > 1 else []",
        "if c.ep > 99 else []",
        MODELS,
    ),
    # tensor and pipeline parallelism
    Mutant(
        "the first rank is the fullest",
        "tuning/_measure.py",
        "return (0, *between, config.pp - 1)",
        "return (0,)",
        PLACES,
    ),
    Mutant(
        "a step takes what its fullest rank does",
        "tuning/_row.py",
        "max([d.ways[d.settings].seconds for d in digests.values()])",
        "digest.ways[digest.settings].seconds",
        PLACES,
    ),
    Mutant(
        "a message is sent once",
        "tuning/_row.py",
        "moved[m.axis] += m.bytes * m.times",
        "moved[m.axis] += m.bytes",
        PLACES,
    ),
    Mutant(
        "all ranks are data-parallel",
        "tuning/_space.py",
        "return self.ranks * self.tp * self.pp",
        "return self.ranks",
        PLACES,
    ),
    Mutant(
        "a pipeline lies within a machine",
        "tuning/_space.py",
        '{"pp": self.pp, "dp": self.ranks // self.ep, "ep": self.ep, "tp": self.tp}',
        '{"tp": self.tp, "dp": self.ranks // self.ep, "ep": self.ep, "pp": self.pp}',
        PLACES,
    ),
    Mutant(
        "a layout holds no less than another",
        "tuning/_space.py",
        ", self._places) == (",
        ") == (",
        PLACES,
        ((", other._places)", ")"),),
    ),
    Mutant("stages come to be even", "tuning/_measure.py", "(few * stages + left, more", "(few * stages, more", PLACES),
    Mutant("blocks are always alike", "tuning/_measure.py", "ALIKE if alike else", "ALIKE if True else", PLACES),
    Mutant("a step on any mesh is planned", "tuning/_measure.py", "if wanted and ", "if False and ", PLACES),
    Mutant("heads are cut", "tuning/_steps.py", "if n % config.tp:", "if False:", PLACES),
    Mutant(
        "whether a loop goes on across turns is forgotten",
        "graph/_knobs.py",
        '"across_turns": False, **settings}',
        "**settings}",
        PLACES,
    ),
    Mutant(
        "bytes stand under any axis",
        "tuning/_table_text.py",
        "row.moved.get(way, 0)",
        "row.moved.get(ways[0], 0)",
        PLACES,
    ),
    Mutant("a table forgets its layouts", "tuning/_table.py", "k not in AXES or k in axes", "k not in AXES", PLACES),
    Mutant(
        "the lines to paste cut no matrix", "tuning/_recipe.py", "if c.tp > 1 else []", "if c.tp > 99 else []", PLACES
    ),
    Mutant("the lines to paste split a batch by stage", "tuning/_recipe.py", ' if name != "pp"])', "])", PLACES),
    Mutant(
        "the lines to paste forget an odd block",
        "tuning/_recipe.py",
        "if c.depth and c.depth %",
        "if False and c.depth %",
        PLACES,
    ),
    Mutant(
        "the lines to paste have one stage a rank",
        "tuning/_recipe.py",
        "if c.pipeline_stages > 1 else",
        "if False else",
        PLACES,
    ),
    Mutant(
        "tensor parallelism has no end",
        "tuning/_rules.py",
        "row.config.tp > asked.near, -row.config.tp",
        "False, -row.config.tp",
        RULES,
    ),
    Mutant(
        "a pipeline is filled by any batch",
        "tuning/_rules.py",
        "return n < enough, n if n >= enough else -n",
        "return n < enough, n",
        RULES,
    ),
    Mutant("more micro-batches than asked for are better", "tuning/_rules.py", "n if n >= enough else -n", "-n", RULES),
    Mutant(
        "layouts of other accumulation are not compared",
        "tuning/_rules.py",
        '"ranks", "schedule", "accumulation")',
        '"ranks", "schedule")',
        RULES,
    ),
    Mutant(
        "no pipeline is idle",
        "tuning/_rules.py",
        "(idle := _idle(other)) > _idle(best) + ALIKE",
        "(idle := 0.0)",
        RULES,
    ),
]
