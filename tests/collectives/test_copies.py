"""A psum in a loss that is one value: found where it counts a gradient once for each rank, and nowhere else."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import PerRank, optim
from fzero.testing import assert_equivalent
from tests.helpers import ALL_STAGES, cases, train_step_for

OPT = optim.sgd(0.1)
Sum = Callable[[torch.Tensor], torch.Tensor]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARAMS = {"inp": normal(3, 4), "up": normal(4, 6), "down": normal(6, 2), "scale": normal(2)}
BATCH = {"x": normal(4, 3), "y": normal(4, 2)}
MESHES = {name: fzero.mesh(dp=2, tp=2, simulate=name) for name in ("vmap", "lockstep")}


def split(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
    dims = {"up": 1, "down": 0}
    return {"tp": dims[path]} if path in dims and "tp" in fzero.axes.axis_names() else None


def tp() -> Any:
    return "tp" if "tp" in fzero.axes.axis_names() else ()


def loss_for(total: Sum, after: Sum = lambda y: y, remat: bool = False) -> Callable[..., torch.Tensor]:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return total(torch.tanh(fzero.collectives.pvary(x, tp()) @ p["up"]) @ p["down"])

    def loss(p: Any, batch: Any) -> torch.Tensor:
        y = (fzero.remat(block) if remat else block)(p, batch["x"] @ p["inp"])
        return (after(y) * p["scale"] - batch["y"]).square().mean()

    return loss


def sum_once(y: torch.Tensor) -> torch.Tensor:
    return fzero.collectives.psum_invariant(y, tp())


WRONG: dict[str, tuple[Sum, str]] = {
    "psum": (
        lambda y: fzero.collectives.psum(y, "tp"),
        r"psum over 'tp' .* Use fzero.collectives.psum_invariant\(x, 'tp'\)",
    ),
    "psum over both": (lambda y: fzero.collectives.psum(y, ("dp", "tp")), r"psum over 'tp'"),
    "pmean": (
        lambda y: fzero.collectives.pmean(y, "tp"),
        r"pmean over 'tp' .* Use fzero.collectives.psum_invariant\(x / n, 'tp'\)",
    ),
    "all_gather": (
        lambda y: fzero.collectives.all_gather(y, "tp").unflatten(0, (2, -1)).sum(0),
        "Use fzero.collectives.all_gather_invariant",
    ),
    "broadcast": (lambda y: fzero.collectives.broadcast(y, "tp"), "broadcast over 'tp'"),
    "mapped": (lambda y: torch.vmap(lambda row: fzero.collectives.psum(row, "tp"))(y), "psum over 'tp'"),
    "in a tree": (lambda y: fzero.collectives.psum({"y": y}, "tp")["y"], "psum over 'tp'"),
    "twice": (lambda y: fzero.collectives.psum(fzero.collectives.psum(y, "tp"), "tp"), "psum over 'tp'"),
}


def assert_refused(loss: Callable[..., Any], mesh: fzero.ranks.Mesh, stage: int, said: str, **options: Any) -> None:
    step = fzero.shard(train_step_for(loss, OPT, **options), stage=stage, mesh=mesh, axis="dp", split=split)
    with pytest.raises(ValueError, match=said):
        step(*step.init(PARAMS, OPT), mesh.split(BATCH, "dp"))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("simulate", MESHES)
def test_a_loss_that_uses_copies_as_one_value_is_refused(name, simulate):
    total, said = WRONG[name]
    assert_refused(loss_for(total), MESHES[simulate], 1, said)


def copies(y: torch.Tensor) -> torch.Tensor:
    return fzero.collectives.psum(y, "tp")


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("simulate", MESHES)
def test_copies_used_as_one_value_are_refused_at_every_stage_by_their_line(stage, simulate):
    line = rf"test_copies.py:{copies.__code__.co_firstlineno + 1}: psum over 'tp'"
    assert_refused(loss_for(copies), MESHES[simulate], stage, line, micro_batches=1 + stage % 2)


def parts(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(fzero.collectives.pvary(x, "tp") @ p["up"]) @ p["down"]


BLOCKS: dict[str, Callable[..., torch.Tensor]] = {
    "in a block": lambda p, x: fzero.remat(lambda p, x: copies(parts(p, x)))(p, x),
    "in a block in a block": lambda p, x: fzero.remat(BLOCKS["in a block"])(p, x),
    "of what a block gives": lambda p, x: copies(fzero.remat(parts)(p, x)),
    "before a block": lambda p, x: fzero.remat(lambda p, y: y * p["scale"])(p, copies(parts(p, x))),
    "in a block before a block": lambda p, x: fzero.remat(lambda p, y: y * p["scale"])(p, BLOCKS["in a block"](p, x)),
    "of a block, before a block": lambda p, x: fzero.remat(lambda y: y * 2)(BLOCKS["of what a block gives"](p, x)),
}


@pytest.mark.parametrize(
    "name,simulate", cases(zip(BLOCKS, itertools.cycle(MESHES)), itertools.product(BLOCKS, MESHES))
)
def test_copies_within_a_block_under_remat_are_refused(name, simulate):
    def loss(p: Any, batch: Any) -> torch.Tensor:
        return (BLOCKS[name](p, batch["x"] @ p["inp"]) - batch["y"]).square().mean()

    assert_refused(loss, MESHES[simulate], 2, "psum over 'tp' gives each rank a copy")
    assert_refused(
        lambda p, batch: fzero.remat(loss)(p, batch), MESHES[simulate], 3, "psum over 'tp' gives each rank a copy"
    )


@pytest.mark.parametrize("simulate", MESHES)
def test_a_block_under_remat_may_make_one_value_of_copies(simulate):
    """Copies are one block's results, and arguments of another, in which each rank goes on with its own."""

    def loss(p: Any, batch: Any) -> torch.Tensor:
        x = batch["x"] @ p["inp"]
        h = fzero.remat(lambda p, x: torch.tanh(fzero.collectives.pvary(x, tp()) @ p["up"]) @ p["down"])(p, x)
        y = fzero.remat(own_columns)(fzero.remat(lambda h: fzero.collectives.psum(h, tp()))(h))
        return (y * p["scale"] - batch["y"]).square().mean()

    step = train_step_for(loss, OPT)
    assert_equivalent(step, PARAMS, OPT, [BATCH], (1,), meshes=[MESHES[simulate]], axis="dp", split=split)


