"""Every tensor that fzero itself makes names its device: with the default device "meta" nothing changes."""

import ast

import pytest
import torch

import fzero
from fzero import optim
from tests.helpers import cases
from tests.optim.table import EACH
from tests.sources import nodes_of, python_files

MAKERS = {"zeros", "ones", "empty", "full", "tensor", "arange", "eye", "rand", "randn", "linspace", "scalar_tensor"}
MAKERS |= {"as_tensor", "randint", "randperm"}
ASKS_FOR_THE_DEFAULT = "random/_torch_draws.py"  # it draws what the user's own call would have drawn
CPU = torch.device("cpu")
OPTIMIZERS = EACH | {
    "schedule": optim.sgd(optim.warmup_cosine(0.1, 1, 4), momentum=0.9, nesterov=True),
    "clipping": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.constant(1e-2), eps=1e-3)),
    "full leaves": optim.on_full_leaves(optim.adamw(1e-2, eps=1e-3)),
    "ema": optim.chain(optim.clip_by_block_rms(0.5), optim.sgd(0.1), optim.params_ema(0.9)),
    "hyperparameters": optim.inject_hyperparams(optim.adamw)(optim.linear(1e-2, 1e-3, 4), eps=1e-3),
    "offload": optim.offload(optim.adamw(1e-2), 0.5),
}


def test_calls_that_make_tensors_name_the_device():
    for path in python_files("fzero"):
        if path.match(ASKS_FOR_THE_DEFAULT):
            continue
        for node in nodes_of(path, ast.Call):
            name = ast.unparse(node.func)
            if name.startswith("torch.") and name.removeprefix("torch.") in MAKERS:
                assert {"device", None} & {k.arg for k in node.keywords}, f"{path}:{node.lineno}: {ast.unparse(node)}"


def train(opt, stage, *, backend=None, simulate=True, **how):
    """Train a small model by two steps on two simulated ranks, whose tensors name their device."""

    def loss_fn(params, batch):
        return ((torch.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]) ** 2).mean()

    def train_step(params, opt_state, batch):
        loss, grads = fzero.value_and_grad(loss_fn, **how)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=CPU)

    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(simulate=simulate, dp=2))
    params, opt_state = step.init({"w": draw(4, 4), "b": draw(4)}, opt)
    batch = step.mesh.split({"x": draw(8, 4), "y": draw(8, 4)})
    run = fzero.jit(step, backend=backend) if backend else step
    for _ in range(2):
        params, opt_state, loss = run(params, opt_state, batch)
    return step.gather((params, opt_state)), loss


def assert_same(with_meta, without):
    xs, ys = fzero.tree.tensors(with_meta), fzero.tree.tensors(without)
    assert len(xs) == len(ys)
    for x, y in zip(xs, ys, strict=True):
        assert x.device == CPU and torch.equal(x, y)


@pytest.mark.parametrize("stage", cases((3,), [0]))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_name_their_devices(name, stage):
    with torch.device("meta"):
        with_meta = train(OPTIMIZERS[name], stage)
    assert_same(with_meta, train(OPTIMIZERS[name], stage))


@pytest.mark.parametrize("how", [{"simulate": "lockstep"}, {"micro_batches": 2}, {"backend": "fx", "micro_batches": 4}])
def test_steps_name_their_devices(how):
    with torch.device("meta"):
        with_meta = train(OPTIMIZERS["adamw"], 3, **how)
    assert_same(with_meta, train(OPTIMIZERS["adamw"], 3, **how))


def test_checkpoints_name_their_devices(tmp_path):
    step = fzero.shard(lambda params, opt_state: (params, opt_state), stage=3, mesh=fzero.mesh(dp=2))
    with torch.device("meta"):
        state = step.init({"w": torch.arange(12.0, device=CPU).view(3, 4)}, optim.adam(1e-3))
        fzero.save(tmp_path / "run", state, mesh=step.mesh)
        loaded = fzero.load(tmp_path / "run", state, mesh=step.mesh)
    assert_same(step.gather(loaded), step.gather(state))


def test_batches_name_their_devices():
    data = [{"x": torch.full((3,), float(i), device=CPU)} for i in range(12)]

    def device_of_new():
        batches = fzero.data.batches(data, fzero.mesh(dp=2), global_batch=4, seed=1)
        return [batch.value for _, batch in batches.steps(0, 4)]

    with torch.device("meta"):
        with_meta = device_of_new()
    assert_same(with_meta, device_of_new())


def test_keys_and_scales_name_their_devices():
    with torch.device("meta"):
        assert fzero.random.key(1).device == CPU
        value, grad = fzero.scaled_value_and_grad(lambda w: w.square().sum(), 8.0)(torch.ones(2, device=CPU))
    assert value.item() == 2.0 and grad.tolist() == [2.0, 2.0]
