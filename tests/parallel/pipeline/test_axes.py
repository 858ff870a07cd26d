"""Pipelines with tensor parallelism and experts on one mesh: training is that of the whole model."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import fzero
from fzero import optim
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.testing import assert_trees_close
from tests.helpers import cases, examples
from tests.parallel.pipeline.model import OPT, step_of

VOCABULARY, WIDTH = 8, 4
TENSOR = tp.split({"tokens": 0, "head": -1, "up": -1, "bias": -1, "down": 0})


def params_of(depth: int, experts: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(depth)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) / 2

    def block() -> dict[str, Any]:
        dense = {"up": normal(WIDTH, 8), "bias": normal(8), "down": normal(8, WIDTH), "scale": normal(WIDTH)}
        mixed = {"router": normal(WIDTH, experts), "experts": {"w": normal(experts, WIDTH, WIDTH)}}
        return {**dense, **mixed} if experts else dense

    return {
        "tokens": normal(VOCABULARY, WIDTH),
        "head": normal(WIDTH, VOCABULARY),
        "blocks": [block() for _ in range(depth)],
    }


def batch_of(size: int, seed: int) -> dict[str, torch.Tensor]:
    tokens, targets = torch.randint(VOCABULARY, (2, size, 3), generator=torch.Generator().manual_seed(seed)).unbind(0)
    return {"x": tokens, "y": targets}


def first(rest: Any, batch: Any) -> Any:
    x = tp.embed(batch["x"], rest["tokens"])
    return {"x": x, "balance": x.new_zeros(())}


def expert(p: Any, rows: torch.Tensor, linear: Any) -> torch.Tensor:
    return torch.tanh(linear(rows, p["w"]))


def block(p: Any, given: Any) -> Any:
    x = given["x"] * p["scale"]
    x = given["x"] + tp.row(torch.tanh(tp.column(x, p["up"], p["bias"])), p["down"])
    if "router" not in p:
        return {**given, "x": x}
    routing = moe.route(x @ p["router"], k=2)
    y = moe.layer(expert, p["experts"], x, routing, axis="ep", capacity=1.0)
    return {"x": x + y, "balance": given["balance"] + moe.balance_loss(routing, over="sequence")}


def last(rest: Any, given: Any, batch: Any) -> torch.Tensor:
    return tp.cross_entropy(tp.column(given["x"], rest["head"]), batch["y"]) + 0.1 * given["balance"]


def check(
    mesh: fzero.ranks.Mesh,
    stage: int,
    loss: fzero.parallel.pipeline.Pipeline,
    params: Any,
    steps: int = 2,
    jit: Any = None,
) -> None:
    data = tuple([name for name in mesh.axis_names if name in ("dp", "ep")])
    size = 2 * loss.micro_batches * mesh.size
    train = step_of(loss)
    whole = (params, OPT.init(params))
    step = fzero.shard(train, stage, mesh, axis=(*data, "pp"), split=loss.split)
    state = step.init(loss.stack(params, mesh), OPT)
    run = step if jit is None else fzero.jit(step, **jit)
    for i in range(steps):
        *whole, value = train(*whole, batch_of(size, i))
        *state, found = run(*state, mesh.split(batch_of(size, i), data))
        assert_trees_close(found, value, 1e-9)
    assert_trees_close(loss.unstack(step.gather(state[0]), mesh), whole[0], 1e-9)


@examples(3, 6)
@given(
    st.sampled_from([(2, 2, 2), (1, 2, 2), (1, 4, 2), (2, 2, 1)]),
    st.integers(0, 3),
    st.sampled_from(["vmap", "lockstep"]),
    st.sampled_from(["1f1b", "zbv"]),
)
def test_with_tensor_parallelism(sizes, stage, simulate, schedule):
    dp, pp, n = sizes
    stages = 2 if schedule == "zbv" else 1
    loss = fzero.pipeline(
        block=block, first=first, last=last, micro_batches=4, schedule=schedule, stages_per_rank=stages, split=TENSOR
    )
    check(fzero.mesh(dp=dp, pp=pp, tp=n, simulate=simulate), stage, loss, params_of(pp * stages))


def test_a_mean_over_tp_is_refused_and_the_pipelines_axis_stays_in_it():
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=2, split=TENSOR)
    mesh = fzero.mesh(dp=2, pp=2, tp=2)
    step = fzero.shard(step_of(loss, OPT), 1, mesh, split=loss.split)
    state = step.init(loss.stack(params_of(2), mesh), OPT)
    with pytest.raises(ValueError, match=r"averages over 'tp'.*leave it out of the mean, .*axis=\('dp', 'pp'\)"):
        step(*state, mesh.split(batch_of(8, 0), "dp"))


@pytest.mark.parametrize("stage", cases([2], [0, 3]))
def test_with_experts(stage):
    """Their balance loss travels with the tokens, and is added at the end."""
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=2, split=moe.split("experts"))
    check(fzero.mesh(ep=2, pp=2, simulate="lockstep"), stage, loss, params_of(4, experts=4))
    check(fzero.mesh(dp=2, ep=2, pp=2), stage, loss, params_of(2, experts=4), steps=1)


def test_with_experts_and_tensor_parallelism():
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=2, split=(TENSOR, moe.split("experts")))
    check(fzero.mesh(ep=2, pp=2, tp=2, simulate="lockstep"), 3, loss, params_of(2, experts=4))


@pytest.mark.parametrize(
    "simulate,sequence",
    cases([("vmap", True), ("lockstep", False)], itertools.product(("vmap", "lockstep"), (False, True))),
)
def test_a_model_of_transformers(simulate, sequence):
    """Cut into stages, by heads and columns, and along the sequence, without being edited."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=16, use_cache=False)).double()
    ids = torch.randint(16, (8, 5))
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, momentum=0.9))

    apply, params, buffers = fzero.nn.functional(model)

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = apply(params, buffers, ids[:, :-1])[0].logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    value, grads = fzero.value_and_grad(loss_fn)(params, ids)
    updates, _ = opt.update(grads, opt.init(params), params)
    expected = optim.apply_updates(params, updates)

    layers = tp.layers(model, {"lm_head": "colwise"}, sequence=sequence)
    loss, cut, join = fzero.nn.pipeline(
        model,
        lambda output, ids: tp.cross_entropy(output.logits, ids[:, 1:]),
        inputs=lambda ids: ids[:, :-1],
        micro_batches=2,
        tp=layers,
    )
    mesh = fzero.mesh(dp=2, pp=2, tp=2, simulate=simulate)
    step = fzero.shard(step_of(loss, opt), 2, mesh, axis=("dp", "pp"), split=loss.split)
    state = step.init(loss.stack(cut, mesh), opt)
    *state, found = step(*state, mesh.split(ids, "dp"))
    assert_trees_close(found, value, 1e-9)
    trained = layers.pack(join(loss.unstack(step.gather(state[0]), mesh)))
    assert_trees_close(trained, {name: expected[name] for name in trained}, 1e-9)
    assert trained.keys() == expected.keys()


def test_no_collective_of_a_stage_is_joined_with_one_of_another_phase():
    """Where small sums are joined, that of a forward pass's end would wait for the backward pass's first."""
    loss = fzero.pipeline(block=block, first=first, last=last, micro_batches=4, split=TENSOR)
    mesh = fzero.mesh(dp=1, pp=2, tp=2)
    step = fzero.shard(step_of(loss), 1, mesh, axis=("dp", "pp"), split=loss.split)
    state = step.init(loss.stack(params_of(4), mesh), OPT)
    for rank in (0, 1):
        plan = fzero.plan(fzero.jit(step, backend="fx"), *state, mesh.split(batch_of(8, 0), "dp"), rank={"pp": rank})
        sums = [c for c in plan.collectives if c.times > 1 and c.axis == "tp"]
        assert len(sums) >= 4
