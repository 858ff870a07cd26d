"""A module cut at its blocks computes what it computes whole, to the last bit, and what cannot be cut is refused."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero.nn.split._dynamic_block import DynamicBlockCall, _group_by_kind
from fzero.nn.split._split_module import DynamicIndex, split_module
from tests.helpers import cases
from tests.nn.helpers import run
from tests.nn.models import MODELS, batch_for, build

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_a_split_module_has_the_outputs_and_gradients_of_the_whole(name):
    model, batch = build(name), batch_for(name)
    made, params = split_module(model)
    assert len(params["blocks"]) == 4
    want, got = model(**batch), run(made, params, batch)
    assert got.logits.equal(want.logits)
    assert got.loss.equal(want.loss)
    gradients = made.join(torch.func.grad(lambda p: run(made, p, batch).logits.square().sum())(params))
    want.logits.square().sum().backward()
    named = dict(model.named_parameters())
    assert list(gradients) != [] and gradients.keys() == named.keys()
    for key, p in named.items():
        torch.testing.assert_close(gradients[key], p.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixtral"])  # whose experts depend on data
@pytest.mark.parametrize("indices", [pytest.param((0, 2), marks=pytest.mark.slow), (3, 0, 1)])
def test_one_program_of_many_ranks_runs_each_ranks_block(name, indices):
    made, params = split_module(build(name))
    batch = batch_for(name)
    x, inputs = made.first(params["rest"], batch), made.block_arguments(batch)
    xs = torch.stack([x + r for r in range(len(indices))])
    stacked = {key: torch.stack([params["blocks"][i][key] for i in indices]) for key in params["blocks"][0]}
    want = torch.stack([made.block(params["blocks"][i], xs[r], inputs, i) for r, i in enumerate(indices)])

    def one(p: Any, x: Any, r: Any) -> Any:
        return made.block(p, x, inputs, DynamicIndex(indices, r))

    got = torch.vmap(one)(stacked, xs, torch.arange(len(indices)))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    got = torch.vmap(lambda p, x, i: made.block(p, x, inputs, i))(stacked, xs, torch.tensor(indices))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def kinds(name: str) -> list[list[int]]:
    made, params = split_module(build(name))
    batch = batch_for(name)
    x, inputs = made.first(params["rest"], batch), made.block_arguments(batch)
    index = DynamicIndex((0, 1, 2, 3), torch.tensor(0))
    return _group_by_kind(
        DynamicBlockCall(made._run_block, params["blocks"][0], made.block_constants, x, inputs), {}, index.indices
    )


@pytest.mark.slow
def test_blocks_that_call_the_same_functions_are_of_one_kind():
    assert (
        kinds("llama") == kinds("gemma2") == kinds("bert") == [[0, 1, 2, 3]]
    )  # gemma2's masks differ, not its functions
    assert kinds("gpt2, scaled by the layer's number") == [[0], [1], [2], [3]]


def test_each_block_has_its_own_mask():
    made, _ = split_module(build("gemma2"))
    masks = [inputs.kwargs["attention_mask"] for inputs in made.block_arguments(batch_for("gemma2"))]
    assert masks[0] is masks[2] and masks[1] is masks[3]
    assert not masks[0].equal(masks[1])


def test_inspecting_a_block_does_not_change_the_draws_of_a_step():
    made, params = split_module(
        torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)) for _ in range(2)])
    )
    x, p = torch.ones(2, 3), params["blocks"][0]
    block = fzero.random.seeded(lambda index: made.block(p, x, made.block_arguments(x), index))
    key = fzero.random.key(0)
    assert block(key, DynamicIndex((0, 1), torch.tensor(0))).equal(block(key, 0))
    torch.manual_seed(0)
    want = made.block(p, x, made.block_arguments(x), 0)
    torch.manual_seed(0)
    assert made.block(p, x, made.block_arguments(x), DynamicIndex((1, 0), torch.tensor(1))).equal(want)


def test_a_cut_module_is_not_changed_and_shares_its_memory():
    model, batch = build("llama"), batch_for("llama")
    before, forwards = model(**batch).logits, [m.forward for m in model.modules()]
    made, params = split_module(model)
    run(made, params, batch)
    assert model(**batch).logits.equal(before)
    assert [m.forward for m in model.modules()] == forwards
    own = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert {name: p.data_ptr() for name, p in made.join(params).items()} == own


@pytest.mark.parametrize("simulate,remat", cases([("vmap", False), ("lockstep", True)], [("vmap", True)]))
def test_a_split_module_trains_as_the_whole(simulate, remat):
    model, batch = build("llama"), batch_for("llama")
    batch = {name: x.repeat(2, 1) for name, x in batch.items()}
    made, params = split_module(model)
    apply, whole, buffers = fzero.nn.functional(model)
    opt = optim.adamw(1e-2)
    block = fzero.remat(made.block) if remat else made.block

    def cut_loss(params: Any, batch: Any) -> Any:
        x, inputs = made.first(params["rest"], batch), made.block_arguments(batch)
        for i, p in enumerate(params["blocks"]):
            x = block(p, x, inputs, i)
        return made.last(params["rest"], x, batch).logits.square().mean()

    def trained(loss_fn: Any, params: Any, mesh: Any) -> Any:
        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            _, grads = fzero.value_and_grad(loss_fn)(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state

        step = fzero.shard(train_step, stage=3, mesh=mesh)
        params, opt_state = step.init(params, opt)
        for _ in range(2):
            params, opt_state = step(params, opt_state, mesh.split(batch))
        return step.gather(params)

    got = made.join(trained(cut_loss, params, fzero.mesh(dp=2, simulate=simulate)))
    want = trained(lambda p, b: apply(p, buffers, **b)[0].logits.square().mean(), whole, fzero.mesh(dp=1))
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-12, atol=1e-13)


# Modules by hand.


class Pair(torch.nn.Module):
    """A block that returns a tuple, as those of older models do."""

    def __init__(self, returned: Any = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.returned = returned

    def forward(self, x: Any, *args: Any) -> Any:
        return torch.tanh(self.linear(x)), *([] if self.returned is None else [self.returned])


class Stack(torch.nn.Module):
    """A model of blocks; `way` is how it calls them."""

    def __init__(self, way: Any, blocks: Any = None) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(3, 3)
        self.layers = torch.nn.ModuleList([Pair() for _ in range(3)] if blocks is None else blocks)
        self.norm = torch.nn.Linear(3, 3, bias=False)
        self.way = way

    def forward(self, x: Any) -> Any:
        return self.norm(self.way(self, self.embed(x)))


def by_length(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        out = layer(x)
        x = out[0] if len(out) == 1 else out[0] + out[1]
    return x


def of_one(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        (x,) = layer(x)
    return x


def in_tuples(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        x = layer(x)[0]
    return x


def linears() -> list[torch.nn.Module]:
    return [torch.nn.Linear(3, 3) for _ in range(3)]


def run_all(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    "way,blocks",
    [(in_tuples, None), (in_tuples, [Pair(torch.ones(1)) for _ in range(3)]), (of_one, None), (run_all, linears())],
)
def test_blocks_may_return_tuples_and_batches_be_tensors(way, blocks):
    model, x = Stack(way, blocks), torch.randn(3, 3)
    made, params = split_module(model)
    assert run(made, params, x).equal(model(x))
    assert run(made, params, (x,)).equal(model(x))
    assert run(made, params, {"x": x}).equal(model(x))
    fresh, _ = split_module(model)
    assert fresh.last(params["rest"], x, x).equal(model.norm(x))  # the form is found out by any call


def test_buffers_and_attributes_of_blocks_may_differ():
    class Scaled(torch.nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.linear, self.power = torch.nn.Linear(3, 3), i + 1
            self.register_buffer("scale", torch.tensor(1.0 + i))
            self.register_buffer("shift", torch.tensor(0.5))

        def forward(self, x: Any) -> Any:
            return self.linear(x) * self.scale**self.power + self.shift

    model, x = Stack(run_all, [Scaled(i) for i in range(3)]), torch.randn(3, 3)
    made, params = split_module(model)
    assert run(made, params, x).equal(model(x))
    assert made.block_constants[0]["shift"] is made.block_constants[2]["shift"]
    got = [
        made.block(params["blocks"][0], x, made.block_arguments(x), DynamicIndex((0, 1, 2), torch.tensor(i)))
        for i in range(3)
    ]
    want = [made.block(params["blocks"][0], x, made.block_arguments(x), i) for i in range(3)]
    torch.testing.assert_close(got, want)
    assert not want[0].equal(want[1])


def test_blocks_of_one_kind_have_their_own_buffers_and_share_constants():
    factor = torch.tensor(2.0)

    class Scaled(torch.nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.linear, self.number = torch.nn.Linear(3, 3), i
            self.register_buffer("scale", torch.tensor(1.0 + i))

        def forward(self, x: Any) -> Any:
            return self.linear(x) * self.scale * factor

    made, params = split_module(Stack(run_all, [Scaled(i) for i in range(3)]))
    x, p = torch.randn(3, 3), params["blocks"][0]
    inputs = made.block_arguments(x)
    index = DynamicIndex((2, 0, 1), torch.tensor(0))
    call = DynamicBlockCall(made._run_block, p, made.block_constants, x, inputs)
    assert _group_by_kind(call, {}, index.indices) == [[0, 1, 2]]
    for r, i in enumerate(index.indices):
        assert made.block(p, x, inputs, DynamicIndex(index.indices, torch.tensor(r))).equal(made.block(p, x, inputs, i))


def backwards(model: Stack, x: Any) -> Any:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def twice(model: Stack, x: Any) -> Any:
    return run_all(model, run_all(model, x))


def with_a_skip(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        x = x + layer(x)
    return x


def some(model: Stack, x: Any) -> Any:
    return model.layers[0](x)


def with_the_embedding(model: Stack, x: Any) -> Any:
    embedded = x.tanh()
    for layer in model.layers:
        x = layer(x, embedded)[0]
    return x


def with_an_object(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        x = layer(x, object())[0]
    return x


def run_in_pairs(model: Stack, x: Any) -> Any:
    for layer in model.layers:
        x, _ = layer(x)
    return x


@pytest.mark.parametrize(
    "way,blocks,words",
    [
        (backwards, linears(), "calls block 'layers.2' where 'layers.0' was expected"),
        (with_a_skip, linears(), "between 'layers.0' and 'layers.1' the module changes the value between blocks"),
        (some, linears(), "ran 1 of its 3 blocks"),
        (with_the_embedding, None, "block 'layers.0' is given '0', which depends on parameters outside the blocks"),
        (with_an_object, None, "block 'layers.0' is given an argument, a object: expected tensors and constants"),
    ],
)
def test_a_module_that_changes_values_between_blocks_is_refused_when_it_runs(way, blocks, words):
    made, _ = split_module(Stack(way, blocks))
    with pytest.raises((ValueError, TypeError), match=words):
        made.block_arguments(torch.ones(1, 3))


def test_blocks_that_run_again_after_the_last_one_are_refused():
    made, params = split_module(Stack(twice, linears()))
    with pytest.raises(ValueError, match=r"calls block 'layers.0' where 'none' was expected"):
        run(made, params, torch.ones(1, 3))


def test_a_block_that_returns_two_tensors_is_refused():
    made, params = split_module(Stack(by_length, [Pair(torch.ones(1)) for _ in range(3)]))
    with pytest.raises(ValueError, match=r"block 'layers.0' returns \['Tensor', 'Tensor'\]: expected one tensor"):
        run(made, params, torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"between 'layers.0' and 'layers.1' the module changes"):
        run(*split_module(Stack(run_in_pairs)), torch.ones(2, 3))


def test_statistics_that_a_block_writes_are_refused():
    blocks = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2)]
    made, params = split_module(Stack(run_all, blocks))
    with pytest.raises(RuntimeError, match=r"wrote buffer '1.num_batches_tracked' in place"):
        run(made, params, torch.ones(2, 3))
    made, params = split_module(Stack(run_all, blocks).eval())
    assert run(made, params, torch.ones(2, 3)).shape == (2, 3)


def different() -> list[torch.nn.Module]:
    return [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)]


def frozen() -> list[torch.nn.Module]:
    blocks = linears()
    blocks[1].weight.requires_grad_(False)
    return blocks


def tied() -> list[torch.nn.Module]:
    blocks: Any = linears()
    blocks[2].weight = blocks[0].weight
    return blocks


@pytest.mark.parametrize(
    "module,words",
    [
        (torch.nn.Linear(2, 2), "Linear has no repeated blocks: expected a ModuleList or Sequential of at least two"),
        (Stack(run_all, [torch.nn.Linear(3, 3), torch.nn.Bilinear(3, 3, 3)]), "has no repeated blocks"),
        (Stack(run_all, linears()[:1]), "has no repeated blocks"),
        (Stack(run_all, different()), "'layers.0' and 'layers.1' differ in 'bias': .* and missing"),
        (
            Stack(run_all, [torch.nn.Linear(3, n) for n in (3, 4)]),
            r"differ in 'weight': \(\(3, 3\), torch.float32\)",
        ),
        (Stack(run_all, frozen()), r"'layers.1.weight' is frozen \(requires_grad=False\)"),
        (Stack(run_all, tied()), "'layers.0.weight' is 'layers.2.weight' too"),
        (
            torch.nn.Sequential(Stack(run_all, linears()), Stack(run_all)),
            "2 lists of blocks: '0.layers' with 3, '1.l",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(module, words):
    if words.startswith("2 lists"):
        module = torch.nn.ModuleDict({"a": module[0], "b": module[1]})
        words = "ModuleDict has 2 lists of blocks: 'a.layers' with 3, 'b.layers' with 3"
    with pytest.raises(ValueError, match=words):
        split_module(module)


def test_the_list_of_blocks_of_a_split_module_may_be_chosen():
    module = torch.nn.Sequential(torch.nn.Sequential(*linears()), torch.nn.Sequential(*linears()[:2]))
    with pytest.raises(ValueError, match="blocks='2': Sequential has no such list of blocks; it has '' with 2"):
        split_module(module, "2")
    model = torch.nn.ModuleDict({"a": Stack(run_all, linears()), "b": Stack(run_all, linears())})
    assert split_module(model, "b.layers").split.names == ("b.layers.0", "b.layers.1", "b.layers.2")


def test_models_that_no_pipeline_runs_are_refused_by_name():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2, "vocab_size": 32}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(ValueError, match=r"2 lists of blocks: 'encoder.block' with 3, 'decoder.block' with 3"):
        split_module(t5)
    with pytest.raises(
        ValueError, match=r"'encoder.block.0' and 'encoder.block.1' differ in 'layer.0.SelfAttention.relative"
    ):
        split_module(t5, "encoder.block")
    with pytest.raises(ValueError, match=r"config.output_router_logits is set"):
        split_module(build("mixtral", output_router_logits=True))
    model = build("llama")
    model.config.use_cache = True
    made, _ = split_module(model)
    with pytest.raises(TypeError, match=r"given past_key_values, a DynamicCache.* model.config.use_cache = False"):
        made.block_arguments(batch_for("llama"))


def test_ranks_in_lockstep_run_copies_of_a_split_module():
    model = Stack(run_all, linears())
    made, params = split_module(model)
    mesh = fzero.mesh(dp=3, simulate="lockstep")
    x = torch.randn(3, 3)
    out = mesh.spmd(lambda x: fzero.PerRank(run(made, params, fzero.collectives.psum(x, "dp") / 3)))(
        mesh.split(x)
    ).value
    torch.testing.assert_close(out, model(x.mean(0, keepdim=True)).expand(3, 1, 3))
