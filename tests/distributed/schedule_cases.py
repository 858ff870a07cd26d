"""Cases of fzero.jit's schedules and passes that every rank of a torchrun world runs; see test_gloo.py.

One alone: torchrun --nproc-per-node 2 -m tests.distributed.schedule_cases NAME
"""

import itertools
import re
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.graph import _trace_agreement
from fzero.graph.loop._loop import node_loop
from fzero.graph.run import _backends
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.distributed.jit_steps import OPT, run_uncompiled, step_peak, train_both
from tests.helpers import either, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)
HALF = fzero.Precision(param=torch.bfloat16)


@slow_case
def reductions_go_on_from_iteration_to_iteration(mesh: fzero.ranks.Mesh) -> None:
    """The numbers are the eager step's, and the peak is the plan's, uncompiled and in pieces."""
    opt = optim.adamw(1e-2)

    def across(actual: Any, budget: Any, name: str) -> int:
        return next(i for i, c in enumerate(actual) if c.pass_settings.across_iterations)

    few = ((3, 4, 2, "fx"),)
    for stage, k, in_flight, backend in either(few, (*few, (2, 4, 2, "inductor"), (2, 3, 1, "fx"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fzero.graph._entry.choose", across)
            patch.setattr(_backends, "is_compiled", lambda code: True)
            patch.setattr(_backends, "compile_all", run_uncompiled)
            step = fzero.shard(train_step_for(gpt_loss, opt, micro_batches=k), stage=stage, mesh=mesh, check=False)
            jitted = fzero.jit(step, backend=backend, in_flight=in_flight)
            eager, fast = [list(s.init(gpt_params(width=16, layers=1), opt)) for s in (step, jitted)]
            for i in range(3):
                tokens = torch.randint(37, (k * mesh.size, 9), generator=torch.Generator().manual_seed(i))
                *eager, loss = step(*eager, mesh.split(tokens))
                *fast, other = jitted(*fast, mesh.split(tokens))
                tolerance = 0 if mesh.size == 2 else 1e-6
                torch.testing.assert_close(loss, other, rtol=tolerance, atol=tolerance)
            for a, b in zip(tree.tensors(eager), tree.tensors(fast), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            (entry,) = jitted._entries.values()
            assert [node_loop(n).carried_count > 0 for n in entry.best.graph.nodes if node_loop(n)] == [True]
            if backend == "fx":
                held, fast = [fast], None
                peak = step_peak(jitted, held, mesh.split(tokens))
                assert entry.plan.argument_bytes + peak == entry.plan.peak_bytes


def own_parts(jitted: fzero.graph.Jitted) -> list[list[Any]]:
    """List of each trace the own parts that are updated where they lie."""
    return [[n for n in e.best.graph.nodes if n.meta.get("own_part")] for e in jitted._entries.values()]


def loss_with_a_norm(params: Any, batch: Any) -> torch.Tensor:
    """Read all leaves of a unit once more, at the end of the loss."""
    return mlp_loss(params, batch) + 1e-3 * sum((x * x).sum() for x in tree.tensors(params))


@case
def an_own_part_is_updated_where_it_lies(mesh: fzero.ranks.Mesh) -> None:
    """The blocks divide by the ranks and lie side by side; the numbers are the eager step's, and the leaves stay."""
    masters = optim.master_weights(optim.adamw(1e-2), HALF)
    tolerance = 0 if mesh.size == 2 else 1e-12
    few = ((2, 3, "fx", OPT),)
    many = (*few, (1, 1, "inductor", masters), (1, 1, "fx", OPT), (1, 1, "inductor", OPT), (2, 1, "inductor", masters))
    for stage, k, backend, opt in either(few, many):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_backends, "is_compiled", lambda code: True)
            patch.setattr(_backends, "compile_all", run_uncompiled)
            options = {"precision": HALF} if opt is masters else {}
            train_step = train_step_for(loss_with_a_norm, opt, micro_batches=k, **options)
            step = fzero.shard(train_step, stage=stage, mesh=mesh)
            jitted = fzero.jit(step, backend=backend)
            eager, fast = [list(s.init(mlp_params(), opt)) for s in (step, jitted)]
            blocks = tree.tensors(fast[0]["blocks"])
            at = [x.data_ptr() for x in blocks]
            for i in range(3):
                dtype = torch.bfloat16 if opt is masters else torch.float64
                batch = mesh.split(mlp_batch(2 * k * mesh.size, seed=i, dtype=dtype))
                *eager, loss = step(*eager, batch)
                *fast, other = jitted(*fast, batch)
                torch.testing.assert_close(loss, other, rtol=tolerance, atol=tolerance)
            for a, b in zip(tree.tensors(eager), tree.tensors(fast), strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            assert [len(actual) for actual in own_parts(jitted)] == [2]
            assert [x.data_ptr() for x in tree.tensors(fast[0]["blocks"])] == at
            (entry,) = jitted._entries.values()
            if backend == "fx":
                held, fast = [fast], None
                assert entry.plan.argument_bytes + step_peak(jitted, held, batch) == entry.plan.peak_bytes


@slow_case
def a_gradient_is_cast_again_for_its_update(mesh: fzero.ranks.Mesh) -> None:
    """The numbers are those of a step that keeps all wide copies, to the last bit, and the peak is the plan's."""
    precision = fzero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    opt = optim.master_weights(optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2)), precision)
    for stage in (2, 3):
        step = fzero.shard(train_step_for(mlp_loss, opt, precision=precision), stage=stage, mesh=mesh, check=False)
        batch, results = mesh.split(mlp_batch(2 * mesh.size, dtype=torch.bfloat16, width=160)), []
        for recast in (False, True):
            jitted = fzero.jit(step, backend="fx", recast=recast)
            state = list(jitted.init(mlp_params(torch.float32, width=160), opt))
            for _ in range(2):
                *state, _ = jitted(*state, batch)
            plan, held = jitted.plan(*state, batch), [state]
            del state
            assert plan.settings.get("recast", False) is recast
            actual_peak = plan.argument_bytes + step_peak(jitted, held, batch)
            assert abs(actual_peak / plan.peak_bytes - 1) < 0.01  # products in bfloat16 pack
            results.append((tree.tensors(held[0]), plan.peak_bytes))
        (plain, most), (again, least) = results
        assert least < most and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@slow_case
def a_leaf_that_was_replaced_is_updated_as_any_other(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=1, mesh=mesh)
    jitted, batch = fzero.jit(step, backend="fx"), mesh.split(mlp_batch(2 * mesh.size))
    eager, fast = [list(s.init(mlp_params(), OPT)) for s in (step, jitted)]
    for replaced in (False, True, True):
        if replaced:
            for params, _ in (eager, fast):
                params["blocks"][0]["b"] = params["blocks"][0]["b"].clone()
        *eager, _ = step(*eager, batch)
        *fast, _ = jitted(*fast, batch)
    assert_trees_close(eager, fast)
    assert [len(actual) for actual in own_parts(jitted)] == [2, 1]


@slow_case
def schedules_give_the_same_numbers(mesh: fzero.ranks.Mesh) -> None:
    check_schedules(mesh, [(2, 1 << 20, 0), ("fitting", 0, 10**9)])


@slow_case
def all_schedules_give_the_same_numbers(mesh: fzero.ranks.Mesh) -> None:
    check_schedules(mesh, itertools.product((0, 2, "fitting"), (0, 1 << 20), (0, 10**9)))


def check_schedules(mesh: fzero.ranks.Mesh, schedules: Iterable[tuple[int | str, int, int]]) -> None:
    if mesh.size > 2:
        return
    step = fzero.shard(train_step_for(mlp_loss, OPT, micro_batches=3), stage=3, mesh=mesh)
    for prefetch, bucket_bytes, reuse in schedules:
        options = {"prefetch": prefetch, "bucket_bytes": bucket_bytes, "max_reuse_bytes": reuse}
        jitted = fzero.jit(step, backend="fx", memory_budget=10**9, **options)
        assert_trees_close(*train_both(step, jitted, 2, 6 * mesh.size))


@case
def ranks_whose_peaks_differ_agree_on_a_schedule(mesh: fzero.ranks.Mesh) -> None:
    """A copy that one rank's strides ask for is data movement: the steps agree, and so must the choice."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.reshape(-1, 8) @ params["a"] @ params["b"]).square().mean()

    params = {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}
    x = torch.ones(4, 400, 8).transpose(0, 1)
    x = x.contiguous() if mesh.rank == 0 else x
    step = fzero.shard(train_step_for(loss, OPT), stage=3, mesh=mesh)
    for budget in (None, 307724, 333324):
        jitted = fzero.jit(step, backend="fx", memory_budget=budget)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the smallest budget may not suffice
            jitted(*jitted.init(params, OPT), mesh.local(x))


@case
def ranks_that_would_order_collectives_differently_are_refused(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh)
    jitted = fzero.jit(step, backend="fx")
    params, state = jitted.init(mlp_params(), OPT)
    original = _trace_agreement._collective_order_digest
    _trace_agreement._collective_order_digest = lambda graph: original(graph) + str(mesh.rank)
    try:
        jitted(params, state, mesh.split(mlp_batch(2 * mesh.size)))
        raise AssertionError("accepted")
    except RuntimeError as error:
        assert "in the same order on all ranks" in str(error), error
    finally:
        _trace_agreement._collective_order_digest = original
    jitted(params, state, mesh.split(mlp_batch(2 * mesh.size)))  # nothing is lost


@case
def ranks_that_ask_for_different_schedules_all_raise(mesh: fzero.ranks.Mesh) -> None:
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh)
    jitted = fzero.jit(step, backend="fx", prefetch=mesh.rank)
    state = jitted.init(mlp_params(), OPT)
    try:
        jitted(*state, mesh.split(mlp_batch(2 * mesh.size)))
    except RuntimeError as error:
        assert re.search(r"not the same step on all ranks.*prefetch=0.*prefetch=1", str(error)), error
    else:
        raise AssertionError("not refused")


if __name__ == "__main__":
    run(CASES)
