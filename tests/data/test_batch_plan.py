"""The arithmetic of batches: any two numbers give the third, and only data-parallel ranks count."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero.testing import world_sizes


@settings(max_examples=60)
@given(m=st.integers(1, 9), k=st.integers(1, 9), n=world_sizes())
def test_a_batch_plan_follows_from_any_two_of_its_numbers(m, k, n):
    mesh = fzero.mesh(simulate=True, dp=n)
    expected = fzero.data.BatchPlan(m * k * n, m, k, n)
    assert fzero.data.batch_plan(micro_batch=m, accumulation=k, mesh=mesh) == expected
    assert fzero.data.batch_plan(global_batch=m * k * n, accumulation=k, mesh=mesh) == expected
    assert fzero.data.batch_plan(global_batch=m * k * n, micro_batch=m, mesh=mesh) == expected
    assert fzero.data.batch_plan(global_batch=m * k * n, micro_batch=m, accumulation=k, mesh=mesh) == expected
    assert expected.local_batch * n == expected.global_batch


def test_only_data_parallel_ranks_count():
    """Those along a pipeline's axis share a batch, though it is one of the axes of the mean, and those along tp do."""

    def ranks(axis: Any = None, model_axes: Any = None, **axes: int) -> int:
        plan = fzero.data.batch_plan(
            micro_batch=3, accumulation=5, mesh=fzero.mesh(**axes), axis=axis, model_axes=model_axes
        )
        assert plan.global_batch == 15 * plan.ranks
        return plan.ranks

    assert ranks(dp=2, tp=4) == ranks(dp=2, tp=4, axis="dp") == 2
    assert ranks(dp=2, pp=3, tp=4) == ranks(dp=2, pp=3, axis=("dp", "pp")) == ranks(dp=2, pp=3, axis="dp") == 2
    assert ranks(pp=4) == ranks(pp=4, tp=2) == ranks(pp=4, axis="pp") == 1
    assert ranks(dp=2, tp=4, axis=("dp", "tp")) == 8  # what is said counts
    assert ranks(dp=2, ep=3, tp=4, axis=("dp", "ep")) == 6
    assert (
        ranks(data=2, stage=3, axis=("data", "stage"), model_axes="stage")
        == ranks(data=2, stage=3, model_axes="stage")
        == 2
    )
    assert ranks(dp=2, pp=3, axis=("dp", "pp"), model_axes=()) == 6  # no pipeline, in spite of the name
    with pytest.raises(ValueError, match=r"axes \('a', 'b'\): name the data-parallel ones, axis='a' or \('a', 'b'\)"):
        ranks(a=2, tp=2, b=2)
    with pytest.raises(ValueError, match=r"'stage' is not an axis of"):
        ranks(dp=2, model_axes="stage")


@pytest.mark.parametrize(
    "given,message",
    [
        (
            {"global_batch": 64},
            r"got {'global_batch': 64} and 4 ranks: expected two of global_batch, micro_batch, acc",
        ),
        ({}, "got no sizes and 4 ranks"),
        ({"global_batch": 64, "micro_batch": 0}, "micro_batch=0: expected an int, at least 1"),
        ({"global_batch": 64, "micro_batch": 2.0}, r"micro_batch=2\.0: expected an int"),
        (
            {"global_batch": 64, "micro_batch": 2, "accumulation": 2},
            r"global_batch=64, micro_batch=2, accumulation=2 and 4 data-parallel ranks contradict .* 2 x 2 x 4 = 16",
        ),
        (
            {"global_batch": 50, "micro_batch": 2},
            r"global_batch=50, micro_batch=2 and 4 .* not a multiple of 8, .* 48 and 56",
        ),
        (
            {"global_batch": 3, "accumulation": 2},
            r"not a multiple of 8, so no micro_batch fits; the smallest global batch is 8$",
        ),
    ],
)
def test_a_contradictory_batch_plan_names_all_its_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        fzero.data.batch_plan(**given, mesh=fzero.mesh(dp=4))
