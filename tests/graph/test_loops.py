"""Micro-batches as a loop: one body, the numbers of the unrolled step, and a plan of all iterations."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, random, tree
from fzero._format import format_bytes
from fzero._notice import warn_once
from fzero.graph import _entry, _one_rank, _trace_agreement
from fzero.graph.loop import _scan
from fzero.graph.loop._scan import loop_of
from fzero.testing import optimizers, stages, trees, world_sizes
from tests.graph.helpers import bitwise, copied, entry_of, plan_of, train_both
from tests.helpers import LEAST, cases, either, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.memory import peak_bytes
from tests.tiny_gpt import gpt_loss, gpt_params
from tests.zero.helpers import loss_of_tree

ADAMW = optim.adamw(1e-2, eps=1e-3)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.5), ADAMW)


@contextlib.contextmanager
def unrolled() -> Iterator[None]:
    """Have every micro-batch traced by itself."""
    real = _entry.record_loops
    _entry.record_loops = lambda on, pipelines: real(False)
    try:
        yield
    finally:
        _entry.record_loops = real


def loops(jitted: Any) -> list[Any]:
    (entry,) = jitted._entries.values()
    return [loop for n in entry.best.graph.nodes if (loop := loop_of(n))]


# ---------------------------------------------------------------- the same numbers


def weighted_loss(params: Any, x: Any) -> Any:
    return loss_of_tree(params, x) * x["x"].square().sum(), x["x"].square().sum()


def loss_with_aux(params: Any, x: Any) -> Any:
    return loss_of_tree(params, x), {"x": x["x"] * 2, "sum": x["x"].sum(), "none": None}


def loss_with_draws(params: Any, x: Any) -> torch.Tensor:
    return loss_of_tree(params, {"x": torch.nn.functional.dropout(x["x"], 0.5)})


def drawn_loss(key: Any, params: Any, x: Any) -> torch.Tensor:
    return random.seeded(loss_with_draws)(key, params, x)


LOSSES = {
    "plain": loss_of_tree,
    "weighted": weighted_loss,
    "aux": loss_with_aux,
    "drawn": drawn_loss,
    "remat": fzero.remat(loss_of_tree),
}
OPTIONS = {"weighted": {"reduce": "weighted"}, "aux": {"has_aux": True}}  # of value_and_grad, by loss


def step_of(name: str, opt: Any, k: int) -> Any:
    """A train step with one of `LOSSES`: each kind that a loop must carry."""

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        f = functools.partial(LOSSES[name], batch["key"]) if name == "drawn" else LOSSES[name]
        value, grads = fzero.value_and_grad(f, micro_batches=k, **OPTIONS.get(name, {}))(params, batch["data"])
        loss = (value[0], fzero.collectives.pmean(value[1])) if name == "aux" else value
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    return train_step


@pytest.mark.parametrize("name", LOSSES)
@examples(0, 2)
@given(params=trees(), opt=optimizers(), stage=stages(), n=world_sizes(4), k=st.integers(3, 5))
@example(params={"a": torch.ones(()), "b": [torch.linspace(-1, 1, 5).double()]}, opt=CLIPPED, stage=3, n=2, k=3)
def test_a_loop_is_the_unrolled_step_and_the_eager_one_bit_for_bit(name, params, opt, stage, n, k):
    mesh = fzero.mesh(dp=n)
    step = fzero.shard(step_of(name, opt, k), stage=stage, mesh=mesh)
    looped, flat = (fzero.jit(step, backend="fx", **LEAST) for _ in range(2))
    states = [step.init(params, opt), looped.init(copied(params), opt), flat.init(copied(params), opt)]
    for i in range(2):
        data = mesh.split({"x": torch.linspace(-1, 1 + i, n * k * 2, dtype=torch.float64)})
        batch = {"data": data, "key": random.key(i)}
        eager, first = step(*states[0], batch), looped(*states[1], batch)
        with unrolled():
            second = flat(*states[2], batch)
        bitwise(first, eager)
        bitwise(second, eager)
        states = [eager[:2], first[:2], second[:2]]
    assert [loop.iterations for loop in loops(looped)] == [k] and not loops(flat)


def test_a_sum_of_negative_zeros_is_negative():
    """Sums begin as -0.0, which is no number's neighbour."""
    f = fzero.value_and_grad(lambda w, x: (w * x[0]).sum(), micro_batches=3)
    w, x = torch.ones(2), torch.tensor([[-0.0, 0.0]] * 3)
    _, expected = f(w, x)
    _, got = fzero.jit(lambda w, x: f(w, x), backend="fx")(w, x)
    assert got.signbit().tolist() == expected.signbit().tolist() == [True, False]


