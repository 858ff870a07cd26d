"""Units that are gathered over the hosts first, and then within a host: the order of `axis=` is that of their parts."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.testing import assert_equivalent, assert_trees_close, stages, trees
from tests.helpers import cases, examples, train_step_for
from tests.zero.helpers import loss_of_tree

HOSTS_FIRST = ("dp", "host")
BLOCKS, WIDTH = 4, 16


def blocks() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {"blocks": [{"w": torch.randn(WIDTH, WIDTH, generator=g) / 4} for _ in range(BLOCKS)]}


def layer(block: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ block["w"])


def make_jitted(
    axis: tuple[str, ...],
    k: int = 1,
    precision: Any = None,
    remat: bool = False,
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> tuple[Any, list[Any], Any]:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for block in params["blocks"]:
            x = (fzero.remat(layer) if remat else layer)(block, x)
        return x.square().mean()

    opt = optim.adam(1e-2) if precision is None else optim.master_weights(optim.adam(1e-2), precision)
    mesh = fzero.mesh(**(sizes or {"host": 2, "dp": 2}))
    train_step = train_step_for(loss, opt, micro_batches=k, precision=precision)
    step = fzero.shard(train_step, stage=3, mesh=mesh, axis=axis)
    dtype = torch.float32 if precision is None else precision.param
    batch = torch.randn(8 * k, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    return fzero.jit(step, backend="fx", **options), [*step.init(blocks(), opt), mesh.split(batch)], step


def sent(plan: Any) -> Counter[tuple[str, str]]:
    """Count the bytes of each kind of collective along each axis, in a step."""
    total = Counter[tuple[str, str]]()
    for c in plan.collectives:
        total[c.kind, c.axis] += c.bytes * c.times
    return total


PRECISIONS = {
    "float32": None,
    "bfloat16": fzero.Precision(torch.bfloat16),
    "float32 shards": fzero.Precision(torch.bfloat16, shard=torch.float32),
    "sums in bfloat16": fzero.Precision(torch.bfloat16, reduce=torch.bfloat16, grad=torch.float32),
}
FEW = [("float32", 3, False), ("float32", 2, True), ("float32 shards", 1, True), ("sums in bfloat16", 3, True)]


@pytest.mark.parametrize("name,k,remat", cases(FEW, itertools.product(PRECISIONS, (1, 2, 3), (False, True))))
def test_a_unit_passes_between_hosts_once_a_step_and_within_a_host_as_often_as_at_stage_3(name, k, remat):
    precision = PRECISIONS[name]
    usual, hosts_first = (
        sent(fzero.plan(step, *args))
        for step, args, _ in (
            make_jitted(axis, k, precision, remat, max_reuse_bytes=0) for axis in (("host", "dp"), HOSTS_FIRST)
        )
    )
    of_parameters = BLOCKS * WIDTH**2 * (4 if precision is None else 2)
    assert hosts_first["all_gather", "host"] == of_parameters / 2  # a rank receives a host's half of each unit
    assert hosts_first["all_gather", "dp"] == usual["all_gather", "host,dp"] > k * of_parameters
    assert hosts_first["reduce_scatter", "dp"] == usual["reduce_scatter", "host,dp"]
    assert hosts_first["reduce_scatter", "host"] == hosts_first["reduce_scatter", "dp"] / 2


def test_the_record_of_a_step_names_the_axis_of_each_gather():
    _, args, step = make_jitted(HOSTS_FIRST)
    with fzero.collectives.record() as log:
        step(*args)
    gathers = Counter([event.axis for event in log.events if event.kind == "all_gather"])
    assert gathers == {"host": BLOCKS, "dp": BLOCKS}


@pytest.mark.parametrize("k", cases([3], [1]))
def test_a_rank_holds_its_hosts_share_during_the_step_and_its_own_between_steps(k):
    (usual, args, step), (hosts_first, more, _) = (make_jitted(axis, k) for axis in (("host", "dp"), HOSTS_FIRST))
    plans = fzero.plan(usual, *args), fzero.plan(hosts_first, *more)
    assert fzero.zero.state_bytes(more[0], step.mesh) == fzero.zero.state_bytes(args[0], step.mesh)
    share = BLOCKS * WIDTH**2 * 4 / 2
    assert 0 < plans[1].peak_bytes - plans[0].peak_bytes <= 1.5 * share


def test_gathered_units_that_stay_in_memory_are_gathered_once_over_each_axis():
    step, args, _ = make_jitted(HOSTS_FIRST, 3, max_reuse_bytes=float("inf"))
    plan = sent(fzero.plan(step, *args))
    assert plan["all_gather", "dp"] == BLOCKS * WIDTH**2 * 4 == 2 * plan["all_gather", "host"]


@pytest.mark.parametrize("k,remat", cases([(1, False), (3, True)], [(1, True), (3, False)]))
def test_a_jitted_step_trains_as_an_eager_one(k, remat):
    jit, args, step = make_jitted(HOSTS_FIRST, k, None, remat)
    *state, batch = args
    eager = fzero.tree.map(torch.clone, state)
    for _ in range(3):
        *eager, expected = step(*eager, batch)
        *state, loss = jit(*state, batch)
        assert_trees_close(loss, expected)
    assert_trees_close(step.gather(state), step.gather(eager))


MESHES = [{"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 1, "b": 3}, {"a": 2, "b": 2, "c": 2}]


@examples(3, 60)
@given(trees(), st.sampled_from(MESHES), st.data(), stages(), st.integers(1, 2))
def test_any_order_of_axes_trains_as_unsharded(params, sizes, data, stage, k):
    axis = tuple(data.draw(st.permutations(sorted(sizes))))
    params = tree.map(lambda x: x.double(), params)
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adam(1e-2, eps=1e-3))
    batches = [{"x": torch.linspace(-1, 1 + i, 24, dtype=torch.float64)} for i in range(2)]
    step = train_step_for(loss_of_tree, opt, micro_batches=k)
    assert_equivalent(step, params, opt, batches, stages=(stage,), meshes=[fzero.mesh(**sizes)], axis=axis)


def test_randomness_of_an_example_does_not_depend_on_the_order_of_axes():
    """A batch is split in the mesh's order, so the index of a rank's examples must not follow `axis=`."""
    opt = optim.sgd(0.1)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x @ params["w"], 0.5, True).square().mean()

    def train_step(params: Any, state: Any, x: torch.Tensor, key: Any) -> Any:
        value, grads = fzero.value_and_grad(lambda p, x: fzero.random.seeded(loss)(key, p, x))(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    x, params, mesh = torch.randn(12, 4), {"w": torch.eye(4)}, fzero.mesh(host=2, dp=3)
    losses = []
    for axis in (HOSTS_FIRST, ("host", "dp")):
        step = fzero.shard(train_step, stage=3, mesh=mesh, axis=axis)
        losses.append(step(*step.init(params, opt), mesh.split(x), fzero.random.key(3))[2])
    assert_trees_close(*losses)


@pytest.mark.parametrize("axis,stage", cases([(HOSTS_FIRST, 3), (("host", "dp"), 2)], [(HOSTS_FIRST, 1)]))
def test_a_state_of_one_order_moves_into_the_other(axis, stage, tmp_path):
    opt, mesh = optim.adam(1e-2), fzero.mesh(host=2, dp=3)
    first, second = (
        fzero.shard(train_step_for(lambda p, x: x.sum() * 0, opt), stage=stage, mesh=mesh, axis=a)
        for a in (axis, axis[::-1])
    )
    full = {"w": torch.arange(35.0).reshape(7, 5), "b": torch.arange(3.0)}
    state = first.init(full, opt)
    fzero.save(tmp_path / "state", list(state), mesh=mesh)
    moved = fzero.load(tmp_path / "state", like=list(second.init(tree.map(torch.zeros_like, full), opt)), mesh=mesh)
    assert_trees_close(second.gather(moved), first.gather(list(state)))


@pytest.mark.parametrize("axis", [("dp", "host"), ("host", "dp"), None])
def test_examples_are_evaluated_in_the_order_in_which_batches_are_split(axis):
    """Any order of `axis=` means the same examples: the first rows of the batch, and outputs in its order."""
    mesh, x = fzero.mesh(host=2, dp=3), torch.arange(12.0)
    step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=mesh, axis=HOSTS_FIRST)
    params, _ = step.init({"w": torch.tensor([2.0])}, optim.sgd(0.1))
    outputs = fzero.predict(step, lambda params, x: x * params["w"], axis=axis)
    assert outputs(params, mesh.split(x)).tolist() == (2 * x).tolist()
    totals = fzero.evaluate(step, lambda params, x: x * params["w"], axis=axis)
    assert [float(value) for value in totals(params, mesh.split(x), 5)] == [2 * sum(range(5)), 5]


TWICE = ("dp", "dp")


@pytest.mark.parametrize(
    "run",
    [
        lambda mesh: fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=mesh, axis=("dp", "host", "dp")),
        lambda mesh: mesh.split(torch.ones(4), TWICE),
        lambda mesh: mesh.spmd(lambda x: fzero.collectives.psum(x, TWICE))(torch.ones(4)),
        lambda mesh: mesh.spmd(lambda x: fzero.transforms.partition(x, axis=TWICE))({"w": torch.ones(4)}),
        lambda mesh: mesh.spmd(lambda x: fzero.value_and_grad(torch.sum, axis=TWICE)(x))(torch.ones(4)),
    ],
    ids=["shard", "split", "psum", "partition", "value_and_grad"],
)
def test_an_axis_that_is_named_twice_is_refused(run):
    """A unit would be divided by its ranks twice, and summed over them once: training on wrong numbers."""
    with pytest.raises(ValueError, match="names 'dp' twice: expected"):
        run(fzero.mesh(host=2, dp=2))
