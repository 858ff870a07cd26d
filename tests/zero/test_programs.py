"""Programs beyond a plain step: they run at every stage, and equal unsharded training."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.sharding import global_norm
from fzero.testing import assert_equivalent, assert_trees_close
from tests.helpers import ALL_STAGES, cases, either, mlp_batch, mlp_loss, mlp_params, train_step_for

BATCHES = [mlp_batch(12, seed=i) for i in range(3)]


@pytest.mark.parametrize("k", [2, 3, 6])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_micro_batches_of_a_mean_loss_are_one_batch(reduce, k):
    """A mean over k equal micro-batches is the mean over the batch; a sum is k times that."""
    value, grads = fzero.value_and_grad(mlp_loss)(mlp_params(), BATCHES[0])
    got_value, got = fzero.value_and_grad(mlp_loss, micro_batches=k, reduce=reduce)(mlp_params(), BATCHES[0])
    times = k if reduce == "sum" else 1
    torch.testing.assert_close(got_value, value * times, rtol=1e-12, atol=0)
    assert_trees_close(got, tree.map(lambda g: g * times, grads))


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1, 0)])
def test_outside_any_mesh_value_and_grad_is_that_of_torch_func(argnums):
    def f(a: Any, b: Any) -> Any:
        return (a["x"] * b).sin().sum(), {"aux": a["x"] + b}

    a, b = {"x": torch.randn(3)}, torch.randn(3)
    grads, (value, aux) = torch.func.grad_and_value(f, argnums=argnums, has_aux=True)(a, b)
    (got_value, got_aux), got = fzero.value_and_grad(f, argnums, True)(a, b)
    assert_trees_close((got_value, got_aux, got), (value, aux, grads), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("k", cases([2], [1]))
def test_sam_takes_two_gradients(k):
    """Sharpness-aware minimisation (arXiv:2010.01412): two gradients, the second at perturbed parameters."""
    opt = optim.sgd(0.1, momentum=0.9)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        f = fzero.value_and_grad(mlp_loss, micro_batches=k)
        loss, grads = f(params, batch)
        norm = global_norm(grads)
        uphill = tree.map(lambda p, g: p + 0.05 * g / norm, params, grads)
        _, grads = f(uphill, batch)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        return params, opt_state, loss

    assert_equivalent(train_step, mlp_params(), opt, BATCHES, world_sizes=either((3,), (1, 2, 3)), rtol=1e-11)


@pytest.mark.slow
def test_an_optimizer_keeps_an_ema_of_parameters():
    base = optim.adam(1e-2, eps=1e-3)

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, inner = base.update(grads, state[0], params)
        average = tree.map(lambda e, p, u: 0.9 * e + 0.1 * (p + u), state[1], params, updates)
        return updates, (inner, average)

    opt = optim.Optimizer(lambda params: (base.init(params), tree.map(torch.clone, params)), update)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(mlp_loss)(params, batch)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        # evaluating the average in the step: boxes of state are gathered like any others
        return params, opt_state, loss, fzero.value_and_grad(mlp_loss)(opt_state[1], batch)[0]

    assert_equivalent(train_step, mlp_params(), opt, BATCHES, world_sizes=either((3,), (1, 2, 3)), rtol=1e-11)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", cases((1, 4), [2]))
def test_a_gan_trains_two_parameter_trees(stage, n):
    """param_argnums=(0, 1): each network's gradient, with the other as a boxed, undifferentiated argument."""
    g_params = {"layers": [{"w": mlp_params(seed=1)["blocks"][0]["w"]}], "b": torch.zeros(7).double()}
    d_params = {"layers": [{"w": mlp_params(seed=2)["head"][0]}], "b": torch.ones(3).double()}
    opt = optim.adam(1e-2, eps=1e-3)

    def generate(g: Any, z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(z @ g["layers"][0]["w"] + g["b"])

    def judge(d: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ d["layers"][0]["w"] + d["b"]).mean(-1)

    def d_loss(d: Any, g: Any, batch: Any) -> torch.Tensor:
        return (judge(d, generate(g, batch["x"])) - judge(d, batch["x"].cos())).mean()

    def g_loss(d: Any, g: Any, batch: Any) -> torch.Tensor:
        return -judge(d, generate(g, batch["x"])).mean()

    def train_step(g: Any, d: Any, g_state: Any, d_state: Any, batch: Any) -> Any:
        loss_d, grads = fzero.value_and_grad(d_loss)(d, g, batch)
        d, d_state = fzero.transforms.step(opt)(d, grads, d_state)
        loss_g, grads = fzero.value_and_grad(g_loss, argnums=1)(d, g, batch)
        g, g_state = fzero.transforms.step(opt)(g, grads, g_state)
        # both at once, as a tuple of argnums
        both, (grads_d, _) = fzero.value_and_grad(lambda *a: d_loss(*a) + g_loss(*a), argnums=(0, 1))(d, g, batch)
        return g, d, g_state, d_state, loss_d, loss_g, both, global_norm(grads_d)

    mesh = fzero.mesh(dp=n)
    step = fzero.shard(train_step, stage=stage, mesh=mesh, param_argnums=(0, 1))
    (g, g_state), (d, d_state) = step.init(g_params, opt), step.init(d_params, opt)
    out, ref = (g, d, g_state, d_state), (g_params, d_params, opt.init(g_params), opt.init(d_params))
    for batch in BATCHES:
        ref = train_step(*ref[:4], batch)
        out = step(*out[:4], mesh.split(batch))
        assert_trees_close(out[4:], ref[4:], rtol=1e-11)
    assert_trees_close(step.gather(list(out[:4])), list(ref[:4]), rtol=1e-11)
    if stage < 3:
        assert all(type(x) is torch.Tensor for x in tree.tensors(out[:2])) and "Shard" not in repr(out[:2])


@pytest.mark.slow
def test_a_loss_may_be_normalised_by_the_user():
    """Token-weighted mean with unequal counts: reduce="sum" and a psum of the counts is exact, the mean is not."""
    opt = optim.sgd(0.1)
    mask = ((torch.arange(12) % 5 == 0) | (torch.arange(12) < 4)).double()[:, None]
    batches = [{**b, "mask": mask} for b in BATCHES]

    def weighted_loss(params: Any, batch: Any) -> torch.Tensor:
        pieces = (batch["x"] @ params["w"] - batch["y"]) ** 2
        return (pieces * batch["mask"]).sum() / fzero.collectives.psum(batch["mask"].sum())

    def naive(params: Any, batch: Any) -> torch.Tensor:
        pieces = (batch["x"] @ params["w"] - batch["y"]) ** 2
        return (pieces * batch["mask"]).sum() / batch["mask"].sum()

    def step_of(loss: Any, reduce: str) -> Any:
        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            value, grads = fzero.value_and_grad(loss, reduce=reduce)(params, batch)
            return *fzero.transforms.step(opt)(params, grads, opt_state), value

        return train_step

    params = {"w": mlp_params()["head"][0]}
    assert_equivalent(step_of(weighted_loss, "sum"), params, opt, batches, world_sizes=(1, 2, 3))
    with pytest.raises(AssertionError):
        assert_equivalent(step_of(naive, "mean"), params, opt, batches, world_sizes=(2,))


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_aux_of_a_loss_is_per_rank_and_stacked_over_micro_batches(stage):
    opt = optim.sgd(0.1)

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"] @ params["w"]
        return h.square().mean(), {"h": h, "none": None}

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, aux), grads = fzero.value_and_grad(loss, has_aux=True, micro_batches=2)(params, batch)
        assert aux["h"].shape[0] == 2 and aux["none"] is None
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        return params, opt_state, value, fzero.PerRank(aux["h"])

    mesh, params = fzero.mesh(dp=3), {"w": mlp_params()["head"][0]}
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    *_, h = step(*step.init(params, opt), mesh.split(BATCHES[0]))
    torch.testing.assert_close(h.value.flatten(0, 2), BATCHES[0]["x"] @ params["w"])


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_step_may_gather_its_parameters_itself_and_take_keywords(stage):
    opt = optim.sgd(0.1)

    def train_step(params: Any, opt_state: Any, *, batch: Any, scale: float) -> Any:
        _loss, grads = fzero.value_and_grad(mlp_loss)(params, batch)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        return params, opt_state, global_norm(fzero.gather(params)) * scale, {"static": scale}

    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    params, _opt_state, norm, info = step(*step.init(mlp_params(), opt), batch=mesh.split(BATCHES[0]), scale=2.0)
    torch.testing.assert_close(norm, 2 * global_norm(step.gather(params)))
    assert info == {"static": 2.0}