@pytest.mark.parametrize("stage", cases((3,), (0, 2)))
def test_half_precision_with_a_loss_scale_is_the_eager_one_bit_for_bit(stage):
    precision = fzero.Precision(param=torch.float16, grad=torch.float32)
    opt = optim.dynamic_loss_scale(optim.master_weights(optim.adamw(1e-2), precision))

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = fzero.scaled_value_and_grad(mlp_loss, state.scale, micro_batches=4, precision=precision)(
            params, batch
        )
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    step = fzero.shard(train_step, stage=stage, mesh=fzero.mesh(dp=2))
    jitted = fzero.jit(step, backend="fx", **LEAST)
    batches = [mlp_batch(16, seed=i, dtype=torch.float16) for i in range(3)]
    bitwise(*train_both(step, jitted, mlp_params(torch.float32), opt, batches))
    assert [loop.iterations for loop in loops(jitted)] == [4]


def test_a_users_vmap_around_the_gradient_maps_the_loop():
    f = fzero.value_and_grad(lambda w, x: torch.tanh(x @ w).square().sum(), micro_batches=3)
    w, x = torch.randn(4, 3, 2), torch.randn(6, 5, 3)

    def members(w: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.vmap(f, in_dims=(0, 1), out_dims=(0, 1))(w, x.movedim(1, 1).expand(6, 5, 3)[:, :4])

    bitwise(fzero.jit(members, backend="fx")(w, x), members(w, x))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_constant_loss_is_refused(stage):
    def loss(params: Any, x: Any) -> torch.Tensor:
        return torch.tensor(0.5)

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=stage, mesh=fzero.mesh(dp=2))
    state = step.init({"w": torch.ones(3)}, ADAMW)
    with pytest.raises(ValueError, match="depends on no leaf of argument 0"):
        fzero.jit(step, backend="fx")(*state, step.mesh.split(torch.ones(6, 2)))


def test_numbers_written_in_a_loss_are_the_same_in_every_iteration():
    """Each run of the function makes a new tensor of them."""

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x * torch.tensor([0.5, float("inf")]).clamp(max=2) * torch.tensor(-0.0).add(1)).sum()

    f = fzero.value_and_grad(loss, micro_batches=3)
    jitted, w, x = fzero.jit(lambda w, x: f(w, x), backend="fx"), torch.randn(2), torch.randn(6, 2)
    bitwise(jitted(w, x), f(w, x))
    assert len(loops(jitted)) == 1


def test_numbers_that_differ_by_iteration_are_traced_one_by_one():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        numbers = iter([0.0, -0.0, 0.0])

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (w * x).sum() * torch.copysign(torch.ones(()), torch.tensor(next(numbers)))

        return fzero.value_and_grad(loss, micro_batches=3)(w, x)

    jitted, w, x = fzero.jit(step, backend="fx"), torch.ones(2), torch.ones(3, 2)
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)


def test_a_part_of_the_batch_may_not_be_written():
    def loss(w: torch.Tensor, b: Any) -> torch.Tensor:
        return (torch.nn.functional.batch_norm(b["x"], b["mean"][0], b["var"][0], training=True) * w).sum()

    f = fzero.value_and_grad(loss, micro_batches=3)
    b = {"x": torch.randn(6, 2), "mean": torch.zeros(6, 2), "var": torch.ones(6, 2)}
    with pytest.raises(RuntimeError, match=r"the step writes into argument 1, leaf 'mean' in place .*test_loops.py"):
        fzero.jit(lambda w, b: f(w, b), backend="fx")(torch.ones(2), b)


def test_two_loops_in_one_step_are_two():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        a, first = fzero.value_and_grad(lambda w, x: (w * x).sin().sum(), micro_batches=3)(w, x)
        b, second = fzero.value_and_grad(lambda w, x: (w * x).cos().sum(), micro_batches=6)(w - first, x)
        return a, b, first, second

    jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
    bitwise(jitted(w, x), step(w, x))
    assert [loop.iterations for loop in loops(jitted)] == [3, 6]
    again = fzero.jit(step, backend="fx")
    assert again.plan(w, x).operations == jitted.plan(w, x).operations
    found = [o for o in again.plan(w, x).operations if "a loop of" in o.target]
    assert [o.name for o in found] == ["loop", "loop_1"] and all("test_loops.py" in o.line for o in found)


