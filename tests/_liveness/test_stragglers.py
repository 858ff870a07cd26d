"""Ranks that are slow: which, where, by how much, and since when."""

import pytest

from fzero._liveness._stragglers import _COMPARED_STEPS, Pace, Stragglers
from tests.distributed.launch import world

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def paces(step: int, inside: list[float], between: float = 0.01) -> dict[int, Pace]:
    return {r: Pace(step, (step * x, step * between)) for r, x in enumerate(inside)}


def test_a_slow_rank_is_named_after_two_comparisons():
    stragglers, inside = Stragglers(), [0.2, 0.2, 0.2, 0.5]
    assert not stragglers.compare(paces(100, inside), HOSTS)
    assert not stragglers.compare(paces(100 + _COMPARED_STEPS - 1, inside), HOSTS)
    assert stragglers.compare(paces(100 + _COMPARED_STEPS, inside), HOSTS)
    assert stragglers.slow_ranks == []
    assert stragglers.compare(paces(100 + 2 * _COMPARED_STEPS, inside), HOSTS)
    (slow,) = stragglers.slow_ranks
    assert (slow.rank, slow.host, slow.where_slow, slow.since) == (3, "b", "in the step", 100)
    text = "rank 3 (b) works 2.5 times as long as the others in the step, 500.0 ms against 200.0 ms, since step 100"
    assert str(slow) == text


@pytest.mark.parametrize("inside", [[0.2, 0.21, 0.25, 0.2], [1e-4, 1e-4, 5e-4, 1e-4]])
def test_small_differences_name_nobody(inside):
    stragglers = Stragglers()
    for step in range(0, 100, _COMPARED_STEPS):
        stragglers.compare(paces(step, inside), HOSTS)
        assert stragglers.slow_ranks == []


def test_one_slow_comparison_names_nobody():
    stragglers, seconds = Stragglers(), [0.0] * 4
    for i in range(8):
        seconds = [x + _COMPARED_STEPS * 0.2 for x in seconds]
        seconds[1] += 5.0 * (i % 2)  # each second one
        stragglers.compare({r: Pace(i * _COMPARED_STEPS, (x, 0.0)) for r, x in enumerate(seconds)}, HOSTS)
        assert stragglers.slow_ranks == []


def test_the_pace_of_a_rank_is_compared_with_the_median_of_the_other_ranks():
    """Of two ranks, one that is slower by 40%: the median with itself would hide it."""
    stragglers = Stragglers()
    for step in range(0, 4 * _COMPARED_STEPS, _COMPARED_STEPS):
        stragglers.compare(paces(step, [0.2, 0.28]), HOSTS)
    assert [(slow.rank, slow.others) for slow in stragglers.slow_ranks] == [(1, pytest.approx(0.2))]


def test_after_a_return_to_a_checkpoint_the_comparison_begins_anew():
    stragglers, inside = Stragglers(), [0.2, 0.2, 0.2, 0.5]
    for step in (100, 100 + _COMPARED_STEPS, 50, 50 + _COMPARED_STEPS):
        stragglers.compare(paces(step, inside), HOSTS)
    assert stragglers.compare(paces(50 + 2 * _COMPARED_STEPS, inside), HOSTS)
    assert [slow.rank for slow in stragglers.slow_ranks] == [3]


SLOW = """
import time, torch, fzero
torch.set_num_threads(1)
mesh = fzero.mesh(dp=-1, timeout=15)
opt = fzero.optim.sgd(0.1)

def train_step(params, opt_state, x):
    loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
    updates, opt_state = opt.update(grads, opt_state, params)
    return fzero.optim.apply_updates(params, updates), opt_state, loss

step = fzero.shard(train_step, stage=3, mesh=mesh, check=False)
params, opt_state = step.init({"w": torch.ones(6, 6)}, opt)
lines = []
watched = fzero.tuning.watch(fzero.jit(step, backend="fx"), every=5, print_fn=lines.append)
with watched:
    for _ in range(100):
        if mesh.rank == 1:
            time.sleep(0.05)
        params, opt_state, _ = watched(params, opt_state, mesh.split(torch.ones(6, 6)))
print(*[line for line in lines if "straggler" in line], sep="\\n", flush=True)
"""


def test_a_watched_step_names_a_straggler():
    """It sleeps between its steps; the other rank waits for it."""
    done = world(2, "-c", SLOW)
    (line,) = [line for line in done.stdout.splitlines() if line]
    assert line.startswith("  straggler: rank 1 (") and " the others between steps, " in line, done


def test_a_rank_is_named_once_where_it_loses_most():
    stragglers = Stragglers()
    for step in range(0, 3 * _COMPARED_STEPS + 1, _COMPARED_STEPS):
        seconds = {0: (0.2, 0.01), 1: (0.3, 0.5), 2: (0.2, 0.01)}
        stragglers.compare({r: Pace(step, (step * x, step * y)) for r, (x, y) in seconds.items()}, HOSTS)
    assert [(x.rank, x.where_slow) for x in stragglers.slow_ranks] == [(1, "between steps")]
