"""Faults in fzero/parallel/schedules."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File
from tests.mutants.rows import keys_of

CHECK = ("tests/parallel/schedules/test_check.py",)
LAWS = ("tests/parallel/schedules/test_schedules.py",)
PARSE = ("tests/parallel/schedules/test_parse.py",)
PICTURE = ("tests/parallel/schedules/test_picture.py",)

GPIPE = "NamedSchedule(orders=(partial(one_f_one_b, wait=True),))"


MUTANTS = [
    *File("parallel/schedules/_simulation.py", CHECK).faults(
        Fault("an action may stand twice", "_check_positions", becomes("A > 1", "A > 2")),
        Fault(
            "a rank may run a stage of another rank",
            "_check_positions",
            becomes("A.rank_of_stage[B.stage] != C", "A.rank_of_stage[B.stage] != C and False"),
        ),
        Fault("a stage may have no rank", "_check_ranks", always("0 <= A < B.C")),
        Fault("a rank may have no stage", "_check_ranks", never("A not in B.rank_of_stage")),
        Fault("I without W counts as a whole backward pass", "_check_micro_batch", becomes("len(A) < 2", "not A")),
        Fault("a micro-batch may have B as well as I and W", "_check_micro_batch", never("A in B and C")),
        Fault("a table without forward passes is accepted", "_check_micro_batch", never("forward not in A"), PARSE),
        Fault(
            "the error about torch's table does not name torch's fault",
            "_check_micro_batch",
            bare("A + B(C, D, E)"),
            PARSE,
        ),
        Fault("micro-batches beyond the schedule's are not refused", "_check_complete", never("extra")),
        Fault(
            "the order of actions is not checked for deadlocks",
            "check",
            becomes("for A in B(C): ...", "for A in (): ..."),
        ),
        Fault("actions that wait for one another are not refused", "walk", never("waiters")),
    ),
    *File("parallel/schedules/_timing.py", CHECK).faults(
        Fault("a gradient that is sent early comes late", "Durations.until_output", never("A == B and C"), LAWS),
    ),
    *File("parallel/schedules/_actions.py", CHECK).faults(
        Fault("B does not wait for its forward pass", "action_inputs", bare("(B('F', C, D), *A)")),
        Fault("W does not wait for I", "action_inputs", dropped("A('G', s, B)")),
        Fault("a backward pass does not wait for the next stage's", "action_inputs", never("A + 1 < B"), LAWS),
        Fault("I frees the residuals", "IN_FLIGHT_CHANGE", (becomes("0", "-1"), becomes("'W': -1", "'W': 0")), LAWS),
    ),
    *File("parallel/schedules/_greedy.py", LAWS).faults(
        Fault("one forward pass more than the cap is in flight", "_Simulation.forward", swapped(">=", ">")),
        Fault("a forward pass does not leave the cap's rest to later stages", "_Simulation.forward", bare("A + B")),
        Fault("a cap of 0 is accepted", "caps_by_rank", becomes("A < B", "A < 0")),
        Fault("the simulation prefers other actions to backward passes", "_Simulation.backward", constant(0, 2)),
    ),
    *File("parallel/schedules/_pipeline_schedule.py", LAWS).faults(
        Fault(
            "stages of one rank send each other messages",
            "PipelineSchedule.messages",
            dropped("self.rank_of_stage[A] != B"),
        ),
        Fault("gradients are sent to the next stage", "PipelineSchedule.messages", always("A.kind == 'F'")),
        Fault("a parsed table is not checked", "PipelineSchedule.parse", skipped("A(B)"), PARSE),
    ),
    *File("parallel/schedules/_timing.py", LAWS).faults(
        Fault("a message within one rank takes the latency", "time_schedule", always("A.rank_of_stage[B.stage] != C")),
        Fault("messages between ranks take no latency", "time_schedule", becomes("A.latency", "0.0")),
        Fault(
            "efficiency is the busiest rank's, not the mean of all ranks",
            "Timing.efficiency",
            returns("max(self.busy) / self.makespan"),
        ),
        Fault("one of several stages takes as long as the whole rank", "Durations.of", becomes("A / B", "1.0")),
        Fault("a backward pass counts its weight half twice", "Durations.of", bare("A - B")),
    ),
    *File("parallel/schedules/_named_schedules.py", LAWS).faults(
        *[
            Fault(f"{name} keeps as much as gpipe", "NAMES", becomes(f'"{name}": A', f'"{name}": {GPIPE}'))
            for name in keys_of("parallel/schedules/_named_schedules.py", "NAMES")
            if name != "gpipe"
        ],
        Fault("the last group of micro-batches is smaller", "_group_sizes", becomes("A // ranks", "-(-A // ranks)")),
        Fault(
            "interleaved 1F1B prefers the order for messages of one hop",
            "NAMES",
            becomes(
                '"interleaved": NamedSchedule(orders=(A, B), min_stages=2, advice=C)',
                '"interleaved": NamedSchedule(orders=(B, A), min_stages=2, advice=C)',
            ),
        ),
        Fault(
            "1F1B prefers the order for messages of two hops",
            "NAMES",
            becomes(
                '"1f1b": NamedSchedule(orders=(A, B), max_stages=1, advice=C)',
                '"1f1b": NamedSchedule(orders=(B, A), max_stages=1, advice=C)',
            ),
        ),
        Fault(
            "zero-bubble runs the weight half at once",
            "one_f_one_b",
            (dropped("A >= B"), becomes("i - A", "i"), becomes("A[max(0, len(A) - B):]", "[]")),
        ),
        Fault("the stages of zero-bubble V lie in a loop", "_zb_v", dropped("'v'")),
        Fault("zero-bubble V is wrong for few micro-batches", "_v_row", bare("max(2 * B - 1, A)")),
        Fault("the lower bound of a split schedule is too high", "_makespan_bound", never("splits_backward")),
        Fault("the longest order is chosen", "schedule", becomes("min", "max")),
        Fault(
            "a known order beyond the cap is chosen",
            "_best_named",
            becomes("[A for A in B if C]", "[A for A in B if True or C]"),
        ),
    ),
    *File("parallel/schedules/_torch_tables.py", PARSE).faults(
        Fault(
            "one of two overlapped actions is lost",
            "_parse_actions",
            becomes("for A in B if C else D: ...", "for A in B[:1] if C else D: ..."),
        ),
        Fault(
            "a stage may lie on two ranks", "parse_rows", becomes("if A != rank: ...", "if A != rank and False: ...")
        ),
        Fault(
            "rows of a dict need not be numbered from 0",
            "_table_cells",
            becomes("set(A) != {*range(len(A))}", "False and set(A) != {*range(len(A))}"),
        ),
    ),
    *File("parallel/schedules/_drawing.py", PICTURE).faults(
        Fault("a long schedule is one line", "_LINE_LETTERS", constant(120, 1200), LAWS),
        Fault(
            "in flight counts the micro-batches of each stage",
            "_in_flight_texts",
            bare("A / B.rank_of_stage.count(C)"),
        ),
        Fault("numbers are drawn into boxes that are too narrow", "_draw_panel", becomes("A * scale", "1000000000.0")),
        Fault("ranks are drawn from the bottom up", "_draw_panel", becomes("A - 0.45", "-A - 0.45")),
    ),
]
