"""Faults in fzero/random."""

from tests.mutants.changes import becomes, dropped, skipped
from tests.mutants.mutant import RANDOM, Fault, File

MUTANTS = [
    *File("random/_seeded.py", RANDOM).faults(
        Fault("every rank draws the same numbers", "seeded.from_key", becomes("A(B, index)", "A(B, 0)")),
        Fault(
            "every micro-batch draws the same numbers", "seeded.from_key", becomes("A(A(B, C), D())", "A(A(B, C), 0)")
        ),
        Fault(
            "a draw differs along axes outside the loss's",
            "seeded.from_key",
            (becomes("tuple", "axis_names"), dropped("[A.name for A in B()]")),
        ),
        Fault("every draw of a block has the same key", "_DrawsByKey.next_key", skipped("self.count += 1")),
        Fault(
            "an operation that draws without a key is not refused",
            "_RefusalOfDraws.__torch_dispatch__",
            becomes("A and B(C, D, E)", "False and A and B(C, D, E)"),
        ),
    ),
    *File("random/_keys.py", RANDOM).faults(
        Fault("fold_in forgets the data", "fold_in", becomes("A(B)", "0", at="5 of 5")),
        Fault("the second half of the key is not used", "bits_at", becomes("A(B + C, 0)", "0")),
    ),
]