# ---------------------------------------------------------------- what stays unrolled


def test_values_that_an_iteration_leaves_behind_are_traced_one_by_one_and_reported(caplog):
    warn_once.cache_clear()

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        left = []

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            left.append(x.sum())
            return (w * x).sum()

        return fzero.value_and_grad(loss, micro_batches=3)(w, x), sum(left)

    w, x = torch.randn(2), torch.randn(6, 2)
    jitted = fzero.jit(step, backend="fx")
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)
    (said,) = [r.getMessage() for r in caplog.records if "micro-batch" in r.getMessage()]
    assert "fzero.jit(step): the second micro-batch computes something other" in said or "leaves the loop" in said
    assert "test_loops.py" in said


def chained(how: str) -> Any:
    """A step whose micro-batches depend on one another through Python."""

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        state, numbers, memory = [torch.ones(2)], iter(range(1, 100)), {}

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            y = (w * x).sum()
            if how == "a value":
                y, state[0] = y * state[0].sum(), state[0] * 0.9 + x.mean()
            if how == "a value that no iteration changes":
                y, state[0] = y * state[0].sum(), state[0] * 0.9
            if how == "a number":
                y = y * next(numbers)
            if how == "a tensor":
                y = y * TENSORS[next(numbers)]
            if how == "a list":
                state.append(w.detach() * 2)
            if how == "the first batch":
                memory.setdefault("x", x.mean(0))
                y = y * memory["x"].sum()
            if how == "the first noise":
                memory.setdefault("x", torch.rand(2))
                y = y * memory["x"].sum()
            if how == "the first loss":
                return memory.setdefault("y", y)
            return y

        grad = fzero.value_and_grad(loss, micro_batches=3)(w, x)
        return grad, sum(state) if how == "a list" else 0 * w

    return step


TENSORS = torch.arange(9.0).unbind()
CHAINS = ("a value", "a value that no iteration changes", "a number", "a tensor", "a list")
CHAINS += ("the first batch", "the first noise", "the first loss")


@pytest.mark.parametrize("how", CHAINS)
def test_iterations_that_depend_on_one_another_are_traced_one_by_one(how):
    step, w, x = chained(how), torch.randn(2), torch.randn(6, 2)
    jitted = fzero.jit(step, backend="fx")
    assert_draws_alike(jitted, step, w, x)
    assert not loops(jitted)
    dropped = fzero.jit(lambda w, x: step(w, x)[0][1], backend="fx")  # without the loss
    assert_draws_alike(dropped, lambda w, x: step(w, x)[0][1], w, x)


def assert_draws_alike(jitted: Any, step: Any, *args: Any) -> None:
    """Check that two steps compute the same from the same random numbers, and take as many of them."""
    found = []
    for f in (jitted, step):
        torch.manual_seed(0)
        found.append((f(*args), torch.rand(2)))
    bitwise(*found)


def test_values_that_no_iteration_changes_may_be_kept_from_iteration_to_iteration():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        memory: dict[str, torch.Tensor] = {}

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (w * x * memory.setdefault("x", torch.arange(2.0) + 1)).sum()

        return fzero.value_and_grad(loss, micro_batches=3)(w, x)

    jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
    bitwise(jitted(w, x), step(w, x))
    assert len(loops(jitted)) == 1


def test_random_numbers_that_nothing_needs_are_drawn_in_every_iteration():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.dropout(x * w, 0.5)
            torch.nn.functional.dropout(h, 0.1)
            return h.sum()

        return fzero.value_and_grad(loss, micro_batches=3)(w, x), torch.rand(2)

    jitted = fzero.jit(step, backend="fx")
    assert_draws_alike(jitted, step, torch.ones(4), torch.ones(6, 4))
    assert len(loops(jitted)) == 1


@pytest.mark.parametrize("what", ["a number", "an order", "an array", "a tensor or none"])
def test_aux_that_python_changes_is_traced_one_by_one(what):
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        numbers = iter(range(9))

        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            i = next(numbers)
            aux = {
                "a number": i,
                "an order": [x + 1, x + 2][:: -1 if i == 1 else 1],
                "an array": numpy.arange(3) + i,
                "a tensor or none": x.sum() if i == 1 else None,
            }
            return (w * x).sum(), aux[what]

        (y, aux), grad = fzero.value_and_grad(loss, has_aux=True, micro_batches=3)(w, x)
        return y, grad, aux if what == "an order" else x.sum() if aux is None else torch.as_tensor(aux)

    jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)


