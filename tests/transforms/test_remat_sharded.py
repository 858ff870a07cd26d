"""Blocks of remat in sharded steps: the numbers of the plain step, and each unit gathered once in a pass."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.transforms.helpers import SAVES


def remat_loss(save: Any) -> Any:
    f = fzero.remat(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), save)

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x = batch["x"]
        for p in params["blocks"]:
            x = f(p, x)
        rest = fzero.gather({k: params[k] for k in ("scale", "head")})
        return ((x @ rest["head"][0] * rest["scale"] - batch["y"]) ** 2).mean()

    return loss


@examples(3, 25)
@given(
    st.sampled_from(("vmap", "lockstep")),
    st.integers(0, 3),
    st.integers(1, 8),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(SAVES),
)
@example("vmap", 3, 2, 1, False, None)
@example("lockstep", 3, 3, 2, False, "matmuls")
@example("vmap", 1, 2, 3, False, None)
def test_a_sharded_step_with_remat_equals_unsharded(sim, stage, n, k, whole, save):
    mesh, opt, params = fzero.mesh(dp=n, simulate=sim), optim.adam(1e-2), mlp_params()
    plain = train_step_for(mlp_loss, opt, micro_batches=k)
    step = fzero.shard(train_step_for(remat_loss(save), opt, micro_batches=k, gather=whole), stage=stage, mesh=mesh)
    reference, state = [params, opt.init(params)], list(step.init(params, opt))
    for i in range(2):
        batch = mlp_batch(2 * n * k, seed=i)
        *reference, expected = plain(*reference, batch)
        *state, loss = step(*state, mesh.split(batch))
        assert_trees_close(loss, expected)
    assert_trees_close(step.gather(state), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage,whole", cases([(0, True), (2, True), (3, False)], itertools.product(ALL_STAGES, (True, False)))
)
def test_a_jitted_step_with_remat_equals_the_eager_one(stage, whole):
    mesh, opt, batch = fzero.mesh(dp=2), optim.adam(1e-2), mlp_batch(8)
    eager = fzero.shard(train_step_for(remat_loss(None), opt, micro_batches=2, gather=whole), stage=stage, mesh=mesh)
    jitted = fzero.jit(eager, backend="fx", **LEAST)
    results = [step(*eager.init(mlp_params(), opt), mesh.split(batch)) for step in (eager, jitted)]
    one, other = [[eager.gather(list(r[:2])), r[2]] for r in results]
    assert_trees_close(one, other)


@pytest.mark.parametrize("sim", ("vmap", "lockstep"))
def test_a_unit_is_gathered_once_in_each_pass(sim):
    opt, batch = optim.sgd(0.1), mlp_batch(4)
    for stage in ALL_STAGES:
        mesh = fzero.mesh(dp=2, simulate=sim)
        step = fzero.shard(train_step_for(remat_loss(None), opt, gather=False), stage=stage, mesh=mesh)
        state = step.init(mlp_params(), opt)
        with fzero.collectives.record() as log:
            step(*state, mesh.split(batch))
        order = [(e.kind, e.unit) for e in log.events if e.unit.startswith("blocks")]
        scatters = [("reduce_scatter", f"blocks.{i}") for i in (1, 0)]
        gathers = [("all_gather", f"blocks.{i}") for i in (0, 1)]
        if stage == 3:
            assert order == [*gathers, gathers[1], scatters[0], gathers[0], scatters[1]]
        elif stage:  # the update's result alone is gathered
            assert order == [*scatters, *gathers]


@pytest.mark.parametrize(
    "sim,save,whole",
    cases(
        [("vmap", SAVES[0], False), ("lockstep", SAVES[1], False), ("vmap", SAVES[1], True)],
        itertools.product(("vmap", "lockstep"), SAVES[:2], (True, False)),
    ),
)
def test_tensor_parallel_blocks_under_remat_equal_the_plain_ones(sim, save, whole):
    def tp() -> Any:
        return "tp" if "tp" in fzero.axes.axis_names() else ()

    def part(p, x):
        h = torch.tanh(fzero.collectives.pvary(x, tp()) @ p["up"])
        return x + fzero.collectives.psum_invariant(h @ p["down"], tp()) + p["bias"]

    def loss(f):
        def inside(params, batch):
            x = batch["x"]
            for p in params["blocks"]:
                x = f(p, x)
            return (x - batch["y"]).square().mean()

        return inside

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    g = torch.Generator().manual_seed(0)
    dims = {"up": 1, "down": 0}
    params = {"blocks": [{"up": normal(3, 4), "down": normal(4, 3), "bias": normal(3)} for _ in range(2)]}
    batch, opt = {"x": normal(8, 3), "y": normal(8, 3)}, optim.adam(1e-2)
    mesh = fzero.mesh(dp=2, tp=2, simulate=sim)
    for stage in (1, 3):
        step = fzero.shard(
            train_step_for(loss(fzero.remat(part, save)), opt, gather=whole),
            stage=stage,
            mesh=mesh,
            axis="dp",
            split=lambda path, leaf: {"tp": dims[path.split(".")[-1]]} if path.split(".")[-1] in dims else None,
        )
        *state, value = step(*step.init(params, opt), mesh.split(batch, "dp"))
        *expected, plain = train_step_for(loss(part), opt)(params, opt.init(params), batch)
        assert_trees_close([step.gather(state), value], [expected, plain])


def test_a_block_under_remat_without_the_unit_of_a_tied_leaf_is_refused():
    """Its boxes hold no shard of their own, so nothing but the message tells the block's function that."""
    opt, w = optim.sgd(0.1), torch.eye(4)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params["h"]:
            x = fzero.remat(lambda p, x: x @ p["w"])(block, x)
        return x.sum()

    step = fzero.shard(train_step_for(loss, opt, gather=False), stage=3, mesh=fzero.mesh(dp=2))
    params, opt_state = step.init({"h": [{"w": w}, {"w": w}]}, opt)
    with pytest.raises(
        ValueError, match=r"w' lies in the shard of unit 'h.0', which is not in this tree.*first path of a tied leaf"
    ):
        step(params, opt_state, step.mesh.split(torch.ones(2, 4)))
