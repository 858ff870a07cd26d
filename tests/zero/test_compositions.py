"""Random compositions: a step with any options together gives the numbers of the unsharded step.

Other laws vary one or two options; this one finds what two of them do to each other.
"""

import dataclasses
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, examples
from tests.zero.choices import F64, JIT, OFFLOADED, OPTIMIZERS, READ_FULL_LEAVES, UPDATED_ON_HOST, WIDE, WRAPPERS

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Composition:
    """One drawn train step, mesh and way to run it."""

    width: int
    blocks: int
    awkward: frozenset[str]  # leaves that the tree has besides
    remat: str | None
    mesh: tuple[tuple[str, int], ...]
    axis: tuple[str, ...] | None
    over: str | None
    simulate: str
    stage: int
    later_stage: int  # of the second half of the steps
    micro_batches: int
    reduce: str
    optimizer: str
    wrapper: str | None
    precision: str | None
    jit: dict[str, Any] | None
    unit: str | None


@st.composite
def compositions(draw: Any) -> Composition:
    axes = draw(
        st.sampled_from(["dp", "dp", "dp", "hybrid", "hosts", "all"]).flatmap(
            lambda kind: st.tuples(st.just(kind), st.integers(1, 5), st.integers(1, 3))
        )
    )
    kind, n, m = axes
    mesh, axis, over = {
        "dp": ((("dp", n),), None, None),
        "hybrid": ((("replica", m), ("dp", n)), ("replica", "dp"), "dp"),
        "hosts": ((("host", m), ("dp", n)), ("dp", "host"), None),
        "all": ((("host", m), ("dp", n)), ("host", "dp"), None),
    }[kind]
    awkward = draw(st.frozensets(st.sampled_from(["empty", "unused", "scalar", "tied", "nested"])))
    optimizer = draw(st.sampled_from([*OPTIMIZERS]))
    refused = UPDATED_ON_HOST if optimizer in READ_FULL_LEAVES else ()
    wrapper = draw(st.none() | st.sampled_from([x for x in WRAPPERS if x not in refused]))
    if wrapper == "offload with delay":
        awkward -= {"scalar"}  # is not late in an unsharded step, where no unit holds it
    return Composition(
        width=draw(st.integers(2, 6)),
        blocks=draw(st.integers(1, 3)),
        awkward=awkward,
        remat=draw(st.sampled_from([None, None, "block", "host"])),
        mesh=mesh,
        axis=axis,
        over=over,
        simulate=draw(st.sampled_from(["vmap", "lockstep"])),
        stage=draw(st.sampled_from(ALL_STAGES)),
        later_stage=draw(st.sampled_from(ALL_STAGES)),
        micro_batches=draw(st.integers(1, 3)),
        reduce=draw(st.sampled_from(["mean", "sum"])),
        optimizer=optimizer,
        wrapper=wrapper,
        precision=draw(st.sampled_from([None, None, "masters", "shards"])),
        jit=draw(JIT),
        unit=draw(st.sampled_from([None, None, "one", "leaf"])),
    )


def make_params(c: Composition) -> Any:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=F64) / 2

    params: dict[str, Any] = {
        "blocks": [{"w": normal(c.width, c.width), "b": normal(c.width)} for _ in range(c.blocks)],
        "head": (normal(c.width, 3),),
    }
    params |= {"empty": normal(0, 3)} if "empty" in c.awkward else {}
    params |= {"unused": normal(5)} if "unused" in c.awkward else {}
    params |= {"scalar": normal()} if "scalar" in c.awkward else {}
    params |= {"nested": ({"a": normal(1, 1, 3)}, [])} if "nested" in c.awkward else {}
    params |= {"tied": params["blocks"][0]["w"]} if "tied" in c.awkward else {}
    return params


def loss_fn(c: Composition) -> Any:
    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ p["w"] + p["b"])

    if c.remat is not None:
        block = fzero.remat(block, **({"save": "host"} if c.remat == "host" else {}))

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x = batch["x"].to(params["head"][0].dtype)
        for p in params["blocks"]:
            x = block(p, x)
        if "tied" in c.awkward:
            x = block(params["blocks"][0] | {"w": params["tied"]}, x)
        x = x @ params["head"][0]
        if "scalar" in c.awkward:
            x = x * params["scalar"]
        if "nested" in c.awkward:
            x = x + params["nested"][0]["a"][0, 0]
        squares = (x - batch["y"].to(x.dtype)) ** 2
        return squares.mean() if c.reduce == "mean" else squares.sum()

    return loss


def make_optimizer(c: Composition) -> Any:
    opt = OPTIMIZERS[c.optimizer]()
    opt = opt if c.wrapper is None else WRAPPERS[c.wrapper](opt)
    return opt if c.precision is None else optim.master_weights(opt, precision_of(c))


def precision_of(c: Composition) -> Any:
    if c.precision == "shards":
        return dataclasses.replace(WIDE, shard=F64)
    return None if c.precision is None else WIDE


def train_step_of(c: Composition, opt: Any) -> Any:
    precision = precision_of(c)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        f = fzero.value_and_grad(loss_fn(c), micro_batches=c.micro_batches, reduce=c.reduce, precision=precision)
        loss, grads = f(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step


def units_of(c: Composition) -> Any:
    return {None: None, "one": lambda path, leaf: "all", "leaf": lambda path, leaf: path}[c.unit]


def make_batches(c: Composition) -> list[Any]:
    rows = math.prod(n for _, n in c.mesh) * c.micro_batches * 2
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=F64)

    return [{"x": normal(rows, c.width), "y": normal(rows, 3)} for _ in range(STEPS)]


