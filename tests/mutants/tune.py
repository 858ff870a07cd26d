"""Faults in fzero.tune: what a row says, what is skipped, what few blocks say of many, and the cost of a GPU."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

TUNE = ("tests/tuning/test_tune.py",)
MODELS = ("tests/tuning/models/test_model_names.py",)
MODEL_AXES = ("tests/tuning/test_model_axes.py",)
COST = ("tests/graph/planning/test_cost.py",)
LINKS = ("tests/graph/planning/test_links.py",)
RULES = ("tests/tuning/test_rules.py",)
PARALLELISM = ("tests/tuning/test_parallelism.py",)
CALIBRATE = ("tests/tuning/machines/test_calibrate.py",)
WATCH = ("tests/tuning/measurements/test_watch.py",)
ALLOCATIONS = ("tests/_torch/test_allocations.py",)
PEER_ESTIMATES = ("tests/tuning/test_peer_estimates.py",)
EXTRAPOLATION = ("tests/tuning/search/test_extrapolation.py",)
GOODPUT = ("tests/tuning/long_runs/test_goodput.py",)
COMMAND = ("tests/tuning/test_command.py",)
BOUNDS = ("tests/tuning/models/test_bounds.py",)
EXPORTS = ("tests/tuning/exports/test_exports.py",)

MUTANTS = [
    *File("tuning/models/_bounds.py", BOUNDS).faults(
        Fault("a bound repeats the last product of a block", "_StepBounds.block", becomes("sum(A[:-1])", "sum(A)")),
        Fault("a bound counts a pipeline's bubble twice", "_StepBounds.seconds", becomes("A.pp - 1", "2 * A.pp - 2")),
    ),
    *File("tuning/search/_best_first.py", BOUNDS).faults(
        Fault("a search by bounds ends at the first row", "search_by_bounds", becomes("A.B.C >= D", "D < math.inf")),
        Fault("a search by bounds plans all rows", "search_by_bounds", becomes("min(A, B - len(C))", "A")),
        Fault("a configuration is skipped by a row that fits", "search_by_bounds", dropped("A(B, C)", at="1 of 1")),
    ),
    *File("tuning/_tune.py", BOUNDS).faults(
        Fault("configurations that may be faster are not named", "ConfigurationTable.left_out", returns("[]")),
    ),
    *File("tuning/_tune.py", TUNE).faults(
        Fault(
            "the best configuration may exceed the budget",
            "ConfigurationTable.fitting",
            always("A.B <= self.budget_bytes"),
        ),
        Fault(
            "the best configuration is the smallest, not the fastest",
            "_sort_by_time",
            becomes("(A.B, A.C)", "(A.C, A.B)"),
        ),
        Fault(
            "the frontier has rows that are slower and larger than others",
            "ConfigurationTable.frontier",
            always("A.B < C[-1].B"),
        ),
        Fault(
            "a table leaves out the columns of its layouts",
            "ConfigurationTable._select_settings",
            dropped("A in B"),
            PARALLELISM,
        ),
    ),
    *File("tuning/search/_search.py", TUNE).faults(
        Fault(
            "a configuration that fits is skipped",
            "is_surely_too_large",
            returns("row.peak_bytes > 0.8 * budget_bytes"),
        ),
        Fault("configurations that cannot fit are planned", "is_surely_too_large", returns("False")),
        Fault("no row is planned in full", "refine", becomes("not A.B", "False")),
        Fault(
            "a row whose extrapolation nearly fits is refused",
            "_deciding_rows",
            becomes("[*A, *B]", "A", at="1 of 2"),
            EXTRAPOLATION,
        ),
    ),
    *File("tuning/search/_configuration_planner.py", TUNE).faults(
        Fault("the schedule of few blocks is used for many", "_ExtrapolationModels.extrapolate", never("replans")),
        Fault("the first rank is the fullest", "_find_fullest_ranks", returns("(0,)", at="2 of 2"), PARALLELISM),
        Fault("a step on a mesh of another size is planned", "_check_mesh", never("expected"), PARALLELISM),
    ),
    *File("tuning/search/_plan_workers.py", TUNE).faults(
        Fault(
            "a pool of processes is used although a fork cannot differentiate",
            "_process_pool",
            never("A > 1 and not B()"),
            ("tests/tuning/search/test_search.py",),
        ),
        Fault(
            "processes start although all rows are known",
            "open_pool.start",
            never("A is not None"),
            ("tests/tuning/search/test_search.py",),
        ),
    ),
    *File("tuning/search/_extrapolation.py", EXTRAPOLATION).faults(
        Fault(
            "models of 1, 2 and 3 blocks are extrapolated",
            "_DEPTHS_BY_PARITY",
            becomes("{1: A, 0: B}", "{1: (1, 2, 3), 0: (1, 2, 3)}"),
            TUNE,
        ),
        Fault(
            "the last pipeline stages are extrapolated as if all were even",
            "choose_depths",
            becomes("n * A + B", "n * A"),
            PARALLELISM,
        ),
        Fault(
            "blocks of different kinds are extrapolated as one kind", "choose_depths", always("is_uniform"), PARALLELISM
        ),
        Fault("blocks that recompute by turns are extrapolated as alike", "choose_depths", always("A != B"), MODELS),
        Fault("the extrapolation is one block off", "extrapolate.at", becomes("depth - A", "depth - A + 1"), TUNE),
        Fault("an operation off its line is extrapolated", "extrapolate_line", becomes("keys - off", "keys")),
        Fault(
            "an operation off its line is left out although it may be the peak",
            "extrapolate_line",
            never("any(A > peak for B in certain)"),
        ),
        Fault(
            "a line is proved whatever the time of the third model",
            "_compared_numbers",
            dropped("(A.schedules[A.B].C, D)"),
        ),
    ),
    *File("tuning/_row.py", TUNE).faults(
        Fault(
            "a lower bound counts buffers",
            "TableRow.min_peak_bytes",
            becomes(
                "('parameters', A, 'activations')",
                "('parameters', A, 'activations', 'buffers', 'gathered', 'gradients')",
            ),
        ),
        Fault("a loop's collectives count once", "summarize", bare("A * c.times")),
        Fault(
            "the seconds are those of the fullest rank, not of the slowest",
            "make_row",
            becomes("max(summaries.values(), key=A)", "summary"),
            PARALLELISM,
        ),
        Fault("a loop's messages count once", "summarize", bare("A * m.times"), PARALLELISM),
    ),
    *File("tuning/_search_space.py", TUNE).faults(
        Fault(
            "a larger micro-batch counts as smaller in memory", "Configuration.holds_no_less_than", swapped(">=", "<=")
        ),
        Fault(
            "a higher stage counts as larger in memory",
            "Configuration.holds_no_less_than",
            always("self.stage <= A.stage"),
        ),
        Fault(
            "every second block counts as smaller in memory than products",
            "Configuration.holds_no_less_than",
            always("self.remat is False"),
            ("tests/tuning/search/test_search.py",),
        ),
        Fault(
            "offload counts as taking device memory",
            "Configuration.holds_no_less_than",
            always("self.A <= B.A", at="2 of 2"),
        ),
        Fault(
            "the global batch ignores accumulation",
            "SearchSpace.__iter__",
            becomes("divmod(self.A // B.C, D)", "(1, self.A // B.C % D)"),
        ),
        Fault("the global batch counts as each rank's", "SearchSpace.__iter__", bare("A // B.C")),
        Fault(
            "a micro-batch that does not divide the batch is dropped without an error",
            "make_search_space",
            never("A.B is not None"),
        ),
        Fault(
            "every configuration is planned in half precision",
            "Configuration.policy",
            becomes("A[self.precision]", "torch.bfloat16"),
        ),
        Fault("the data-parallel world counts all ranks", "Configuration.world", returns("self.ranks"), PARALLELISM),
        Fault(
            "a pipeline's ranks are placed within a machine, and those of tp between machines",
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
            "configurations of different layouts are compared in memory",
            "Configuration.holds_no_less_than",
            dropped("self._dims == other._dims"),
            PARALLELISM,
        ),
    ),
    *File("tuning/machines/_machine.py", TUNE).faults(
        Fault("each device counts the whole host's memory speed", "Machine.as_hardware", bare("A / self.B")),
        Fault(
            "the machine's own host link is ignored",
            "Machine.as_hardware",
            becomes("self.host_link_bandwidth", "50000000000.0"),
        ),
        Fault(
            "a constant that the user changes keeps its old source",
            "Machine.constants",
            (becomes("A.get", "dict([(n, s) for n, _, s in self.sources]).get"), bare("(A, B)", at="4 of 5")),
        ),
        Fault("axis_bandwidths= is ignored", "Machine.as_hardware", dropped("axis_bandwidths=self.axis_bandwidths")),
    ),
    *File("tuning/machines/_named_machines.py", TUNE).faults(
        Fault(
            "a calibrated machine is replaced by the CPU's constants",
            "find_machine",
            returns("MACHINES['cpu']", at="2 of 3"),
            CALIBRATE,
        ),
    ),
    *File("graph/planning/_clocks.py", LINKS).faults(
        Fault(
            "the host's update takes the device's time",
            "_Clocks.__init__",
            becomes("A(graph)", "()", at="2 of 2"),
            COST,
        ),
    ),
    *File("graph/planning/_collective_seconds.py", LINKS).faults(
        Fault("the network is as fast as the machine's links", "_transfer_seconds", always("A == 1")),
        Fault(
            "the ranks of a machine share one network link", "_transfer_seconds", bare("min(B.link_bandwidth, C * A)")
        ),
        Fault("latency ignores the number of machines", "_latency_seconds", returns("0", at="2 of 3")),
        Fault("the first axis changes fastest", "_find_route", bare("reversed(A)")),
        Fault("the latency of an all_reduce is counted once, not twice", "_latency_seconds", bare("2 * A")),
        Fault("the latency of a tree is the larger of tree and ring", "_latency_seconds", becomes("min", "max")),
        Fault(
            "the time of all_to_all leaves out the network's speed",
            "_transfer_seconds",
            becomes("A / B.network_bandwidth", "A / local_ranks"),
        ),
        Fault("a link of another axis is used", "collective_seconds", dropped("A in B")),
    ),
    *File("graph/planning/_cost.py", LINKS).faults(
        Fault("float32 is as fast as half", "_compute_seconds", skipped("A *= B.float32_slowdown"), TUNE),
        Fault("a product reaches its rate at any depth", "_product_rate", becomes("A + B.half_depth", "A"), COST),
        Fault(
            "the last wave of tiles counts as full",
            "_filled_share",
            becomes("math.ceil(A / processors)", "A / processors"),
            COST,
        ),
        Fault("attention is as fast as a product", "_operation_rate", never("'attention' in A(B)"), COST),
        Fault("the bias of a product is taken for its factor", "_PRODUCTS", constant(1, 0, at="1 of 2"), COST),
    ),
    *File("tuning/_tune.py", TUNE).faults(
        Fault("margin= is ignored", "_compute_budget", becomes("A if B is None else B", "0")),
    ),
    *File("graph/_entry.py", TUNE).faults(
        Fault("a plan for a GPU assumes gloo's buffers", "_trace_call", never("A.hardware is not None")),
        Fault("a plan for a GPU has the seconds of a CPU", "Entry.plan", becomes("self.options.hardware", "None")),
    ),
    *File("graph/ir/_node_work.py", TUNE).faults(
        Fault("attention is free on a CPU", "flops", skipped("A = B.get(A, A)")),
    ),
    *File("tuning/models/_steps.py", MODELS).faults(
        Fault("the other half of the blocks recomputes too", "_block_variants", never("A == B")),
    ),
    *File("tuning/models/_forward_pass.py", MODELS).faults(
        Fault("a chunked loss has all logits at once", "head_loss", never("A.chunked")),
    ),
    *File("tuning/models/_model_names.py", MODELS).faults(
        Fault("a tied output head counts twice", "init", never("A.tied")),
        Fault("grouped key heads count like query heads", "_block_params", dropped("A.kv_heads")),
        Fault("a mixture has the parameters of one expert", "_block_params", never("count", at="1 of 2")),
        Fault("head_dim of the configuration is ignored", "ModelShape.head_width", dropped("self.head")),
    ),
    *File("tuning/models/_steps.py", MODELS).faults(
        Fault("a text beyond the model's positions is accepted", "model_step", never("0 < A.positions < B")),
        Fault("the planner does not split experts", "_split_rules", never("A.ep > 1")),
        Fault("experts that do not divide are split", "ModelStep._check_axes", dropped("A.experts[0] % B.ep")),
        Fault("the planner may split an attention head", "ModelStep._check_axes", never("A % B.tp"), PARALLELISM),
    ),
    *File("tuning/models/_forward_pass.py", MODELS).faults(
        Fault("attention is always fused", "_apply_attention", never("A.explicit")),
    ),
    *File("tuning/models/_steps.py", MODEL_AXES).faults(
        Fault(
            "ranks along tp hold all tokens between layers",
            "ModelStep._forward_options",
            never("A > 1 and B and C == 0"),
        ),
        Fault("images are split along their tokens", "ModelStep._check_tokens", never("A == 'image'")),
    ),
    *File("tuning/models/_forward_pass.py", MODEL_AXES).faults(
        Fault("a norm's gradient is that of one rank's tokens", "_enter_for_own_tokens", never("A.sequence")),
        Fault("ranks along cp have the positions of the first", "_learned_positions", never("axis_if_bound('cp')")),
    ),
    *File("tuning/_peer_estimates.py", PEER_ESTIMATES).faults(
        Fault("DeepSpeed's estimate leaves the gradients out", "deepspeed_zero2", constant(4, 2, at="2 of 3")),
        Fault("an estimate gives each host the memory of all hosts", "deepspeed_zero3", bare("A / hosts")),
        Fault("an estimate leaves out the largest layer", "deepspeed_zero3", becomes("4 * A", "0")),
    ),
    *File("tuning/_command_options.py", COMMAND).faults(
        Fault("a kilobyte is 1024 bytes", "_UNITS", constant(1000, 1024)),
    ),
    *File("tuning/command.py", COMMAND).faults(
        Fault("the command exits with 0 if nothing fits", "_run_plan", constant(1, 0)),
        Fault("--chunked-loss is ignored", "_tune_by_options", dropped("chunked_loss=A.chunked_loss")),
    ),
    *File("tuning/_page.py", COMMAND).faults(
        Fault("the timeline drops the peak", "_live_bytes", bare("max(range(A, B), key=C.D.__getitem__)")),
        Fault("a stream is busy twice as long as it is", "_stream_shares", bare("A / width", at="3 of 3")),
        Fault("text in the data can end the page's script", "html_page", bare("A.replace('</', '<\\\\/')")),
    ),
    *File("tuning/_sweep.py", COMMAND).faults(
        Fault(
            "all cases have the first length",
            "_argument_combinations",
            becomes("getattr(A, B) or (None,)", "(getattr(A, B) or (None,))[:1]"),
        ),
    ),
    *File("tuning/exports/_deepspeed.py", EXPORTS).faults(
        Fault(
            "an export counts a micro-batch twice",
            "deepspeed",
            becomes("c.global_batch", "c.global_batch * c.micro_batch"),
        ),
        Fault("an export has another stage", "deepspeed", becomes("c.stage", "c.stage - 1")),
        Fault("DeepSpeed offloads a share at every stage", "_offload_section", always("A and B")),
    ),
    *File("tuning/exports/_fsdp2.py", EXPORTS).faults(
        Fault("FSDP2 reshards at stage 2", "_reshard_setting", becomes("A.stage < 3", "A.stage < 2")),
        Fault(
            "FSDP2 adds up whole losses",
            "_train_step",
            constant(
                "        loss = loss_fn(model, micro_batch) / len(micro_batches)",
                "        loss = loss_fn(model, micro_batch)",
            ),
        ),
    ),
    *File("tuning/exports/_accelerate.py", EXPORTS).faults(
        Fault("accelerate sums once a step at stage 2", "_list_differences", swapped("A.accumulation > 1", "<")),
    ),
    *File("tuning/exports/_torchtitan.py", EXPORTS).faults(
        Fault("torchtitan's step has a rank's tokens", "_apply_plan", becomes("c.global_batch", "c.accumulation")),
    ),
    *File("tuning/exports/_megatron.py", EXPORTS).faults(
        Fault("Megatron-LM shards gradients at stage 1", "_STRATEGIES", constant(2, 1)),
    ),
    *File("tuning/exports/_peaks.py", ("tests/tuning/exports/test_peaks.py",)).faults(
        Fault("FSDP2 holds a copy of its parameters in half precision", "fsdp2_states", constant(8, 12)),
        Fault(
            "DeepSpeed's live parameters are left out",
            "deepspeed_states",
            becomes("_BUCKET_ELEMENTS + live", "_BUCKET_ELEMENTS"),
        ),
        Fault("experts count whole on each rank", "count_parameters", becomes("config.ep", "1")),
        Fault("gradients of earlier micro-batches are left out", "StateBytes.peak", bare("A + self.gradients * B")),
    ),
    *File("tuning/_recipe.py", PARALLELISM).faults(
        Fault(
            "the recipe gathers all parameters at once",
            "_grad_options",
            constant(", gather=False", ", gather=True"),
            COMMAND,
        ),
        Fault(
            "the recipe has another stage",
            "_shard_lines",
            becomes("A.stage", "A.stage + 2", at="1 of 2"),
            COMMAND,
        ),
        Fault("the recipe does not split experts", "_split_rules", becomes("A.ep > 1", "A.ep > 99"), MODELS),
        Fault("the recipe does not split matrices", "_split_rules", becomes("A.tp > 1", "A.tp > 99")),
        Fault("the recipe splits the batch over pipeline stages", "_shard_lines", becomes("A.sample_axes", "A.mean")),
        Fault("the recipe forgets blocks that are not alike", "_model_lines", never("A.B", at="2 of 3")),
        Fault("the recipe has one pipeline stage a rank", "_model_lines", never("A.pipeline_stages > 1")),
    ),
    *File("tuning/measurements/_watch.py", WATCH).faults(
        Fault("the first call is measured", "WatchedStep.__call__", dropped("A > 0")),
        Fault("the call that compiles is measured", "WatchedStep.__call__", bare("A or self.B")),
        Fault("every call is compared with the last plan", "WatchedStep._plan_on_machine", never("A is not None")),
        Fault("the seconds of the named machine are ignored", "WatchedStep._plan_on_machine", dropped("hardware")),
        Fault("watch waits for the device", "WatchedStep.__call__", bare("A.measurement.is_over()")),
        Fault("rows are written to the file twice", "WatchedStep._write_measurements", bare("A[B:]")),
        Fault(
            "a hint is printed at each call", "WatchedStep._write_measurements", skipped("self._reported.add(A.key)")
        ),
    ),
    *File("tuning/measurements/_measurement.py", WATCH).faults(
        Fault("a workspace counts as a second copy", "_memory_hints", becomes("outside - workspace", "outside")),
        Fault("the peak leaves out memory held before the call", "StepMeasurement.peak_bytes", bare("A + B")),
        Fault("the slowest call is taken for the median", "_time_hints", becomes("median", "max")),
    ),
    *File("tuning/measurements/_meter.py", WATCH).faults(
        Fault(
            "the peak of a GPU is not reset between calls",
            "_DeviceMeter.__call__",
            skipped("A.reset_peak_memory_stats(self.B)"),
        ),
    ),
    *File("_torch/cpu_allocator.py", ALLOCATIONS).faults(
        Fault(
            "freed memory is not subtracted",
            "_peak_bytes",
            becomes("A.cpu_memory_usage()", "max(A.cpu_memory_usage(), 0)"),
        ),
        Fault("the user's profiler is ended", "allocations", never("A()")),
    ),
    *File("tuning/machines/_calibrate.py", CALIBRATE).faults(
        Fault("the speeds of float32 and half precision are swapped", "calibrate", becomes("(A / B, C)", "(B / A, C)")),
        Fault("the latency of a ring is counted in its speed", "_fit_links", bare("A - (B - 1) * C")),
        Fault("a link's speed includes its latency", "_fit_links", bare("max(A - B, 0.1 * A)")),
        Fault(
            "an assumed constant counts as measured", "_make_machine", constant("assumed, as for ", "measured, as for ")
        ),
        Fault(
            "links between machines have the speed of links within",
            "_measure_links",
            always("A > 1"),
            (*CALIBRATE, "-m", "slow or not slow"),
        ),
    ),
    *File("tuning/machines/_stopwatches.py", CALIBRATE).faults(
        Fault("the speed of a copy counts wrong bytes", "copy_speed", becomes("2 * 4", "-4")),
    ),
    *File("tuning/_verdicts.py", RULES).faults(
        Fault("rules that contradict the plans are kept", "verdicts", always("A[0] is B")),
        Fault("the rule of thumb takes the highest stage", "_prefer_low_stages", becomes("A.B.stage", "-A.B.stage")),
        Fault(
            "settings are compared at the fastest micro-batch, not at the smallest",
            "_prefer_fast_settings",
            always("A.B.C == D"),
        ),
        Fault("configurations of other settings are compared", "_comparable_rows", dropped("A(B) == A(C.D)")),
        Fault("experts may exceed a machine", "_prefer_experts_within_host", bare("(B.C.ep > D.devices_per_host, A)")),
        Fault("equal seconds count as a reason", "_explain_choice", never("A < B")),
        Fault("tensor parallelism may exceed a machine", "_tp_sort_key", never("A.B.tp > C.devices_per_host")),
        Fault("the rule of pipelines ignores the number of micro-batches", "_pipeline_fill.order", always("A >= B")),
        Fault("more micro-batches than asked for are better", "_pipeline_fill.order", never("A >= B")),
        Fault("layouts of other accumulation are not compared", "_PARALLEL_FIELDS", dropped("'accumulation'")),
        Fault("a pipeline's bubbles are no reason", "_explain_choice", becomes("(A := B(C)) > B(D) + E", "(A := 0.0)")),
    ),
    *File("tuning/_search_space.py", MODELS).faults(
        Fault("codes are planned as full numbers", "Configuration.policy", always("A.gather is None")),
    ),
    *File("tuning/models/_steps.py", MODELS).faults(
        Fault("moments of 8 bits are planned as float32", "ModelStep.__call__", dropped("moments=A.moments")),
    ),
    *File("tuning/_local_sgd_estimate.py", ("tests/tuning/test_command.py",)).faults(
        Fault(
            "an average counts in each step",
            "LocalSgdEstimate.__str__",
            becomes("self.average_seconds / self.every", "self.average_seconds"),
        ),
    ),
    *File("tuning/_search_space.py", ("tests/tuning/test_model_axes.py",)).faults(
        Fault("hosts share their ranks with a pipeline", "_parallel_dims", dropped("host == 1 or A == B == C == 1")),
        Fault("a step without shards is planned by hosts", "SearchSpace.__iter__", dropped("A > 0 or B.host == 1")),
    ),
    *File("tuning/_search_space.py", PARALLELISM).faults(
        Fault("all pipelines have the fewest stages", "Configuration.pipeline_stages", dropped("self.stages_per_rank")),
        Fault("a schedule takes any number of stages", "_is_schedule", always("not A or B <= int(A) <= C")),
    ),
    *File("tuning/long_runs/_goodput.py", GOODPUT).faults(
        Fault("Daly's formula forgets that steps stand still", "save_interval", becomes("A - save_seconds", "A")),
    ),
    *File("tuning/long_runs/_simulated_run.py", GOODPUT).faults(
        Fault(
            "a run of many devices fails like one device",
            "SimulatedRun._draw_lifetime",
            becomes("A / self.devices", "A"),
        ),
        Fault("a failure loses no steps", "SimulatedRun._stop", becomes("self.work_seconds - A", "0.0")),
        Fault("a save counts before it is complete", "SimulatedRun._fail", becomes("self.now - A", "self.now")),
        Fault("saves that are passed at once take no time", "SimulatedRun._pass_cycles", skipped("A['saves'] += B")),
        Fault("what began before a restart ends after it", "SimulatedRun._if_still", always("A == restarts")),
        Fault(
            "a repaired host loses work",
            "SimulatedRun._rejoin",
            becomes("self.work_seconds", "self.committed_work_seconds"),
        ),
        Fault(
            "a failure takes eight devices away",
            "SimulatedRun._present_share",
            becomes("self.reliability.devices_lost", "8"),
        ),
        Fault(
            "a lost host does not slow the run",
            "SimulatedRun._work_speed",
            becomes("self._present_share / A", "1.0 / A"),
        ),
    ),
    *File("graph/_schedule_options.py", PARALLELISM).faults(
        Fault(
            "options of a plan's settings leave out across_iterations",
            "ScheduleOptions.of",
            dropped("'across_iterations': False"),
        ),
    ),
    *File("tuning/_table_views.py", PARALLELISM).faults(
        Fault(
            "the table shows bytes under the wrong axis",
            "_rich_table",
            becomes("A.B.get(C, 0)", "A.B.get(moved_axes[0], 0)"),
        ),
    ),
]
