"""Running an example."""

from tests.distributed.launch import python, world

WARNINGS = ("-W", "error", "-W", "ignore::DeprecationWarning")  # the latter are torch's own, when it imports Inductor


def run(*words: str, ranks: int = 1, **variables: str) -> str:
    done = python(*WARNINGS, *words, **variables) if ranks == 1 else world(ranks, *WARNINGS, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
