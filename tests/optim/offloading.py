"""Pairs with a hole for `offload`, trees for them, and training to the bit: what the tests of offload share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torchopt
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import stages, trees
from tests.helpers import LEAST
from tests.optim.table import EACH
from tests.zero.helpers import loss_of_tree

Wrap = Callable[[Any], optim.Optimizer]
BF16 = fzero.Precision(param=torch.bfloat16, grad=torch.bfloat16)


class Row(NamedTuple):
    """An optimizer: `make` is given what goes around its inner part, such as `offload`, and the parameters."""

    make: Callable[[Wrap, Any], Any]
    precision: fzero.Precision | None = None
    scaled: bool = False
    gathers: bool = True  # whether its state can be gathered


class Third(NamedTuple):
    """An optimizer of someone else's, who knows nothing of fzero."""

    init: Any
    update: Any


def matrices(params: Any) -> Any:
    return tree.map(lambda p: p.ndim >= 2, params)


def third_party() -> Third:
    """Momentum, with a count of its own; it says nothing of itself."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        m = tree.map(lambda g, m: 0.9 * m + g, grads, state["m"])
        updates = tree.map(lambda m, p: -0.05 * m - 0.001 * p, m, params)
        return updates, {"m": m, "count": state["count"] + 1}

    return Third(lambda p: {"m": tree.map(torch.zeros_like, p), "count": torch.zeros((), dtype=torch.int64)}, update)


def masters(optimizer: Any) -> optim.Optimizer:
    return optim.master_weights(optimizer, BF16)


CLIP = optim.clip_by_global_norm(0.5)
ADAMW = optim.adamw(1e-2, weight_decay=0.1, mask=matrices)
FALLING = optim.warmup_cosine(1e-2, 2, 10)


def rows(elementwise: bool) -> dict[str, Row]:
    """Each optimizer of fzero.optim, if its update is elementwise, or the others."""
    chosen = {name: opt for name, opt in EACH.items() if (opt.elementwise is not False) == elementwise}
    return {name: Row(lambda o, p, opt=opt: o(opt)) for name, opt in chosen.items()}


POINTWISE: dict[str, Row] = rows(elementwise=True) | {
    "momentum": Row(lambda o, p: o(optim.sgd(0.1, momentum=0.9, nesterov=True))),
    "adamw": Row(lambda o, p: o(ADAMW)),
    "a schedule": Row(lambda o, p: o(optim.adamw(FALLING))),
    "clip before": Row(lambda o, p: optim.chain(CLIP, o(ADAMW))),
    "a link behind": Row(lambda o, p: optim.chain(o(optim.scale_by_adam()), optim.scale_by_learning_rate(FALLING))),
    "injected": Row(lambda o, p: o(optim.inject_hyperparams(optim.adamw)(FALLING, weight_decay=0.1))),
    "injected around": Row(
        lambda o, p: optim.inject_hyperparams(lambda learning_rate: o(optim.adamw(learning_rate)))(FALLING)
    ),
    "a mask": Row(lambda o, p: o(optim.masked(optim.adam(1e-2), matrices))),
    "a mask that is a tree": Row(lambda o, p: o(optim.masked(optim.adam(1e-2), matrices(p)))),
    "a mask around": Row(lambda o, p: optim.masked(o(optim.adam(1e-2)), matrices)),
    "averaged gradients": Row(lambda o, p: o(optim.chain(optim.ema(0.9), optim.sgd(0.1)))),
    "averaged parameters": Row(lambda o, p: o(optim.chain(optim.adam(1e-2), optim.params_ema(0.9)))),
    "third party": Row(lambda o, p: o(third_party())),
    "leafwise": Row(lambda o, p: o(optim.leafwise(torchopt.adam(1e-2))), gathers=False),
    "masters": Row(lambda o, p: o(masters(ADAMW)), BF16),
    "masters, clip before": Row(lambda o, p: optim.chain(CLIP, o(masters(ADAMW))), BF16),
    "masters of lion": Row(lambda o, p: o(masters(optim.lion(1e-3))), BF16),
    "masters around": Row(lambda o, p: masters(o(ADAMW)), BF16),
    "a loss scale around": Row(lambda o, p: optim.dynamic_loss_scale(o(masters(ADAMW)), 64.0), BF16, True),
}
ON_DEVICE_ONLY: dict[str, Row] = rows(elementwise=False) | {
    "clip inside": Row(lambda o, p: o(optim.chain(CLIP, ADAMW))),
    "clip by block": Row(lambda o, p: o(optim.chain(optim.clip_by_block_rms(0.5), ADAMW))),
    "lamb": Row(lambda o, p: o(optim.lamb(1e-2, weight_decay=0.1, mask=matrices))),
    "whole": Row(lambda o, p: o(optim.on_full_leaves(optim.adamw(1e-2)))),
    "masked lamb": Row(lambda o, p: o(optim.masked(optim.lamb(1e-2), matrices))),
    "masters of lamb": Row(lambda o, p: o(masters(optim.chain(CLIP, optim.lamb(1e-2)))), BF16),
}
OPTIMIZERS = POINTWISE | ON_DEVICE_ONLY

SIZES = st.sampled_from([(0,), (1,), (63,), (64,), (65,), (13, 17), (128,), (5, 2, 40), (3, 0), (), (700,)])


def by_path(path: str) -> float:
    """A rule: another share of each leaf, by its name alone."""
    return (sum(map(ord, path)) * 37 % 100) / 100


RATIOS = st.sampled_from([0, 1, 1e-9, 0.37, 0.5, 0.9, by_path])


@st.composite
def params_of(draw: Any) -> dict[str, Any]:
    """Parameters: awkward trees, and leaves about as large as the grain of a cut, some of them tied."""
    results = dict(draw(trees(dtypes=(torch.float32,), max_leaves=4)))
    shapes = draw(st.lists(SIZES, min_size=1, max_size=4))
    results["more"] = [normal(shape, i) for i, shape in enumerate(shapes)]
    if draw(st.booleans()):
        results["tied"] = {"again": results["more"][-1], "first": results["first"]}
    return results


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def small_params() -> dict[str, Any]:
    """Two blocks, a tied table, an empty leaf and a number: no size divides, and units are larger than the grain."""
    table = normal((17, 13), 9)
    blocks = [{"w": normal((13, 17), i), "b": normal((17,), i + 5)} for i in range(2)]
    return {"h": blocks, "e": table, "none": None, "empty": normal((0,)), "s": normal((), 8), "tied": table}


def batches_of(n: int, steps: int = 3, overflow: bool = False) -> list[dict[str, torch.Tensor]]:
    """Batches, of which the second one overflows if asked."""
    results = [{"x": torch.linspace(-1, 1 + i, n)} for i in range(steps)]
    if overflow:
        results[1]["x"][-1] = float("inf")
    return results


def train_step_of(optimizer: Any, row: Row, micro_batches: int = 1, loss: Any = loss_of_tree) -> Any:
    options: dict[str, Any] = {"micro_batches": micro_batches}
    options |= {} if row.precision is None else {"precision": row.precision}

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        if row.scaled:
            scale = optim.loss_scale(opt_state).scale
            value, grads = fzero.scaled_value_and_grad(loss, scale, **options)(params, batch)
        else:
            value, grads = fzero.value_and_grad(loss, **options)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step


class Way(NamedTuple):
    """A way to train: `n` ranks, or 0 for no mesh."""

    stage: int = 2
    n: int = 2
    micro_batches: int = 1
    jit: bool = False
    units: Any = None
    simulate: str = "vmap"

    def step(self, optimizer: Any, row: Row) -> fzero.zero.ShardedStep:
        mesh = fzero.mesh(dp=self.n, simulate=self.simulate)
        return fzero.shard(train_step_of(optimizer, row, self.micro_batches), self.stage, mesh, units=self.units)


def train(way: Way, row: Row, params: Any, wrap: Wrap, steps: int = 3) -> Any:
    """Train, and return whole parameters, whole state and losses."""
    optimizer = row.make(wrap, params)
    batches = batches_of(max(way.n, 1) * way.micro_batches * 2, steps, row.scaled)
    if not way.n:
        return _train_unsharded(optimizer, row, way, params, batches)
    step = way.step(optimizer, row)
    state, losses = list(step.init(params, optimizer)), []
    run = fzero.jit(step, backend="fx", **LEAST) if way.jit else step
    for batch in batches:
        *state, loss = run(*state, step.mesh.split(batch))
        losses.append(loss)
    assert not way.jit or run.traces == 1  # the state is of one structure from the beginning
    return step.gather(state[0]), step.gather(state[1]) if row.gathers else (), losses


def _train_unsharded(optimizer: Any, row: Row, way: Way, params: Any, batches: Sequence[Any]) -> Any:
    train_step, losses = train_step_of(optimizer, row, way.micro_batches), []
    state = [params if row.precision is None else row.precision.cast(params), optimizer.init(params)]
    run = fzero.jit(train_step, backend="fx", donate=(), **LEAST) if way.jit else train_step
    for batch in batches:
        *state, loss = run(*state, batch)
        losses.append(loss)
    return fzero.gather(state[0]), fzero.gather(state[1]) if row.gathers else (), losses


def plain(optimizer: Any) -> Any:
    return optimizer


def offloading(ratio: Any, update: str = "host") -> Any:
    return lambda optimizer: optim.offload(optimizer, ratio, update)


layouts = {"stage": stages(), "n": st.integers(0, 5), "micro_batches": st.integers(1, 2)}