@pytest.mark.parametrize("simulate", MESHES)
def test_a_psum_of_products_with_split_weights_is_refused(simulate):
    """Nothing enters: the input is data, of which nobody wants the gradient."""

    def loss(p: Any, batch: Any) -> torch.Tensor:
        return fzero.collectives.psum(batch["x"].sum() * p["up"].sum(), "tp").square() + p["inp"].sum()

    for stage, k in ((0, 1), (1, 2), (3, 1)):  # in a box, whole leaves of it, and gathered
        assert_refused(loss, MESHES[simulate], stage, "psum over 'tp'", micro_batches=k)


def test_jit_refuses_a_loss_that_uses_copies_as_one_value():
    mesh = MESHES["vmap"]
    step = fzero.shard(train_step_for(loss_for(WRONG["psum"][0]), OPT), stage=2, mesh=mesh, axis="dp", split=split)
    with pytest.raises(ValueError, match="psum over 'tp' gives each rank a copy"):
        fzero.jit(step, backend="fx")(*step.init(PARAMS, OPT), mesh.split(BATCH, "dp"))


def each_in_its_own_way(y: torch.Tensor) -> torch.Tensor:
    """A sum over ranks, of which each goes on with its own part of the columns."""
    return own_columns(fzero.collectives.psum(y, tp()))


def own_columns(copy: torch.Tensor) -> torch.Tensor:
    return sum_once(copy * (torch.arange(2) % fzero.axes.axis_size(tp()) == fzero.axes.axis_index(tp())))


RIGHT: dict[str, tuple[Sum, Sum]] = {
    "one value": (sum_once, lambda y: y),
    "each in its own way": (each_in_its_own_way, lambda y: y),
    "the mean of one value": (sum_once, lambda y: fzero.collectives.pmean(y, tp())),
    "over the axis of the mean": (
        sum_once,
        lambda y: y - fzero.collectives.pmean(y.mean(), "dp" if tp() else None),
    ),
    "a constant": (
        sum_once,
        lambda y: y / fzero.collectives.psum(torch.ones_like(y), "tp" if tp() else None).detach() * (2 if tp() else 1),
    ),
    "what is not differentiated": (sum_once, lambda y: y + 0 * fzero.collectives.psum(y.detach(), tp())),
    "behind a sum that is one": (
        lambda y: sum_once(
            fzero.collectives.pvary(fzero.collectives.pmean(sum_once(y), tp()), tp()) / fzero.axes.axis_size(tp())
        ),
        lambda y: y,
    ),
}


@pytest.mark.parametrize("name,simulate", cases(zip(RIGHT, itertools.cycle(MESHES)), itertools.product(RIGHT, MESHES)))
def test_programs_with_invariant_collectives_equal_dense_training(name, simulate):
    for stage, remat in ((0, False), (3, True)):
        step = train_step_for(loss_for(*RIGHT[name], remat), OPT)
        assert_equivalent(step, PARAMS, OPT, [BATCH], (stage,), meshes=[MESHES[simulate]], axis="dp", split=split)


@pytest.mark.parametrize("simulate", MESHES)
def test_ranks_that_train_separate_models_may_sum_their_losses(simulate):
    """An ensemble: all that is differentiated is each rank's own, and the losses add up."""
    mesh = fzero.mesh(dp=2, member=2, simulate=simulate)
    own, x = normal(2, 3), normal(4, 3)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().mean() + (w - fzero.collectives.pmean(w, "member")).square().sum()

    def program(w: torch.Tensor, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss, axis="dp")(PerRank(w, "member"), x)
        return PerRank(value, "member"), grads

    def whole(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x @ v).square().mean() + (v - w.mean(0)).square().sum() for v in w]).sum()

    value, grads = mesh.spmd(program)(PerRank(own, "member"), mesh.split(x, "dp"))
    torch.testing.assert_close(value.value.sum(), whole(own))
    torch.testing.assert_close(grads.value, torch.func.grad(whole)(own))


def test_torch_func_grad_in_a_rank_program_differentiates_the_sum_of_all_losses():
    """torch.func.grad knows no axes of a mean: docs/tutorial/4_axes.md says what it gives."""
    mesh, w = fzero.mesh(tp=2), PerRank(normal(2, 3))
    grads = mesh.spmd(lambda w: PerRank(torch.func.grad(lambda w: fzero.collectives.psum(w.sum(), "tp"))(w)))(w)
    assert (grads.value == 2).all()


def test_psum_of_a_loss_is_allowed_along_an_axis_of_the_mean():
    """With the axis among those of the mean psum is right: the loss of each rank counts, divided by their number."""
    mesh, w = fzero.mesh(tp=2), PerRank(normal(2, 3))
    f = fzero.value_and_grad(lambda w: fzero.collectives.psum(w.square().sum(), "tp"), axis="tp")
    value, grads = mesh.spmd(lambda w: f(PerRank(w)))(w)
    torch.testing.assert_close(value, w.value.square().sum())
    torch.testing.assert_close(grads.value, 2 * w.value)
