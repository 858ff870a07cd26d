"""Plans of names: what they cut, what becomes of the module, and what is refused in words."""

from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero import optim
from fzero.parallel import tensor as tp
from fzero.testing import assert_trees_close
from tests.helpers import train_step_for

MESH = fzero.mesh(dp=1, tp=2)
OPT = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, eps=1e-3))
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
PLAN: dict[str, Any] = {
    "up": "colwise",
    "gate": "colwise_gather_output",
    "mid": "rowwise_split_input",
    "down": "rowwise",
}


class Mlp(nn.Module):
    """Each style once: columns, columns that are joined, rows of what is whole, rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.mid = nn.Linear(6, 8), nn.Linear(8, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mid(torch.tanh(self.gate(x)))
        return self.down(torch.tanh(self.up(x)))


def train(module: nn.Module, layers: tp.Layers | None, x: torch.Tensor = X, mesh: Any = None, stage: Any = 3) -> Any:
    apply, params, buffers = fzero.nn.functional(module.double(), tp=layers)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, x)[0].square().mean()

    train_step = train_step_for(loss, OPT)
    if layers is None:
        return train_step(params, OPT.init(params), x)[0]
    step = fzero.shard(train_step, stage=stage, mesh=mesh or MESH, axis="dp", split=layers.split)
    state = step.init(params, OPT)
    new, _, _ = step(*state, (mesh or MESH).split(x, "dp"))
    return layers.pack(step.gather(new))


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_each_tensor_parallel_style_equals_the_whole_layer(simulate):
    module = Mlp()
    mesh = fzero.mesh(dp=2, tp=2, simulate=simulate)
    assert_trees_close(train(module, tp.layers(module, PLAN), mesh=mesh), train(module, None))


def test_tp_layers_leave_the_module_unchanged():
    module = Mlp().double()
    before, y = dict(vars(module.up)), module(X)
    train(module, tp.layers(module, PLAN))
    assert vars(module.up) == before and torch.equal(module(X), y)
    assert "forward" not in vars(module.up)


class Tied(nn.Module):
    """An embedding with a row for padding, scaled by a forward pass of its own, whose weight is the head's."""

    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = Tied.Scaled(8, 4, padding_idx=padding), nn.Linear(4, 8)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.tokens(tokens)))


@pytest.mark.parametrize("padding", [None, 0, 5, -1])
@pytest.mark.parametrize("named", ["tokens", "head", "both"])
def test_a_tied_layer_follows_the_other_and_padding_has_no_gradient(padding, named):
    module, tokens = Tied(padding), torch.tensor([[0, 5], [7, 0], [1, 2], [5, 5]])
    plan = {"tokens": "embedding_rowwise", "head": "colwise_gather_output"}
    layers = tp.layers(module, plan if named == "both" else {named: plan[named]})
    assert sorted(layers.param_splits) == ["head.bias", "head.weight", "tokens.weight"]
    assert_trees_close(train(module, layers, tokens), train(module, None, tokens))


class Fused(nn.Module):
    """Attention that counts its heads, and the columns of its fused projection, in attributes."""

    def __init__(self, count: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 6)
        self.head_dim, self.width = 2, 8
        setattr(self, count, 4)
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(self.width, dim=-1)
        q, k, v = (y.view(-1, getattr(self, self.count), self.head_dim) for y in (q, k, v))
        return self.out((torch.tanh(q) * k + v).flatten(1))


def test_packed_matrices_are_each_cut_and_attributes_are_divided():
    """Heads by names that are known for a number of heads, the rest by `divided`."""
    plan = {"qkv": tp.packed(3), "out": "rowwise"}
    for count, divided in (("num_heads", ("width",)), ("parts", ("width", "parts"))):
        module = Fused(count)
        layers = tp.layers(nn.Sequential(module), {"0": tp.divided(*divided), **{f"0.{k}": v for k, v in plan.items()}})
        got = train(nn.Sequential(module), layers)
        assert_trees_close(got, train(nn.Sequential(module), None))
        params = fzero.nn.functional(nn.Sequential(module), tp=layers).params
        assert params["0.qkv.weight"].shape == (3, 8, 6)
        assert vars(module)["width"] == 8


