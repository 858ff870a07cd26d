"""Cases of fzero.jit that every rank of a torchrun world runs; see test_gloo.py.

One alone: torchrun --nproc-per-node 2 -m tests.distributed.jit_cases NAME
"""

import importlib
import itertools
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import fzero
from fzero import optim, tree
from fzero.graph import _trace_agreement
from fzero.graph.loop._loop import node_loop
from fzero.ranks import _agreement
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.helpers import either, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.memory import peak_bytes
from tests.tiny_gpt import gpt_loss, gpt_params

CASES: Cases = {}
SLOW: Cases = {}  # of them; only make test-all runs these
case, slow_case = into(CASES), into(CASES, SLOW)
AUTO = "fzero.graph.run._auto_backend"
OPT = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2, eps=1e-3))

HALF = fzero.Precision(param=torch.bfloat16)


def train_both(step: fzero.zero.ShardedStep, jitted: fzero.graph.Jitted, steps: int, size: int) -> tuple[Any, Any]:
    eager, fast = step.init(mlp_params(), OPT), jitted.init(mlp_params(), OPT)
    for i in range(steps):
        batch = step.mesh.split(mlp_batch(size, seed=i))
        *eager, loss = step(*eager, batch)
        *fast, other = jitted(*fast, batch)
        assert torch.equal(loss, other) or jitted.options.backend != "fx"
    return list(eager), list(fast)


@case
def ranks_go_over_to_compiled_code_in_the_same_step(mesh: fzero.ranks.Mesh) -> None:
    """Rank 0 has all compiled at once, the last rank from its fourth call on; until then all run uncompiled."""
    changing, lowering = importlib.import_module(AUTO), importlib.import_module("fzero.graph.run._backends")
    calls = 0

    def ready(code: Any) -> bool:
        return mesh.rank < mesh.size - 1 or calls >= 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "start_workers", lambda codes, count, nice: changing.Workers((Unending(),)))
        patch.setattr(changing, "is_compiled", ready)
        patch.setattr(changing, "can_load", lambda code: True)
        patch.setattr(
            changing, "compile_and_mark", lambda code: lambda args: GraphModule({}, code.graph).forward(*args)
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
    lowering, compiling = (
        importlib.import_module(f"fzero.graph.run.{name}") for name in ("_backends", "_segment_compiler")
    )

    def inductor(gm: GraphModule, stand_ins: Any, made: Any) -> Any:
        if mesh.rank == mesh.size - 1 and any("tanh" in str(n.target) for n in gm.graph.nodes):
            raise RuntimeError("no space left on device")
        changed = any("tanh" in str(n.target) for n in gm.graph.nodes)
        return lambda args: [x + changed for x in gm.forward(*args)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "inductor", inductor)
        patch.setattr(lowering, "is_compiled", lambda code: True)
        step = fzero.shard(train_step_for(mlp_loss, OPT), stage=0, mesh=mesh)
        eager, fast = train_both(step, fzero.jit(step), 2, 2 * mesh.size)
        assert_trees_close(fast, eager)
        with pytest.raises(RuntimeError, match=f"on rank {mesh.size - 1}.*no space left on device"):
            train_both(step, fzero.jit(step, strict=True), 1, 2 * mesh.size)


@slow_case
def what_one_rank_cannot_compile_for_all_lengths_all_compile_for_each(mesh: fzero.ranks.Mesh) -> None:
    """Code for all lengths adds one here, so that copies of parameters would come to differ."""
    files = ("_backends", "_segment_compiler", "_lengths", "_template")
    backends, compiler, lengths, template = (importlib.import_module(f"fzero.graph.run.{name}") for name in files)

    def for_lengths(gm: GraphModule, arguments: Any, forms: Any, length: int) -> Any:
        if mesh.rank == mesh.size - 1:
            raise RuntimeError("no space left on device")
        return lambda args: [x + 1 for x in gm.forward(*args[1:])], lambda n: True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "inductor", lambda gm, stand_ins, made: lambda args: gm.forward(*args))
        patch.setattr(template, "inductor_for_lengths", for_lengths)
        patch.setattr(lengths, "worker_count", lambda cold: 0)
        patch.setattr(backends, "is_compiled", lambda code: True)
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


