"""Faults in fzero.tune: what a row says, what is skipped, what few blocks say of many, and the cost of a GPU."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

TUNE = ("tests/tuning/test_tune.py",)
MODELS = ("tests/tuning/test_models.py",)
COST = ("tests/graph/test_cost.py",)
LINKS = ("tests/graph/test_links.py",)
RULES = ("tests/tuning/test_rules.py",)
PARALLELISM = ("tests/tuning/test_parallelism.py",)
CALIBRATE = ("tests/tuning/test_calibrate.py",)
WATCH = ("tests/tuning/test_watch.py",)
ALLOCATIONS = ("tests/_torch/test_allocations.py",)
PEER_ESTIMATES = ("tests/tuning/test_peer_estimates.py",)
COMMAND = ("tests/tuning/test_command.py",)

MUTANTS = [
    *File("tuning/_tune.py", TUNE).faults(
        Fault("the budget is forgotten in the best", "Table.fitting", always("A.B <= self.budget")),
        Fault("the best is the smallest", "_by_time", becomes("(A.B, A.C)", "(A.C, A.B)")),
        Fault("a frontier of all rows", "Table.frontier", always("A.B < C[-1].B")),
        Fault("a table forgets its layouts", "Table._select_settings", dropped("A in B"), PARALLELISM),
    ),
    *File("tuning/_search.py", TUNE).faults(
        Fault(
            "a fork without gradients is used",
            "pool_of",
            never("A > 1 and not B()"),
            ("tests/tuning/test_search.py",),
        ),
        Fault("what fits is skipped", "rows_of", becomes("A.B > C", "A.peak_bytes > 0.8 * C")),
        Fault("nothing is skipped", "rows_of", never("A.B > C")),
        Fault(
            "two blocks say what many take",
            "DEPTHS_BY_PARITY",
            becomes("{1: (3, 5), 0: (4, 6)}", "{1: (1, 2), 0: (1, 2)}"),
        ),
        Fault("the schedule of few blocks stays", "ConfigurationPlanner._extrapolated", never("replans")),
        Fault("no row is planned in full", "refine", always("not rough")),
        Fault("the first rank is the fullest", "fullest_of", returns("(0,)", at="2 of 2"), PARALLELISM),
        Fault("stages come to be even", "depths_of", becomes("few * A + B", "few * A"), PARALLELISM),
        Fault("blocks are always alike", "depths_of", always("alike"), PARALLELISM),
        Fault("a step on any mesh is planned", "check_mesh", never("expected"), PARALLELISM),
    ),
    *File("tuning/_row.py", TUNE).faults(
        Fault(
            "buffers are surely held",
            "TableRow.at_least",
            becomes(
                "('parameters', A, 'activations')",
                "('parameters', A, 'activations', 'buffers', 'gathered', 'gradients')",
            ),
        ),
        Fault("the line is a step too steep", "extrapolate.at", becomes("depth - A", "depth - A + 1")),
        Fault("bytes of loops count once", "summarize", bare("A * c.times")),
        Fault(
            "a step takes what its fullest rank does",
            "row_of",
            becomes("max([A.schedules[A.B].C for A in D])", "summary.schedules[summary.B].C"),
            PARALLELISM,
        ),
        Fault("a message is sent once", "summarize", bare("A * m.times"), PARALLELISM),
    ),
    *File("tuning/_space.py", TUNE).faults(
        Fault("a larger micro-batch holds less", "Configuration.holds_no_less_than", swapped(">=", "<=")),
        Fault("a higher stage holds more", "Configuration.holds_no_less_than", always("self.stage <= A.stage")),
        Fault("offload takes memory", "Configuration.holds_no_less_than", always("self.A <= B.A", at="2 of 2")),
        Fault(
            "micro-batches are not multiplied",
            "Space.__iter__",
            becomes("divmod(self.A // B.C, D)", "(1, self.A // B.C % D)"),
        ),
        Fault("the batch is each rank's", "Space.__iter__", bare("A // B.C")),
        Fault("an odd micro-batch is left out without a word", "space_of", never("A.B is not None")),
        Fault("half precision for all", "Configuration.policy", becomes("A[self.precision]", "torch.bfloat16")),
        Fault("all ranks are data-parallel", "Configuration.world", returns("self.ranks"), PARALLELISM),
        Fault(
            "a pipeline lies within a machine",
            "Configuration.axes",
            (
                constant("pp", "tp"),
                constant("tp", "pp", at="2 of 2"),
                becomes("self.pp", "self.tp"),
                becomes("'pp': self.tp", "'pp': self.pp"),
            ),
            PARALLELISM,
        ),
        Fault(
            "a layout holds no less than another",
            "Configuration.holds_no_less_than",
            (dropped("self.A", at="3 of 4"), dropped("A.B", at="5 of 7")),
            PARALLELISM,
        ),
    ),
    *File("tuning/_machines.py", TUNE).faults(
        Fault("each device has the whole host", "Machine.as_device", bare("A / self.B")),
        Fault("the host's link is the usual", "Machine.as_device", becomes("self.link", "50000000000.0")),
        Fault(
            "a changed constant keeps its source",
            "Machine.constants",
            (becomes("A.get", "dict([(n, s) for n, _, s in self.sources]).get"), bare("(A, B)", at="4 of 5")),
        ),
        Fault("links that were given are forgotten", "Machine.as_device", dropped("links=self.links")),
        Fault("a calibrated machine is a common one", "machine_of", returns("MACHINES['cpu']", at="2 of 3"), CALIBRATE),
    ),
    *File("graph/planning/_cost.py", LINKS).faults(
        Fault("the host's update is the device's", "seconds", becomes("A(graph)", "()", at="2 of 2"), COST),
        Fault("the network is as fast as the machine's links", "_transfer_seconds", always("A == 1")),
        Fault("a machine has one way out", "_transfer_seconds", bare("min(B.link, C * A)")),
        Fault("a thousand ranks are as near as eight", "_latency_seconds", returns("0", at="2 of 3")),
        Fault("the first axis changes fastest", "route_of", bare("reversed(A)")),
        Fault("an all_reduce is one ring", "_latency_seconds", bare("2 * A")),
        Fault("a tree is no shorter", "_latency_seconds", becomes("min", "max")),
        Fault("all to all share their ways out", "_transfer_seconds", becomes("A / B.network", "A / local_ranks")),
        Fault("a link of any axis counts", "collective_seconds", dropped("A in B")),
        Fault("float32 is as fast as half", "work_seconds", skipped("A *= B.slow"), TUNE),
    ),
    *File("tuning/_tune.py", TUNE).faults(
        Fault("the margin is forgotten", "budget_of", becomes("A if B is None else B", "0")),
    ),
    *File("graph/_entry.py", TUNE).faults(
        Fault("a GPU receives as gloo does", "_trace_call", never("A.device is not None")),
        Fault("a GPU's plan has a CPU's seconds", "Entry.plan", becomes("self.options.device", "None")),
    ),
    *File("graph/_ir.py", TUNE).faults(
        Fault("attention is free on a CPU", "flops", skipped("A = B.get(A, A)")),
    ),
    *File("tuning/_models.py", MODELS).faults(
        Fault("a tied head counts twice", "init", never("A.tied")),
        Fault("keys are as many as queries", "_block", dropped("A.kv_heads")),
        Fault("one expert stands for all", "_block", never("count", at="1 of 2")),
        Fault("a head is as wide as its share", "ModelShape.head_width", dropped("self.head")),
    ),
    *File("tuning/_steps.py", MODELS).faults(
        Fault("attention is always fused", "_attention", never("explicit")),
        Fault("a long text is let through", "model_step", never("0 < A.positions < B")),
        Fault("experts lie whole on each rank", "_rules", never("A.ep > 1")),
        Fault("experts that do not divide are split", "ModelStep._check", dropped("A.experts[0] % B.ep")),
        Fault("the planner cuts heads", "ModelStep._check", never("A % B.tp"), PARALLELISM),
    ),
    *File("tuning/_peer_estimates.py", PEER_ESTIMATES).faults(
        Fault("gradients are left out", "deepspeed_zero2", constant(4, 2, at="2 of 3")),
        Fault("a host has all that the hosts have", "deepspeed_zero3", bare("A / hosts")),
        Fault("the largest layer is left out", "deepspeed_zero3", becomes("4 * A", "0")),
    ),
    *File("tuning/command.py", COMMAND).faults(
        Fault("a kilobyte is 1024 bytes", "UNITS", constant(1000, 1024)),
        Fault("nothing that fits is a success", "_plan", constant(1, 0)),
        Fault("a timeline that misses the peak", "_timeline", bare("max(range(A, B), key=C.D.__getitem__)")),
        Fault("a script within the data ends the page", "page", bare("A.replace('</', '<\\\\/')")),
    ),
    *File("tuning/command.py", PARALLELISM).faults(
        Fault(
            "the lines to paste gather at once", "_grad_options", constant(", gather=False", ", gather=True"), COMMAND
        ),
        Fault(
            "the lines to paste have another stage",
            "_shard_lines",
            becomes("A.stage", "A.stage + 2", at="1 of 2"),
            COMMAND,
        ),
        Fault("the lines to paste split no experts", "_rules", becomes("A.ep > 1", "A.ep > 99"), MODELS),
        Fault("the lines to paste cut no matrix", "_rules", becomes("A.tp > 1", "A.tp > 99")),
        Fault("the lines to paste split a batch by stage", "_shard_lines", dropped("A != 'pp'")),
        Fault("the lines to paste forget an odd block", "_model_lines", never("A.B", at="2 of 3")),
        Fault("the lines to paste have one stage a rank", "_model_lines", never("A.B > 1", at="2 of 2")),
    ),
    *File("tuning/_watch.py", WATCH).faults(
        Fault("a workspace is a second copy", "_memory_hints", becomes("outside - workspace", "outside")),
        Fault("what was there before is forgotten", "StepMeasurement.peak_bytes", bare("A + B")),
        Fault("the first call is measured", "WatchedStep.__call__", dropped("A > 0")),
        Fault("the compiled call is not", "WatchedStep.__call__", bare("A or self.B")),
        Fault("all calls have the last plan", "WatchedStep._plan", never("A is not None")),
        Fault("a machine's seconds are anyone's", "WatchedStep._plan", dropped("device")),
        Fault("a device that is behind is waited for", "WatchedStep.__call__", bare("A.measurement.is_over()")),
        Fault("rows are written again", "WatchedStep._write", bare("A[B:]")),
        Fault("a hint is said each time", "WatchedStep._write", skipped("self._reported.add(A.name)")),
        Fault("the median is the worst", "_time_hints", becomes("median", "max")),
        Fault(
            "a GPU's peak is that of all time",
            "_DeviceMeter.__call__",
            skipped("A.reset_peak_memory_stats(self.B)"),
        ),
    ),
    *File("_torch/watched.py", ALLOCATIONS).faults(
        Fault("what is freed stays", "_peak", becomes("A.cpu_memory_usage()", "max(A.cpu_memory_usage(), 0)")),
        Fault("the user's profiler is ended", "allocations", never("A()")),
    ),
    *File("tuning/_calibrate.py", CALIBRATE).faults(
        Fault("float32 is as much faster", "calibrate", becomes("(A / B, C)", "(B / A, C)")),
        Fault("a copy only reads", "copy_speed", becomes("2 * 4", "-4")),
        Fault("a step of the ring counts twice", "links_of", bare("A - (B - 1) * C")),
        Fault("a link's latency is in its speed", "links_of", bare("max(A - B, 0.1 * A)")),
        Fault("what is assumed was measured", "_machine", constant("assumed, as for ", "measured, as for ")),
        Fault(
            "links between machines are those within",
            "_link_constants",
            always("A > 1", at="1 of 2"),
            (*CALIBRATE, "-m", "slow or not slow"),
        ),
    ),
    *File("tuning/_rules.py", RULES).faults(
        Fault("any rule is kept", "verdicts", always("A[0] is B")),
        Fault("the highest stage is an expert's", "_stage", becomes("A.B.stage", "-A.B.stage")),
        Fault("settings of any micro-batch", "_settings_first", always("A.B.C == D")),
        Fault("all that fits is compared", "_peers", dropped("A(B) == A(C.D)")),
        Fault("a machine has no end", "_experts", bare("(B.C.ep > D.devices_per_host, A)")),
        Fault("a difference of nothing is a reason", "_reason", never("A < B")),
        Fault("tensor parallelism has no end", "_within", never("A.B.tp > C.devices_per_host")),
        Fault("a pipeline is filled by any batch", "_pipeline_fill.order", always("A >= B")),
        Fault("more micro-batches than asked for are better", "_pipeline_fill.order", never("A >= B")),
        Fault("layouts of other accumulation are not compared", "PARALLEL_FIELDS", dropped("'accumulation'")),
        Fault("no pipeline is idle", "_reason", becomes("(A := B(C)) > B(D) + E", "(A := 0.0)")),
    ),
    *File("graph/_pass_manager.py", PARALLELISM).faults(
        Fault(
            "whether a loop goes on across turns is forgotten",
            "ScheduleOptions.of",
            dropped("'across_iterations': False"),
        ),
    ),
    *File("tuning/_table_views.py", PARALLELISM).faults(
        Fault("bytes stand under any axis", "_rows", becomes("A.B.get(C, 0)", "A.B.get(moved_axes[0], 0)")),
    ),
]
