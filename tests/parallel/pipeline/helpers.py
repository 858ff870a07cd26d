"""A model with split layers and experts, as a pipeline, and its comparison with the model without one."""

from typing import Any

import torch

import fzero
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.testing import assert_trees_close
from tests.parallel.pipeline.model import OPT, make_step

VOCABULARY, WIDTH = 8, 4


TENSOR = tp.split_rule({"tokens": 0, "head": -1, "up": -1, "bias": -1, "down": 0})


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


def block(p: Any, stream: Any) -> Any:
    x = stream["x"] * p["scale"]
    x = stream["x"] + tp.row(torch.tanh(tp.column(x, p["up"], p["bias"])), p["down"])
    if "router" not in p:
        return {**stream, "x": x}
    routing = moe.route(x @ p["router"], k=2)
    y = moe.layer(expert, p["experts"], x, routing, axis="ep", capacity=1.0)
    return {"x": x + y, "balance": stream["balance"] + moe.balance_loss(routing, over="sequence")}


def last(rest: Any, stream: Any, batch: Any) -> torch.Tensor:
    return tp.cross_entropy(tp.column(stream["x"], rest["head"]), batch["y"]) + 0.1 * stream["balance"]


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
    train = make_step(loss)
    whole = (params, OPT.init(params))
    step = fzero.shard(train, stage, mesh, axis=(*data, "pp"), split=loss.split)
    state = step.init(loss.stack(params, mesh), OPT)
    run = step if jit is None else fzero.jit(step, **jit)
    for i in range(steps):
        *whole, value = train(*whole, batch_of(size, i))
        *state, actual = run(*state, mesh.split(batch_of(size, i), data))
        assert_trees_close(actual, value, 1e-9)
    assert_trees_close(loss.unstack(step.gather(state[0]), mesh), whole[0], 1e-9)
