"""fzero.nn.functional: a module as a pure function, with the module's own numbers."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import fzero
from fzero import optim, tree
from fzero.nn import functional
from fzero.testing import assert_trees_close
from tests.helpers import LEAST, cases


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(make: Any, seed: int = 0) -> Any:
    """Build a float64 module from a seed."""
    torch.manual_seed(seed)
    return make().double()


class Tied(nn.Module):
    """A language model's skeleton: blocks, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5)) for _ in range(2)])
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Norms(nn.Module):
    """BatchNorm1d and 2d."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm2d = nn.BatchNorm2d(3)
        self.norm1d = nn.BatchNorm1d(3, momentum=0.3)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm2d(self.conv(x)).exp()).mean((-1, -2))
        return self.out(self.norm1d(x))[:, 0]


IDS = torch.randint(0, 11, (3, 12, 4), generator=torch.Generator().manual_seed(0))  # three batches
IMAGES = randn(3, 12, 2, 5, 5)

MODULES = {
    "linear": (lambda: nn.Linear(5, 3), randn(12, 5)),
    "sequential": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), randn(12, 5)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, 2)),
        randn(4, 2, 6),
    ),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(6, 2)), randn(4, 4, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True), randn(3, 4, 8)),
    "batch norm": (Norms, IMAGES[0]),
    "tied": (Tied, IDS[0]),
}


# ---------------------------------------------------------------- the module's own numbers


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_apply_equals_the_module_forward_and_gradients(name, training):
    make, x = MODULES[name]
    module = built(make).train(training)
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
    module = built(Norms)
    _, params, buffers = functional(module)
    for name, p in module.named_parameters():
        assert params[name].data_ptr() == p.data_ptr() and not params[name].requires_grad
    for name, b in module.named_buffers():
        assert buffers[name].data_ptr() != b.data_ptr() and torch.equal(buffers[name], b)


@pytest.mark.parametrize("stage", cases((3,), [0]))
@pytest.mark.parametrize("frozen", [False, True])
def test_a_jitted_step_takes_over_buffers_and_the_module_keeps_its_own(frozen, stage):
    module, opt, mesh = built(Norms), optim.sgd(0.1), fzero.mesh(dp=2)
    module.conv.requires_grad_(not frozen)  # a frozen one is handed on, in memory that the module has as well
    apply, params, buffers = functional(module)
    averaged = {name for name, b in module.named_buffers() if b.is_floating_point()}

    def train_step(params: Any, opt_state: Any, buffers: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            y, new = apply(params, buffers, x)
            return y.square().mean(), new

        (value, new), grads = fzero.value_and_grad(loss, has_aux=True)(params, x)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        new = tree.map_with_path(lambda name, b: fzero.collectives.pmean(b) if name in averaged else b, new)
        return params, opt_state, new, value

    before = copy.deepcopy(module.state_dict())
    step = fzero.jit(fzero.shard(train_step, stage=stage, mesh=mesh), backend="fx", **LEAST)
    new, state, after, _ = step(*step.init(params, opt), buffers, mesh.split(IMAGES[0]))
    *_, after, _ = step(new, state, after, mesh.split(IMAGES[0]))
    assert after["norm2d.num_batches_tracked"] == 2 and after["norm2d.running_mean"].any()
    with pytest.raises(fzero.errors.DonatedError):
        buffers["norm2d.running_mean"].sum()
    assert_trees_close(dict(module.state_dict()), dict(before), 0.0)


def test_apply_owns_no_storage():
    for make, _ in MODULES.values():
        apply = functional(built(make)).apply
        tensors = [*apply.module.parameters(), *apply.module.buffers()]
        assert all(x.is_meta for x in tensors)
        held = [x for m in apply.module.modules() for x in vars(m).values() if isinstance(x, torch.Tensor)]
        assert all(x.is_meta for x in held)


def test_apply_leaves_the_module_as_it_was():
    module = built(Norms)
    before = copy.deepcopy(module.state_dict())
    apply, params, buffers = functional(module)
    apply(params, buffers, IMAGES[0])
    assert_trees_close(dict(module.state_dict()), dict(before), 0.0)
    assert all(p.is_meta is False and p.requires_grad for p in module.parameters())


def test_apply_leaves_its_arguments_as_they_were():
    apply, params, buffers = functional(built(Norms))
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
    module = built(Norms)
    module(IMAGES[0])
    training, evaluation = functional(module), functional(copy.deepcopy(module).eval())
    assert all(m.training for m in training.apply.module.modules())
    module.eval()  # too late for `training`, which has a copy
    _, after = training.apply(training.params, training.buffers, IMAGES[1])
    assert after["norm1d.num_batches_tracked"] == 2
    y, after = evaluation.apply(evaluation.params, evaluation.buffers, IMAGES[1])
    assert_trees_close(y, module(IMAGES[1]).detach())
    assert_trees_close(after, evaluation.buffers, 0.0)


def test_per_sample_gradients_of_a_module():
    module = built(MODULES["sequential"][0])
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


# ---------------------------------------------------------------- tied and frozen parameters


def test_tied_parameters_have_one_name():
    _, params, _ = functional(built(Tied))
    assert "embed.weight" in params and "head.weight" not in params
    assert len({x.data_ptr() for x in params.values()}) == len(params)


def test_tied_parameters_stay_one_in_the_copy_without_storage():
    module: Any = functional(built(Tied)).apply.module
    assert module.head.weight is module.embed.weight


def tied_step(apply: Any, opt: Any) -> Any:
    def loss(params: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        logits, _ = apply(params, buffers, ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), (ids * 7 % 11).flatten())

    def train_step(params: Any, state: Any, buffers: Any, ids: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(params, buffers, ids)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    return train_step


@pytest.mark.parametrize("stage", cases((2, 3), range(4)))
@pytest.mark.parametrize("n", [2, 4])
def test_tied_module_trains_as_with_torch_optim(n, stage):
    module = built(Tied)
    apply, params, buffers = functional(copy.deepcopy(module))
    opt, mesh = optim.adamw(1e-2), fzero.mesh(dp=n)
    step = fzero.shard(tied_step(apply, opt), stage, mesh)
    params, state = step.init(params, opt)
    reference = torch.optim.AdamW(module.parameters(), 1e-2)
    for ids in IDS:
        reference.zero_grad()
        expected = nn.functional.cross_entropy(module(ids).flatten(0, 1), (ids * 7 % 11).flatten())
        expected.backward()
        reference.step()
        params, state, value = step(params, state, buffers, mesh.split(ids))
        assert_trees_close(value, expected.detach())
    assert_trees_close(step.gather(params), {k: p.detach() for k, p in module.named_parameters()})
    assert "head.weight" not in params


def frozen() -> Any:
    module = built(Tied)
    for p in module.blocks[0].parameters():
        p.requires_grad_(False)
    return module


def test_frozen_parameters_are_among_the_buffers():
    module = frozen()
    apply, params, buffers = functional(module)
    names = {f"blocks.0.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
    assert buffers.keys() == names
    assert params.keys() == dict(module.named_parameters()).keys() - names
    assert {n for n, p in apply.module.named_parameters() if not p.requires_grad} == names


@pytest.mark.parametrize("stage", cases((1, 3), range(4)))
def test_frozen_parameters_have_no_gradient_and_no_state(stage):
    module = frozen()
    apply, params, buffers = functional(copy.deepcopy(module))
    before = tree.map(torch.clone, buffers)
    opt, mesh = optim.adamw(1e-2), fzero.mesh(dp=2)
    step = fzero.shard(tied_step(apply, opt), stage, mesh)
    params, state = step.init(params, opt)
    assert not any(name.startswith("blocks.0") for name in state.mu)
    trainable = [p for p in module.parameters() if p.requires_grad]
    held = sum(x.numel() for x in tree.tensors(step.gather(state.mu)))
    assert held == sum(p.numel() for p in trainable)
    reference = torch.optim.AdamW(trainable, 1e-2)
    for ids in IDS:
        reference.zero_grad()
        nn.functional.cross_entropy(module(ids).flatten(0, 1), (ids * 7 % 11).flatten()).backward()
        reference.step()
        params, state, _ = step(params, state, buffers, mesh.split(ids))
    assert_trees_close(buffers, before, 0.0)
    whole = step.gather(params)
    assert_trees_close(whole, {k: p.detach() for k, p in module.named_parameters() if p.requires_grad})


def test_frozen_parameters_may_be_sharded_like_the_others():
    apply, params, buffers = functional(frozen())
    mesh = fzero.mesh(dp=2)

    def loss(params: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, ids)[0].square().mean()

    def program(params: Any, buffers: Any, ids: torch.Tensor) -> Any:
        return fzero.value_and_grad(loss)(fzero.partition(params), fzero.partition(buffers), ids)[0]

    assert_trees_close(mesh.spmd(program)(params, buffers, mesh.split(IDS[0])), loss(params, buffers, IDS[0]))


# ---------------------------------------------------------------- BatchNorm


def norm_step(apply: Any, opt: Any) -> Any:
    """A train step that carries BatchNorm's statistics, as the docstring of `Apply` says."""

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        return mse_loss(y, x.mean((1, 2, 3))), buffers

    def train_step(params: Any, state: Any, buffers: Any, x: torch.Tensor) -> Any:
        (value, buffers), grads = fzero.value_and_grad(loss, has_aux=True)(params, buffers, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, fzero.collectives.pmean(buffers), value

    return train_step


def test_unsharded_training_carries_the_modules_own_running_statistics():
    module = built(Norms)
    apply, params, buffers = functional(copy.deepcopy(module))
    opt = optim.sgd(0.1)
    step, state = norm_step(apply, opt), opt.init(params)
    reference = torch.optim.SGD(module.parameters(), 0.1)
    for x in IMAGES:
        reference.zero_grad()
        mse_loss(module(x), x.mean((1, 2, 3))).backward()
        reference.step()
        params, state, buffers, _ = step(params, state, buffers, x)
        assert_trees_close(buffers, dict(module.named_buffers()))
    assert_trees_close(params, {k: p.detach() for k, p in module.named_parameters()})


@pytest.mark.parametrize("stage", cases((0, 3), range(4)))
@pytest.mark.parametrize("n", [2, 4])
def test_running_statistics_of_a_sharded_step_are_the_mean_over_ranks(n, stage):
    opt, mesh = optim.sgd(0.1), fzero.mesh(dp=n)
    module = built(Norms)
    apply, params, buffers = functional(copy.deepcopy(module))
    step = fzero.shard(norm_step(apply, opt), stage, mesh)
    params, state = step.init(params, opt)
    by_hand = dict(copy.deepcopy(module).named_buffers())
    for i, x in enumerate(IMAGES):
        replicas = []
        for part in x.chunk(n):  # each rank starts from the same statistics
            replica = copy.deepcopy(module)
            replica.load_state_dict({**step.gather(params), **by_hand})
            replica(part)
            replicas.append(dict(replica.named_buffers()))
        by_hand = {
            k: sum(r[k] for r in replicas) / n if v.is_floating_point() else replicas[0][k] for k, v in by_hand.items()
        }
        params, state, buffers, _ = step(params, state, buffers, mesh.split(x))
        assert_trees_close(buffers, by_hand, what=f"step {i}")
        assert buffers["norm2d.num_batches_tracked"].dtype == torch.int64
        assert buffers["norm2d.num_batches_tracked"] == i + 1


@pytest.mark.parametrize("stage", cases((0, 3), range(4)))
def test_batch_norm_in_evaluation_mode_trains_as_unsharded(stage):
    module = built(Norms)
    module(IMAGES[0])
    apply, params, buffers = functional(module.eval())
    opt, mesh = optim.sgd(0.1), fzero.mesh(dp=2)
    train_step = norm_step(apply, opt)
    step = fzero.shard(train_step, stage, mesh)
    sharded, state = (params, opt.init(params), buffers), None
    p, state = step.init(params, opt)
    b = buffers
    for x in IMAGES:
        *sharded, expected = train_step(*sharded, x)
        p, state, b, value = step(p, state, b, mesh.split(x))
        assert_trees_close(value, expected)
    assert_trees_close(step.gather(p), sharded[0])
    assert_trees_close(b, buffers)


def test_buffers_of_one_rank_are_refused_as_a_replicated_result():
    apply, params, buffers = functional(built(Norms))
    mesh = fzero.mesh(dp=2)
    with pytest.raises(ValueError, match=r"'norm2d.running_mean' differs by rank.*fzero.collectives.pmean"):
        mesh.spmd(lambda p, b, x: apply(p, b, x)[1])(params, buffers, mesh.split(IMAGES[0]))


@pytest.mark.parametrize("n", [2, 4])
def test_cumulative_batch_norm_runs_on_simulated_ranks(n):
    """With momentum=None the running mean is that of all batches: BatchNorm reads its counter as a Python number."""
    module = nn.BatchNorm1d(3, momentum=None).double()
    apply, params, buffers = functional(module)
    mesh, x = fzero.mesh(dp=n), randn(2, 12, 3)
    for batch in x:
        buffers = mesh.spmd(lambda p, b, x: fzero.collectives.pmean(apply(p, b, x)[1]))(
            params, buffers, mesh.split(batch)
        )
    assert_trees_close(buffers["running_mean"], x.mean((0, 1)))


class Writer(nn.Module):
    """A module that writes one of its buffers, each in another way."""

    history: torch.Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.name:
            case "calls":
                self.calls += 1
            case "history":
                self.history[0] += 1
            case "last":
                self.last = x.mean(0)
            case "total":
                self.total += x.sum(0)
            case "scratch":
                self.scratch += x.sum(0)
            case "cache":
                self.cache = x.sum(0)
        return (self.w * x).sum()


WRITTEN = ["calls", "history", "last", "total", "scratch", "cache"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_buffer_is_a_result_or_an_error_that_names_it(name, training):
    module = Writer(name).train(training)
    apply, params, buffers = functional(copy.deepcopy(module))
    before = tree.map(torch.clone, buffers)
    x = torch.arange(6.0).reshape(2, 3)
    module(x)
    try:
        _, after = apply(params, buffers, x)
    except (ValueError, RuntimeError) as error:
        assert repr(name) in str(error)
        return
    assert_trees_close(buffers, before, 0.0, "argument")
    assert_trees_close(after, dict(module.named_buffers()), 0.0, "result")


class Statistics(nn.Module):
    """A module whose ranks write different values into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += x.sum(0)
        self.last = x.mean(0)
        return (self.w * x).sum()


def test_buffers_that_ranks_write_differ_by_rank():
    apply, params, buffers = functional(Statistics())
    mesh = fzero.mesh(dp=2)
    x = torch.arange(12.0).reshape(4, 3)
    program = mesh.spmd(lambda p, b, x: fzero.PerRank(apply(p, b, x)[1]))
    after = program(params, buffers, mesh.split(x)).value
    assert after["last"].tolist() == [[1.5, 2.5, 3.5], [7.5, 8.5, 9.5]]
    assert after["total"].tolist() == [[3, 5, 7], [15, 17, 19]]
    assert after["calls"].tolist() == [1, 1]


# ---------------------------------------------------------------- dropout


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


@pytest.mark.parametrize("stage", cases((0, 3), range(4)))
def test_a_module_with_dropout_trains_at_every_stage_and_repeats_with_the_seed(stage):
    def run() -> Any:
        apply, params, buffers = functional(
            built(lambda: nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
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


# ---------------------------------------------------------------- units


def units_of(params: Any) -> dict[str, str]:
    """The unit of each parameter, as a stage-3 step cuts them."""
    step = fzero.shard(lambda p, s: (p, s), 3, fzero.mesh(dp=2))
    boxes, _ = step.init(params, optim.sgd(0.1))
    return {name: box.spec.unit for name, box in boxes.items()}


def test_units_follow_the_blocks_of_a_module_list():
    units = units_of(functional(built(Tied)).params)
    assert units["embed.weight"] == "embed"
    for i in range(2):
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            assert units[f"blocks.{i}.{name}"] == f"blocks.{i}"


def test_units_follow_the_children_of_a_sequential():
    units = units_of(functional(built(MODULES["sequential"][0])).params)
    assert units == {"0.weight": "0", "0.bias": "0", "2.weight": "2", "2.bias": "2"}


def test_units_of_a_module_inside_another_follow_its_blocks():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 2, enable_nested_tensor=False)
    module = nn.ModuleDict({"encoder": encoder, "out": nn.Linear(8, 2)})
    units = units_of(functional(module).params)
    assert set(units.values()) == {"encoder.layers.0", "encoder.layers.1", "out"}


def test_frozen_and_trainable_parameters_of_one_block_are_different_units():
    module = built(Tied)
    module.blocks[0][0].weight.requires_grad_(False)
    _, params, buffers = functional(module)
    assert units_of(params)["blocks.0.0.bias"] == "blocks.0"
    boxes = fzero.mesh(dp=2).spmd(fzero.partition)(buffers)
    assert boxes["blocks.0.0.weight"].spec.paths == ("blocks.0.0.weight",)


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_is_refused(process_group):
    module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*pass the plain module"):
        functional(module)


def test_ddp_inside_a_module_is_refused_by_name(process_group):
    module = nn.Sequential(nn.Linear(2, 2), nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="'1' is DistributedDataParallel"):
        functional(module)


def test_fsdp2_is_refused(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="FSDPModule"):
        functional(module)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
def test_fsdp1_is_refused(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        functional(module)


def test_dtensor_is_refused_by_name(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    module = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match="'weight' is a DTensor"):
        functional(module)


def test_data_parallel_is_refused():
    with pytest.raises(TypeError, match="DataParallel"):
        functional(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))


def test_a_compiled_module_is_refused():
    with pytest.raises(TypeError, match="compiled; pass the plain module and compile the sharded step"):
        functional(torch.compile(nn.Linear(2, 2)))  # pyright: ignore[reportArgumentType]


def test_a_module_compiled_in_place_is_taken_as_it_was_before():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].compile(backend=lambda *_: pytest.fail("compiled"))
    apply, params, buffers = functional(module)
    expected = torch.ones(4, 2) @ params["0.weight"].T + params["0.bias"]
    torch.testing.assert_close(apply(params, buffers, torch.ones(4, 2))[0], expected)


def test_a_lazy_module_is_refused_until_it_has_run():
    module = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"'1.weight' is not initialised.*once on a batch"):
        functional(module)
    module(torch.ones(4, 2))
    assert len(functional(module).params) == 6


def test_a_lazy_buffer_is_refused_by_name():
    with pytest.raises(ValueError, match="'running_mean' is not initialised"):
        functional(nn.LazyBatchNorm1d(affine=False))


def test_another_value_than_a_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        functional({"w": torch.ones(2)})  # pyright: ignore[reportArgumentType]


def test_boxes_are_refused_by_name():
    apply, params, buffers = functional(built(Tied))
    mesh = fzero.mesh(dp=2)
    with pytest.raises(TypeError, match=r"Tied was given Shard.*'embed.weight'.*fzero.gather"):
        mesh.spmd(lambda p, ids: apply(fzero.partition(p), buffers, ids)[0])(params, mesh.split(IDS[0]))


def test_a_parameter_that_is_missing_is_named():
    apply, params, buffers = functional(built(Tied))
    del params["blocks.1.0.bias"]
    with pytest.raises(ValueError, match=r"'blocks\.1\.0\.bias'"):
        apply(params, buffers, IDS[0])


def test_a_parameter_that_the_module_does_not_have_is_named():
    apply, params, buffers = functional(built(Tied))
    with pytest.raises(ValueError, match="'typo'"):
        apply({**params, "typo": torch.ones(2)}, buffers, IDS[0])


def test_a_buffer_that_is_missing_is_named():
    apply, params, buffers = functional(built(Norms))
    for name in ("norm2d.running_mean", "norm2d.num_batches_tracked"):
        rest = {k: x for k, x in buffers.items() if k != name}
        with pytest.raises(ValueError, match=f"'{name}'"):
            apply(params, rest, IMAGES[0])


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


def test_a_function_that_torch_func_cannot_differentiate_is_named():
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * x

        @staticmethod
        def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * g

    class Doubling(torch.nn.Linear):
        def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return Old.apply(super().forward(x)) if self.training else 2 * super().forward(x)

    apply, params, buffers = fzero.nn.functional(Doubling(3, 2))
    with pytest.raises(RuntimeError, match=r"Doubling applies an autograd.Function.* without setup_context.*eval\(\)"):
        torch.func.grad(lambda p: apply(p, buffers, torch.ones(4, 3))[0].sum())(params)
    apply, params, buffers = fzero.nn.functional(Doubling(3, 2).eval())
    assert torch.func.grad(lambda p: apply(p, buffers, torch.ones(4, 3))[0].sum())(params)["bias"].tolist() == [8, 8]


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
