"""Faults in fzero/schedules."""

from tests.mutants.mutant import Mutant

CHECK = ("tests/schedules/test_check.py",)
LAWS = ("tests/schedules/test_schedules.py",)
PARSE = ("tests/schedules/test_parse.py",)
PICTURE = ("tests/schedules/test_picture.py",)

MUTANTS = [
    # what check refuses
    Mutant("an action may stand twice", "schedules/_check.py", "if n > 1]", "if n > 2]", CHECK),
    Mutant("any rank may run a stage", "schedules/_check.py", "!= rank:", "!= rank and False:", CHECK),
    Mutant("a stage may have no rank", "schedules/_check.py", "0 <= rank < schedule.ranks", "True", CHECK),
    Mutant("a rank may have no stage", "schedules/_check.py", "if rank not in schedule.home:", "if False:", CHECK),
    Mutant("half a backward pass is a whole one", "schedules/_check.py", "len(halves) < 2", "not halves", CHECK),
    Mutant("B may stand beside I and W", "schedules/_check.py", "backward in there and halves", "False", CHECK),
    Mutant("torch's table of 1F1B is accepted", "schedules/_check.py", "if forward not in there:", "if False:", PARSE),
    Mutant("torch's fault is not named", "schedules/_check.py", "+ _torch_1f1b(schedule, there, stage)", "", PARSE),
    Mutant("further micro-batches are not seen", "schedules/_check.py", "    if further:", "    if False:", CHECK),
    Mutant("no walk through the order", "schedules/_check.py", "in walk(schedule):", "in ():", CHECK),
    Mutant("a circle ends the walk without a word", "schedules/_walk.py", "    if waiting:", "    if False:", CHECK),
    Mutant(
        "B does not wait for its forward pass", "schedules/_actions.py", '(Value("F", s, m), *after)', "after", CHECK
    ),
    Mutant("W does not wait for I", "schedules/_actions.py", 'return (Value("G", s, m),)', "return ()", CHECK),
    Mutant(
        "a backward pass may overtake", "schedules/_actions.py", "if s + 1 < stages else ()", "if False else ()", LAWS
    ),
    # what is in flight, what is sent, when
    Mutant("I frees the residuals", "schedules/_actions.py", '"I": 0, "W": -1', '"I": -1, "W": 0', LAWS),
    Mutant("a cap with one more", "schedules/_greedy.py", "+ later >= one.cap", "+ later > one.cap", LAWS),
    Mutant("no room is left for later stages", "schedules/_greedy.py", "one.alive + later >=", "one.alive >=", LAWS),
    Mutant("a cap of none", "schedules/_greedy.py", "or most < stages:", "or most < 0:", LAWS),
    Mutant("stages of one rank send messages", "schedules/_schedule.py", " and self.home[to] != rank", "", LAWS),
    Mutant("gradients go forward", "schedules/_schedule.py", '1 if made.kind == "F" else -1', "1", LAWS),
    Mutant(
        "a hop in the rank costs", "schedules/_timing.py", "if schedule.home[value.stage] != rank else 0.0", "", LAWS
    ),
    Mutant("hops cost nothing", "schedules/_timing.py", "(durations.hop if", "(0.0 if", LAWS),
    Mutant(
        "efficiency is the busiest rank's",
        "schedules/_timing.py",
        "sum(self.busy) / (len(self.busy) * self.makespan)",
        "max(self.busy) / self.makespan",
        LAWS,
    ),
    Mutant("a stage takes as long as a rank", "schedules/_timing.py", "share = ranks / stages", "share = 1.0", LAWS),
    Mutant("the weight half is counted twice", "schedules/_timing.py", "(backward - weight)", "backward", LAWS),
    # the orders
    Mutant(
        "a last group is smaller",
        "schedules/_closed.py",
        "micro_batches // ranks)",
        "-(-micro_batches // ranks))",
        LAWS,
    ),
    Mutant("interleaved ranks begin late", "schedules/_named.py", "(_far, _near), False", "(_near, _far), False", LAWS),
    Mutant("1F1B begins early", "schedules/_named.py", "(_near, _far), False", "(_far, _near), False", LAWS),
    Mutant(
        "weights are done at once",
        "schedules/_closed.py",
        "back[i - rank])] if split and i >= rank",
        "back[i])] if split",
        LAWS,
        (("back[max(0, len(back) - rank) :]", "[]"),),
    ),
    Mutant("V is a loop", "schedules/_closed.py", 'stages * ranks, "v")', "stages * ranks)", LAWS),
    Mutant(
        "V of few micro-batches", "schedules/_closed.py", "max(2 * ranks - 1, micro_batches)", "micro_batches", LAWS
    ),
    Mutant(
        "a bound that is too high keeps the known order",
        "schedules/_closed.py",
        "(0 if split else",
        "(0 if False else",
        LAWS,
    ),
    Mutant(
        "the longer order is taken",
        "schedules/_named.py",
        "return min([best, other]",
        "return max([best, other]",
        LAWS,
    ),
    Mutant(
        "the cap is the known order's",
        "schedules/_named.py",
        "fit = [s for s in closed if all(",
        "fit = [s for s in closed if True or all(",
        LAWS,
    ),
    Mutant("backward passes wait for their turn", "schedules/_greedy.py", "(0, -stage))", "(2, -stage))", LAWS),
    # tables of torch's form
    Mutant("half of an overlapped pair is lost", "schedules/_parse.py", '.split(";") if', '.split(";")[:1] if', PARSE),
    Mutant("a stage may lie on two ranks", "schedules/_parse.py", "!= rank:", "!= rank and False:", PARSE),
    Mutant("a parsed table is not checked", "schedules/_schedule.py", "        check(schedule)\n", "", PARSE),
    Mutant(
        "rows of a dict are in any order",
        "schedules/_parse.py",
        "if set(given) !=",
        "if False and set(given) !=",
        PARSE,
    ),
    # what is drawn
    Mutant("a long schedule is one line", "schedules/_text.py", "WIDTH = 120", "WIDTH = 1200", LAWS),
    Mutant("in flight counts stages", "schedules/_text.py", " / schedule.home.count(r)", "", PICTURE),
    Mutant("numbers without room", "schedules/_picture.py", "if width * scale >", "if 1e9 >", PICTURE),
    Mutant("ranks are drawn upwards", "schedules/_picture.py", "(rank - 0.45, 0.9)", "(-rank - 0.45, 0.9)", PICTURE),
]
