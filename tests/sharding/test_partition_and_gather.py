"""Laws of the layout: partition, gather and reduce_scatter of trees, and the boxes."""

import copy
import pickle
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import PerRank, tree
from fzero.sharding import Shard
from fzero.sharding._boxes import is_box
from fzero.testing import assert_trees_close, trees, world_sizes
from tests.helpers import ALL_STAGES, cases, examples, mlp_batch, mlp_loss, mlp_params

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
RULES = st.sampled_from([None, lambda p, x: "all", lambda p, x: p, lambda p, x: None if x.ndim == 0 else p[:3]])


def shards_of(values: Any) -> list[Shard]:
    return [x for x in tree.flatten(values, is_box)[0] if isinstance(x, Shard)]


def forget(values: Any) -> Any:
    """Copy a tree, so that its boxes no longer know what they were sharded from."""
    return tree.map(lambda x: x.clone(), values)


@examples(25, 100)
@given(trees(DTYPES), world_sizes(), RULES)
def test_gather_after_partition_is_the_identity(params, n, rule):
    """Bitwise, with the memory of the origin and without it, for every dtype."""
    mesh = fzero.mesh(dp=n)
    for f in (lambda x: x, forget):
        out = mesh.spmd(lambda p, f=f: fzero.gather(f(fzero.partition(p, units=rule))))(params)
        assert_trees_close(out, params, rtol=0)


@examples(25, 100)
@given(trees(DTYPES), world_sizes(), RULES)
def test_partition_after_gather_is_the_identity(params, n, rule):
    mesh = fzero.mesh(dp=n)
    boxes = mesh.spmd(lambda p: fzero.partition(p, units=rule))(params)
    again = mesh.spmd(lambda b: fzero.partition(fzero.gather(b), units=rule))(boxes)
    assert tree.flatten(again)[1] == tree.flatten(boxes)[1]
    assert_trees_close([x.data for x in shards_of(again)], [x.data for x in shards_of(boxes)], rtol=0)


