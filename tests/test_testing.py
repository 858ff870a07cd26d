"""fzero.testing: it passes what is right, and finds what is wrong and says where."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchopt
from hypothesis import Phase, find, given, settings

import fzero
from fzero import optim, testing, tree
from fzero.testing import assert_equivalent, assert_trees_close, is_exact_on_shards
from tests.helpers import ALL_STAGES, cases, either, train_step_for
from tests.parallel.pipeline import model as pipelines

STAGES = ALL_STAGES
PARAMS = {"a": [{"w": torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)}], "b": torch.ones(2).double()}
OPT = optim.sgd(0.1, momentum=0.9)


def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["a"][0]["w"]) + params["b"]).square().mean()


def batches_of(steps: int = 3, size: int = 12) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size, 3, generator=g, dtype=torch.float64) for _ in range(steps)]


GOOD = train_step_for(loss_of, OPT)


# Assert_equivalent: what is right.


def test_a_good_step_passes_at_every_stage_and_world_size():
    assert_equivalent(GOOD, PARAMS, OPT, batches_of(), world_sizes=(1, 2, 3, 4))


@pytest.mark.slow
def test_a_good_step_passes_with_micro_batches_units_and_other_results():
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        def loss(params: Any, x: torch.Tensor) -> Any:
            return loss_of(params, x), x.mean(0)

        (value, means), grads = fzero.value_and_grad(loss, has_aux=True, micro_batches=2)(params, x)
        updates, opt_state = OPT.update(grads, opt_state, params)
        metrics = {"norm": optim.global_norm(grads), "mean": fzero.collectives.pmean(means.mean(0))}
        return optim.apply_updates(params, updates), opt_state, value, metrics, {"grads": grads}

    def units(path: str, leaf: torch.Tensor) -> str | None:
        return None if path == "b" else "a"

    assert_equivalent(train_step, PARAMS, OPT, batches_of(size=16), units=units)


@pytest.mark.slow
@pytest.mark.parametrize(
    "opt",
    [
        pytest.param(optim.sgd(0.1), marks=pytest.mark.slow),
        optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2)),
    ],
)
def test_a_step_with_a_pipelined_loss_passes_and_a_wrong_one_does_not(opt):
    """Its parameters and the state's moments are compared as a model without a pipeline has them."""
    loss, params, batches = pipelines.make_loss(4, depth=5), pipelines.make_params(5), [pipelines.make_batch(16)] * 2
    meshes = [fzero.mesh(dp=2, pp=2), fzero.mesh(pp=3, simulate="lockstep"), fzero.mesh(dp=2)]

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, reduce="weighted")(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value, {"grads": grads, "step": torch.tensor(1)}

    def wrong(params: Any, opt_state: Any, batch: Any) -> Any:
        params, *others = train_step(params, opt_state, batch)
        for p in params["blocks"]:  # as many as a rank has places
            p["w"] = fzero.tree.map(lambda x: x * (1 + len(params["blocks"])), p["w"])
        return params, *others

    worlds = either((2,), (1, 2))
    assert_equivalent(train_step, params, opt, batches, rtol=1e-9, pipeline=loss, world_sizes=worlds)
    assert_equivalent(
        train_step,
        params,
        opt,
        batches,
        either((3,), ALL_STAGES),
        rtol=1e-9,
        pipeline=loss,
        meshes=either(meshes[1:2], meshes),
    )
    with pytest.raises(AssertionError, match=r"stage=1, pp=2, after 1 steps: parameters leaf 'blocks.0.w'"):
        assert_equivalent(wrong, params, opt, batches[:1], (1,), (2,), rtol=1e-9, pipeline=loss)


def test_results_of_each_rank_are_compared_along_the_batch():
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        return *GOOD(params, opt_state, x), fzero.PerRank({"x": 2 * x})

    assert_equivalent(train_step, PARAMS, OPT, batches_of(), world_sizes=(1, 3))


@pytest.mark.slow
def test_assert_equivalent_does_not_change_its_arguments():
    params, batches = copy.deepcopy(PARAMS), batches_of()
    assert_equivalent(GOOD, params, OPT, batches)
    assert_trees_close(params, PARAMS, 0.0)
    assert_trees_close(batches, batches_of(), 0.0)


@pytest.mark.slow
def test_assert_equivalent_uses_the_callers_tolerance():
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        params, opt_state, loss = GOOD(params, opt_state, x)
        return params, opt_state, loss * (1 + 1e-7 * (fzero.axes.axis_size() > 1))

    assert_equivalent(train_step, PARAMS, OPT, batches_of(), rtol=1e-6)
    with pytest.raises(AssertionError, match="result 2"):
        assert_equivalent(train_step, PARAMS, OPT, batches_of())


def test_assert_equivalent_refuses_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match=r"\[7, 3\]: dimension 0 must be divisible by the 2 ranks"):
        assert_equivalent(GOOD, PARAMS, OPT, batches_of(size=7))


