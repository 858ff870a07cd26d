"""model_step: a model by name trains alike however its weights, tokens and blocks are split."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tuning
from fzero.tuning import Configuration
from fzero.tuning._recipe import recipe
from fzero.tuning.models import ModelStep
from fzero.tuning.models._model_names import ModelShape, init, make_batch
from fzero.tuning.models._presets import PRESETS
from tests.tuning.helpers import TINY

LENGTH = 16
WHOLE = Configuration(1, 4, 1, precision="float32")
SPLIT = {
    "tp": Configuration(1, 4, 1, precision="float32", tp=2),
    "tp, chunked loss": Configuration(2, 4, 1, precision="float32", tp=2, chunked_loss=True),
    "tp, tokens that do not divide": Configuration(2, 4, 1, precision="float32", tp=2),
    "cp": Configuration(3, 2, 1, precision="float32", ranks=2, cp=2),
    "cp, tp, remat": Configuration(2, 4, 1, True, precision="float32", cp=2, tp=2),
    "cp of 4, tp, remat": Configuration(2, 4, 1, True, precision="float32", cp=4, tp=2),
    "hosts": Configuration(3, 1, 1, True, precision="float32", ranks=4, host=2),
    "hosts, tp": Configuration(2, 1, 1, precision="float32", ranks=4, host=2, tp=2),
    "pp, tp": Configuration(1, 2, 2, precision="float32", pp=2, tp=2),
    "pp, cp": Configuration(1, 2, 2, precision="float32", pp=2, cp=2),
}


def losses(shape: ModelShape, config: Configuration, length: int) -> list[float]:
    """Train for some steps from the same parameters and on the same batch."""
    make_step = ModelStep(shape, length, False)
    step = make_step(config)[0]
    rng = torch.Generator().manual_seed(0)

    def real(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return torch.randint(8, x.shape, generator=rng)
        return torch.randn(x.shape, generator=rng) * 0.2 + (x.ndim == 1)  # the weights of norms are about 1

    params = fzero.tree.map(real, init(shape, 2))
    batch = fzero.tree.map(real, make_batch(shape, 4, length))
    opt = optim.master_weights(optim.adamw(3e-2), config.policy)
    if config.pp > 1:
        params = make_step._make_pipeline(shape, config, 2).stack(params, step.mesh)
    params, opt_state = step.init(params, optim.chain(optim.clip_by_global_norm(1.0), opt))
    batch = make_step._split_batch(batch, config, step.mesh)
    values: list[float] = []
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, batch)
        values.append(loss.item())
    return values


def cases() -> list[Any]:
    """List models and splits; all but a few are more of the same."""
    few = {("causal", "hosts"), ("causal", "cp, tp, remat"), ("gpt2", "pp, cp"), ("masked", "tp, chunked loss")}
    pairs = [(name, s) for name, shape in TINY.items() if shape.task != "image" for s in SPLIT]
    # an expert's capacity is that of one rank's tokens, so other tokens are dropped where ranks hold others
    pairs = [(name, s) for name, s in pairs if name != "experts" or SPLIT[s].cp * SPLIT[s].ranks == 1]
    return [pytest.param(*pair, marks=() if pair in few else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize("name,split", cases())
def test_a_planned_model_trains_alike_on_every_mesh(name, split):
    length = 15 if "divide" in split else LENGTH
    shape = TINY[name].pad_vocab(4)
    expected = losses(shape, WHOLE, length)
    assert expected[-1] < expected[0] - 0.1, expected
    assert losses(shape, SPLIT[split], length) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_ranks_along_tp_hold_parts_of_the_tokens_between_layers():
    """All that a block keeps is thus divided by tp, and not only what its heads and hidden units keep."""
    shape = ModelShape("wide", 64, 1, 4, 64, 64, gated=True, norm="rms", biases="")
    config = Configuration(1, 8, 1, ranks=2, tp=4)
    even, odd = (fzero.plan(*ModelStep(shape, n, False)(config)).live_of("activations") for n in (64, 65))
    assert max(even) < 0.6 * max(odd)


def test_ranks_of_cp_and_tp_hold_parts_if_the_tokens_of_one_divide():
    config = Configuration(1, 1, 1, cp=4, tp=4)
    assert not ModelStep(TINY["gpt2"], 8, False)._forward_options(config).sequence  # two tokens on a rank, of eight
    assert ModelStep(TINY["gpt2"], 16, False)._forward_options(config).sequence


BAD = {
    "odd parts": (
        "tiny-causal",
        20,
        {"cp": 4},
        r"cp=4: each rank holds two equal parts .* length=20 does not divide by 8",
    ),
    "an image": ("tiny-image", 16, {"cp": 2}, "cp=2: .* reads images, which are not split: choose cp=1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_length_that_the_axis_of_tokens_cannot_split_is_refused(name, monkeypatch):
    model, length, axes, message = BAD[name]
    for tiny, shape in TINY.items():
        monkeypatch.setitem(PRESETS, f"tiny-{tiny}", shape)
    with pytest.raises(ValueError, match=message):
        tuning.model_step(model, length=length)(Configuration(1, 1, 1, ranks=2, **axes))


def test_explicit_attention_is_not_split_over_tokens():
    with pytest.raises(ValueError, match="cp=2: attention across ranks is always fused"):
        tuning.model_step("gpt2", length=16, explicit=True)(Configuration(1, 1, 1, ranks=2, cp=2))


@pytest.mark.slow
def test_the_table_and_the_lines_to_paste_name_the_axis():
    make_step = tuning.model_step("gpt2", length=64)
    options = {"world_size": 8, "global_batch": 8, "machine": "h100", "stages": (1,), "remat": (True,), "cp": (1, 4)}
    table = fzero.tune(make_step, **options, micro_batches=(1,), depth=1)
    one, four = (next(r for r in table.rows if r.config.cp == n) for n in (1, 4))
    assert (one.config.ranks, four.config.ranks) == (8, 2) and "cp" in str(table).splitlines()[1].split()
    assert {*one.traffic_bytes} == {"dp"} and "cp" in four.traffic_bytes
    lines = recipe(four.config)
    assert 'mesh=mesh, axis=("dp", "cp")' in lines and "mesh = fzero.mesh(dp=-1, cp=4)" in lines
    assert 'fzero.parallel.context.split(mesh, batch, batch_axis="dp")' in lines
    assert 'precision=precision, reduce="weighted", micro_batches=4' in lines and "shift_labels" in lines
    assert "cp" not in recipe(one.config) and "weighted" not in recipe(one.config)


def test_rows_of_hosts_send_less_between_hosts_and_hold_a_hosts_shards():
    make_step = ModelStep(TINY["causal"], LENGTH, False)
    options: Any = {"world_size": 16, "global_batch": 32, "machine": "h100", "micro_batches": (1,), "remat": (True,)}
    table = fzero.tune(make_step, **options, stages=(0, 3), precision=("float32",), host=(1, 2), cache=False)
    assert [(r.config.stage, r.config.host) for r in table.rows].count((0, 2)) == 0  # nothing is sharded there
    one, two = (next(r for r in table.rows if (r.config.stage, r.config.host) == (3, n)) for n in (1, 2))
    assert two.config.axes == {"host": 2, "dp": 8} and two.config.mean == ("dp", "host")
    weights = sum(x.numel() * 4 for x in fzero.tree.tensors(init(TINY["causal"], TINY["causal"].depth)))
    assert two.traffic_bytes["host"] < 0.2 * one.traffic_bytes["dp"]
    assert one.peak_bytes < two.peak_bytes < one.peak_bytes + 1.5 * weights / 8
    lines = recipe(two.config)
    assert "mesh = fzero.mesh(host=2, dp=-1)" in lines and 'mesh=mesh, axis=("dp", "host")' in lines


def test_hosts_go_without_other_axes_of_data():
    options: Any = {"world_size": 16, "global_batch": 16, "machine": "h100", "pp": (1, 2), "host": (2,)}
    with pytest.raises(ValueError, match=r"no configuration has pp=2: .*; hosts go without ep, cp and pp"):
        fzero.tune(ModelStep(TINY["causal"], LENGTH, False), **options)
    with pytest.raises(ValueError, match=r"host=\(2,\), stages=\(0,\): at stage 0 nothing is sharded over hosts"):
        fzero.tune(ModelStep(TINY["causal"], LENGTH, False), **options | {"pp": (1,), "stages": (0,)})


@pytest.mark.parametrize("name", ["causal", "experts"])
def test_a_planned_model_with_float8_products_trains_as_the_exact_one(name):
    shape = TINY[name]
    exact, coded = (losses(shape, Configuration(1, 4, 1, precision="float32", float8=x), 16) for x in (None, "rowwise"))
    assert exact != coded and exact == pytest.approx(coded, rel=0.02)
