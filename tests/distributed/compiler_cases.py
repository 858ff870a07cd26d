"""Cases of fzero.jit's compilers that every rank of a torchrun world runs; see test_gloo.py.

One alone: torchrun --nproc-per-node 2 -m tests.distributed.compiler_cases NAME
"""

import re
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import fzero
from fzero.graph.run import _auto_backend, _backends, _lengths, _segment_compiler, _template
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.distributed.jit_steps import OPT, train_both
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)


@case
def ranks_go_over_to_compiled_code_in_the_same_step(mesh: fzero.ranks.Mesh) -> None:
    """Rank 0 has all compiled at once, the last rank from its fourth call on; until then all run uncompiled."""
    calls = 0

    def ready(code: Any) -> bool:
        return mesh.rank < mesh.size - 1 or calls >= 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_backends, "start_workers", lambda codes, count, nice: _auto_backend.Workers((Unending(),)))
        patch.setattr(_auto_backend, "is_compiled", ready)
        patch.setattr(_auto_backend, "can_load", lambda code: True)
        patch.setattr(
            _auto_backend, "compile_and_mark", lambda code: lambda args: GraphModule({}, code.graph).forward(*args)
        )
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=0, mesh=mesh)
        jitted = fzero.jit(step, backend="auto")
        eager, fast = step.init(mlp_params(), OPT), jitted.init(mlp_params(), OPT)
        for i in range(6):
            calls += 1
            batch = mesh.split(mlp_batch(8, seed=i))
            *eager, _ = step(*eager, batch)
            *fast, _ = jitted(*fast, batch)
            (entry,) = jitted._entries.values()
            assert (entry.executable.function.compiled is not None) == (calls >= 4), calls
        assert_trees_close(fast, eager)


@case
def what_one_rank_cannot_compile_no_rank_runs_compiled(mesh: fzero.ranks.Mesh) -> None:
    """Compiled code here adds one to what it computes, so that copies of parameters would come to differ."""

    def inductor(gm: GraphModule, stand_ins: Any, made: Any) -> Any:
        if mesh.rank == mesh.size - 1 and any("tanh" in str(n.target) for n in gm.graph.nodes):
            raise RuntimeError("no space left on device")
        changed = any("tanh" in str(n.target) for n in gm.graph.nodes)
        return lambda args: [x + changed for x in gm.forward(*args)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_segment_compiler, "inductor", inductor)
        patch.setattr(_backends, "is_compiled", lambda code: True)
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=0, mesh=mesh)
        eager, fast = train_both(step, fzero.jit(step), 2, 2 * mesh.size)
        assert_trees_close(fast, eager)
        with pytest.raises(RuntimeError, match=f"on rank {mesh.size - 1}.*no space left on device"):
            train_both(step, fzero.jit(step, strict=True), 1, 2 * mesh.size)


@slow_case
def what_one_rank_cannot_compile_for_all_lengths_all_compile_for_each(mesh: fzero.ranks.Mesh) -> None:
    """Code for all lengths adds one here, so that copies of parameters would come to differ."""

    def for_lengths(gm: GraphModule, arguments: Any, forms: Any, length: int) -> Any:
        if mesh.rank == mesh.size - 1:
            raise RuntimeError("no space left on device")
        return lambda args: [x + 1 for x in gm.forward(*args[1:])], lambda n: True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_segment_compiler, "inductor", lambda gm, stand_ins, made: lambda args: gm.forward(*args))
        patch.setattr(_template, "inductor_for_lengths", for_lengths)
        patch.setattr(_lengths, "worker_count", lambda cold: 0)
        patch.setattr(_backends, "is_compiled", lambda code: True)
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=0, mesh=mesh)
        jitted = fzero.jit(step, strict=True)
        eager, fast = step.init(mlp_params(), OPT), jitted.init(mlp_params(), OPT)
        for size in (2, 3, 4):
            batch = mesh.split(mlp_batch(size * mesh.size, seed=size))
            *eager, _ = step(*eager, batch)
            *fast, _ = jitted(*fast, batch)
        assert_trees_close(fast, eager)
        assert jitted._lengths.refused_names


