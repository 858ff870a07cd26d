"""What a plan says of two memories is what lies in them: a step runs in an arena that knows nothing of graphs."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from tests.arena import Arena, MixedError
from tests.graph.helpers import ROWS, WIDTH, loss_of, params_of
from tests.helpers import examples
from tests.optim.offloading import train_step_of

OPTIONS: dict[str, dict[str, Any]] = {
    "host": {},
    "device": {"update_on": "device"},
    "a step late": {"delay": 1},
    "parameters, too": {"params": True},
}
COUNTERS = 64  # bytes of numbers, which may lie in either memory


@examples(0, 8)
@given(
    name=st.sampled_from(sorted(ROWS)),
    option=st.sampled_from(sorted(OPTIONS)),
    ratio=st.floats(0.1, 1),
    stage=st.integers(0, 3),
    n=st.integers(1, 3),
    k=st.sampled_from([1, 4]),
)
@example("clip before", "host", 0.3, 2, 2, 1)
@example("float32", "parameters, too", 0.3, 3, 2, 1)
@example("masters", "device", 0.8, 1, 2, 1)
def test_a_plan_of_offload_has_the_measured_bytes_of_both_memories(name, option, ratio, stage, n, k):
    options, row, mesh = OPTIONS[option], ROWS[name], fzero.mesh(dp=n)
    optimizer = row.make(lambda p: optim.offload(p, ratio, **options), None)
    stage = 3 if "params" in options else stage
    step = fzero.jit(fzero.shard(train_step_of(optimizer, row, k, loss_of), stage, mesh), backend="fx")
    params = tree.map(lambda x: torch.linspace(-1, 1, x.numel()).view(x.shape) / 11, params_of())
    state, x = list(step.init(params, optimizer)), mesh.split(torch.linspace(-1, 1, 4 * n * k * WIDTH).view(-1, WIDTH))
    del params
    plan = step.plan(*state, x)
    *state, _ = step(*state, x)  # the first call keeps more
    with Arena(state, x) as arena:
        *state, _ = step(*state, x)
    assert abs(arena.peak["host"] - plan.peak_of("host")) <= COUNTERS
    beside = plan.peak_of("device") - arena.peak["device"]
    assert -COUNTERS <= beside <= 0.5 * plan.peak_of("device")  # what an operation takes while it runs is in the plan
    if row.precision is None:  # sums in bfloat16 take such
        assert beside <= COUNTERS


def test_the_test_arena_finds_an_operation_on_both_memories():
    x = torch.ones(4)
    with Arena(x), pytest.raises(MixedError):
        fzero.collectives.to_host(x) + x


def test_a_piece_of_a_unit_keeps_no_other_memory_alive():
    """A view would keep the whole shard alive, on the device that is short of memory."""
    mesh, optimizer = fzero.mesh(dp=2), optim.master_weights(optim.adam(0.1), fzero.Precision(param=torch.bfloat16))
    for update in ("host", "device"):
        opt = optim.offload(optimizer, 0.4, update, params=True)
        state = fzero.shard(lambda p, s: (p, s), 3, mesh).init({"w": torch.ones(4096)}, opt)
        moved = optim.with_offload_ratio(state[1], state[0], 0.7)
        for x in tree.tensors((state, moved)):
            assert x.untyped_storage().nbytes() == x.nbytes
