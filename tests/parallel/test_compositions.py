"""Random compositions with axes of the model: parts of layers, experts, sequences and pipelines, with any options."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, examples
from tests.parallel.context import model as sequences
from tests.parallel.experts import model as mixture
from tests.parallel.pipeline import model as pipelines
from tests.parallel.tensor import model as tensor
from tests.zero.choices import JIT, OFFLOADED, OPTIMIZERS, READ_FULL_LEAVES, UPDATED_ON_HOST, WIDE, WRAPPERS

STEPS = 2


@dataclasses.dataclass(frozen=True)
class ModelComposition:
    """A drawn model with axes of its own, and the options of its training."""

    model: str
    mesh: tuple[tuple[str, int], ...]
    axis: tuple[str, ...] | None
    over: tuple[str, ...] | None
    simulate: str
    stage: int
    micro_batches: int
    remat: bool
    flag: bool  # parts of sequences in the residual stream; experts with a capacity; attention by a ring; tied ends
    optimizer: str
    wrapper: str | None
    has_masters: bool
    jit: dict[str, Any] | None
    gather: bool


@st.composite
def model_compositions(draw: Any) -> ModelComposition:
    model = draw(st.sampled_from(["tensor", "experts", "sequences", "pipeline"]))
    own = {"tensor": "tp", "experts": "ep", "sequences": "cp", "pipeline": "pp"}[model]
    data = draw(st.sampled_from([("dp",), ("host", "dp"), ("replica", "dp")]))
    sizes = {name: draw(st.integers(1, 2)) for name in data} | {own: draw(st.sampled_from([1, 2, 2, 4]))}
    names = draw(st.permutations([*sizes]))
    divided = tuple(x for x in names if x != "tp")
    over = tuple(x for x in divided if x != "replica") if "replica" in data else None
    if names[0] == "host" and model != "experts" and draw(st.booleans()):
        divided = (*divided[1:], "host")  # hosts pass each unit once
    optimizer = draw(st.sampled_from([x for x in OPTIMIZERS if x != "adafactor" or model != "pipeline"]))
    refused = {"offload with delay", *(UPDATED_ON_HOST if optimizer in READ_FULL_LEAVES else ())}
    return ModelComposition(
        model=model,
        mesh=tuple((name, sizes[name]) for name in names),
        axis=divided,
        over=over,
        simulate=draw(st.sampled_from(["vmap", "lockstep"])),
        stage=draw(st.sampled_from(ALL_STAGES)),
        micro_batches=draw(st.integers(1, 2)),
        remat=draw(st.booleans()),
        flag=draw(st.booleans()),
        optimizer=optimizer,
        wrapper=draw(st.none() | st.sampled_from([x for x in WRAPPERS if x not in refused])),
        has_masters=draw(st.booleans()),
        jit=draw(JIT),
        gather=draw(st.booleans()),
    )


def in_dtype_of(params: Any, batch: Any) -> Any:
    dtype = next(x.dtype for x in tree.tensors(params) if x.is_floating_point())
    return tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


class Model(NamedTuple):
    """What a composition trains."""

    params: Any
    loss_fn: Any
    split: Any
    batch_at: Callable[..., Any]  # of seed=, the step


def model_of(c: ModelComposition) -> Model:
    sizes = dict(c.mesh)
    rows = 2 * c.micro_batches * math.prod(n for name, n in c.mesh if name != "tp")
    if c.model == "tensor":
        loss_fn = tensor.loss_for(c.flag and tensor.LENGTH % sizes["tp"] == 0, c.remat)
        return Model(tensor.params_of(), loss_fn, tensor.SPLIT, functools.partial(tensor.batch_of, rows))
    if c.model == "experts":
        over = "sequence" if c.micro_batches > 1 else "batch"
        loss_fn = mixture.loss_for(2, 1.0 if c.flag else None, over, remat=c.remat)
        batch_at = functools.partial(mixture.batch_of, rows, 5)
        return Model(mixture.params_of(), loss_fn, moe.split_rule("experts"), batch_at)
    if c.model == "sequences":
        loss_fn = sequences.loss_for(causal=True, method="ring" if c.flag else None)
        return Model(sequences.params_of(), loss_fn, None, functools.partial(sequences.batch_of, samples=rows))
    depth = 2 * sizes["pp"] + c.flag
    pipeline = pipelines.make_loss(c.micro_batches * sizes["pp"], depth=depth, remat=c.remat)
    params = pipelines.make_params(depth, tied=not c.flag)
    return Model(params, pipeline, pipeline.split, functools.partial(pipelines.make_batch, rows * sizes["pp"]))


def check_model_composition(c: ModelComposition) -> None:
    params, loss_fn, split, batch_at = model_of(c)
    is_pipeline = c.model == "pipeline"
    base = OPTIMIZERS[c.optimizer]()
    precision = WIDE if c.has_masters else None

    def optimizer(wrapper: str | None) -> Any:
        opt = base if wrapper is None else WRAPPERS[wrapper](base)
        return opt if precision is None else optim.master_weights(opt, precision)

    def step_with(opt: Any) -> Any:
        def cast_loss(params: Any, batch: Any) -> Any:
            return loss_fn(params, in_dtype_of(params, batch))

        more = {"reduce": "weighted"} if is_pipeline else {"micro_batches": c.micro_batches}

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            f = fzero.value_and_grad(
                loss_fn if is_pipeline else cast_loss, precision=precision, gather=c.gather or not is_pipeline, **more
            )
            loss, grads = f(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        return train_step

    mesh = fzero.mesh(simulate=c.simulate, **dict(c.mesh))
    reference = optimizer(None if c.wrapper in OFFLOADED else c.wrapper)
    state = (params if precision is None else precision.cast(params), reference.init(params))
    losses = []
    for i in range(STEPS):
        *state, loss = step_with(reference)(*state, batch_at(seed=i))
        losses.append(loss)
    opt = optimizer(c.wrapper)
    step = fzero.shard(step_with(opt), stage=c.stage, mesh=mesh, axis=c.axis, over=c.over, split=split)
    run = step if c.jit is None else fzero.jit(step, **c.jit)
    sharded = tuple(step.init(loss_fn.stack(params, mesh) if is_pipeline else params, opt))
    tolerance = 1e-9 if precision is None else 1e-3
    for i in range(STEPS):
        batch = batch_at(seed=i)
        if c.model == "sequences":
            batch = context.split(mesh, batch)
        else:
            batch = mesh.split(batch, tuple(x for x in c.axis if x != "pp"))
        *sharded, loss = run(*sharded, batch)
        assert_trees_close(loss, losses[i], tolerance, f"loss of step {i}")
    gathered = step.gather(sharded[0])
    gathered = loss_fn.unstack(gathered, mesh) if is_pipeline else gathered
    assert_trees_close(gathered, state[0], tolerance, "parameters")


@examples(2, 150)
@given(model_compositions())
def test_a_composition_with_axes_of_the_model_gives_the_numbers_of_the_unsharded_step(c: ModelComposition) -> None:
    check_model_composition(c)