@examples(30, 60)
@given(trees(DTYPES), world_sizes())
def test_shards_are_the_unit_cut_in_equal_parts(params, n):
    boxes = fzero.mesh(dp=n).spmd(fzero.partition)(params)
    leaves = dict(zip(*tree.flatten_with_paths(params)[:2], strict=True))
    for box in shards_of(boxes):
        flat = torch.cat([leaves[path].reshape(-1) for path in box.spec.paths])
        assert box.data.shape == (n, -(-flat.numel() // n)) == (n, box.spec.shard_numel)
        assert torch.equal(box.data.reshape(-1)[: flat.numel()], flat)
        assert not box.data.reshape(-1)[flat.numel() :].any()
        assert {leaves[path].dtype for path in box.spec.paths} == {box.spec.dtype}
    sharded = {path for box in shards_of(boxes) for path in box.spec.paths}
    assert sharded == {p for p, x in leaves.items() if x is not None and x.is_floating_point()}


@examples(15, 60)
@given(trees(), world_sizes(), RULES)
def test_reduce_scatter_is_the_transpose_of_gather(params, n, rule):
    """The dot-product test: the gradient of <gather(shards), y> is reduce_scatter(y)."""
    mesh = fzero.mesh(dp=n)

    def program(params: Any, seed: torch.Tensor) -> Any:
        boxes = fzero.partition(params, units=rule)
        # a gradient for each leaf that differs by rank
        y = tree.map(lambda x: torch.sin(x + seed), params)

        leaves, structure = tree.flatten(boxes)

        def pairing(tensors: list[torch.Tensor]) -> torch.Tensor:
            rest = iter(tensors)
            full = fzero.gather(tree.unflatten(structure, [x if x is None else next(rest) for x in leaves]))
            return torch.stack([(a * b).sum() for a, b in zip(tree.tensors(full), tree.tensors(y), strict=True)]).sum()

        grads = iter(torch.func.grad(pairing)(tree.tensors(boxes)))
        by_grad = tree.map(lambda x: next(grads), boxes)
        by_hand = fzero.reduce_scatter(y, like=boxes)
        replicated = [x for x in tree.flatten(by_grad, is_box)[0] if isinstance(x, torch.Tensor)]
        hand = [x for x in tree.flatten(by_hand, is_box)[0] if isinstance(x, torch.Tensor)]
        return (
            [PerRank(x.data) for x in shards_of(by_grad)],
            [PerRank(x.data) for x in shards_of(by_hand)],
            [
                fzero.collectives.psum(x) for x in replicated
            ],  # plain leaves were never gathered: their gradient is this rank's
            hand,
        )

    by_grad, by_hand, plain_grad, plain_hand = mesh.spmd(program)(params, mesh.local(torch.arange(n).double()))
    assert_trees_close(by_grad, by_hand)
    assert_trees_close(plain_grad, plain_hand)


@examples(20, 40)
@given(trees(), world_sizes())
def test_the_transpose_of_partition_pads_the_shard_with_zeros(params, n):
    mesh = fzero.mesh(dp=n)
    leaves = list(tree.tensors(params))

    def program(leaves: list[torch.Tensor]) -> Any:
        def f(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            return [x.data for x in shards_of(fzero.partition(leaves, units=lambda p, x: "all"))]

        out, pull = torch.func.vjp(f, leaves)
        (grads,) = pull([torch.ones_like(x) for x in out])
        return fzero.collectives.psum(grads)

    # each element is in exactly one shard, so the parts add up to ones
    for g in mesh.spmd(program)(leaves):
        assert torch.equal(g, torch.ones_like(g))


@examples(13, 25)
@given(world_sizes(4), st.integers(1, 3))
def test_gradients_inside_equal_gradients_outside(n, b):
    """torch.func.grad over boxes by the user: d(sum over ranks of the loss) / d(own shard)."""
    mesh, params, batch = fzero.mesh(dp=n), mlp_params(), mlp_batch(n * b)

    def inside(params: Any, batch: Any) -> Any:
        boxes = fzero.partition(params)
        return fzero.gather(torch.func.grad(lambda boxes: mlp_loss(fzero.gather(boxes), batch))(boxes))

    got = mesh.spmd(inside)(params, mesh.split(batch))
    expected = torch.func.grad(lambda p: mlp_loss(p, batch) * n)(params)
    assert_trees_close(tree.tensors(got), tree.tensors(expected), rtol=1e-11)


@settings(max_examples=10)
@given(world_sizes(4))
def test_the_gradient_of_each_sample_is_reduced_into_shards(n):
    """vmap over samples inside a rank program: each sample's gradient is reduced into shards."""
    mesh, params, batch = fzero.mesh(dp=n), mlp_params(), mlp_batch(n * 3)

    def program(params: Any, batch: Any) -> Any:
        boxes = forget(fzero.partition(params))

        def grad(sample: Any) -> Any:
            return torch.func.grad(lambda boxes: mlp_loss(fzero.gather(boxes), sample))(boxes)

        return fzero.gather(tree.map(lambda g: g.sum(0), torch.vmap(grad)(batch)))

    got = mesh.spmd(program)(params, mesh.split(batch))
    expected = torch.vmap(torch.func.grad(mlp_loss), in_dims=(None, 0))(params, batch)
    assert_trees_close(tree.tensors(got), [g.sum(0) for g in tree.tensors(expected)], rtol=1e-11)


@settings(max_examples=10)
@given(world_sizes(4), st.booleans())
def test_jvp_goes_through_gather(n, remember):
    mesh, params, batch = fzero.mesh(dp=n), mlp_params(), mlp_batch(n * 2)

    def program(params: Any, batch: Any) -> Any:
        boxes = fzero.partition(params) if remember else forget(fzero.partition(params))
        f = lambda boxes: mlp_loss(fzero.gather(boxes), batch)  # noqa: E731
        if remember:  # torch.func flattens boxes, which then forget; value_and_grad does not
            leaves, structure = tree.flatten(boxes, is_box)
            f = lambda data: mlp_loss(fzero.gather(_with_data(structure, leaves, data)), batch)  # noqa: E731
            boxes = [x.data for x in shards_of(boxes)]
        return fzero.collectives.pmean(torch.func.jvp(f, (boxes,), (boxes,))[1])

    got = mesh.spmd(program)(params, mesh.split(batch))
    torch.testing.assert_close(got, torch.func.jvp(lambda p: mlp_loss(p, batch), (params,), (params,))[1])


def _with_data(structure: Any, leaves: list[Any], data: list[torch.Tensor]) -> Any:
    rest = iter(data)
    return tree.unflatten(
        structure, [Shard(next(rest), x.spec_id, x.origin) if isinstance(x, Shard) else x for x in leaves]
    )


@settings(max_examples=10)
@given(world_sizes(3), st.booleans())
def test_value_and_grad_gives_the_gradient_of_a_gradient(n, boxed):
    """The gradient of a gradient's norm, as a gradient penalty needs it."""
    mesh, params, batch = fzero.mesh(dp=n), {"w": mlp_params()["blocks"][0]["w"]}, mlp_batch(n * 2)

    def loss(p: Any, batch: Any) -> torch.Tensor:
        return (torch.tanh(batch["x"] @ p["w"]) ** 2).mean()

    def penalty(p: Any, batch: Any) -> torch.Tensor:
        return torch.func.grad(lambda p: loss(p, batch))(p)["w"].square().sum()

    def program(p: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(penalty)(fzero.partition(p) if boxed else p, batch)
        return value, fzero.gather(grads)

    _value, grads = mesh.spmd(program)(params, mesh.split(batch))
    parts = [{k: v[i * 2 : i * 2 + 2] for k, v in batch.items()} for i in range(n)]
    expected = torch.func.grad(lambda p: sum(penalty(p, part) for part in parts) / n)(params)
    assert_trees_close(grads, expected, rtol=1e-11)


def operations(graph: torch.fx.GraphModule) -> list[str]:
    graph.graph.eliminate_dead_code()
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_gathering_an_unchanged_partition_is_free():
    """No collective and no copy in the traced graph: only aliases of what went in."""
    mesh = fzero.mesh(dp=2)
    graph = make_fx(mesh.spmd(lambda p: fzero.gather(fzero.partition(p))))({"w": torch.ones(3), "b": torch.ones(2)})
    assert set(operations(graph)) <= {"aten.view.default", "aten.alias.default", "aten.detach.default"}


def test_a_changed_box_forgets_its_origin():
    def program(p: Any) -> Any:
        boxes = fzero.partition(p)
        assert all(box.origin is not None for box in shards_of(boxes))
        for changed in (tree.map(lambda x: x * 2, boxes), optree.tree_map(lambda x: x * 2, boxes)):
            assert all(box.origin is None for box in shards_of(changed))
        return fzero.gather(tree.map(lambda x: x * 2, boxes))

    assert fzero.mesh(dp=2).spmd(program)({"w": torch.ones(3)})["w"].tolist() == [2, 2, 2]


def test_the_origin_of_a_box_never_leaves_the_step():
    boxes = fzero.mesh(dp=2).spmd(fzero.partition)({"w": torch.ones(3)})
    assert boxes["w"].origin is None


@examples(10, 40)
@given(trees(), world_sizes(), st.floats(-9, 9))
def test_values_of_the_padding_have_no_effect(params, n, noise):
    """Whatever the padding holds, gathered leaves, norms and gradients are the same."""
    mesh = fzero.mesh(dp=n)

    def program(params: Any, rank: torch.Tensor) -> Any:
        clean = forget(fzero.partition(params))
        noisy = tree.map(lambda box: _fill_padding(box, rank, noise), clean, is_leaf=is_box)
        loss = lambda p, _: sum((x**2).sum() for x in tree.tensors(p))  # noqa: E731
        grads = [fzero.gather(fzero.value_and_grad(loss)(boxes, None)) for boxes in (clean, noisy)]
        norms = [fzero.optim.global_norm(boxes) for boxes in (clean, noisy)]
        return grads, norms, fzero.gather(noisy)

    grads, norms, gathered = mesh.spmd(program)(params, mesh.local(torch.arange(n)))
    assert_trees_close(gathered, params, rtol=0)
    assert_trees_close(grads[1], grads[0], rtol=0)
    assert torch.equal(norms[0], norms[1])
    whole = torch.cat([x.reshape(-1) for x in tree.tensors(params)])
    torch.testing.assert_close(norms[0], whole.norm(), rtol=1e-12, atol=1e-12)


def _fill_padding(box: Any, rank: torch.Tensor, value: float) -> Any:
    if not isinstance(box, Shard):
        return box
    k = box.spec.shard_numel
    padding = rank * k + torch.arange(k) >= box.spec.numel
    return Shard(torch.where(padding, value, box.data), box.spec_id)


def test_tree_map_of_torch_and_optree_visits_each_shard_once():
    boxes = fzero.mesh(dp=2).spmd(fzero.partition)(mlp_params())
    assert [s.spec.unit for s in shards_of(boxes)] == ["blocks.0", "blocks.1", "scale", "head"]
    leaves = list(optree.tree_leaves(boxes))
    assert len(leaves) == len(tree.tensors(boxes)) == 4
    doubled = optree.tree_map(lambda x: 2 * x, boxes)
    assert_trees_close(tree.tensors(doubled), [2 * x for x in tree.tensors(boxes)], rtol=0)


def test_boxes_of_differently_sharded_trees_refuse_to_be_combined():
    params = {"w": torch.ones(5)}
    two, three = (fzero.mesh(dp=n).spmd(fzero.partition)(params) for n in (2, 3))
    with pytest.raises(
        ValueError, match=r"sharded differently at 'w': Shard\('w', float32 \[5\], 3 of 5 elements, dp=2\) against"
    ):
        tree.map(torch.add, two, three)
    with pytest.raises(ValueError):
        optree.tree_map(torch.add, two, three)


def test_equal_specs_are_one_object_and_survive_pickling_and_copying():
    boxes = fzero.mesh(dp=2).spmd(fzero.partition)({"w": torch.ones(5), "b": torch.ones(2)})
    for again in (pickle.loads(pickle.dumps(boxes)), copy.deepcopy(boxes)):
        assert tree.flatten(again)[1] == tree.flatten(boxes)[1]
        assert again["w"].spec is boxes["w"].spec
    assert hash(boxes["w"].spec) == hash(boxes["w"].spec) and (boxes["w"].spec == boxes["b"].spec) is False


def test_two_trees_of_one_layout_in_one_tree_gather_apart():
    """Parameters and their moving average, side by side or interleaved with rebuilt dicts."""
    mesh, params = fzero.mesh(dp=2), {"u": {"a": torch.arange(3.0), "b": torch.ones(2)}}

    def program(p: Any) -> Any:
        one = forget(fzero.partition(p))
        two = tree.map(lambda x: -x, one)
        backwards = {"u": dict(reversed(one["u"].items()))}
        return fzero.gather([one, two]), fzero.gather(backwards)

    (one, two), backwards = mesh.spmd(program)(params)
    assert_trees_close(one, params, rtol=0)
    assert_trees_close(two, tree.map(lambda x: -x, params), rtol=0)
    assert_trees_close(backwards["u"]["b"], params["u"]["b"], rtol=0)


def test_reduce_scatter_keeps_two_trees_of_one_layout_apart():
    mesh, params = fzero.mesh(dp=2), {"u": {"a": torch.arange(3.0), "b": torch.ones(2)}}

    def program(p: Any) -> Any:
        like = [fzero.partition(p), fzero.partition(p)]
        return fzero.gather(fzero.reduce_scatter([p, tree.map(lambda x: -x, p)], like=like))

    one, two = mesh.spmd(program)(params)
    assert_trees_close(one, tree.map(lambda x: 2 * x, params), rtol=0)
    assert_trees_close(two, tree.map(lambda x: -2 * x, params), rtol=0)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("k", [1, 2])
def test_tied_leaves_are_one_parameter_and_stay_tied(stage, n, k):
    """A tensor at two paths: one gradient, the sum over both uses; stored once when sharded; still one tensor after."""
    w = mlp_params()["blocks"][0]["w"]
    params = {"in": {"w": w}, "mid": [{"b": torch.ones(7).double()}], "out": {"w": w}}
    opt = fzero.optim.chain(fzero.optim.clip_by_global_norm(1e-3), fzero.optim.sgd(10.0, momentum=0.9))

    def loss(p: Any, batch: Any) -> torch.Tensor:
        h = torch.tanh(batch["x"] @ p["in"]["w"] + p["mid"][0]["b"])
        return (h @ p["out"]["w"].T - batch["x"]).square().mean()

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, micro_batches=k)(params, batch)
        params, opt_state = fzero.transforms.step(opt)(params, grads, opt_state)
        return params, opt_state, value

    # the reference knows nothing of ties: one leaf, used twice
    single = {"w": w, "b": params["mid"][0]["b"]}
    ref_opt_state = opt.init(single)
    mesh = fzero.mesh(dp=n)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    state = step.init(params, opt)
    for i in range(3):
        batch = mlp_batch(6, seed=i)
        value, g = fzero.value_and_grad(
            lambda s, b: loss({"in": {"w": s["w"]}, "mid": [{"b": s["b"]}], "out": {"w": s["w"]}}, b), micro_batches=k
        )(single, batch)
        single, ref_opt_state = fzero.transforms.step(opt)(single, g, ref_opt_state)
        *state, loss_value = step(*state, mesh.split(batch))
        torch.testing.assert_close(loss_value, value, rtol=1e-12, atol=1e-12)
    full = step.gather(state[0])
    assert full["in"]["w"] is full["out"]["w"]
    assert_trees_close([full["in"]["w"], full["mid"][0]["b"]], [single["w"], single["b"]])
    if stage == 3:
        assert sum(x.numel() for x in tree.tensors(state[0])) == n * (-(-49 // n) + -(-7 // n))


def test_trees_whose_leaves_alternate_are_refused():
    """Nothing would tell which shard a slot belongs to: {"a": (p, average of p), "b": ...}."""
    mesh = fzero.mesh(dp=2)

    def program(params: Any) -> Any:
        boxes = fzero.partition(params, units=lambda path, leaf: "one")
        other = tree.map(lambda x: 10 * x, boxes)
        together = fzero.gather((boxes, other))
        with pytest.raises(ValueError, match="leaves of 2 trees of one layout alternate"):
            fzero.gather({name: (boxes[name], other[name]) for name in boxes})
        return together

    one, other = mesh.spmd(program)({"a": torch.ones(2), "b": torch.full((3,), 2.0)})
    assert one["b"].tolist() == [2, 2, 2] and other["b"].tolist() == [20, 20, 20]
