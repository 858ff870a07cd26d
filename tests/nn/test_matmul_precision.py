"""Laws of a module's products: which layers multiply in float8, and that they do what `float8_linear` does."""

import re
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.nn import MatmulPrecision, float8_linear, functional
from fzero.parallel import tensor as tp
from tests.helpers import LEAST, cases


class Block(nn.Module):
    """A block of a language model with a router; its projection to 24 is not a multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.router, self.odd = nn.Linear(32, 16), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x))) * self.router(x).amax(-1, keepdim=True)
        return x + self.odd(x).mean(-1, keepdim=True)


class Model(nn.Module):
    """An input layer, blocks and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.input, self.head = nn.Linear(16, 32), nn.Linear(32, 48)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model(blocks: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(blocks)


INPUTS = torch.randn(8, 3, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_chosen_layers_compute_float8_linear_and_the_others_stay_exact(scaling):
    module = model(1)
    apply, params, buffers = functional(module, matmul_precision=MatmulPrecision("float8", scaling=scaling))

    def run_by_hand(p: Any, x: torch.Tensor) -> torch.Tensor:
        def exact(name: str, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

        x = exact("input", x)
        y = float8_linear(x, p["blocks.0.up.weight"], p["blocks.0.up.bias"], scaling=scaling)
        y = float8_linear(torch.tanh(y), p["blocks.0.down.weight"], scaling=scaling)
        x = x + y * exact("blocks.0.router", x).amax(-1, keepdim=True)
        return exact("head", x + exact("blocks.0.odd", x).mean(-1, keepdim=True))

    actual = torch.func.grad(lambda p: apply(p, buffers, INPUTS)[0].square().mean())(params)
    expected = torch.func.grad(lambda p: run_by_hand(p, INPUTS).square().mean())(params)
    assert torch.equal(apply(params, buffers, INPUTS)[0], run_by_hand(params, INPUTS))
    assert actual.keys() == expected.keys() and all(torch.equal(actual[k], expected[k]) for k in actual)
    assert torch.equal(module(INPUTS), functional(module).apply(params, buffers, INPUTS)[0])  # it was not changed


def test_matmul_precision_chooses_the_layers_of_blocks_without_routers():
    names = [f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")]
    assert MatmulPrecision("float8").paths(model()) == tuple(names)


def test_without_blocks_the_first_and_the_last_layer_stay_exact():
    layers = [nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 32)]
    assert MatmulPrecision("float8").paths(nn.Sequential(*layers)) == ("4.weight",)


def test_a_layer_that_attention_only_reads_is_not_chosen():
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    paths = MatmulPrecision("float8").paths(nn.ModuleDict({"layers": nn.ModuleList([layer])}))
    assert paths == ("layers.0.linear1.weight", "layers.0.linear2.weight")


def test_transposed_weights_of_transformers_are_multiplied_in_float8():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, use_cache=False)).eval()
    paths = MatmulPrecision("float8").paths(module)
    assert paths == tuple(
        f"transformer.h.{i}.{name}.weight"
        for i in (0, 1)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    )
    tokens = torch.arange(24).view(2, 12)

    def loss(**options: Any) -> Any:
        apply, params, buffers = functional(module, **options)
        return torch.func.grad_and_value(lambda p: apply(p, buffers, tokens, labels=tokens)[0].loss)(params)

    (grads, value), (exact_grads, exact) = loss(matmul_precision="float8"), loss()
    assert 0 < abs(value - exact) < 0.01 * exact
    for name, g in exact_grads.items():
        assert (grads[name] - g).norm() < 0.25 * g.norm() + 1e-6, name


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_layers_may_be_split_over_an_axis(scaling):
    """A part's scale is a power of two, as the whole's: the products are equal but for the order of sums."""
    module = model()
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    layers = tp.layers(module, plan)
    apply, params, buffers = functional(module, tp=layers, matmul_precision=MatmulPrecision("float8", scaling=scaling))
    whole, *_ = functional(module, matmul_precision=MatmulPrecision("float8", scaling=scaling))
    mesh = fzero.mesh(dp=1, tp=2)
    take = fzero.value_and_grad(lambda p, x: apply(p, buffers, x)[0].square().mean())
    step = fzero.shard(lambda p, s, x: (p, s, take(p, x)[0]), stage=0, mesh=mesh, axis="dp", split=layers.split)
    start, state = step.init(params, fzero.optim.sgd(0.1))
    _, _, loss = step(start, state, INPUTS)
    exact = functional(module).apply(params, buffers, INPUTS)[0].square().mean()
    expected = whole(params, buffers, INPUTS)[0].square().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    assert abs(loss - exact) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("remat", cases((True,), [False]))
def test_float8_training_at_stage_3_equals_one_rank(remat):
    """Rowwise scales belong to a token, so ranks with different tokens have the scales of one rank with all of them."""
    apply, params, buffers = functional(
        model(), remat=remat, matmul_precision=MatmulPrecision("float8", scaling="rowwise")
    )
    opt = fzero.optim.sgd(1e-2)

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        take = fzero.value_and_grad(lambda p, x: apply(p, buffers, x)[0].square().mean(), gather=not remat)
        loss, grads = take(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    step = fzero.jit(fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2)), backend="fx", **LEAST)
    _, _, loss = step(*step.init(params, opt), step.mesh.split(INPUTS))
    _, _, expected = train_step(params, opt.init(params), INPUTS)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    exact = functional(model()).apply(params, buffers, INPUTS)[0].square().mean()
    assert abs(loss - exact) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scaling", cases(["rowwise"], ["tensorwise"]))
