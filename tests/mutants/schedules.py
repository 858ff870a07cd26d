"""Faults in fzero/schedules."""

from tests.mutants.mutant import Mutant

CHECK = ("tests/parallel/schedules/test_check.py",)
LAWS = ("tests/parallel/schedules/test_schedules.py",)
PARSE = ("tests/parallel/schedules/test_parse.py",)
PICTURE = ("tests/parallel/schedules/test_picture.py",)

MUTANTS = [
    # what check refuses
    Mutant("an action may stand twice", "parallel/schedules/_check.py", "if n > 1]", "if n > 2]", CHECK),
    Mutant("any rank may run a stage", "parallel/schedules/_check.py", "!= rank:", "!= rank and False:", CHECK),
    Mutant("a stage may have no rank", "parallel/schedules/_check.py", "0 <= rank < schedule.ranks", "True", CHECK),
    Mutant(
        "a rank may have no stage", "parallel/schedules/_check.py", "if rank not in schedule.home:", "if False:", CHECK
    ),
    Mutant(
        "half a backward pass is a whole one", "parallel/schedules/_check.py", "len(halves) < 2", "not halves", CHECK
    ),
    Mutant(
        "B may stand beside I and W", "parallel/schedules/_check.py", "backward in there and halves", "False", CHECK
    ),
    Mutant(
        "torch's table of 1F1B is accepted",
        "parallel/schedules/_check.py",
        "if forward not in there:",
        "if False:",
        PARSE,
    ),
    Mutant(
        "torch's fault is not named", "parallel/schedules/_check.py", "+ _torch_1f1b(schedule, there, stage)", "", PARSE
    ),
    Mutant(
        "further micro-batches are not seen", "parallel/schedules/_check.py", "    if further:", "    if False:", CHECK
    ),
    Mutant("no walk through the order", "parallel/schedules/_check.py", "in walk(schedule):", "in ():", CHECK),
    Mutant(
        "a circle ends the walk without a word",
        "parallel/schedules/_check.py",
        "    if waiting:",
        "    if False:",
        CHECK,
    ),
    Mutant(
        "B does not wait for its forward pass",
        "parallel/schedules/_actions.py",
        '(Value("F", s, m), *after)',
        "after",
        CHECK,
    ),
    Mutant("W does not wait for I", "parallel/schedules/_actions.py", 'return (Value("G", s, m),)', "return ()", CHECK),
    Mutant(
        "a backward pass may overtake",
        "parallel/schedules/_actions.py",
        "if s + 1 < stages else ()",
        "if False else ()",
        LAWS,
    ),
    # what is in flight, what is sent, when
    Mutant("I frees the residuals", "parallel/schedules/_actions.py", '"I": 0, "W": -1', '"I": -1, "W": 0', LAWS),
    Mutant("a cap with one more", "parallel/schedules/_greedy.py", "+ later >= one.cap", "+ later > one.cap", LAWS),
    Mutant(
        "no room is left for later stages",
        "parallel/schedules/_greedy.py",
        "one.alive + later >=",
        "one.alive >=",
        LAWS,
    ),
    Mutant("a cap of none", "parallel/schedules/_greedy.py", "or most < stages:", "or most < 0:", LAWS),
    Mutant(
        "stages of one rank send messages", "parallel/schedules/_schedule.py", " and self.home[to] != rank", "", LAWS
    ),
    Mutant("gradients go forward", "parallel/schedules/_schedule.py", '1 if made.kind == "F" else -1', "1", LAWS),
    Mutant(
        "a hop in the rank costs",
        "parallel/schedules/_timing.py",
        "if schedule.home[value.stage] != rank else 0.0",
        "",
        LAWS,
    ),
    Mutant("hops cost nothing", "parallel/schedules/_timing.py", "(durations.hop if", "(0.0 if", LAWS),
    Mutant(
        "efficiency is the busiest rank's",
        "parallel/schedules/_timing.py",
        "sum(self.busy) / (len(self.busy) * self.makespan)",
        "max(self.busy) / self.makespan",
        LAWS,
    ),
    Mutant(
        "a stage takes as long as a rank",
        "parallel/schedules/_timing.py",
        "share = ranks / stages",
        "share = 1.0",
        LAWS,
    ),
    Mutant(
        "the weight half is counted twice", "parallel/schedules/_timing.py", "(backward - weight)", "backward", LAWS
    ),
    # the orders
    Mutant(
        "a last group is smaller",
        "parallel/schedules/_named.py",
        "micro_batches // ranks)",
        "-(-micro_batches // ranks))",
        LAWS,
    ),
    Mutant(
        "interleaved ranks begin late",
        "parallel/schedules/_named.py",
        "(_far, _near), False",
        "(_near, _far), False",
        LAWS,
    ),
    Mutant("1F1B begins early", "parallel/schedules/_named.py", "(_near, _far), False", "(_far, _near), False", LAWS),
    Mutant(
        "weights are done at once",
        "parallel/schedules/_named.py",
        "back[i - rank])] if split and i >= rank",
        "back[i])] if split",
        LAWS,
        (("back[max(0, len(back) - rank) :]", "[]"),),
    ),
    Mutant("V is a loop", "parallel/schedules/_named.py", 'stages * ranks, "v")', "stages * ranks)", LAWS),
    Mutant(
        "V of few micro-batches",
        "parallel/schedules/_named.py",
        "max(2 * ranks - 1, micro_batches)",
        "micro_batches",
        LAWS,
    ),
    Mutant(
        "a bound that is too high keeps the known order",
        "parallel/schedules/_named.py",
        "(0 if split else",
        "(0 if False else",
        LAWS,
    ),
    Mutant(
        "the longer order is taken",
        "parallel/schedules/_named.py",
        "return min([best, other]",
        "return max([best, other]",
        LAWS,
    ),
    Mutant(
        "the cap is the known order's",
        "parallel/schedules/_named.py",
        "fit = [s for s in closed if all(",
        "fit = [s for s in closed if True or all(",
        LAWS,
    ),
    Mutant(
        "backward passes wait for their turn", "parallel/schedules/_greedy.py", "(0, -stage))", "(2, -stage))", LAWS
    ),
    # tables of torch's form
    Mutant(
        "half of an overlapped pair is lost",
        "parallel/schedules/_parse.py",
        '.split(";") if',
        '.split(";")[:1] if',
        PARSE,
    ),
    Mutant("a stage may lie on two ranks", "parallel/schedules/_parse.py", "!= rank:", "!= rank and False:", PARSE),
    Mutant("a parsed table is not checked", "parallel/schedules/_schedule.py", "        check(schedule)\n", "", PARSE),
    Mutant(
        "rows of a dict are in any order",
        "parallel/schedules/_parse.py",
        "if set(given) !=",
        "if False and set(given) !=",
        PARSE,
    ),
    # what is drawn
    Mutant("a long schedule is one line", "parallel/schedules/_drawing.py", "COLUMNS = 120", "COLUMNS = 1200", LAWS),
    Mutant("in flight counts stages", "parallel/schedules/_drawing.py", " / schedule.home.count(r)", "", PICTURE),
    Mutant("numbers without room", "parallel/schedules/_drawing.py", "if width * scale >", "if 1e9 >", PICTURE),
    Mutant(
        "ranks are drawn upwards",
        "parallel/schedules/_drawing.py",
        "(rank - 0.45, 0.9)",
        "(-rank - 0.45, 0.9)",
        PICTURE,
    ),
]