def test_aux_of_another_tree_is_refused_as_by_the_eager_step():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        numbers = iter(range(9))

        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            return (w * x).sum(), {str(next(numbers)): x.sum()}

        return fzero.value_and_grad(loss, has_aux=True, micro_batches=3)(w, x)

    for f in (step, fzero.jit(step, backend="fx")):
        with pytest.raises(ValueError, match="trees differ in structure"):
            f(torch.randn(2), torch.randn(6, 2))


def test_a_step_may_drop_a_part_of_aux():
    f = fzero.value_and_grad(
        lambda w, x: ((w * x).sum(), {"norm": x.norm(), "sum": x.sum()}), has_aux=True, micro_batches=3
    )
    for kept in ("", "norm", "sum"):

        def step(w: torch.Tensor, x: torch.Tensor, kept: str = kept) -> Any:
            (y, aux), grad = f(w, x)
            return y, grad, aux[kept] if kept else None

        jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
        bitwise(jitted(w, x), step(w, x))
        assert len(loops(jitted)) == 1


def test_sums_have_the_strides_of_their_shares():
    """Else the next iteration's sum, and the update, would be of other strides than in the eager step."""
    f = fzero.value_and_grad(lambda w, x: (x @ w.t()).square().sum(), micro_batches=3)
    jitted, w, x = fzero.jit(lambda w, x: f(w, x), backend="fx"), torch.randn(4, 3), torch.randn(6, 3)
    (_, got), (_, expected) = jitted(w, x), f(w, x)
    assert got.stride() == expected.stride()
    transposed = w.t().contiguous().t()
    assert jitted(transposed, x)[1].stride() == f(transposed, x)[1].stride()


def test_a_key_around_all_micro_batches_gives_each_its_own_numbers():
    def program(w: torch.Tensor, x: torch.Tensor) -> Any:
        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            y = torch.nn.functional.dropout(x * w, 0.5)
            return y.sum(), y

        return fzero.value_and_grad(loss, has_aux=True, micro_batches=4)(w, x)

    step = lambda w, x: random.seeded(program)(random.key(0), w, x)  # noqa: E731
    w, x = torch.ones(3), torch.ones(8, 3)
    bitwise(fzero.jit(step, backend="fx")(w, x), step(w, x))


def test_what_a_loss_left_behind_is_no_result():
    """It belongs to the transform that has ended; once it was handed out as a stand-in without values."""

    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        left = []

        def loss(w: torch.Tensor) -> torch.Tensor:
            left.append(w * 2)
            return left[-1].sum()

        return torch.func.grad(loss)(w), left[0]

    with pytest.raises(RuntimeError, match=r"the step uses a value .* a differentiated function stored it"):
        fzero.jit(step, backend="fx")(torch.ones(2), torch.ones(2))


def test_without_loop_there_is_none():
    f = fzero.value_and_grad(lambda w, x: (w * x).sum(), micro_batches=3)
    jitted, w, x = fzero.jit(f, backend="fx", loop=False), torch.randn(2), torch.randn(6, 2)
    jitted(w, x)
    assert not loops(jitted)
    with pytest.raises(ValueError, match=r"loop=3: expected True or False"):
        fzero.jit(f, loop=3)


def test_a_derivative_around_the_micro_batches_unrolls_them():
    f = fzero.value_and_grad(lambda w, x: ((w * 2 - x) ** 3).mean(), micro_batches=3)
    w, x = torch.randn(3), torch.randn(6, 3)
    for g in (
        lambda w, x: torch.func.jvp(lambda w: f(w, x), (w,), (torch.ones(3),)),
        lambda w, x: torch.func.jacfwd(lambda w: f(w, x)[1])(w),
        lambda w, x: torch.func.grad(lambda s: f(w * s, x)[0])(torch.ones(3)),
        lambda w, x: torch.func.grad(
            lambda s: fzero.value_and_grad(lambda w, x: (w * s - x).square().mean(), micro_batches=3)(w, x)[0]
        )(w),
    ):
        jitted = fzero.jit(g, backend="fx")
        bitwise(jitted(w, x), g(w, x))
        assert not loops(jitted)