def test_an_error_in_a_split_module_notes_that_it_runs_on_part_of_the_heads():
    module = nn.Sequential(Fused("parts"))
    layers = tp.layers(module, {"0.qkv": tp.packed(3), "0.out": "rowwise"})
    with pytest.raises((RuntimeError, ValueError)) as caught:
        train(module, layers)
    assert any("runs on its part of heads and columns along 'tp'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("raised_by", ["the model", "fzero"])
def test_an_error_of_fzero_in_a_split_region_gets_no_note(raised_by):
    class Refusing(Fused):
        def forward(self, x):
            if raised_by == "the model":
                raise ValueError("a text that names fzero")
            return fzero.collectives.psum(super().forward(x), "unknown")

    plan = {"0": tp.divided("width"), "0.qkv": tp.packed(3), "0.out": "rowwise"}
    layers = tp.layers(nn.Sequential(Refusing("num_heads")), plan)
    with pytest.raises(ValueError) as caught:
        train(nn.Sequential(Refusing("num_heads")), layers)
    is_noted = any("runs on its part of heads" in note for note in getattr(caught.value, "__notes__", ()))
    assert is_noted == (raised_by == "the model"), repr(caught.value)


def test_unpack_and_pack_are_inverses():
    module = nn.Sequential(Fused("num_heads"))
    layers = tp.layers(module, {"0.qkv": tp.packed(3)})
    params = dict(module.named_parameters())
    assert_trees_close(layers.pack(layers.unpack(params)), params)
    with pytest.raises(ValueError, match=r"0.qkv.weight' is \[24, 6\]: expected 3 matrices along dimension 0"):
        fzero.mesh(tp=2).spmd(lambda: layers.split("0.qkv.weight", params["0.qkv.weight"]))()


def test_a_split_layer_with_full_parameters_is_refused():
    """Frozen ones, say, that the rule has not seen: the columns of all ranks would be multiplied on each."""
    module = Mlp().double()
    apply, params, buffers = fzero.nn.functional(module, tp=tp.layers(module, PLAN))
    with pytest.raises(
        ValueError, match=r"parameter 'gate.weight' is \[8, 6\]: of the 8 along dimension 0, each of the 2 ranks"
    ):
        MESH.spmd(lambda p: apply(p, buffers, X)[0])(params)


def test_on_a_mesh_without_the_axis_a_split_module_runs_whole():
    module = Mlp().double()
    layers = tp.layers(module, PLAN)
    apply, params, buffers = fzero.nn.functional(module, tp=layers)
    assert torch.equal(apply(params, buffers, X)[0], module(X))
    result = fzero.mesh(dp=2).spmd(lambda: [layers.split(name, x) for name, x in params.items()])()
    assert result == [None] * len(params)


def test_the_table_of_tp_layers_shows_how_each_layer_is_split():
    shown = repr(tp.layers(nn.Sequential(*[Mlp() for _ in range(3)]), {f"*.{k}": v for k, v in PLAN.items()}))
    assert shown.splitlines() == [
        "layers along 'tp'",
        "  *.gate  some columns, joined",
        "  *.mid   some rows, of an input that is split",
        "  *.up    some columns",
        "  *.down  some rows",
    ]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def blocks(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.ModuleList([Mlp()]) for name in names})


TABLE = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no plan": (Mlp(), None, ValueError, "Mlp carries no tp_plan: give one"),
    "a typo": (Mlp(), {"gat": "colwise"}, ValueError, "'gat' names no layer of Mlp"),
    "a wrong place": (nn.Sequential(Mlp()), {"up": "colwise"}, ValueError, "did you mean one of '0.up'"),
    "a style": (Mlp(), {"up": "columnwise"}, ValueError, "layer 'up' has the style 'columnwise', which"),
    "a forward pass of its own": (nn.Sequential(Own(2, 2)), {"0": "colwise"}, TypeError, "layer '0' is a Own with"),
    "an embedding's style": (Mlp(), {"up": "embedding_rowwise"}, TypeError, "is for a torch.nn.Embedding"),
    "an option": (TABLE, {"0": "embedding_rowwise"}, ValueError, "max_norm"),
    "ties": (Twice(), {"a": "colwise", "b": "rowwise"}, ValueError, "would be split in different ways"),
    "experts with a bias": (Mlp(), {"up": "moe_tp_experts", "up.weight": "colwise"}, ValueError, "'bias' is not split"),
    "a parameter's style": (
        Mlp(),
        {"up.weight": "embedding_rowwise"},
        ValueError,
        "parameter 'up.weight' has the style",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_plans_of_tp_layers_are_refused(name):
    module, plan, kind, said = REFUSED[name]
    with pytest.raises(kind, match=said):
        tp.layers(module, plan)


def test_layers_of_another_module_and_plans_that_name_nothing_are_refused():
    with pytest.raises(ValueError, match="are of another module: Tied has no 'gate'"):
        fzero.nn.functional(Tied(None), tp=tp.layers(Mlp(), PLAN))
    wrapped = nn.Sequential(Mlp())
    wrapped.tp_plan = PLAN  # as a wrapper that hands on all attributes
    with pytest.raises(ValueError, match="Sequential carries a tp_plan that names none of its layers"):
        tp.layers(wrapped)


@pytest.mark.parametrize("names,lists", [((), 0), (("encoder", "decoder"), 2)])
def test_a_sequence_is_cut_in_one_list_of_blocks(names, lists):
    module = blocks(*names) if names else Mlp()
    layers = tp.layers(module, {"*.up": "colwise"}, sequence=True)
    with pytest.raises(ValueError, match=rf"the layers lie in {lists} lists, .*sequence=False"):
        fzero.nn.functional(module, tp=layers)


def test_a_vocabulary_that_tp_does_not_divide_is_refused_with_a_remedy():
    module = nn.Sequential(nn.Embedding(7, 4))
    layers = tp.layers(module, {"0": "embedding_rowwise"})
    said = (
        r"leaf '0.weight' has 7 along dimension 0, .*pad_to_multiple_of=2\)\), or leave its layer out, plan=\{'0': None"
    )
    with pytest.raises(ValueError, match=said):
        train(module, layers, torch.zeros(2).long())


class Stack(nn.Module):
    """Blocks with a norm, columns and rows, a gain of its own kind, and a layer that needs all tokens."""

    class Block(nn.Module):
        class Mixer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(6, 6) / 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cumsum(x @ self.weight, dim=-2)  # over tokens

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixer = nn.LayerNorm(6), Stack.Block.Mixer()
            self.mlp = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
            x = hidden_states + self.mlp(self.norm(hidden_states))
            return x + self.mixer(x), None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Stack.Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(hidden_states=x)[0]
        return x


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_with_sequence_parallelism_each_child_gets_the_tokens_that_it_needs(simulate):
    module, x = Stack(), torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 4, 6)
    layers = tp.layers(module, {"*.mlp.0": "colwise", "*.mlp.2": "rowwise"}, sequence=True)
    mesh = fzero.mesh(dp=1, tp=2, simulate=simulate)
    assert_trees_close(train(module, layers, x, mesh), train(module, None, x))
    with pytest.raises(ValueError, match=r"dimension 1 of a tensor \[2, 3, 6\] is split into 2 equal parts"):
        train(module, layers, x[:, :3], mesh)


