"""The gradient of what is in a PerRank box is each rank's own: adversarial training equals unsharded training."""

from typing import Any

import pytest
import torch

import fzero
from fzero import PerRank, optim
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases, mlp_batch, mlp_loss, mlp_params

BATCH = mlp_batch(12)


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mlp_loss(params, {"x": x, "y": y})


def sum_weighted(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    w = x[:, 0].abs()  # another weight for each sample, so another for each rank and micro-batch
    return (w * (params["scale"] * x.sin() - y.sum(-1, keepdim=True)).square().sum(-1)).sum(), w.sum()


def sum_scaled(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (params["scale"] * x.sin() - y.sum(-1, keepdim=True)).square().sum()


LOSSES = {"mean": loss, "weighted": sum_weighted, "sum": sum_scaled}


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("reduce", list(LOSSES))
def test_gradients_of_boxed_inputs_are_those_of_the_global_batch(reduce, k, simulate):
    params, mesh = mlp_params(), fzero.mesh(dp=3, simulate=simulate)

    def run_both(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        f = fzero.value_and_grad(LOSSES[reduce], (0, 1), reduce=reduce, micro_batches=k, batch_argnums=(1, 2))
        return f(p, PerRank(x), y)

    def run_sharded(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        value, (grads, own) = run_both(fzero.partition(p), x, y)
        return value, (fzero.gather(grads), own)

    value, (grads, own) = run_both(params, BATCH["x"], BATCH["y"])
    expected, (_, of_tensor) = fzero.value_and_grad(LOSSES[reduce], (0, 1), reduce=reduce)(
        params, BATCH["x"], BATCH["y"]
    )
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(own.value, of_tensor)
    got, (got_grads, got_own) = mesh.spmd(run_sharded)(params, mesh.split(BATCH["x"]), mesh.split(BATCH["y"]))
    assert_trees_close((got, got_grads), (value, grads))
    torch.testing.assert_close(got_own.value.flatten(0, 1), own.value)


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_adversarial_training_equals_unsharded(stage):
    """FGSM (arXiv:1412.6572): uphill in the inputs, then downhill in the parameters."""
    opt = optim.adam(1e-2, eps=1e-3)

    def train_step(params: Any, opt_state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        _, uphill = fzero.value_and_grad(loss, argnums=1)(params, PerRank(x), y)
        value, grads = fzero.value_and_grad(loss)(params, x + 0.1 * uphill.value.sign(), y)
        return *fzero.transforms.step(opt)(params, grads, opt_state), value

    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(dp=2, simulate=simulate)
        step = fzero.shard(train_step, stage=stage, mesh=mesh)
        state, expected = step.init(mlp_params(), opt), (mlp_params(), opt.init(mlp_params()))
        for i in range(2):
            x, y = mlp_batch(12, seed=i).values()
            *expected, value = train_step(*expected, x, y)
            *state, got = step(*state, mesh.split(x), mesh.split(y))
            torch.testing.assert_close(got, value)
        assert_trees_close(step.gather(list(state)), list(expected), rtol=1e-9)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("derived", [False, True])
def test_a_plain_tensor_that_differs_by_rank_is_an_error(derived, simulate):
    """Its gradient would be the sum of gradients of different samples."""
    mesh = fzero.mesh(dp=2, simulate=simulate)

    def program(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return fzero.value_and_grad(loss, argnums=1)(p, 2 * x if derived else x, y)

    with pytest.raises(ValueError, match=r"argument 1 differs by rank along 'dp'.* pass fzero\.PerRank\(x\)"):
        mesh.spmd(program)(mlp_params(), mesh.split(BATCH["x"]), mesh.split(BATCH["y"]))


def test_a_box_may_differ_along_some_axes_and_lie_in_a_tree():
    """Along the others each rank's copy has the gradient of its own part of the batch, and they are summed."""
    mesh, x = fzero.mesh(dp=2, ep=2), BATCH["x"][:8]
    shift = torch.arange(14.0).double().reshape(2, 7) / 9

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        moved = x + params["shift"]["s"] + params["tied"]["s"]
        return (moved.sin() * params["w"]).mean()

    def program(w: Any, shift: torch.Tensor, x: torch.Tensor) -> Any:
        boxes = {"w": w, "shift": PerRank({"s": shift}, "dp"), "tied": PerRank({"s": shift}, "dp")}
        return fzero.value_and_grad(f, axis=("dp", "ep"))(boxes, x)

    def run_unsharded(w: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return f({"w": w, "shift": {"s": shift.repeat_interleave(4, 0)}, "tied": {"s": 0 * x}}, x)

    w = torch.ones(7).double()
    value, grads = mesh.spmd(program)(w, PerRank(shift, "dp"), mesh.split(x))
    doubled = shift.clone() * 2
    expected = torch.func.grad(run_unsharded, argnums=(0, 1))(w, doubled)
    torch.testing.assert_close(value, run_unsharded(w, doubled))
    torch.testing.assert_close(grads["w"], expected[0])
    for name in ("shift", "tied"):
        torch.testing.assert_close(grads[name].value["s"], expected[1])


def test_arguments_that_are_not_differentiated_may_be_boxed_too():
    mesh = fzero.mesh(dp=2)

    def program(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        plain = fzero.value_and_grad(loss)(p, x, y)
        assert_equal(plain, fzero.value_and_grad(loss)(p, PerRank(x), y=PerRank(y)))
        assert_equal(plain, fzero.value_and_grad(mlp_loss)(p, {"x": PerRank(x), "y": y}))
        return plain

    def assert_equal(one: Any, other: Any) -> None:
        assert_trees_close(one, other, rtol=0)

    fzero.mesh(dp=2, simulate="lockstep").spmd(program)(mlp_params(), mesh.split(BATCH["x"]), mesh.split(BATCH["y"]))


def test_integers_in_a_box_are_refused_by_name():
    with pytest.raises(TypeError, match=r"argument 1 is differentiated, and its leaf 'ids' is int64 \[3\]"):
        fzero.value_and_grad(loss, argnums=1)({}, PerRank({"ids": torch.arange(3)}), torch.ones(3))


def test_batch_argnums_is_required_when_a_differentiated_box_may_be_the_batch():
    x = torch.ones(4, 7).double()
    with pytest.raises(ValueError, match=r"arguments \[1, 2\] may be the batch; name the batch with batch_argnums="):
        fzero.value_and_grad(loss, argnums=1, micro_batches=2)({}, PerRank(x), x)
    with pytest.raises(ValueError, match=r"batch_argnums=0: expected positions below 3"):
        fzero.value_and_grad(loss, argnums=(0, 1), micro_batches=2, batch_argnums=0)({}, PerRank(x), x)


def test_a_planned_rank_knows_arguments_that_arrived_in_a_box():
    """It knows its argument, or a view of it, as one rank of a planned world does, not what the step makes of it."""
    mesh, opt = fzero.mesh(dp=2), optim.sgd(0.1)

    def step_of(box: Any) -> Any:
        def train_step(params: Any, opt_state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            _, grads = fzero.value_and_grad(loss, argnums=1)(params, box(x), y)
            return params, opt_state, fzero.collectives.pmean(fzero.tree.tensors(grads)[0].sum())

        return fzero.shard(train_step, stage=2, mesh=mesh)

    def plan(box: Any) -> Any:
        step = step_of(box)
        return fzero.plan(
            step, *step.init(mlp_params(), opt), mesh.split(BATCH["x"]), mesh.split(BATCH["y"]), world_size=4
        )

    for box in (lambda x: x, lambda x: x[:, :]):
        with pytest.raises(ValueError, match=r"argument 1 differs by rank along 'dp'.* pass fzero\.PerRank\(x\)"):
            plan(box)
    assert plan(PerRank).peak_bytes > 0