# Assert_equivalent: what is wrong.


def sum_over_ranks(params: Any, x: torch.Tensor) -> Any:
    """Forgets to average: the sum over ranks of the ranks' means."""
    return fzero.value_and_grad(loss_of, reduce="sum")(params, x)


def sum_by_hand(params: Any, x: torch.Tensor) -> Any:
    """Sums the ranks' means before it differentiates."""
    return fzero.value_and_grad(lambda p, x: fzero.collectives.psum(loss_of(p, x)))(params, x)


def of_own_rank(params: Any, x: torch.Tensor) -> Any:
    """Weighs a rank's loss by its index."""
    return fzero.value_and_grad(lambda p, x: loss_of(p, x) * (1 + fzero.axes.axis_index()))(params, x)


def of_first_half(params: Any, x: torch.Tensor) -> Any:
    """Drops part of every rank's batch."""
    return fzero.value_and_grad(lambda p, x: loss_of(p, x[: len(x) // 2]))(params, x)


def average_twice(params: Any, x: torch.Tensor) -> Any:
    """Averages averages: harmless on whole leaves, a mixture of their parts on shards."""
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    return loss, tree.map(fzero.collectives.pmean, grads)


def by_norm_of_own_shard(params: Any, x: torch.Tensor) -> Any:
    """Divides gradients by the norm of what the rank holds."""
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    return loss, tree.map(lambda g: g / g.norm(), grads)


LOSS = r"step 0: result 2"  # seen in the first loss
LATER = r"step 1: result 2"  # in the loss after the first update

WRONG: dict[str, tuple[Callable[..., Any], Any, str]] = {  # the fault, the stages where it is one, where it shows
    "summed": (sum_over_ranks, STAGES, LOSS),
    "summed by hand": (sum_by_hand, STAGES, LOSS),
    "of own rank": (of_own_rank, STAGES, LOSS),
    "of first half": (of_first_half, STAGES, LOSS),
    "averaged twice": (average_twice, (1, 2, 3), LATER),
    "by norm of own shard": (by_norm_of_own_shard, (1, 2, 3), LATER),
}


@pytest.mark.parametrize("stage", cases((STAGES[0], STAGES[-1]), STAGES))
@pytest.mark.parametrize("name", WRONG)
def test_assert_equivalent_reports_the_stage_step_and_result_of_a_fault(name, stage):
    fault, stages, where = WRONG[name]

    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        loss, grads = fault(params, x)
        updates, opt_state = OPT.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    def check() -> None:
        assert_equivalent(train_step, PARAMS, OPT, batches_of(), (stage,), (2,))

    if stage not in stages:
        check()
        return
    with pytest.raises(AssertionError, match=f"stage={stage}, dp=2, {where}"):
        check()


def scale_by_ranks(tree_: Any) -> Any:
    return tree.map(lambda x: x * (1 + 1e-9 * (fzero.axes.axis_size() - 1)) if x.is_floating_point() else x, tree_)


@pytest.mark.parametrize("stage", cases((STAGES[0], STAGES[-1]), STAGES))
def test_assert_equivalent_reports_the_leaf_of_a_fault(stage):
    def check(train_step: Callable[..., Any], message: str) -> None:
        with pytest.raises(AssertionError, match=rf"stage={stage}, dp=3, {message}.*allowed: 1e-12"):
            assert_equivalent(train_step, PARAMS, OPT, batches_of(1), (stage,), (1, 3))

    def new_params(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        params, opt_state, loss = GOOD(params, opt_state, x)
        return {**params, "b": scale_by_ranks(params["b"])}, opt_state, loss

    def state(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        params, opt_state, loss = GOOD(params, opt_state, x)
        moment = {**opt_state.momentum, "a": scale_by_ranks(opt_state.momentum["a"])}
        return params, opt_state._replace(momentum=moment), loss

    def metric(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        params, opt_state, loss = GOOD(params, opt_state, x)
        return params, opt_state, loss, {"loss": scale_by_ranks(loss)}

    check(new_params, "after 1 steps: parameters leaf 'b'(.|\n)*")
    check(state, "after 1 steps: optimizer state leaf 'momentum.a.0.w'(.|\n)*")
    check(metric, "step 0: result 3 leaf 'loss'(.|\n)*")


def test_a_counter_that_depends_on_the_ranks_is_found():
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        params, opt_state, loss = GOOD(params, opt_state, x)
        return params, opt_state._replace(count=opt_state.count + fzero.axes.axis_size() - 1), loss

    with pytest.raises(AssertionError, match=r"stage=0, dp=2, after 3 steps: optimizer state leaf 'count': 6 is not 3"):
        assert_equivalent(train_step, PARAMS, OPT, batches_of())


def test_a_result_that_differs_by_rank_is_an_error():
    def train_step(params: Any, opt_state: Any, x: torch.Tensor) -> Any:
        params, opt_state, loss = GOOD(params, opt_state, x)
        return params, opt_state, loss + fzero.axes.axis_index()

    with pytest.raises(ValueError, match="result 2 differs by rank"):
        assert_equivalent(train_step, PARAMS, OPT, batches_of())


X = torch.tensor([1.0, 2.0])
DIFFERENT = {
    "value": ({"a": X + 1e-3}, {"a": X}, r"what leaf 'a'"),
    "nan": ({"a": X * torch.nan}, {"a": X}, r"what leaf 'a'"),
    "dtype": ({"a": X.double()}, {"a": X}, r"what leaf 'a': \(torch.float64, \[2\]\) is not \(torch.float32, \[2\]\)"),
    "shape": ({"a": X[None]}, {"a": X}, r"what leaf 'a': \(torch.float32, \[1, 2\]\)"),
    "key": ({"b": X}, {"a": X}, r"what: trees differ in structure: the .* leaf 'a'"),
    "missing": ({"a": X}, {"a": X, "b": X}, r"what: trees differ in structure: the .* leaf 'b'"),
    "spare": ({"a": X, "b": X}, {"a": X}, r"what: trees differ in structure: the .* leaf 'b'"),
    "None for a tensor": ({"a": None}, {"a": X}, r"what leaf 'a': None is not a tensor"),
    "tensor for None": ({"a": X}, {"a": None}, r"what leaf 'a'"),
    "number": ({"a": 1}, {"a": 1.0}, r"what leaf 'a': 1 is not 1.0"),
    "beside an infinity": (
        {"a": torch.tensor([5.0, torch.inf])},
        {"a": torch.tensor([1.0, torch.inf])},
        r"what leaf 'a'",
    ),
    "beside a nan": ({"a": torch.tensor([5.0, torch.nan])}, {"a": torch.tensor([1.0, torch.nan])}, r"what leaf 'a'"),
    "integer": ({"a": torch.tensor(2)}, {"a": torch.tensor(3)}, r"what leaf 'a': 2 is not 3"),
    "bare": (X + 1, X, r"^what: "),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_assert_trees_close_names_the_leaf_that_differs(name):
    actual, expected, message = DIFFERENT[name]
    with pytest.raises(AssertionError, match=message):
        assert_trees_close(actual, expected, what="what")


def test_trees_within_the_tolerance_are_close():
    big = torch.tensor([1.0, 1e6])
    assert_trees_close({"a": big + torch.tensor([1.0, 0.0])}, {"a": big})  # relative to the leaf's largest element
    assert_trees_close({"a": X + 0.1}, {"a": X}, rtol=0.06)
    assert_trees_close({"a": X[:0], "n": None, "s": "s"}, {"a": X[:0], "n": None, "s": "s"})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_trees_with_equal_infinities_and_nans_are_close(value):
    """Training that diverges unsharded and sharded alike is equivalent."""
    assert_trees_close({"a": X * value}, {"a": X * value})
    mixed = torch.tensor([1.0, value])
    assert_trees_close({"a": mixed}, {"a": mixed + torch.tensor([1e-9, 0.0])})


class Pair(NamedTuple):
    init: Callable[..., Any]
    update: Callable[..., Any]


def stateless(update: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    return Pair(lambda params: (), lambda grads, state, params=None: (tree.map(update, grads), state))


def trust_ratio(grads: Any, state: Any, params: Any = None) -> Any:
    """LARS: a step as long as the leaf."""
    return tree.map(lambda g, p: -0.1 * g * p.norm() / g.norm(), grads, params), state


def whiten(g: torch.Tensor) -> torch.Tensor:
    """Muon's direction, of matrices only."""
    if g.ndim < 2:
        return g
    u, _, v = torch.linalg.svd(g.flatten(1), full_matrices=False)
    return (u @ v).reshape(g.shape)


WHOLE = {
    "norm of each leaf": stateless(lambda g: -g / g.norm()),
    "centred gradients": stateless(lambda g: g.mean() - g),
    "largest element": stateless(lambda g: -g / g.abs().max()),
    "trust ratio": Pair(lambda params: (), trust_ratio),
    "rank of the tensor": stateless(lambda g: -g * g.ndim),
    "size of the tensor": stateless(lambda g: -g / g.numel()),
    "in a chain": optim.chain(optim.sgd(0.1), stateless(lambda g: g / g.norm())),
    "direction of the matrix": stateless(whiten),
}

EXACT = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(optim.warmup_cosine(0.1, 1, 4)),
    "adamw with a decay mask": optim.adamw(0.1, weight_decay=0.1, mask=lambda p: tree.map(lambda x: x.ndim > 1, p)),
    "clip": optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1)),
    "signs": stateless(lambda g: -0.1 * g.sign()),
    "torchopt.sgd": optim.leafwise(torchopt.sgd(0.1, momentum=0.9, nesterov=True)),
    "torchopt.adam": optim.leafwise(torchopt.adam(0.1)),
    "torchopt.adamw": optim.leafwise(torchopt.adamw(0.1)),
    "torchopt.rmsprop": optim.leafwise(torchopt.rmsprop(0.1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_pair_that_is_exact_on_shards_is_recognised(name):
    assert is_exact_on_shards(EXACT[name]) is True


@pytest.mark.parametrize("name", WHOLE)
def test_a_pair_that_needs_full_leaves_is_recognised(name):
    assert is_exact_on_shards(WHOLE[name]) is False


@pytest.mark.parametrize("name", ["norm of each leaf", "trust ratio", "rank of the tensor"])
def test_an_optimizer_that_is_not_exact_on_shards_trains_wrongly_there(name):
    opt = WHOLE[name]
    step = train_step_for(loss_of, opt)
    assert_equivalent(step, PARAMS, opt, batches_of(), stages=(0,))
    with pytest.raises(AssertionError, match="stage=3"):
        assert_equivalent(step, PARAMS, opt, batches_of(), stages=(3,), world_sizes=(2,))


def is_drawn(strategy: Any, what: Callable[[Any], bool]) -> bool:
    find_example(strategy, what)  # raises NoSuchExample
    return True


def find_example(strategy: Any, what: Callable[[Any], bool]) -> Any:
    return find(
        strategy, what, settings=settings(max_examples=100, phases=[Phase.generate], database=None)
    )  # any will do, not the least


def holds(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Tell whether a tree has a node of a kind."""

    def within(x: Any) -> bool:
        children = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
        return kind(x) or any(within(child) for child in children)

    return within


NODES: dict[str, Callable[[Any], bool]] = {
    "0-d leaf": lambda x: isinstance(x, torch.Tensor) and x.ndim == 0,
    "empty leaf": lambda x: isinstance(x, torch.Tensor) and x.numel() == 0,
    "matrix": lambda x: isinstance(x, torch.Tensor) and x.ndim == 2,
    "leaf that nothing divides": lambda x: isinstance(x, torch.Tensor) and x.numel() in (13, 17),
    "None": lambda x: x is None,
    "list": lambda x: isinstance(x, list),
    "tuple": lambda x: type(x) is tuple,
    "NamedTuple": lambda x: hasattr(x, "_fields"),
    "dict in a dict": lambda x: isinstance(x, dict) and any(isinstance(v, dict) for v in x.values()),
    "list of dicts": lambda x: isinstance(x, list) and any(isinstance(v, dict) for v in x),
}


@pytest.mark.parametrize("name", NODES)
def test_every_kind_of_node_is_drawn_in_trees(name):
    assert is_drawn(testing.trees(), holds(NODES[name]))


@given(testing.trees())
def test_trees_are_dicts_with_a_leaf_and_float64_by_default(drawn):
    leaves = tree.tensors(drawn)
    assert isinstance(drawn, dict) and len(leaves) >= 1
    assert all(x.dtype == torch.float64 and x.isfinite().all() for x in leaves)


@given(testing.trees(max_leaves=2))
def test_drawn_trees_are_about_as_large_as_asked(drawn):
    assert len(tree.tensors(drawn)) <= 1 + 2 * 3


KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@given(testing.trees(dtypes=KINDS))
def test_trees_have_the_dtypes_asked_for(drawn):
    for x in tree.tensors(drawn):
        assert x.dtype in KINDS
        assert x.dtype != torch.int64 or ((x >= 0) & (x < 9)).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_trees_have_each_dtype_asked_for(dtype):
    assert is_drawn(testing.trees(dtypes=KINDS), lambda t: any(x.dtype == dtype for x in tree.tensors(t)))


def test_drawn_trees_repeat_from_their_seed():
    def spread(t: Any) -> bool:
        return any(x.numel() > 3 and x.std() > 0.1 for x in tree.tensors(t))

    assert_trees_close(find_example(testing.trees(), spread), find_example(testing.trees(), spread), 0.0)


@given(testing.stages())
def test_the_strategy_of_stages_draws_0_to_3(stage):
    assert stage in STAGES


@given(testing.world_sizes())
def test_world_sizes_are_one_to_eight(n):
    assert 1 <= n <= 8


@given(testing.world_sizes(3))
def test_world_sizes_end_where_asked(n):
    assert 1 <= n <= 3


def test_every_stage_and_world_size_is_drawn():
    assert all(is_drawn(testing.stages(), lambda s, stage=stage: s == stage) for stage in STAGES)
    assert all(is_drawn(testing.world_sizes(), lambda m, n=n: m == n) for n in range(1, 9))


@given(opt=testing.optimizers(), params=testing.trees())
def test_optimizers_are_pairs_exact_on_shards_that_update_any_tree(opt, params):
    init, update = opt
    state = init(params)
    updates, new_state = update(params, state, params)
    new = optim.apply_updates(params, updates)
    for before, after in [(params, new), (state, new_state)]:
        assert [(x.shape, x.dtype) for x in tree.tensors(before)] == [(x.shape, x.dtype) for x in tree.tensors(after)]
    assert opt.exact_on_shards


KINDS_OF_STATE = {
    "plain": lambda s: isinstance(s, optim.SgdState) and s.momentum is None,
    "momentum": lambda s: isinstance(s, optim.SgdState) and s.momentum is not None,
    "adam": lambda s: isinstance(s, optim.AdamState),
    "chain": lambda s: type(s) is tuple,
}


@pytest.mark.parametrize("kind", KINDS_OF_STATE)
def test_optimizers_of_every_kind_are_drawn(kind):
    assert is_drawn(testing.optimizers(), lambda opt: KINDS_OF_STATE[kind](opt.init(PARAMS)))