def check_composition(c: Composition) -> None:
    opt = make_optimizer(c)
    train_step = train_step_of(c, opt)
    on_device = dataclasses.replace(c, wrapper=None) if c.wrapper in OFFLOADED else c  # their numbers are the same
    reference = make_optimizer(on_device)
    mesh = fzero.mesh(simulate=c.simulate, **dict(c.mesh))
    batches = make_batches(c)
    params, precision = make_params(c), precision_of(c)
    expected = (params if precision is None else precision.cast(params), reference.init(params))
    losses = []
    for batch in batches:
        *expected, loss = train_step_of(c, reference)(*expected, batch)
        losses.append(loss)
    options = {"mesh": mesh, "axis": c.axis, "over": c.over, "units": units_of(c)}
    steps = [fzero.shard(train_step, stage=s, **options) for s in (c.stage, c.later_stage)]
    run = [s if c.jit is None else fzero.jit(s, **c.jit) for s in steps]
    state = tuple(steps[0].init(params, opt))
    tolerance = 1e-10 if precision is None else 2e-4
    changes_stage = c.precision != "shards"  # those masters are parameters at stage 3 alone
    for i, batch in enumerate(batches):
        now = changes_stage and i > STEPS // 2
        if changes_stage and i == STEPS // 2 + 1:
            full, like = steps[0].gather(tuple(state)), steps[1].init(params, opt)
            state = tuple(steps[1].partition(x, like=y) for x, y in zip(full, like, strict=True))
        *state, loss = run[now](*state, mesh.split(batch, steps[0].data_axes))
        assert_trees_close(loss, losses[i], tolerance, f"loss of step {i}")
    gathered = steps[now].gather(tuple(state))
    if c.precision == "shards" or c.wrapper == "offload with delay":
        found, wanted = (tree.map(torch.Tensor.double, x[0]) for x in (gathered, expected))
        assert_trees_close(found, wanted, tolerance, "parameters")
    else:
        assert_trees_close(gathered, tuple(expected), tolerance, "parameters and state")


@examples(6, 200)
@given(compositions())
def test_a_composition_gives_the_numbers_of_the_unsharded_step(c: Composition) -> None:
    check_composition(c)


CODECS: dict[str, Any] = {
    "int8": lambda rounding: fzero.codecs.int8(8, rounding),
    "int4": lambda rounding: fzero.codecs.int4(8, rounding),
    "float8": lambda rounding: fzero.codecs.float8(block=8),
}


@dataclasses.dataclass(frozen=True)
class LossyComposition:
    """A composition whose numbers differ from the unsharded step's, by the rounding of codes and moments."""

    exact: Composition
    gather: str | None
    reduce: str | None
    moments: str | None
    rounding: str


@st.composite
def lossy_compositions(draw: Any) -> LossyComposition:
    exact = draw(compositions())
    gather, reduce = (draw(st.none() | st.sampled_from(["int8", "int4", "float8"])) for _ in range(2))
    moments = draw(st.none() | st.sampled_from(["int8", "bfloat16"]))
    wrappers = ["clip", "rms", "offload on device", *(["offload"] if moments is None else [])]
    exact = dataclasses.replace(
        exact,
        optimizer="adamw",
        wrapper=draw(st.none() | st.sampled_from(wrappers)),
        precision=None,
        later_stage=exact.stage,
        jit=exact.jit or {"backend": "fx"},
        simulate="vmap",
    )
    return LossyComposition(exact, gather, reduce, moments, draw(st.sampled_from(["nearest", "stochastic"])))


def check_lossy_composition(c: LossyComposition) -> None:
    gather = None if c.gather is None else CODECS[c.gather]("nearest")
    reduce = torch.float32 if c.reduce is None else CODECS[c.reduce](c.rounding)
    precision = fzero.Precision(torch.float32, gather=gather, reduce=reduce)
    opt = optim.adamw(1e-2, eps=1e-3, moments=optim.Moments(c.moments, full=lambda *_: False) if c.moments else None)
    opt = opt if c.exact.wrapper is None else WRAPPERS[c.exact.wrapper](opt)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        f = fzero.value_and_grad(
            loss_fn(c.exact), micro_batches=c.exact.micro_batches, reduce=c.exact.reduce, precision=precision
        )
        loss, grads = f(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    params = tree.map(torch.Tensor.float, make_params(c.exact))
    results = []
    for jitted in (False, True):
        mesh = fzero.mesh(simulate="vmap" if jitted else "lockstep", **dict(c.exact.mesh))
        batches = make_batches(c.exact)
        options = {"mesh": mesh, "axis": c.exact.axis, "over": c.exact.over, "units": units_of(c.exact)}
        step = fzero.shard(train_step, stage=c.exact.stage, **options)
        run = fzero.jit(step, **c.exact.jit) if jitted else step
        state = step.init(params, opt)
        losses = []
        for batch in batches:
            *state, loss = run(*state, mesh.split(batch, step.data_axes))
            losses.append(loss)
        results.append((step.gather(state[0]), losses))
    assert_trees_close(results[1], results[0], 1e-4)


@examples(4, 150)
@given(lossy_compositions())
def test_a_jitted_lossy_composition_gives_the_numbers_of_ranks_in_lockstep(c: LossyComposition) -> None:
    check_lossy_composition(c)
