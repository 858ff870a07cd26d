"""Cases of fzero.jit that every rank of a torchrun world runs; see test_gloo.py.

One alone: torchrun --nproc-per-node 2 -m tests.distributed.jit_cases NAME
"""

import pathlib
import re
import tempfile
from typing import Any

import torch

import fzero
from fzero import tree
from fzero.ranks import _agreement
from tests.distributed.harness import Cases, into, run
from tests.distributed.jit_steps import OPT, train_both
from tests.helpers import either, mlp_batch, mlp_loss, mlp_params, train_step_for

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)


@case
def a_jitted_step_equals_the_eager_one_bitwise(mesh: fzero.ranks.Mesh) -> None:
    for stage, k in either(((3, 4),), ((0, 4), (1, 1), (2, 4), (3, 1), (3, 4))):
        train_step = train_step_for(mlp_loss, OPT, micro_batches=k)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=True)
        eager, fast = train_both(step, fzero.jit(step, backend="fx"), 3, 2 * mesh.size * k)
        for a, b in zip(tree.tensors(eager), tree.tensors(fast), strict=True):
            # gloo sums in its own order on more than two ranks, and not in the same one twice
            torch.testing.assert_close(a, b, rtol=0 if mesh.size == 2 else 1e-12, atol=0 if mesh.size == 2 else 1e-12)


@slow_case
def each_rank_dumps_into_a_folder_of_its_own(mesh: fzero.ranks.Mesh) -> None:
    """Though only some ranks look, all agree: a dump is none of what they compare."""
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh)
    with tempfile.TemporaryDirectory() as folder:
        jitted = fzero.jit(step, backend="fx", dump=None if mesh.rank else folder)
        train_both(step, jitted, 1, 2 * mesh.size)
        results = {str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*.txt")}
        assert mesh.rank or "rank_0/peaks.txt" in results, results
        assert all(name.startswith("rank_0/") for name in results) and (results == set() or not mesh.rank), results


@slow_case
def a_profile_counts_the_plans_collectives(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.jit(fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh), backend="inductor")
    args = (*step.init(mlp_params(), OPT), mesh.split(mlp_batch(2 * mesh.size)))
    result = fzero.profile(step, *args, steps=2)
    calls = {c.name: c.calls for c in result.kinds}
    count = len(step.plan(*args).collectives)
    assert min(calls["waits"], calls["collectives"]) >= count, (calls, count)  # a bucket has several waits
    assert all(c.seconds > 0 for c in result.kinds if c.name != "compute"), result


@case
def the_plan_is_the_one_made_without_a_world(mesh: fzero.ranks.Mesh) -> None:
    for stage in either((3,), (1, 3)):
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=stage, mesh=mesh)
        jitted = fzero.jit(step, backend="fx")
        args = (*step.init(mlp_params(), OPT), mesh.split(mlp_batch(2 * mesh.size)))
        here, anywhere = jitted.plan(*args), fzero.plan(jitted, *args)
        assert [c[1:] for c in here.collectives] == [c[1:] for c in anywhere.collectives]
        if mesh.rank == 0:
            assert here.peak_bytes == anywhere.peak_bytes


@case
def ranks_that_trace_different_steps_all_raise(mesh: fzero.ranks.Mesh) -> None:
    factor = 1.0 + mesh.rank

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return mlp_loss(params, batch) * factor

    step = fzero.jit(fzero.shard(train_step_for(loss, OPT), stage=3, mesh=mesh), backend="fx")
    state = step.init(mlp_params(), OPT)
    try:
        step(*state, mesh.split(mlp_batch(2 * mesh.size)))
    except RuntimeError as error:
        where = r"Operation \d+ is aten\.mul.*1\.0.*jit_cases\.py:\d+ on rank 0, but .* on rank 1"
        assert re.search(rf"not the same step on all ranks\. {where}", str(error)), error
    else:
        raise AssertionError("not refused")


@case
def a_rank_that_traces_alone_raises_and_does_not_hang(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.jit(fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh, check=False), backend="fx")
    state = step.init(mlp_params(), OPT)
    seconds, _agreement._TEXT_SECONDS = _agreement._TEXT_SECONDS, 2.0
    try:
        if mesh.rank == 0:
            step(*state, mesh.split(mlp_batch(2 * mesh.size)))
    except RuntimeError as error:
        assert "rank 0 traces train_step, but rank 1 did not within 2 s" in str(error), error
    else:
        assert mesh.rank, "not refused"
    finally:
        _agreement._TEXT_SECONDS = seconds
    torch.distributed.barrier()


if __name__ == "__main__":
    run(CASES)