def test_micro_batches_of_a_gradient_in_a_loss_are_unrolled():
    inner = fzero.value_and_grad(lambda w, x: (w * x).square().sum(), micro_batches=3)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x * inner(x.sum(0).detach(), x)[1]).sum()

    f = fzero.value_and_grad(loss, micro_batches=4)
    jitted, w, x = fzero.jit(lambda w, x: f(w, x), backend="fx"), torch.randn(2), torch.randn(12, 2)
    bitwise(jitted(w, x), f(w, x))
    assert [loop.iterations for loop in loops(jitted)] == [4]


def test_a_batch_that_is_differentiated_is_unrolled():
    f = fzero.value_and_grad(lambda w, x: (w * x).square().sum(), argnums=(0, 1), micro_batches=3)
    step = fzero.mesh(dp=2).spmd(lambda w, x: f(w, fzero.PerRank(x)))
    w, x = torch.randn(2), fzero.mesh(dp=2).split(torch.randn(12, 2))
    jitted = fzero.jit(step, backend="fx")
    bitwise(jitted(w, x), step(w, x))
    assert not loops(jitted)


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize("stage", cases((3,), range(4)))
def test_the_plans_peak_is_the_allocators_over_all_iterations(stage):
    step = fzero.jit(
        fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=5), stage=stage, mesh=fzero.mesh(dp=2)), backend="fx"
    )
    state = list(step.init(gpt_params(width=32, layers=either(1, 2)), ADAMW))
    tokens = step.mesh.split(torch.randint(37, (20, 17)))
    *state, _ = step(*state, tokens)
    plan = step.plan(*state, tokens)
    box = [state]
    del state

    def run() -> None:
        *state, _ = step(*box.pop(), tokens)
        box.append(state)

    measured = plan.argument_bytes + peak_bytes(run)
    assert abs(measured / plan.peak_bytes - 1) < 0.005, (measured, plan.peak_bytes)


@functools.cache
def with_and_without_a_loop(stage: int) -> list[fzero.graph.Plan]:
    step = fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=3), stage=stage, mesh=fzero.mesh(dp=2))
    args = (*step.init(gpt_params(width=32, layers=either(1, 2)), ADAMW), step.mesh.split(torch.randint(37, (12, 17))))
    looped = fzero.plan(fzero.jit(step, backend="fx"), *args, world_size=4)
    with unrolled():
        return [looped, fzero.plan(fzero.jit(step, backend="fx"), *args, world_size=4)]


@pytest.mark.parametrize("stage", cases((3,), range(4)))
def test_a_loop_takes_no_more_memory_than_the_iterations_one_by_one(stage):
    looped, flat = with_and_without_a_loop(stage)
    assert looped.peak_bytes <= flat.peak_bytes and looped.flops == flat.flops


def test_the_sum_of_all_iterations_is_reduced_where_it_lies():
    step = fzero.shard(train_step_for(loss_of_tree, ADAMW, micro_batches=3), stage=0, mesh=fzero.mesh(dp=2))
    args = (*step.init({"w": torch.ones(64)}, ADAMW), step.mesh.split({"x": torch.ones(6)}))
    plan = fzero.plan(fzero.jit(step, backend="fx", bucket_bytes=0), *args, world_size=4)
    reductions = [o.target for o in plan.operations if "all_reduce" in o.target]
    assert len(reductions) == 2 and all("all_reduce_." in target for target in reductions), reductions


def test_rows_are_in_the_plan():
    """An iteration's rows, those of the iterations before, and the sums, to the byte."""
    f = fzero.value_and_grad(lambda w, x: ((w * x).sum(), x * 2), has_aux=True, micro_batches=8)
    step, w, x = fzero.jit(f, backend="fx"), torch.randn(16), torch.randn(64, 16)
    step(w, x)
    plan = step.plan(w, x)
    assert plan.added_bytes == peak_bytes(lambda: step(w, x))