def test_a_plan_counts_the_flops_of_float8_products(scaling):
    """The same floating-point operations and collectives; the products of blocks are of float8."""

    def make_plan(products: Any) -> Any:
        apply, params, buffers = functional(model(), matmul_precision=products)
        opt = fzero.optim.sgd(1e-2)

        def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
            loss, grads = fzero.value_and_grad(lambda p, x: apply(p, buffers, x)[0].square().mean())(params, x)
            updates, opt_state = opt.update(grads, opt_state, params)
            return fzero.optim.apply_updates(params, updates), opt_state, loss

        step = fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2))
        jitted = fzero.jit(step, backend="fx", **LEAST)
        return fzero.plan(jitted, *step.init(params, opt), step.mesh.split(torch.zeros(64, 16)))

    exact, float8 = make_plan(None), make_plan(MatmulPrecision("float8", scaling=scaling))
    assert float8.flops == exact.flops > 0
    assert sum("_scaled_mm" in o.name for o in float8.operations) == 2 * 2 * 3  # blocks, layers, products
    assert [(c.kind, c.bytes) for c in float8.collectives] == [(c.kind, c.bytes) for c in exact.collectives]


@pytest.mark.parametrize(
    "products,error,message",
    [
        (8, TypeError, 'matmul_precision=8: expected "float8", an fzero.nn.MatmulPrecision, or None'),
        ("int8", ValueError, "matmul_precision='int8': expected 'float8'"),
        (MatmulPrecision("float8", layers=lambda path, weight: False), ValueError, "choose some of ['input.weight', "),
        (
            MatmulPrecision("float8", layers=lambda path, weight: "odd" in path),
            ValueError,
            "'blocks.0.odd.weight' has the shape",
        ),
        (MatmulPrecision("float8", layers=lambda path, weight: False), ValueError, "no layer of Model is chosen"),
    ],
)
def test_layers_that_float8_cannot_multiply_are_refused_by_name(products, error, message):
    with pytest.raises(error, match=re.escape(message)):
        functional(model(), matmul_precision=products)
    with pytest.raises(ValueError, match="scaling='columnwise': expected"):
        MatmulPrecision("float8", scaling="columnwise")
    with pytest.raises(TypeError, match="expected a rule"):
        MatmulPrecision("float8", layers=["1.weight"])  # pyright: ignore[reportArgumentType]
    for wrong, text in (
        (torch.nn.Conv2d(1, 1, 1), "it has no linear layers"),
        (torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(4)]), "multiples of 16"),
    ):
        with pytest.raises(ValueError, match=text):
            functional(wrong, matmul_precision="float8")


@pytest.mark.parametrize("is_training", [True, False])
def test_torchs_encoder_multiplies_in_float8_in_both_modes(is_training):
    """In eval mode torch's encoder would read weights for a kernel of its own."""
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(block, 2).train(is_training)
    x, padding = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    results = []
    for products in ("float8", None):
        apply, params, buffers = functional(encoder, matmul_precision=products)
        with torch.no_grad():
            results.append(apply(params, buffers, x, src_key_padding_mask=padding)[0])
    assert 1e-3 < (results[0] - results[1])[~padding].norm() / results[1][~padding].norm() < 0.1
    assert block.activation_relu_or_gelu and encoder.use_nested_tensor  # the module itself stays as it is


def test_under_autocast_operands_are_cast_first():
    mlp = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    apply, params, buffers = functional(mlp, matmul_precision="float8")
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = apply(params, buffers, x)[0]
    narrow = torch.nn.Sequential(*mlp).bfloat16()
    apply, params, buffers = functional(narrow, matmul_precision="float8")
    assert torch.equal(y, apply(params, buffers, x.bfloat16())[0])
