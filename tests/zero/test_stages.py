"""The table of stages: a further stage is a further row."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding import Shard
from fzero.sharding._boxes import is_box
from fzero.testing import assert_trees_close
from fzero.zero import StageLayouts, _stages
from tests.helpers import collectives_of, examples, mlp_batch, mlp_loss, mlp_params, train_step_for

FEWER_SUMS = StageLayouts(params="sharded", grads="once", opt_state="sharded")
LAYOUTS = ("replicated", "sharded")
ROWS = [StageLayouts(p, g, s) for p in LAYOUTS for g in ("replicated", "once", "each") for s in LAYOUTS]


@contextmanager
def stages(*rows: StageLayouts) -> Iterator[None]:
    """Let these rows be the table of stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stages, "STAGES", _stages._stage_table(*rows))
        yield


def is_valid(row: StageLayouts) -> bool:
    try:
        return bool(_stages._stage_table(row))
    except ValueError:
        return False


def test_a_stage_is_a_row_of_layouts():
    """The first four are ZeRO's; a further row needs no line here."""
    rows = [fzero.shard(lambda p, s, x: (p, s), stage, fzero.mesh(dp=2)).layout for stage in range(len(_stages.STAGES))]
    assert rows[:4] == [
        ("replicated", "replicated", "replicated"),
        ("replicated", "once", "sharded"),
        ("replicated", "each", "sharded"),
        ("sharded", "each", "sharded"),
    ]
    assert tuple(rows) == _stages.STAGES


@pytest.mark.parametrize("n", [1, 3])
def test_a_further_row_of_stages_is_another_way_to_shard(n):
    """Parameters in shards, and gradients whole until the last micro-batch: fewer collectives, more memory."""
    opt, mesh, reductions = optim.adamw(1e-2), fzero.mesh(dp=n), []
    each = _stages.STAGES[3]
    with stages(each, FEWER_SUMS):
        for stage in (0, 1):
            step = fzero.shard(train_step_for(mlp_loss, opt, micro_batches=3), stage, mesh)
            state, expected = step.init(mlp_params(), opt), (mlp_params(), opt.init(mlp_params()))
            for i in range(3):
                with fzero.collectives.record() as log:
                    *state, _ = step(*state, mesh.split(mlp_batch(3 * n, seed=i)))
                *expected, _ = train_step_for(mlp_loss, opt)(*expected, mlp_batch(3 * n, seed=i))
            reductions.append(log.count("reduce_scatter"))
            assert_trees_close(step.gather(state[0]), expected[0])
            boxes = tree.flatten(state[0], is_box)[0]
            assert all(isinstance(x, Shard | fzero.sharding.Slot) for x in boxes)
        assert reductions[0] == 3 * reductions[1]
        with pytest.raises(ValueError, match="stage=2: expected a stage of ZeRO, 0 to 1"):
            fzero.shard(lambda p, s, x: (p, s), 2, mesh)


def measure(step: Any, k: int, n: int) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Collectives of a unit in a step, and bytes of a rank's parameters and state."""
    opt = optim.adam(1e-2)
    state = step.init(mlp_params(torch.float32), opt)
    with fzero.collectives.record() as log:
        step(*state, step.mesh.split(mlp_batch(k * n, dtype=torch.float32)))
    units = len({event.unit for event in log.unit_events})
    counts = tuple(log.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    return tuple(count / units for count in counts), tuple(step.state_bytes(x) for x in state)


@examples(6, 30)
@given(
    st.lists(st.sampled_from([row for row in ROWS if is_valid(row)]), min_size=1, max_size=2, unique=True), st.data()
)
def test_the_collectives_and_the_bytes_of_a_row_follow_from_its_fields(rows, data):
    """Any two rows thus differ: in a collective, or in the bytes that a rank holds."""
    n, k = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 4))
    full, results = 4 * sum(x.numel() for x in tree.tensors(mlp_params())), []
    with stages(*rows):
        for stage, row in enumerate(rows):
            step = fzero.shard(train_step_for(mlp_loss, optim.adam(1e-2), micro_batches=k), stage, fzero.mesh(dp=n))
            counts, (params, state) = measure(step, k, n)
            assert counts == collectives_of(row, k), row
            assert (params < full) == (row.params == "sharded") and (params == full) == (row.params != "sharded"), row
            assert (state < 2 * full) == (row.opt_state == "sharded"), row
            results.append((counts, params, state))
    assert len({*results}) == len(rows)


REFUSED = {
    ("replicated", "replicated", "sharded"): "beside grads='replicated', opt_state='sharded': expected \"replicated\"",
    ("sharded", "replicated", "replicated"): "beside grads='replicated', params='sharded': expected \"replicated\"",
    ("sharded", "replicated", "sharded"): "beside grads='replicated', params='sharded': expected \"replicated\"",
} | {
    (params, grads, "replicated"): f"beside grads={grads!r}, opt_state='replicated': expected \"sharded\""
    for params, grads in itertools.product(LAYOUTS, ("once", "each"))
}
REFUSED |= {("sharded", "twice", "sharded"): 'grads=\'twice\': expected "replicated", "once" or "each"'}


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_a_row_whose_fields_do_not_go_together_is_refused(fields):
    row = StageLayouts(*fields)
    with pytest.raises(ValueError, match=re.escape(f"stage 4, {row}: {REFUSED[fields]}")):
        _stages._stage_table(*_stages.STAGES[:4], row)


def test_every_combination_trains_as_it_says_or_is_refused():
    assert {row for row in ROWS if not is_valid(row)} == {fields for fields in REFUSED if fields[1] != "twice"}


def test_two_equal_rows_are_refused():
    with pytest.raises(ValueError, match=r"stage 4, StageLayouts\(.*: stage 3 is this row; a further stage differs"):
        _stages._stage_table(*_stages.STAGES[:4], _stages.STAGES[3])