def test_with_sequence_parallelism_a_rank_holds_part_of_the_tokens_between_blocks():
    module, x = Stack().double(), torch.ones(2, 4, 6, dtype=torch.float64)
    layers = tp.layers(module, {"*.mlp.0": "colwise", "*.mlp.2": "rowwise"}, sequence=True)
    records = []
    module.blocks[1].register_forward_pre_hook(
        lambda m, args, kwargs: records.append(kwargs["hidden_states"].shape), with_kwargs=True
    )
    apply, params, buffers = fzero.nn.functional(module, tp=layers)

    def program(params: Any) -> torch.Tensor:
        return apply(fzero.gather(fzero.partition(params, (), split=layers.split)), buffers, x)[0]

    fzero.mesh(tp=2).spmd(program)(params)
    assert records == [(2, 2, 6)]


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_ranks_along_tp_with_different_examples_are_refused(simulate):
    """A batch that is split over all axes, mesh.split(batch), would train each part of a model on other examples."""
    mesh, module = fzero.mesh(dp=1, tp=2, simulate=simulate), Mlp().double()
    apply, params, buffers = fzero.nn.functional(module, tp=(layers := tp.layers(module, PLAN)))
    train_step = train_step_for(lambda p, x: apply(p, buffers, x)[0].mean(), OPT)
    step = fzero.shard(train_step, 0, mesh, axis="dp", split=layers.split)
    state = step.init(params, OPT)
    said = r"the module's input, leaf '0' differs by rank along 'tp'.*mesh\.split\(batch, step\.data_axes\)"
    with pytest.raises(ValueError, match=said):
        step(*state, mesh.split(X))
    step(*state, mesh.split(X, "dp"))


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_ranks_along_tp_of_a_pipeline_with_different_examples_are_refused(simulate):
    mesh, module = fzero.mesh(pp=2, tp=2, simulate=simulate), nn.Sequential(Mlp(), Mlp()).double()
    layers = tp.layers(module, {f"*.{name}": style for name, style in PLAN.items()})
    loss, params, _ = fzero.nn.pipeline(module, lambda out, x: out.square().mean(), tp=layers, micro_batches=2)
    step = fzero.shard(train_step_for(loss, OPT), 0, mesh, axis="pp", split=loss.split)
    params, _ = step.init(loss.stack(params, mesh), OPT)
    grads_of = step.program(fzero.value_and_grad(loss, reduce="weighted"))
    with pytest.raises(ValueError, match="the module's input differs by rank along 'tp'"):
        grads_of(params, mesh.split(X, "tp"))
    grads_of(params, X)


def test_the_error_of_layers_split_along_the_data_axis_names_it():
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    wrong = tp.layers(module, {"0": "colwise", "1": "rowwise"}, axis="dp")
    apply, params, buffers = fzero.nn.functional(module, tp=wrong)
    mesh = fzero.mesh(dp=2, tp=2)
    program = mesh.spmd(lambda x: apply(params, buffers, x)[0].sum())
    with pytest.raises(ValueError, match=r"along 'dp', the axis of layers\(\.\.\., axis='dp'\).*or give layers the"):
        program(mesh.split(torch.ones(4, 4), "dp"))
