"""Faults in fzero/parallel/schedules."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped, swapped
from tests.mutants.mutant import Fault, File

CHECK = ("tests/parallel/schedules/test_check.py",)
LAWS = ("tests/parallel/schedules/test_schedules.py",)
PARSE = ("tests/parallel/schedules/test_parse.py",)
PICTURE = ("tests/parallel/schedules/test_picture.py",)

MUTANTS = [
    *File("parallel/schedules/_simulation.py", CHECK).faults(
        Fault("an action may stand twice", "_check_positions", becomes("A > 1", "A > 2")),
        Fault(
            "any rank may run a stage",
            "_check_positions",
            becomes("A.rank_of_stage[B.stage] != C", "A.rank_of_stage[B.stage] != C and False"),
        ),
        Fault("a stage may have no rank", "_check_ranks", always("0 <= A < B.C")),
        Fault("a rank may have no stage", "_check_ranks", never("A not in B.rank_of_stage")),
        Fault("half a backward pass is a whole one", "_check_micro_batch", becomes("len(A) < 2", "not A")),
        Fault("B may stand beside I and W", "_check_micro_batch", never("A in B and C")),
        Fault("torch's table of 1F1B is accepted", "_check_micro_batch", never("forward not in A"), PARSE),
        Fault("torch's fault is not named", "_check_micro_batch", bare("A + B(C, D, E)"), PARSE),
        Fault("further micro-batches are not seen", "_check_complete", never("extra")),
        Fault("no walk through the order", "check", becomes("for A in B(C): ...", "for A in (): ...")),
        Fault("a circle ends the walk without a word", "walk", never("waiters")),
    ),
    *File("parallel/schedules/_actions.py", CHECK).faults(
        Fault("B does not wait for its forward pass", "inputs_of", bare("(B('F', C, D), *A)")),
        Fault("W does not wait for I", "inputs_of", dropped("A('G', s, B)")),
        Fault("a backward pass may overtake", "inputs_of", never("A + 1 < B"), LAWS),
        Fault("I frees the residuals", "IN_FLIGHT_CHANGE", (becomes("0", "-1"), becomes("'W': -1", "'W': 0")), LAWS),
    ),
    *File("parallel/schedules/_builders.py", LAWS).faults(
        Fault("a cap with one more", "_Simulation.forward", swapped(">=", ">")),
        Fault("no room is left for later stages", "_Simulation.forward", bare("A + B")),
        Fault("a cap of none", "caps_of", becomes("A < B", "A < 0")),
        Fault("backward passes wait for their turn", "_Simulation.backward", constant(0, 2)),
    ),
    *File("parallel/schedules/_schedule.py", LAWS).faults(
        Fault("stages of one rank send messages", "Schedule.messages", dropped("self.rank_of_stage[A] != B")),
        Fault("gradients go forward", "Schedule.messages", always("A.kind == 'F'")),
        Fault("a parsed table is not checked", "Schedule.parse", skipped("A(B)"), PARSE),
    ),
    *File("parallel/schedules/_simulation.py", LAWS).faults(
        Fault("a hop in the rank costs", "time_schedule", always("A.rank_of_stage[B.stage] != C")),
        Fault("hops cost nothing", "time_schedule", becomes("A.latency", "0.0")),
        Fault("efficiency is the busiest rank's", "Timing.efficiency", returns("max(self.busy) / self.makespan")),
        Fault("a stage takes as long as a rank", "Durations.of", becomes("A / B", "1.0")),
        Fault("the weight half is counted twice", "Durations.of", bare("A - B")),
    ),
    *File("parallel/schedules/_builders.py", LAWS).faults(
        Fault("a last group is smaller", "group_sizes", becomes("A // ranks", "-(-A // ranks)")),
        Fault("interleaved ranks begin late", "NAMES", becomes("(A, B)", "(B, A)", at="2 of 3")),
        Fault("1F1B begins early", "NAMES", becomes("(A, B)", "(B, A)", at="1 of 3")),
        Fault(
            "weights are done at once",
            "one_f_one_b",
            (dropped("A >= B"), becomes("i - A", "i"), becomes("A[max(0, len(A) - B):]", "[]")),
        ),
        Fault("V is a loop", "zb_v", dropped("'v'")),
        Fault("V of few micro-batches", "_v_row", bare("max(2 * B - 1, A)")),
        Fault("a bound that is too high keeps the known order", "makespan_bound", never("split")),
        Fault("the longer order is taken", "schedule", becomes("min", "max", at="2 of 2")),
        Fault(
            "the cap is the known order's", "schedule", becomes("[A for A in B if C]", "[A for A in B if True or C]")
        ),
    ),
    *File("parallel/schedules/_actions.py", PARSE).faults(
        Fault(
            "half of an overlapped pair is lost",
            "_actions",
            becomes("for A in B if C else D: ...", "for A in B[:1] if C else D: ..."),
        ),
        Fault("a stage may lie on two ranks", "rows_of", becomes("if A != rank: ...", "if A != rank and False: ...")),
        Fault(
            "rows of a dict are in any order",
            "_cells",
            becomes("set(A) != {*range(len(A))}", "False and set(A) != {*range(len(A))}"),
        ),
    ),
    *File("parallel/schedules/_drawing.py", PICTURE).faults(
        Fault("a long schedule is one line", "COLUMNS", constant(120, 1200), LAWS),
        Fault("in flight counts stages", "in_micro_batches", bare("A / B.rank_of_stage.count(C)")),
        Fault("numbers without room", "_panel", becomes("A * scale", "1000000000.0")),
        Fault("ranks are drawn upwards", "_panel", becomes("A - 0.45", "-A - 0.45")),
    ),
]
