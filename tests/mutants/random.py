"""Faults in fzero/random."""

from tests.mutants.mutant import RANDOM, Mutant

MUTANTS = [
    Mutant("all ranks draw alike", "random/_seeded.py", "fold_in(key, index)", "fold_in(key, 0)", RANDOM),
    Mutant("micro-batches draw alike", "random/_seeded.py", "index), micro_batch()", "index), 0", RANDOM),
    Mutant(
        "ranks of all axes differ",
        "random/_seeded.py",
        "axis_index(tuple([a.name for a in data_axes()]))",
        "axis_index(axis_names())",
        RANDOM,
    ),
    Mutant("fold_in forgets the data", "random/_keys.py", "else _signed(data))", "else 0)", RANDOM),
    Mutant("all draws have one key", "random/_seeded.py", "self.drawn += 1", "pass", RANDOM),
    Mutant("what draws is not asked", "random/_seeded.py", "if torch.Tag", "if False and torch.Tag", RANDOM),
    Mutant("the key enters a draw once", "random/_keys.py", "second=_mixed(key + SECOND, 0)", "second=0", RANDOM),
]