def test_a_step_does_not_change_its_arguments():
    opt = optim.adam(0.1)
    for stage in ALL_STAGES:

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = fzero.value_and_grad(mlp_loss, micro_batches=2)(params, batch)
            return *fzero.transforms.step(opt)(params, grads, opt_state), loss

        mesh = fzero.mesh(dp=2)
        step = fzero.shard(train_step, stage=stage, mesh=mesh)
        state = step.init(mlp_params(), opt)
        before = tree.map(torch.clone, state)
        step(*state, mesh.split(BATCHES[0]))
        assert_trees_close(state, before, rtol=0)


def test_dropout_differs_by_rank_and_runs_at_every_stage():
    opt = optim.sgd(0.1)

    def loss(params: Any, batch: Any) -> Any:
        dropped = torch.nn.functional.dropout(torch.ones(50), 0.5)
        return (params["w"] * dropped.mean() * batch["x"].float().mean()).sum(), dropped

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        (value, dropped), grads = fzero.value_and_grad(loss, has_aux=True)(params, batch)
        return *fzero.transforms.step(opt)(params, grads, opt_state), value, fzero.PerRank(dropped)

    mesh = fzero.mesh(dp=2)
    for stage in ALL_STAGES:
        torch.manual_seed(0)
        step = fzero.shard(train_step, stage=stage, mesh=mesh)
        *_, dropped = step(*step.init({"w": torch.ones(3)}, opt), mesh.split(BATCHES[0]))
        assert not torch.equal(dropped.value[0], dropped.value[1])


