"""fzero.nn.functional: a module as a pure function, with the numbers and the units of the module itself."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero import optim, tree
from fzero.nn import functional
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, cases
from tests.nn.modules import IMAGES, MODULES, Norms, Tied, build, randn


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_apply_equals_the_module_forward_and_gradients(name, training):
    make, x = MODULES[name]
    module = build(make).train(training)
    module(x)  # move running statistics away from their start
    apply, params, buffers = functional(module)

    def loss(params: Any, buffers: Any) -> Any:
        y, buffers = apply(params, buffers, x)
        return y.square().mean(), (y, buffers)

    (value, (y, after)), grads = fzero.value_and_grad(loss, has_aux=True)(params, buffers)
    expected = module(x)
    expected.square().mean().backward()
    assert_trees_close(y, expected.detach())
    assert_trees_close(value, expected.detach().square().mean())
    assert_trees_close(grads, {name: p.grad for name, p in module.named_parameters()})
    assert_trees_close(after, dict(module.named_buffers()))


def test_params_are_the_modules_own_tensors_detached():
    module = build(Norms)
    _, params, buffers = functional(module)
    for name, p in module.named_parameters():
        assert params[name].data_ptr() == p.data_ptr() and not params[name].requires_grad
    for name, b in module.named_buffers():
        assert buffers[name].data_ptr() != b.data_ptr() and torch.equal(buffers[name], b)


def test_apply_owns_no_storage():
    for make, _ in MODULES.values():
        apply = functional(build(make)).apply
        tensors = [*apply.module.parameters(), *apply.module.buffers()]
        assert all(x.is_meta for x in tensors)
        held = [x for m in apply.module.modules() for x in vars(m).values() if isinstance(x, torch.Tensor)]
        assert all(x.is_meta for x in held)


def test_apply_leaves_the_module_as_it_was():
    module = build(Norms)
    before = copy.deepcopy(module.state_dict())
    apply, params, buffers = functional(module)
    apply(params, buffers, IMAGES[0])
    assert_trees_close(dict(module.state_dict()), dict(before), 0.0)
    assert all(p.is_meta is False and p.requires_grad for p in module.parameters())


def test_apply_leaves_its_arguments_as_they_were():
    apply, params, buffers = functional(build(Norms))
    before = tree.map(torch.clone, (params, buffers))
    _, after = apply(params, buffers, IMAGES[0])
    assert_trees_close((params, buffers), before, 0.0)
    assert after["norm2d.num_batches_tracked"] == 1 and buffers["norm2d.num_batches_tracked"] == 0


def test_apply_passes_positional_and_keyword_arguments():
    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, *, shift: float, scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {"y": self.w * x * scale + shift}

    apply, params, buffers = functional(Affine())
    y, _ = apply(params, buffers, torch.ones(2), shift=1.0, scale=3.0)
    assert y["y"].tolist() == [4, 4]


def test_evaluation_mode_is_kept_as_it_was_and_writes_no_buffer():
    module = build(Norms)
    module(IMAGES[0])
    training, evaluation = functional(module), functional(copy.deepcopy(module).eval())
    assert all(m.training for m in training.apply.module.modules())
    module.eval()  # too late for `training`, which has a copy
    _, after = training.apply(training.params, training.buffers, IMAGES[1])
    assert after["norm1d.num_batches_tracked"] == 2
    y, after = evaluation.apply(evaluation.params, evaluation.buffers, IMAGES[1])
    assert_trees_close(y, module(IMAGES[1]).detach())
    assert_trees_close(after, evaluation.buffers, 0.0)


def test_vmap_gives_a_modules_gradient_of_each_sample():
    module = build(MODULES["sequential"][0])
    apply, params, buffers = functional(module)
    x = randn(6, 5)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, x)[0].square().sum()

    grads = torch.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for i in range(6):
        module.zero_grad()
        module(x[i]).square().sum().backward()
        assert_trees_close(
            {k: g[i] for k, g in grads.items()}, {k: p.grad for k, p in module.named_parameters()}, 1e-12
        )


def test_dropout_differs_by_rank():
    apply, params, buffers = functional(nn.Dropout(0.5))
    mesh = fzero.mesh(dp=4)
    torch.manual_seed(0)
    ones = torch.ones(4, 64)
    out = mesh.spmd(lambda x: fzero.PerRank(apply(params, buffers, x)[0]))(mesh.split(ones)).value
    assert set(out.unique().tolist()) == {0, 2}
    for i in range(4):
        for j in range(i):
            assert not torch.equal(out[i], out[j])


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_module_with_dropout_trains_at_every_stage_and_repeats_with_the_seed(stage):
    def run() -> Any:
        apply, params, buffers = functional(
            build(lambda: nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
        )
        opt, mesh = optim.sgd(0.05), fzero.mesh(dp=2)

        def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
            value, grads = fzero.value_and_grad(lambda p, x: apply(p, buffers, x)[0].square().mean())(params, x)
            updates, state = opt.update(grads, state, params)
            return optim.apply_updates(params, updates), state, value

        step = fzero.shard(train_step, stage, mesh)
        params, state = step.init(params, opt)
        torch.manual_seed(1)
        values = []
        for _ in range(8):
            params, state, value = step(params, state, mesh.split(randn(12, 5)))
            values.append(value.item())
        return values

    values = run()
    assert values == run()
    assert values[-1] < values[0]


def units_of(params: Any) -> dict[str, str]:
    """The unit of each parameter, as a stage-3 step cuts them."""
    step = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=2))
    boxes, _ = step.init(params, optim.sgd(0.1))
    return {name: box.spec.unit for name, box in boxes.items()}


def test_units_follow_the_blocks_of_a_module_list():
    units = units_of(functional(build(Tied)).params)
    assert units["embed.weight"] == "embed"
    for i in range(2):
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            assert units[f"blocks.{i}.{name}"] == f"blocks.{i}"


def test_units_follow_the_children_of_a_sequential():
    units = units_of(functional(build(MODULES["sequential"][0])).params)
    assert units == {"0.weight": "0", "0.bias": "0", "2.weight": "2", "2.bias": "2"}


def test_units_of_a_module_inside_another_follow_its_blocks():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2, enable_nested_tensor=False)
    module = nn.ModuleDict({"encoder": encoder, "out": nn.Linear(8, 2)})
    units = units_of(functional(module).params)
    assert set(units.values()) == {"encoder.layers.0", "encoder.layers.1", "out"}


def test_frozen_and_trainable_parameters_of_one_block_are_different_units():
    module = build(Tied)
    module.blocks[0][0].weight.requires_grad_(False)
    _, params, buffers = functional(module)
    assert units_of(params)["blocks.0.0.bias"] == "blocks.0"
    boxes = fzero.mesh(dp=2).spmd(fzero.partition)(buffers)
    assert boxes["blocks.0.0.weight"].spec.paths == ("blocks.0.0.weight",)


def test_a_module_may_run_again_in_the_backward_pass_of_ranks_in_lockstep():
    # remat's guard refused the copy that each rank makes of the module, for that reads parameters that require grad
    apply, params, _ = functional(nn.Linear(3, 2).double())
    mesh, x = fzero.mesh(dp=2, simulate="lockstep"), randn(4, 3)

    def gradient(run: Any, x: Any) -> Any:
        return torch.func.grad(lambda p: run(p, x).square().sum())(params)

    def one(run: Any) -> Any:
        return mesh.spmd(lambda x: fzero.PerRank(gradient(run, x)))(mesh.split(x)).value

    again = one(fzero.remat(lambda p, x: apply(p, {}, x)[0]))  # first, for the copies are made once
    assert_trees_close(again, one(lambda p, x: apply(p, {}, x)[0]))


def test_a_method_that_is_made_anew_at_each_call_is_not_kept():
    apply, params, buffers = fzero.nn.functional(torch.nn.Linear(3, 3))
    references = []
    for _ in range(3):
        x = torch.randn(2, 3)
        apply.method(lambda module, x=x: module(x))(params, buffers)
        references.append(weakref.ref(x))
        del x
    assert [reference() for reference in references] == [None] * 3


def test_a_method_runs_on_the_module_with_the_given_tensors():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    apply, params, buffers = fzero.nn.functional(module.train())
    x, doubled = torch.randn(4, 3), {name: 2 * p for name, p in params.items()}

    def twice(module, x):
        return module(x) + module[0](x).sum() + module[0].weight.sum()

    out, new = apply.method(twice)(doubled, buffers, x)
    first, after = apply(doubled, buffers, x)
    linear = torch.nn.functional.linear(x, doubled["0.weight"], doubled["0.bias"])
    torch.testing.assert_close(out, first + linear.sum() + doubled["0.weight"].sum())
    torch.testing.assert_close(new, after)  # the running statistics too
    assert not torch.equal(new["1.running_mean"], buffers["1.running_mean"])
    grads = torch.func.grad(lambda p: apply.method(lambda m: m[0].weight.square().sum())(p, buffers)[0])(params)
    torch.testing.assert_close(grads["0.weight"], 2 * params["0.weight"])
