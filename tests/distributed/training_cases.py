"""What real training needs, on real processes: half precision, overflows, weighted means; see test_gloo.py."""

from typing import Any

import torch

import fzero
from fzero import optim, tree
from fzero.ranks._agreement import gather_texts
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.helpers import ALL_STAGES, LEAST, either, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.observe.helpers import batch as nonfinite_batch
from tests.observe.helpers import line_of, log_of_negative, overflow, root_of_zero, train_step_of
from tests.observe.helpers import params as nonfinite_params
from tests.precision_steps import integers, step_of, token_loss, wide_norm

CASES: Cases = {}
case = into(CASES)


@case
def half_precision_is_lockstep_bit_for_bit(mesh: fzero.ranks.Mesh) -> None:
    """Integers do not round, so all worlds agree on any number of ranks; eager and jit, on the wire what it says."""
    params = integers({"w": torch.ones(5, 3), "n": torch.ones(3), "c": torch.ones(())}, 0)
    lockstep = fzero.mesh(dp=mesh.size, simulate="lockstep")
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    few = ((bf16, f32, 2),)
    for half, reduce, stage in either(few, (*few, (f16, f16, 3), (bf16, f32, 0), (bf16, f32, 3), (f16, f16, 1))):
        precision = fzero.Precision(half, reduce=reduce, full=wide_norm)
        opt = optim.dynamic_loss_scale(optim.master_weights(optim.sgd(2.0**-9, momentum=0.5), precision), 4.0)
        train_step = step_of(opt, scaled=True, reduce="sum", micro_batches=3, precision=precision)
        steps = [fzero.shard(train_step, stage, m, check=True) for m in (mesh, lockstep)]
        jitted = fzero.jit(steps[0], backend="fx", **LEAST)
        states = [step.init(params, opt) for step in (*steps, steps[0])]
        for i in range(2):
            batch = torch.arange(mesh.size * 3) % 3 - float(i)
            with fzero.collectives.record() as log:
                *states[0], _ = steps[0](*states[0], mesh.split(batch))
            *states[1], _ = steps[1](*states[1], lockstep.split(batch))
            *states[2], _ = jitted(*states[2], mesh.split(batch))
        for e in log.unit_events:
            narrow = half if e.kind == "all_gather" else reduce
            assert e.dtype == (torch.float32 if e.unit == "n" else narrow), e
        whole = [s.gather(tuple(x)) for s, x in zip((*steps, steps[0]), states, strict=True)]
        assert_trees_close(whole[0], whole[1], rtol=0.0)
        assert_trees_close(whole[2], whole[1], rtol=0.0)


@case
def codes_are_lockstep_bit_for_bit(mesh: fzero.ranks.Mesh) -> None:
    """Codecs on the wire: shards that begin within a block, eager and jitted, with sums that no order changes."""
    params = {"w": torch.randn(5, 31, generator=torch.Generator().manual_seed(0)), "c": torch.ones(())}
    lockstep = fzero.mesh(dp=mesh.size, simulate="lockstep")
    int4, float8 = fzero.codecs.int4(16, "stochastic"), fzero.codecs.float8(block=16)
    few = ((fzero.codecs.int8(16), int4, 3),)
    for gather, reduce, stage in either(
        few, (*few, (None, fzero.codecs.int8(16), 0), (float8, float8, 3), (float8, float8, 0), (None, int4, 2))
    ):
        precision = fzero.Precision(torch.float32, gather=gather, reduce=reduce)
        opt = optim.sgd(0.5)
        train_step = step_of(opt, reduce="sum", precision=precision)
        steps = [fzero.shard(train_step, stage, m) for m in (mesh, lockstep)]
        jitted = fzero.jit(steps[0], backend="fx", **LEAST)
        states = [step.init(params, opt) for step in (*steps, steps[0])]
        for i in range(2):
            batch = torch.arange(mesh.size) + float(i)
            *states[0], _ = steps[0](*states[0], mesh.split(batch))
            *states[1], _ = steps[1](*states[1], lockstep.split(batch))
            *states[2], _ = jitted(*states[2], mesh.split(batch))
        whole = [s.gather(tuple(x)) for s, x in zip((*steps, steps[0]), states, strict=True)]
        assert_trees_close(whole[0], whole[1], rtol=0.0)
        assert_trees_close(whole[2], whole[1], rtol=0.0)