def test_gradients_are_values_and_each_unit_is_reduced_once():
    """Frozen parameters are an argument that is not differentiated: gathered, never reduced."""
    params, frozen = {"w": torch.ones(5)}, {"base": torch.ones(6)}

    def loss(params: Any, frozen: Any, x: torch.Tensor) -> torch.Tensor:
        return (params["w"].sum() * frozen["base"].sum() * x).mean()

    def program(params: Any, frozen: Any, x: torch.Tensor) -> Any:
        boxes = tree.map(torch.clone, fzero.partition((params, frozen)))
        return fzero.value_and_grad(loss)(*boxes, x)[0]

    mesh = fzero.mesh(dp=2)
    with fzero.collectives.record() as log:
        mesh.spmd(program)(params, frozen, mesh.split(torch.ones(4)))
    assert log.count("all_gather") == 2 and log.count("reduce_scatter") == 1


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_value_and_grad_sees_the_global_gradient_within(boxed, n):
    """A gradient penalty, and a step inside the loss (MAML), see the global gradient, as unsharded training does."""
    params, batch = {"w": mlp_params()["head"][0]}, BATCHES[0]

    def inner(p: Any, b: Any) -> torch.Tensor:
        return (torch.tanh(b["x"] @ p["w"]) - b["y"]).square().mean()

    def penalty(p: Any, b: Any) -> torch.Tensor:
        value, grads = fzero.value_and_grad(inner)(p, b)
        return value + grads["w"].square().sum()

    def maml(p: Any, b: Any) -> torch.Tensor:
        grads = fzero.value_and_grad(inner)(p, b)[1]
        return inner(tree.map(lambda x, g: x - 0.1 * g, p, grads), b)

    mesh = fzero.mesh(dp=n)
    for f in (penalty, maml):

        def program(p: Any, b: Any, f: Any = f) -> Any:
            value, grads = fzero.value_and_grad(f)(fzero.partition(p) if boxed else p, b)
            return value, fzero.gather(grads)

        got = mesh.spmd(program)(params, mesh.split(batch))
        assert_trees_close(got, fzero.value_and_grad(f)(params, batch), rtol=1e-11)


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_means_do_not_overflow(stage, dtype):
    """They are divided before they are summed: 8 ranks' losses of 30000 have a mean in float16, and no sum."""
    opt = optim.sgd(1e-6)
    step = train_step_for(lambda p, x: (p["w"] * x).mean() * 30000, opt)
    mesh = fzero.mesh(dp=8)
    sharded = fzero.shard(step, stage=stage, mesh=mesh)
    params, _, loss = sharded(
        *sharded.init({"w": torch.ones(3, dtype=dtype)}, opt), mesh.split(torch.ones(16, 3).to(dtype))
    )
    assert loss.isfinite() and all(x.isfinite().all() for x in tree.tensors(sharded.gather(params)))
    assert mesh.spmd(fzero.collectives.pmean)(torch.full((2,), 60000.0, dtype=dtype)).isfinite().all()


