"""What real training needs, on real processes: half precision, overflows, weighted means; see test_gloo.py."""

from typing import Any

import torch

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.distributed.harness import Cases, into, run
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.test_precision import integers, step_of, token_loss, wide_norm

CASES: Cases = {}
case = into(CASES)


@case
def half_precision_is_lockstep_bit_for_bit(mesh: fzero.Mesh) -> None:
    """Integers do not round, so all worlds agree on any number of ranks; eager and jit, on the wire what it says."""
    params = integers({"w": torch.ones(5, 3), "n": torch.ones(3), "c": torch.ones(())}, 0)
    lockstep = fzero.mesh(dp=mesh.size, simulate="lockstep")
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    for half, reduce, stage in ((bf16, f32, 0), (bf16, f32, 2), (bf16, f32, 3), (f16, f16, 1), (f16, f16, 3)):
        precision = fzero.Precision(half, reduce=reduce, full=wide_norm)
        opt = optim.dynamic_loss_scale(optim.master_weights(optim.sgd(2.0**-9, momentum=0.5), precision), 4.0)
        train_step = step_of(opt, scaled=True, reduce="sum", micro_batches=3, precision=precision)
        steps = [fzero.shard(train_step, stage, m, check=True) for m in (mesh, lockstep)]
        jitted = fzero.jit(steps[0], backend="fx")
        states = [step.init(params, opt) for step in (*steps, steps[0])]
        for i in range(2):
            batch = torch.arange(mesh.size * 3) % 3 - float(i)
            with fzero.record() as log:
                *states[0], _ = steps[0](*states[0], mesh.split(batch))
            *states[1], _ = steps[1](*states[1], lockstep.split(batch))
            *states[2], _ = jitted(*states[2], mesh.split(batch))
        for e in log.events:
            narrow = half if e.kind == "all_gather" else reduce
            assert e.dtype == (torch.float32 if e.unit == "n" else narrow), e
        whole = [s.gather(tuple(x)) for s, x in zip((*steps, steps[0]), states, strict=True)]
        assert_trees_close(whole[0], whole[1], rtol=0.0)
        assert_trees_close(whole[2], whole[1], rtol=0.0)


@case
def a_vmap_around_the_world_maps_every_process(mesh: fzero.Mesh) -> None:
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
def an_overflow_on_the_last_rank_skips_on_all(mesh: fzero.Mesh) -> None:
    precision = fzero.Precision(torch.float16)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.adamw(0.1), precision), 64.0)
    for stage in range(4):
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
def unequal_token_counts_make_one_mean(mesh: fzero.Mesh) -> None:
    batch = mlp_batch(6 * mesh.size)
    batch["mask"] = (torch.arange(6 * mesh.size) > 6).double()  # the first rank has none
    params, opt = mlp_params(), optim.sgd(0.1)

    def dense(params: Any, batch: Any) -> torch.Tensor:
        total, count = token_loss(params, batch)
        return total / count

    expected = fzero.value_and_grad(dense)(params, batch)
    for stage in range(4):
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


if __name__ == "__main__":
    run(CASES)