@case
def a_jitted_step_equals_the_eager_one_bitwise(mesh: fzero.ranks.Mesh) -> None:
    for stage, k in either(((3, 4),), ((0, 4), (1, 1), (2, 4), (3, 1), (3, 4))):
        train_step = train_step_for(mlp_loss, OPT, micro_batches=k)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=True)
        eager, fast = train_both(step, fzero.jit(step, backend="fx"), 3, 2 * mesh.size * k)
        for a, b in zip(tree.tensors(eager), tree.tensors(fast), strict=True):
            # gloo sums in its own order on more than two ranks, and not in the same one twice
            torch.testing.assert_close(a, b, rtol=0 if mesh.size == 2 else 1e-12, atol=0 if mesh.size == 2 else 1e-12)


def uncompiled(codes: Any, one: Any) -> Any:
    """Take the place of Inductor: run each segment operation by operation."""
    return ((code, lambda args, graph=code.graph: GraphModule({}, graph).forward(*args)) for code in codes)


@slow_case
def reductions_go_on_from_iteration_to_iteration(mesh: fzero.ranks.Mesh) -> None:
    """The numbers are the eager step's, and the peak is the plan's, uncompiled and in pieces."""
    lowering, opt = importlib.import_module("fzero.graph.run._backends"), optim.adamw(1e-2)

    def across(actual: Any, budget: Any, name: str) -> int:
        return next(i for i, c in enumerate(actual) if c.pass_settings.across_iterations)

    few = ((3, 4, 2, "fx"),)
    for stage, k, in_flight, backend in either(few, (*few, (2, 4, 2, "inductor"), (2, 3, 1, "fx"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fzero.graph._entry.choose", across)
            patch.setattr(lowering, "is_compiled", lambda code: True)
            patch.setattr(lowering, "compile_all", uncompiled)
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

                def run(jitted: Any = jitted, held: Any = held, tokens: Any = tokens) -> None:
                    *state, _ = jitted(*held.pop(), mesh.split(tokens))
                    held.append(state)

                assert entry.plan.argument_bytes + peak_bytes(run) == entry.plan.peak_bytes


def own_parts(jitted: fzero.graph.Jitted) -> list[list[Any]]:
    """List of each trace the own parts that are updated where they lie."""
    return [[n for n in e.best.graph.nodes if n.meta.get("own_part")] for e in jitted._entries.values()]


def loss_with_a_norm(params: Any, batch: Any) -> torch.Tensor:
    """Read all leaves of a unit once more, at the end of the loss."""
    return mlp_loss(params, batch) + 1e-3 * sum((x * x).sum() for x in tree.tensors(params))


@case
def an_own_part_is_updated_where_it_lies(mesh: fzero.ranks.Mesh) -> None:
    """The blocks divide by the ranks and lie side by side; the numbers are the eager step's, and the leaves stay."""
    lowering, masters = (
        importlib.import_module("fzero.graph.run._backends"),
        optim.master_weights(optim.adamw(1e-2), HALF),
    )
    tolerance = 0 if mesh.size == 2 else 1e-12
    few = ((2, 3, "fx", OPT),)
    many = (*few, (1, 1, "inductor", masters), (1, 1, "fx", OPT), (1, 1, "inductor", OPT), (2, 1, "inductor", masters))
    for stage, k, backend, opt in either(few, many):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lowering, "is_compiled", lambda code: True)
            patch.setattr(lowering, "compile_all", uncompiled)
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

                def run(jitted: Any = jitted, held: Any = held, batch: Any = batch) -> None:
                    *state, _ = jitted(*held.pop(), batch)
                    held.append(state)

                assert entry.plan.argument_bytes + peak_bytes(run) == entry.plan.peak_bytes


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

            def run(jitted: Any = jitted, held: Any = held, batch: Any = batch) -> None:
                *state, _ = jitted(*held.pop(), batch)
                held.append(state)

            assert plan.settings.get("recast", False) is recast
            assert (
                abs((plan.argument_bytes + peak_bytes(run)) / plan.peak_bytes - 1) < 0.01
            )  # products in bfloat16 pack
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
