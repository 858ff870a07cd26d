"""What a fault is, and the files of tests that the tables name."""

from typing import NamedTuple

LAWS = (  # the quickest first
    "tests/sharding/test_layout.py",
    "tests/zero/test_equivalence.py",
    "tests/collectives/test_collectives.py",
    "tests/zero/test_programs.py",
    "tests/collectives/test_record.py",
)
DONATION = ("tests/graph/trace/test_donation.py",)
IN_PLACE = ("tests/graph/trace/test_writes.py",)
GRAPH = ("tests/graph/test_passes.py",)
JIT = ("tests/graph/test_jit.py",)
TEXTS = ("tests/ranks/test_texts.py",)
OPS = ("tests/graph/test_ops.py",)
PIPELINE = ("tests/graph/test_pipeline.py",)
PAIRS, OPTIM_LAWS = ("tests/optim/test_optim_pairs.py",), ("tests/optim/test_optim_laws.py",)
WHOLE = ("tests/optim/test_whole.py",)
AXES = ("tests/zero/test_axes.py",)
HALF = ("tests/test_precision.py",)
STEP = ("tests/axes/test_lockstep.py",)
RANDOM = ("tests/random/test_random.py",)
REMAT = ("tests/transforms/test_remat.py",)
OWN = ("tests/transforms/test_own_gradients.py",)
WRITES = ("tests/zero/test_writes.py",)
GLOO = ("tests/distributed/test_gloo.py", "-k", "core-2")


class Mutant(NamedTuple):
    """A fault: in a file of fzero, `old` becomes `new`, also each pair of `more`; `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = LAWS
    more: tuple[tuple[str, str], ...] = ()

    def planted(self, text: str) -> str:
        """Return the file's text with the fault in it.

        Raises:
            LookupError: The text does not hold a line to change.
        """
        for old, new in ((self.old, self.new), *self.more):
            if old not in text:
                raise LookupError(f"mutant {self.name!r}: {old!r} is not in {self.file} any more")
            text = text.replace(old, new)
        return text
