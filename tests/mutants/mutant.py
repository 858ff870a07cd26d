"""What a fault is, and the files of tests that the tables name."""

from typing import NamedTuple

from tests.mutants.changes import Change

LAWS = (  # the quickest first
    "tests/sharding/test_partition_and_gather.py",
    "tests/zero/test_equivalence.py",
    "tests/collectives/test_collectives.py",
    "tests/zero/test_programs.py",
    "tests/collectives/test_record.py",
)
DONATION = ("tests/graph/trace/test_donation.py",)
IN_PLACE = ("tests/graph/trace/test_writes.py",)
GRAPH = ("tests/graph/test_passes.py",)
LENGTHS = ("tests/graph/run/test_lengths.py",)
LIVE_RANGES = ("tests/graph/planning/memory/test_live_ranges.py",)
LOOPS = ("tests/graph/test_loops.py",)
LOOP_PLANS = ("tests/graph/test_plans_of_loops.py",)
UNROLLED = ("tests/graph/test_unrolled.py",)
SLICE_OF_GATHER = ("tests/graph/passes/test_slice_of_gather.py",)
JIT = ("tests/graph/test_jit.py",)
GATHER_TEXTS = ("tests/ranks/test_gather_texts.py",)
OPS = ("tests/graph/test_ops.py",)
PASS_MANAGER = ("tests/graph/test_pass_manager.py",)
WRAPPERS, OPTIM_LAWS = ("tests/optim/wrappers/test_wrappers.py",), ("tests/optim/test_optim_laws.py",)
FULL_LEAVES = ("tests/optim/wrappers/test_full_leaves.py",)
AXES = ("tests/zero/test_axes.py",)
HALF = ("tests/test_precision.py",)
SHARD_MASTERS = ("tests/test_masters_as_shards.py",)
STEP = ("tests/axes/test_lockstep.py",)
RANDOM = ("tests/random/test_random.py",)
REMAT = ("tests/transforms/test_remat.py",)
REMAT_SHARDED = ("tests/transforms/test_remat_sharded.py",)
OWN = ("tests/transforms/test_own_gradients.py",)
WRITES = ("tests/zero/test_writes.py",)


def on_processes(*modules: str, ranks: int = 2, slow: bool = False) -> tuple[str, ...]:
    """Return the words for pytest that run the quick or the slow cases of modules on real processes."""
    names = " or ".join([f"{module}-{ranks}" for module in modules])
    test = f"{'test_slow_cases' if slow else 'test_cases_of_one_module'} and ({names})"
    return ("tests/distributed/test_gloo.py", "-m", "slow or not slow", "-k", test)


GLOO = on_processes("core")
JIT_ON_GLOO, SLOW_JIT_ON_GLOO = [on_processes("jit", "schedules", "compilers", slow=slow) for slow in (False, True)]


class Mutant(NamedTuple):
    """A fault: changes in a symbol of a file of fzero, which make `tests` fail."""

    name: str
    file: str
    symbol: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...] = LAWS

    def plant(self, text: str) -> str:
        """Return the file's text with the fault in it.

        Raises:
            LookupError: The file has no such symbol, or no such place in it to change, or several.
        """
        for change in self.changes:
            try:
                text = change.plant(text, self.symbol)
            except LookupError as error:
                raise LookupError(f"mutant {self.name!r}: fzero/{self.file} {error.args[0]}") from None
        return text


class Fault(NamedTuple):
    """A row of a table: what is wrong, in which function, class or assignment, and the change; tests of its own."""

    name: str
    symbol: str
    change: Change | tuple[Change, ...]
    tests: tuple[str, ...] | None = None


class File(NamedTuple):
    """A file of fzero, and the tests that catch the faults in it."""

    path: str
    tests: tuple[str, ...] = LAWS

    def faults(self, *rows: Fault) -> list[Mutant]:
        """Plant faults in the file."""
        return [
            Mutant(
                row.name,
                self.path,
                row.symbol,
                (row.change,) if isinstance(row.change, Change) else row.change,
                self.tests if row.tests is None else row.tests,
            )
            for row in rows
        ]
