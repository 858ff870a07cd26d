"""Micro-batches as a loop: one body, with the numbers of the unrolled step."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero import optim, random
from fzero.testing import optimizers, stages, trees, world_sizes
from tests.graph.helpers import bitwise, copy_graph, train_both
from tests.graph.loops import ADAMW, CLIPPED, assert_draws_alike, loops, unroll
from tests.helpers import LEAST, cases, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.zero.helpers import loss_of_tree


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


@pytest.mark.parametrize("name", cases(["aux", "drawn"], LOSSES))
@examples(0, 2)
@given(params=trees(), opt=optimizers(), stage=stages(), n=world_sizes(4), k=st.integers(3, 5))
@example(params={"a": torch.ones(()), "b": [torch.linspace(-1, 1, 5).double()]}, opt=CLIPPED, stage=3, n=2, k=3)
def test_a_loop_is_the_unrolled_step_and_the_eager_one_bit_for_bit(name, params, opt, stage, n, k):
    mesh = fzero.mesh(dp=n)
    step = fzero.shard(step_of(name, opt, k), stage=stage, mesh=mesh)
    looped, flat = (fzero.jit(step, backend="fx", **LEAST) for _ in range(2))
    states = [step.init(params, opt), looped.init(copy_graph(params), opt), flat.init(copy_graph(params), opt)]
    for i in range(2):
        data = mesh.split({"x": torch.linspace(-1, 1 + i, n * k * 2, dtype=torch.float64)})
        batch = {"data": data, "key": random.key(i)}
        eager, first = step(*states[0], batch), looped(*states[1], batch)
        with unroll():
            second = flat(*states[2], batch)
        bitwise(first, eager)
        bitwise(second, eager)
        states = [eager[:2], first[:2], second[:2]]
    assert [loop.iterations for loop in loops(looped)] == [k] and not loops(flat)


def test_a_sum_of_negative_zeros_is_negative():
    """Sums begin as -0.0, which is not a number's neighbour."""
    f = fzero.value_and_grad(lambda w, x: (w * x[0]).sum(), micro_batches=3)
    w, x = torch.ones(2), torch.tensor([[-0.0, 0.0]] * 3)
    _, expected = f(w, x)
    _, got = fzero.jit(lambda w, x: f(w, x), backend="fx")(w, x)
    assert got.signbit().tolist() == expected.signbit().tolist() == [True, False]


@pytest.mark.slow
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


def test_a_vmap_around_a_gradient_maps_its_loop_of_micro_batches():
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


def test_a_step_with_two_loops_is_traced_as_two_loops():
    def step(w: torch.Tensor, x: torch.Tensor) -> Any:
        a, first = fzero.value_and_grad(lambda w, x: (w * x).sin().sum(), micro_batches=3)(w, x)
        b, second = fzero.value_and_grad(lambda w, x: (w * x).cos().sum(), micro_batches=6)(w - first, x)
        return a, b, first, second

    jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
    bitwise(jitted(w, x), step(w, x))
    assert [loop.iterations for loop in loops(jitted)] == [3, 6]
    again = fzero.jit(step, backend="fx")
    assert again.plan(w, x).operations == jitted.plan(w, x).operations
    results = [o for o in again.plan(w, x).operations if "a loop of" in o.target]
    assert [o.name for o in results] == ["loop", "loop_1"] and all("test_loops.py" in o.line for o in results)


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
    for part in ("", "norm", "sum"):

        def step(w: torch.Tensor, x: torch.Tensor, part: str = part) -> Any:
            (y, aux), grad = f(w, x)
            return y, grad, aux[part] if part else None

        jitted, w, x = fzero.jit(step, backend="fx"), torch.randn(2), torch.randn(6, 2)
        bitwise(jitted(w, x), step(w, x))
        assert len(loops(jitted)) == 1


def test_the_sums_of_a_loop_have_the_strides_of_its_gradients():
    """The next iteration's sum, and the update, would otherwise have other strides than in the eager step."""
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
