"""A mesh's device is not the CPU: here it is meta, whose tensors torch refuses to mix with the CPU's."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero
from fzero import optim
from tests.distributed.launch import rank_variables
from tests.helpers import ALL_STAGES, cases

META, CPU, GPU = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)
OPTIMIZERS = {
    "adamw": optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.constant(1e-2))),
    "adafactor": optim.adafactor(0.1),
    "muon": optim.muon(0.1, fallback=optim.adam(1e-2)),
    "offload": optim.offload(optim.adamw(1e-2), 0.5),
    "all on the host": optim.offload(optim.adamw(1e-2), 1.0, update_on="device"),
}


def make():
    return {"a": {"w": torch.ones(4, 6), "b": torch.ones(6)}, "out": torch.ones(6, 4), "scale": torch.ones(())}


def loss_fn(params, batch):
    x = torch.tanh(batch["x"] @ params["a"]["w"] + params["a"]["b"])
    return ((x @ params["out"] * params["scale"] - batch["y"]) ** 2).mean()


def step_on(device, stage, opt):
    def train_step(params, opt_state, batch):
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    mesh = fzero.mesh(dp=2, device=device.type)
    return fzero.shard(train_step, stage=stage, mesh=mesh)


def batch(n=8):
    return {"x": torch.ones(n, 4), "y": torch.ones(n, 4)}


def places(values):
    """Where each tensor lies that is not a number."""
    return {
        path: x.device
        for path, x in zip(*fzero.tree.flatten_with_paths(values)[:2], strict=True)
        if x is not None and x.ndim
    }


@pytest.mark.parametrize("source", ["tree", "donated", "function", "on the device"])
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_init_makes_parameters_and_state_on_the_device(stage, source):
    step = step_on(META, stage, OPTIMIZERS["adamw"])
    values = fzero.tree.map(lambda x: x.to(META), make()) if source == "on the device" else make()
    params, opt_state = step.init(
        make if source == "function" else values, OPTIMIZERS["adamw"], donate=source == "donated"
    )
    assert set(places((params, opt_state)).values()) == {META}
    assert all(x.device == META for x in fzero.tree.tensors(params))  # numbers among them
    assert all(x.device == META for x in fzero.tree.tensors(step.gather(params)))


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_run_on_the_device(stage, name):
    opt = OPTIMIZERS[name]
    step = step_on(META, stage, opt)
    params, opt_state = step.init(make, opt)
    loss = torch.zeros(())
    for _ in range(2):
        params, opt_state, loss = step.program(step.rank_step)(params, opt_state, step.mesh.split(batch()))
    assert loss.device == META
    assert set(places((params, opt_state)).values()) == {META}  # what lies on the host has no memory here, either


def test_batches_are_brought_to_the_device():
    mesh = fzero.mesh(dp=2, device="meta")
    for boxed in (mesh.split(batch()), mesh.local({"x": torch.ones(2, 3)}), mesh.local(lambda r: torch.ones(()))):
        assert {x.device for x in fzero.tree.tensors(boxed)} == {META}
    x = torch.ones(2, 3, device=META)
    assert mesh.local(x).value is x
    assert mesh.split(torch.ones(2, device="meta")).value.is_meta
    assert mesh.device_put({"mask": torch.ones(2), "name": None})["mask"].device == META


def test_partition_moves_a_tree_to_the_device_of_its_layout():
    opt = OPTIMIZERS["adamw"]
    step = step_on(META, 1, opt)
    params, opt_state = step.init(make, opt)
    saved = fzero.tree.map(lambda x: torch.zeros_like(x, device=CPU), step.gather((params, opt_state)))
    assert places(step.partition(saved, like=(params, opt_state))) == places((params, opt_state))
    assert {x.device for x in fzero.tree.tensors(step.partition(saved[1], like=opt_state)) if not x.ndim} == {CPU}


def move_to_gpu(values):
    """Stand-ins on a GPU that this machine lacks."""
    with FakeTensorMode():
        return fzero.tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=GPU) if x.ndim else x, values)


def without(values, path):
    """The tree with the CPU's tensor at one path."""
    paths, leaves, structure = fzero.tree.flatten_with_paths(values)
    assert path in paths
    moved = [torch.ones(x.shape) if p == path else x for p, x in zip(paths, leaves, strict=True)]
    return fzero.tree.unflatten(structure, moved)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_leaf_on_another_device_is_named(stage):
    opt = OPTIMIZERS["adamw"]
    on_cpu = step_on(CPU, stage, opt)
    state = on_cpu.init(make, opt)
    step = on_cpu.on_mesh(replace(on_cpu.mesh, device=GPU))
    params, opt_state, data = move_to_gpu((*state, on_cpu.mesh.split(batch())))
    where = r"is on cpu, and Mesh\(dp=2, simulated, cuda:0\) computes on cuda:0: "
    box = ".0" if stage else ""
    with pytest.raises(ValueError, match=rf"argument 0, leaf 'a.w' {where}.*step.init"):
        step(without(params, f"a.w{box}"), opt_state, data)
    with pytest.raises(ValueError, match=rf"argument 1, leaf '1.mu.out' {where}.*step.init"):
        step(params, without(opt_state, f"1.mu.out{box}"), data)
    with pytest.raises(ValueError, match=rf"argument 2, leaf 'y' {where}make it with mesh.split"):
        step(params, opt_state, without(data, "0.y"))
    with pytest.raises(ValueError, match=r"leaf 'x' is on cuda:0, and Mesh\(dp=2, simulated\) computes on cpu"):
        on_cpu(*state, data)