@case
def a_vmap_around_the_world_maps_every_process(mesh: fzero.ranks.Mesh) -> None:
    opt = optim.adamw(0.1)
    for stage in (0, 3):
        step = fzero.shard(train_step_for(mlp_loss, opt), stage, mesh, check=True)
        state = step.init(mlp_params(), opt)
        batches = [mesh.split(mlp_batch(2 * mesh.size, seed=i)) for i in range(2)]
        stacked = fzero.PerRank(tree.map(lambda *xs: torch.stack(xs), *[b.value for b in batches]))
        together = torch.vmap(lambda batch, step=step, state=state: step(*state, batch))(stacked)
        for i, batch in enumerate(batches):
            assert_trees_close(tree.map(lambda x, i=i: x[i], together), step(*state, batch), rtol=1e-12)


@case
def an_overflow_on_the_last_rank_skips_on_all(mesh: fzero.ranks.Mesh) -> None:
    precision = fzero.Precision(torch.float16)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.adamw(0.1), precision), 64.0)
    for stage in either((0, 3), ALL_STAGES):
        train_step = step_of(opt, scaled=True, micro_batches=2, precision=precision)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, check=True)
        state = step.init({"w": torch.tensor([-0.0, 1.0, 2.0]), "v": torch.ones(2)}, opt)
        before = [x.clone() for x in tree.tensors((state[0], state[1].inner))]
        mine = torch.ones(4)
        if mesh.rank == mesh.size - 1:
            mine[1] = float("inf")
        *state, _ = step(*state, mesh.local(mine))
        for x, y in zip(before, tree.tensors((state[0], state[1].inner)), strict=True):
            assert x.numpy(force=True).tobytes() == y.numpy(force=True).tobytes(), (x, y)
        assert (state[1].scale, state[1].skipped) == (32.0, 1)
        *state, loss = step(*state, mesh.local(torch.ones(4)))
        assert loss.isfinite() and state[1].skipped == 1 and state[1].growth == 1


@case
def unequal_token_counts_make_one_mean(mesh: fzero.ranks.Mesh) -> None:
    batch = mlp_batch(6 * mesh.size)
    batch["mask"] = (torch.arange(6 * mesh.size) > 6).double()  # the first rank has none
    params, opt = mlp_params(), optim.sgd(0.1)

    def dense(params: Any, batch: Any) -> torch.Tensor:
        total, count = token_loss(params, batch)
        return total / count

    expected = fzero.value_and_grad(dense)(params, batch)
    for stage in either((1, 3), ALL_STAGES):
        for k in (1, 3):

            def train_step(params: Any, opt_state: Any, batch: Any, k: int = k) -> Any:
                return (
                    params,
                    opt_state,
                    *fzero.value_and_grad(token_loss, reduce="weighted", micro_batches=k)(params, batch),
                )

            step = fzero.shard(train_step, stage=stage, mesh=mesh)
            *_, loss, grads = step(*step.init(params, opt), mesh.split(batch))
            assert_trees_close((loss, step.gather(grads)), expected)


@case
def what_is_not_finite_is_blamed_on_its_rank(mesh: fzero.ranks.Mesh) -> None:
    """All ranks get one report: that of the rank that began, and not of those that a collective spread it to."""
    opt, last = optim.adam(0.1), mesh.size - 1
    for stage in either((3,), ALL_STAGES):
        for loss, operation in ((log_of_negative, "log"), (root_of_zero, "div"), (overflow, "exp")):
            step = fzero.shard(train_step_of(loss, 2 if stage else 1), stage, mesh)
            state, x = step.init(nonfinite_params(), opt), nonfinite_batch(mesh.size)
            assert fzero.observe.nonfinite(step)(*state, mesh.split(x)).finite
            x[-1, -1] = -2 if loss is log_of_negative else -1
            result = fzero.observe.nonfinite(step)(*state, mesh.split(x))
            assert result.cause is not None and result.cause.ranks == (last,), result
            assert (result.cause.operation, result.cause.line) == (operation, line_of(loss)), result
            texts = gather_texts(str(result), mesh, "report")
            assert len(set(texts)) == 1 and "result 0, leaf 'n'" in result.results, texts
        mine = mesh.local(torch.full((2, 3), torch.nan if mesh.rank == last else 1.0))
        result = fzero.observe.nonfinite(step)(*state, mine)
        assert result.cause is not None and result.cause.leaf == "argument 2" and result.rank == last, result
    result = fzero.observe.nonfinite(mesh.spmd(lambda x: fzero.collectives.psum(x.sum())))(
        mesh.local(torch.tensor([40000.0]).half())
    )
    assert result.cause is not None and result.cause.ranks == tuple(range(mesh.size)), result
    result = fzero.observe.nonfinite(mesh.spmd(fzero.collectives.psum))(mesh.local(torch.tensor(-torch.inf)))
    assert result.cause is not None and result.cause.leaf == "argument 0" and result.rank == 0, result