@pytest.mark.parametrize("stage", cases((3,), range(4)))
def test_collectives_are_counted_with_their_iterations(stage):
    """By unit and kind, without re-gathers and buckets: what the eager step sends, which gathers in every iteration."""
    mesh, k = fzero.mesh(dp=4), 5
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=k), stage=stage, mesh=mesh)
    args = (*step.init(mlp_params(), ADAMW), mesh.split(mlp_batch(8 * k)))
    with fzero.collectives.record() as log:
        step(*args)
    plan = fzero.plan(fzero.jit(step, backend="fx", bucket_bytes=0, max_reuse_bytes=math.inf), *args)
    planned = [(c.kind, c.unit, c.elements, c.bytes) for c in plan.collectives for _ in range(c.times)]
    planned += [x for x in planned if x[0] == "all_gather" for _ in range(k - 1) if stage == 3]
    assert sorted(planned) == sorted((e.kind, e.unit or "(metric)", e.elements, e.bytes) for e in log.events)


def test_a_unit_stays_from_iteration_to_iteration_where_it_may():
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=4), stage=3, mesh=fzero.mesh(dp=2))
    traced = entry_of(step, *step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(8)), world_size=4)

    def gathers(**options: Any) -> dict[str, int]:
        plan = plan_of(traced, bucket_bytes=0, **options)
        return {c.unit: c.times for c in plan.collectives if c.kind == "all_gather"}

    units = gathers(max_reuse_bytes=math.inf)
    assert set(units.values()) == {1} and len(units) == 4
    assert gathers(memory_budget=10**9) == units
    assert set(gathers(max_reuse_bytes=0).values()) == {4}
    # a block has 56 elements of 8 bytes, the head 21, the scale is 1: with the others of an iteration, 512 to 760 bytes
    sizes = {"blocks.0": 56 * 8, "blocks.1": 56 * 8, "head": 21 * 8 + 24, "scale": 32}
    limit = sum(sizes.values()) - sizes["blocks.0"]
    assert gathers(max_reuse_bytes=limit) == {"blocks.0": 1, "blocks.1": 1, "head": 4, "scale": 4}
    assert set(gathers(max_reuse_bytes=limit - 1).values()) == {4}


def test_a_unit_that_an_iteration_gathers_twice_stays_once():
    """`remat` gathers it for the forward pass, and again for the backward pass."""
    block = fzero.remat(lambda w, x: torch.tanh(x @ fzero.gather(w)["w"]))
    mesh = fzero.mesh(dp=2)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any, x: Any) -> torch.Tensor:
            for w in params:
                x = block(w, x)
            return x.square().sum()

        value, grads = fzero.value_and_grad(loss, micro_batches=3, gather=False)(params, batch)
        updates, state = ADAMW.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    step = fzero.shard(train_step, stage=3, mesh=mesh, units=lambda path, leaf: path.split(".")[0])
    params = [{"w": torch.randn(4, 4)} for _ in range(3)]
    jitted = fzero.jit(step, backend="fx", max_reuse_bytes=math.inf, bucket_bytes=0)
    bitwise(*train_both(step, jitted, params, ADAMW, [torch.randn(12, 4)]))
    args = (*step.init(params, ADAMW), mesh.split(torch.randn(12, 4)))
    plan = fzero.plan(jitted, *args, world_size=2)
    assert [c.times for c in plan.collectives if c.kind == "all_gather"] == [1, 1, 1]
    assert max(plan.live_of("gathered")) == 3 * 16 * 4
    # with the other two units of an iteration, each counted once, it still has room
    jitted = fzero.jit(step, backend="fx", max_reuse_bytes=2 * 16 * 4, bucket_bytes=0)
    plan = fzero.plan(jitted, *args, world_size=2)
    assert [c.times for c in plan.collectives if c.kind == "all_gather"] == [1, 1, 1]


def test_schedules_look_into_loops():
    """The same settings are tried as for the iterations one by one, and gathers start ahead only where they fit."""
    looped, flat = with_and_without_a_loop(3)

    def tried(plan: fzero.graph.Plan) -> dict[Any, int]:
        kept = (plan.settings, plan.peak_bytes)
        return {tuple(s.values()): peak for s, peak in [kept, *[r[:2] for r in plan.rejected]]}

    def ways(plan: fzero.graph.Plan) -> set[Any]:
        return {settings[-2:] for settings in tried(plan)}

    assert ways(looped) == ways(flat) == {(0, 0), (0, 1), ("fitting", 0), ("fitting", 1)}
    assert looped.settings["bucket_bytes"] == flat.settings["bucket_bytes"] > 0
    leanest = min(peak for settings, peak in tried(looped).items() if settings[-2:] == (0, 0))
    assert all(peak <= leanest for settings, peak in tried(looped).items() if settings[-2:] == ("fitting", 0))