@slow_case
def from_the_fourth_length_on_ranks_may_have_different_ones(mesh: fzero.ranks.Mesh) -> None:
    """Each rank has as many rows as it likes, or as it had before: no collective of the step depends on them."""
    jitted = fzero.jit(fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh), backend="fx")
    eager, fast = jitted.step.init(mlp_params(), OPT), jitted.init(mlp_params(), OPT)
    for i, size in enumerate((2, 3, 4, 3 + 4 * mesh.rank, *[5 + (i + mesh.rank) % 4 for i in range(6)])):
        rows = mlp_batch(12, seed=i)
        batch = fzero.PerRank(fzero.tree.map(lambda x, n=size: x[:n], rows))
        *eager, expected = jitted.step(*eager, batch)
        *fast, loss = jitted(*fast, batch)
        assert torch.equal(loss, expected)
    assert_trees_close(fast, eager, 0)
    assert jitted.traces == 3


@slow_case
def what_one_rank_decides_by_the_length_all_trace(mesh: fzero.ranks.Mesh) -> None:
    """A rank whose step needs the number keeps the others from going on without it."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        rows = int(batch["x"].shape[0]) if mesh.rank == mesh.size - 1 else batch["x"].shape[0]
        return mlp_loss(params, fzero.tree.map(lambda x: x[:rows], batch))

    jitted = fzero.jit(fzero.shard(train_step_for(loss, OPT), stage=1, mesh=mesh), backend="fx")
    state = jitted.init(mlp_params(), OPT)
    for size in (2, 3, 4, 5, 6):
        *state, _ = jitted(*state, mesh.split(mlp_batch(size * mesh.size, seed=size)))
    assert jitted.traces == 5


class Unending:
    """Stands in the place of a worker's process."""

    stdin = None

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        pass

    def wait(self) -> None:
        pass


@slow_case
def a_compiled_step_equals_the_eager_one(mesh: fzero.ranks.Mesh) -> None:
    check_compiled(mesh, [("inductor", 3)])


@slow_case
def compiled_steps_of_other_stages_equal_the_eager_ones(mesh: fzero.ranks.Mesh) -> None:
    check_compiled(mesh, [("inductor", 0), ("inductor", 1), ("inductor-whole", 2)] if mesh.size == 2 else [])


def check_compiled(mesh: fzero.ranks.Mesh, compiled: list[tuple[str, int]]) -> None:
    for backend, stage in compiled:
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=stage, mesh=mesh)
        assert_trees_close(*train_both(step, fzero.jit(step, backend=backend), 5, 2 * mesh.size))


@slow_case
def what_is_reduced_and_used_again_is_not_overwritten(mesh: fzero.ranks.Mesh) -> None:
    """A copy of it is reduced in place: no compiler may drop the copy."""

    def program(x: torch.Tensor) -> Any:
        y = x.sin()
        return fzero.collectives.psum(y.clone()), fzero.PerRank(y * 3)

    x = mesh.local(torch.arange(4.0) + mesh.rank)
    for backend in ("fx", "inductor", "inductor-whole") if mesh.size == 2 else ("fx",):
        jitted = fzero.jit(mesh.spmd(program), backend=backend)
        overwritten = any("all_reduce_." in o.target for o in jitted.plan(x).operations)
        assert overwritten == (backend != "inductor-whole")
        assert_trees_close(jitted(x), mesh.spmd(program)(x))


@slow_case
def generated_code_issues_collectives_in_the_plans_order(mesh: fzero.ranks.Mesh) -> None:
    if mesh.size > 2:
        return
    step = fzero.shard(train_step_for(mlp_loss, OPT), stage=3, mesh=mesh)
    jitted = fzero.jit(step, backend="inductor-whole", bucket_bytes=0)
    assert_trees_close(*train_both(step, jitted, 1, 2 * mesh.size))
    (entry,) = jitted._entries.values()
    assert entry.executable is not None
    compiled: Any = getattr(entry.executable, "compiled")  # noqa: B009
    code: str = compiled.source_code
    issued = re.findall(r"torch\.ops\._c10d_functional\.(\w+?)_?\.default\(", code)
    issued = [name for name in issued if name != "wait_tensor"]
    planned = [entry.plan.operations[c.position].target.split(".")[1].rstrip("_") for c in entry.plan.collectives]
    assert issued == planned and len(planned) >= 3, (issued, planned)


if __name__ == "__main__":
    run(CASES)