@case
def matrices_are_dealt_to_their_owners(mesh: fzero.ranks.Mesh) -> None:
    """Muon on processes equals lockstep and unsharded training, eager and jitted, as does a pair on whole leaves."""
    muon = optim.muon(0.05, fallback=optim.adamw(1e-2, eps=1e-3), ns_dtype=None)
    full = optim.on_full_leaves(optim.lamb(1e-2, eps=1e-3))
    for opt, stages in ((muon, either((3,), ALL_STAGES)), (full, either((), ALL_STAGES))):
        train_step = train_step_for(mlp_loss, opt)
        for stage in stages:
            step = fzero.shard(train_step, stage, mesh, check=True)
            jitted = fzero.jit(step, backend="fx", **LEAST)
            state, fast = step.init(mlp_params(), opt), jitted.init(mlp_params(), opt)
            expected = (mlp_params(), opt.init(mlp_params()))
            for i in range(2):
                batch = mlp_batch(6 * mesh.size, seed=i)
                with fzero.collectives.record() as log:
                    *state, _ = step(*state, mesh.split(batch))
                *fast, _ = jitted(*fast, mesh.split(batch))
                *expected, _ = train_step(*expected, batch)
            exchanges = [e for e in log.other_events if e.kind == "all_to_all"]
            assert len(exchanges) == (2 if opt is muon and stage and mesh.size > 1 else 0)
            assert_trees_close(step.gather(tuple(state)), tuple(expected), rtol=1e-11)
            assert_trees_close(step.gather(tuple(fast)), tuple(expected), rtol=1e-11)


@case
def each_process_loads_its_own_rows(mesh: fzero.ranks.Mesh) -> None:
    """Of the global batch that a simulation sees; and means and predictions are the simulation's."""
    alike = fzero.mesh(dp=mesh.size, simulate="vmap")
    steps: list[int] = []

    class Own(list):
        def __getitem__(self, i: int) -> torch.Tensor:  # pyright: ignore
            steps.append(i)
            return torch.tensor([float(i), 1.0])

    def pairs(mesh: fzero.ranks.Mesh) -> fzero.data.Batches:
        return fzero.data.batches(Own(range(4 * mesh.size + 1)), mesh, global_batch=2 * mesh.size, seed=3)

    for i, batch in pairs(mesh).steps(1, 4):
        assert len(steps) == 2, "and nobody else's"
        steps.clear()
        assert torch.equal(batch.value, pairs(alike)[i].value[mesh.rank])
        steps.clear()
    texts = [torch.arange(1, 2 + 5 * i % 17) for i in range(4 * mesh.size)]
    pad = fzero.data.padding([len(x) for x in texts], global_batch=2 * mesh.size, buckets=(4, 8, 12, 20), mask=None)
    for m in (mesh, alike):
        numbered = fzero.data.batches(texts, m, global_batch=2 * mesh.size, seed=3, pad=pad)
        widths = [batch.value.shape[-1] for _, batch in numbered.steps(0, 4)]
        assert widths == [pad.padded_length(numbered.indices(i)) for i in range(4)], "on all ranks"
    w = {"w": torch.tensor([0.5, -3.0])}

    def of(mesh: fzero.ranks.Mesh) -> tuple[float, list[float]]:
        step = fzero.shard(lambda p, s, x: (p, s), 3, mesh)
        params, _ = step.init(w, optim.sgd(0.1))
        measure = fzero.evaluate(step, lambda params, x: (x @ params["w"]).abs())
        say = fzero.predict(step, lambda params, x: x @ params["w"])
        batches = list(fzero.data.epoch(Own(range(2 * mesh.size + 1)), mesh, global_batch=2 * mesh.size))
        mean = fzero.data.mean(measure(params, *pair) for pair in batches)
        return mean, torch.cat([say(params, batch)[: int(rows)] for batch, rows in batches]).tolist()

    mean, said = of(mesh)
    expected = [0.5 * i - 3 for i in range(2 * mesh.size + 1)]
    assert said == of(alike)[1] == expected
    assert abs(mean - sum(map(abs, expected)) / len(expected)) < 1e-6


if __name__ == "__main__":
    run(CASES)