@pytest.mark.parametrize("stage", cases((3,), [1, 2]))
def test_sums_of_gradients_are_gradients_in_the_plan(stage):
    """At stage 1 they are whole."""
    step = fzero.shard(
        train_step_for(gpt_loss, ADAMW, micro_batches=4), stage=stage, mesh=fzero.mesh(dp=2), check=False
    )
    params = gpt_params(width=32, layers=2)
    args = (*step.init(params, ADAMW), step.mesh.split(torch.randint(37, (8, 17))))
    plan = fzero.plan(step, *args, world_size=2)
    whole = sum(4 * x.numel() for x in tree.tensors(params))
    assert max(plan.live_of("gradients")) >= (whole if stage == 1 else whole // 2)
    assert not any("full" in r.label and r.bytes > 1000 for r in plan.ranges if r.kind == "activations")


def test_a_micro_batch_that_leaves_a_value_outside_of_the_step_is_refused():
    left: list[torch.Tensor] = []

    def loss(params: Any, batch: Any) -> torch.Tensor:
        left.append(batch["x"].mean())
        return mlp_loss(params, batch) + 0 * sum(left)

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=1, mesh=fzero.mesh(dp=2), check=False)
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(6)))
    with pytest.raises(RuntimeError, match=r"micro-batch stored it outside the step.*loop=False"):
        fzero.jit(step, backend="fx")(*args)
    left.clear()
    fzero.jit(step, backend="fx", loop=False)(*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(6)))


def test_gathers_start_ahead_in_a_loop_as_far_as_there_is_room():
    """A budget of little more than what the schedule takes that gathers ahead everywhere leaves it as it is."""
    step = fzero.shard(train_step_for(gpt_loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2), check=False)
    args = (*step.init(gpt_params(width=32, layers=3), ADAMW), step.mesh.split(torch.randint(37, (6, 17))))
    traced = entry_of(step, *args, world_size=2)

    def planned(**options: Any) -> fzero.graph.Plan:
        return plan_of(traced, **{**LEAST, **options})

    lean, ahead = planned(prefetch=0), planned(prefetch="fitting", memory_budget=10**9)
    unit = max(c.bytes for c in ahead.collectives)
    just = planned(prefetch="fitting", memory_budget=ahead.peak_bytes + unit)
    assert lean.peak_bytes < just.peak_bytes == ahead.peak_bytes
    assert just.seconds == ahead.seconds < lean.seconds


def rank_of(factor: float, **options: Any) -> Any:
    """The traced and the scheduled graph of one rank's step whose loss has a factor."""

    def loss(params: Any, batch: Any) -> torch.Tensor:
        return mlp_loss(params, batch) * factor

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(6)))
    jitted = fzero.jit(
        step.on_mesh(_one_rank.planned_mesh((("dp", 2),))), backend="fx", max_reuse_bytes=0, bucket_bytes=0, **options
    )
    jitted.plan(*_one_rank.one_rank_tree(args, {"dp": 2}, all_ranks=True))
    (entry,) = jitted._entries.values()
    return entry.traced.graph, entry.best.graph


def test_ranks_compare_what_loops_run():
    """Two steps that differ in the body of a loop are two, and so are two orders of its collectives."""
    orders = [{"prefetch": 0, "in_flight": 0}, {"prefetch": 2, "in_flight": 1}]
    (double, lean), (triple, _), (_, ahead) = rank_of(2.0, **orders[0]), rank_of(3.0), rank_of(2.0, **orders[1])
    differing = [a for a, b in zip(*map(_trace_agreement._signatures, (double, triple)), strict=True) if a != b]
    assert len(differing) > 1 and all("2.0" in a for a in differing)
    assert (
        _trace_agreement._digest_of_order(lean)
        == _trace_agreement._digest_of_order(rank_of(2.0, **orders[0])[1])
        != _trace_agreement._digest_of_order(ahead)
    )