def test_a_plain_tensor_on_another_device_is_named_unless_it_is_a_scalar():
    step = fzero.shard(lambda params, key, *, mask: params, 0, mesh=replace(fzero.mesh(dp=2), device=GPU))
    with pytest.raises(ValueError, match=r"argument leaf 'mask' is on cpu, .* mesh.device_put\(value\); or stay on"):
        step(move_to_gpu(make()), torch.ones(()), mask=torch.ones(3))


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_plan_on_the_meta_device_has_the_peak_of_the_cpus(stage):
    peaks = []
    for device in (META, CPU):
        step = step_on(device, stage, OPTIMIZERS["adamw"])
        state = step.init(make, OPTIMIZERS["adamw"])
        peaks.append(fzero.plan(step, *state, step.mesh.split(batch())).peak_bytes)
    assert peaks[0] == peaks[1] > 0


def test_no_process_runs_on_the_meta_device(monkeypatch):
    for key, value in rank_variables(0, 2, 1).items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(ValueError, match="has no memory, so no process can run on it: pass simulate=True"):
        fzero.mesh(dp=2, device="meta")
    assert fzero.mesh(dp=2, device="meta", simulate=True).device == META


def test_a_module_buffer_on_another_device_is_named():
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.register_buffer("position", torch.arange(3))

        def forward(self, x):
            return self.linear(x) + self.position

    apply, params, buffers = fzero.nn.functional(Positions())
    mesh = fzero.mesh(dp=2, device="meta")
    params, x = mesh.device_put(params), torch.ones(2, 3, device=META)
    with pytest.raises(ValueError, match=r"buffer 'position' is on cpu, and parameter .*buffers = mesh.device_put"):
        apply(params, buffers, x)
    assert apply(params, mesh.device_put(buffers), x)[0].device == META


def test_a_default_device_does_not_change_the_meshs_device():
    with torch.device("meta"):
        step = step_on(META, 3, OPTIMIZERS["adamw"])
        values = fzero.tree.map(lambda x: torch.ones(x.shape, device=CPU), make())
        state = step.init(values, OPTIMIZERS["adamw"])
        assert set(places(state).values()) == {META}
