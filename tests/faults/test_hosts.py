"""A lost host on a link of this machine: both sides name the other in time. `make faults` draws the other faults."""

import pytest

from tests.faults.hosts import missing
from tests.faults.on_hosts import Case, run_case

LACKS = missing()


@pytest.mark.skipif(bool(LACKS), reason=f"hosts need {LACKS}, which this machine lacks")
@pytest.mark.parametrize(
    "kind,ranks",
    [("link cut, backward", 1), *[pytest.param(x, 2, marks=pytest.mark.slow) for x in ("one direction cut", "1 MB/s")]],
)
def test_both_sides_of_a_link_name_a_rank_of_the_other(kind, ranks):
    """In three seconds, a sixth of the timeout; 12 s allow for a busy machine. A link that is slow is not lost."""
    run = run_case(Case(kind, ranks, timeout=18.0), patience=12.0)
    assert not run.wrong, "\n".join(run.wrong)
    assert run.seconds is None or 1.5 < run.seconds < 12