@pytest.mark.parametrize("what", ["a part", "a sum of a part"])
def test_values_gathered_from_an_iterations_part_stay_in_the_iteration(what):
    mesh = fzero.mesh(dp=2)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        all_of_it = fzero.collectives.all_gather(x if what == "a part" else x.sum(0, keepdim=True))
        return (params["w"] * all_of_it).square().sum()

    step = fzero.shard(train_step_for(loss, ADAMW, micro_batches=3), stage=3, mesh=mesh, check=False)
    jitted = fzero.jit(step, backend="fx", max_reuse_bytes=math.inf)
    bitwise(*train_both(step, jitted, {"w": torch.randn(4)}, ADAMW, [torch.randn(12, 4)]))
    args = (*step.init({"w": torch.randn(4)}, ADAMW), mesh.split(torch.randn(12, 4)))
    plan = fzero.plan(jitted, *args, world_size=2)
    gathers = sorted([(c.unit, c.times) for c in plan.collectives if c.kind == "all_gather"])
    assert gathers == [("w", 1), ("w", 3)]  # the parameter's, and that of what it is applied to


@pytest.mark.parametrize("stage", cases((3,), range(4)))
def test_a_plan_does_not_grow_with_the_micro_batches(stage):
    step = [
        fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=k), stage=stage, mesh=fzero.mesh(dp=2))
        for k in (3, 48)
    ]
    few, many = [
        fzero.plan(fzero.jit(s, backend="fx"), *s.init(mlp_params(), ADAMW), s.mesh.split(mlp_batch(2 * k)))
        for s, k in zip(step, (3, 48), strict=True)
    ]
    assert [o.target.replace("48", "3") for o in many.operations] == [o.target for o in few.operations]
    assert many.added_bytes == few.added_bytes
    assert {o.times for o in many.operations} == {1, 48} and "a loop of 48 iterations" in {
        o.target for o in many.operations
    }
    assert [c.times for c in many.collectives] == [16 * c.times if c.times > 1 else 1 for c in few.collectives]
    assert (" times)" in many.details()) == any(c.times > 1 for c in many.collectives)
    reduced = [c for c in many.collectives if c.kind == "reduce_scatter"]
    moved = format_bytes(sum(c.bytes * c.times for c in reduced))
    assert f"{sum(c.times for c in reduced):>4} x reduce_scatter  {moved:>10}" in str(many) or not reduced
    moved = sum(c.bytes * c.times for c in many.collectives)
    assert f"{sum(c.times for c in many.collectives)} collectives move {moved / 1000:,.1f} kB" in str(many)


def test_iterations_are_traced_by_jit_alone():
    f = fzero.value_and_grad(lambda w, x: (w * x).sum(), micro_batches=4)
    graph = torch.fx.experimental.proxy_tensor.make_fx(f)(torch.ones(2), torch.ones(4, 2)).graph
    assert not [n for n in graph.nodes if "fzero" in str(n.target)]
    with pytest.raises(AssertionError, match="outside a trace"):
        _scan.iteration(3)


@pytest.mark.slow
def test_torch_compile_of_the_eager_step_runs_every_iteration():
    torch._dynamo.reset()
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(12)))
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    bitwise(compiled(*args), step(*args))


def test_a_loop_is_dumped_into_a_folder_of_its_own(tmp_path):
    step = fzero.shard(train_step_for(mlp_loss, ADAMW, micro_batches=3), stage=3, mesh=fzero.mesh(dp=2))
    args = (*step.init(mlp_params(), ADAMW), step.mesh.split(mlp_batch(12)))
    plan = fzero.plan(fzero.jit(step, backend="fx", dump=tmp_path), *args, world_size=4)
    rows = [line.split() for line in (tmp_path / "peaks.txt").read_text().splitlines() if " schedule " in line]
    assert [row[4] for row in rows] == [f"{plan.peak_bytes:,}"]
    text = (tmp_path / "loop" / "schedule.txt").read_text()
    assert "train_step, loop" in text and "reduce_scatter_tensor" in text
    assert "reduce_scatter_tensor" not in (tmp_path / "schedule.txt").read_text()


def test_random_numbers_of_no_key_are_drawn_in_every_iteration():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        def loss(w: torch.Tensor, x: torch.Tensor) -> Any:
            noise = torch.rand(2)
            return (w * x * noise).sum(), noise

        return fzero.value_and_grad(loss, has_aux=True, micro_batches=3)(w, x)

    w, x = torch.randn(2), torch.randn(6, 2)
    jitted = fzero.jit(step, backend="fx")
    torch.manual_seed(0)
    expected = step(w, x)
    torch.manual_seed(0)
    bitwise(jitted(w, x), expected)
    assert len(loops(jitted)) == 1 and len({tuple(row) for row in expected[0][1].tolist()}) == 3