def test_means_of_small_integers_do_not_wrap():
    assert fzero.mesh(dp=2).spmd(fzero.collectives.pmean)(torch.tensor([200], dtype=torch.uint8)).tolist() == [200]


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_tied_leaves_stay_tied_under_any_optimizer(stage):
    """A clip after another transform still counts a tied leaf once."""
    w, v = mlp_params()["head"][0], mlp_params(seed=1)["head"][0]
    opt = optim.chain(optim.adam(1e-2, eps=1e-3), optim.clip_by_global_norm(0.005))

    def loss(p: Any, b: Any) -> torch.Tensor:
        return (b["x"] @ p["in"] @ p["mid"].T @ p["out"] - b["y"]).square().mean()

    assert_equivalent(train_step_for(loss, opt), {"in": w, "mid": v, "out": w}, opt, BATCHES, (stage,), (1, 3))


def test_masks_that_differ_on_tied_leaves_are_refused():
    w = torch.ones(3)
    params, opt = {"a": w, "b": torch.ones(2), "c": w}, optim.adamw(0.1, mask={"a": True, "b": True, "c": False})
    with pytest.raises(ValueError, match="leaves 'a' and 'c' are tied"):
        opt.update(params, opt.init(params), params)
    with pytest.raises(ValueError, match="leaves 'a' and 'c' are tied"):
        fzero.mesh(dp=2).spmd(lambda p: opt.update(p, opt.init(p), p)[0])(fzero.mesh(dp=2).spmd(_one_unit)(params))


def _one_unit(params: Any) -> Any:
    return fzero.partition(params, units=lambda path, leaf: "one")


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_writing_into_parameters_is_refused_at_every_stage(stage):
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p["w"].clamp_(-0.5, 0.5)
        return (p["w"] * x).sum()

    opt, mesh = optim.sgd(0.1), fzero.mesh(dp=2)
    step = fzero.shard(train_step_for(loss, opt), stage=stage, mesh=mesh)
    with pytest.raises(RuntimeError, match="wrote into its parameters in place"):
        step(*step.init({"w": torch.tensor([3.0, -3.0])}, opt), mesh.split(torch.ones(4)))


def test_keyword_arguments_of_a_loss_are_gathered():
    def loss(p: Any, x: torch.Tensor, *, other: Any) -> torch.Tensor:
        return (p["w"] * other["w"] * x).mean()

    def program(p: Any, x: torch.Tensor) -> Any:
        boxes = fzero.partition(p)
        return fzero.gather(fzero.value_and_grad(loss)(boxes, x, other=tree.map(torch.clone, boxes))[1])

    mesh = fzero.mesh(dp=2)
    got = mesh.spmd(program)({"w": torch.arange(3.0)}, mesh.split(torch.ones(4, 3)))
    torch.testing.assert_close(got["w"], torch.arange(3.0) / 3)


def test_rank_programs_of_two_threads_do_not_interfere():
    from concurrent.futures import ThreadPoolExecutor

    def work(n: int) -> float:
        mesh = fzero.mesh(dp=n)
        return sum(
            mesh.spmd(fzero.collectives.psum)(torch.ones(())).item() + fzero.collectives.psum(torch.ones(())).item()
            for _ in range(50)
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [1, 2, 3, 4])) == [100.0, 150.0, 200.0, 250.0]


def test_parameters_may_be_a_single_tensor():
    params, opt = torch.arange(5.0), optim.sgd(0.1, momentum=0.9)
    step = train_step_for(lambda p, x: (p * x).square().mean(), opt)
    assert_equivalent(step, params, opt, [torch.randn(4, 5) for _ in range(2)])
    with fzero.collectives.record() as log:
        fzero.mesh(dp=2).spmd(lambda p: fzero.gather(tree.map(torch.clone, fzero.partition(p))))(params)
    assert [e.unit for e in log.unit_events] == ["params"]
