"""Laws of meshes with several axes: collectives over one or some of them, and units that lie over different ones."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import PerRank, optim, tree
from fzero.testing import assert_equivalent, assert_trees_close, stages, trees
from tests.collectives.helpers import COLLECTIVES, draw_stacked, simulations
from tests.helpers import ALL_STAGES, cases, either, examples, train_step_for
from tests.zero.helpers import ARRANGEMENTS, along, loss_of_tree, parallel_loss, parallel_params, parts

SHAPES = [
    {"a": 2, "b": 2},
    {"a": 2, "b": 3},
    {"a": 4, "b": 2},
    {"a": 2, "b": 4},
    {"a": 1, "b": 3},
    {"a": 2, "b": 2, "c": 2},
]
shapes = st.sampled_from(SHAPES)


def run_on_mesh(axes: dict[str, int], f: Callable[..., torch.Tensor], *xs: torch.Tensor, simulate: str = "vmap") -> Any:
    mesh = fzero.mesh(simulate=simulate, **axes)
    return mesh.spmd(lambda *xs: PerRank(f(*xs)))(*[PerRank(x) for x in xs]).value


def size_of(axes: dict[str, int], names: tuple[str, ...]) -> int:
    n = 1
    for name in names:
        n *= axes[name]
    return n


@st.composite
def meshes_and_axes(draw: Any) -> tuple[dict[str, int], tuple[str, ...]]:
    axes = draw(shapes)
    return axes, tuple(draw(st.permutations(sorted(axes)))[: draw(st.integers(1, len(axes)))])


def join_to_one_axis(axes: dict[str, int], names: tuple[str, ...], X: torch.Tensor) -> torch.Tensor:
    """Rearrange [ranks, ..] as [ranks along the other axes, ranks along `names` in their order, ..]."""
    order = list(axes)
    rest = [name for name in order if name not in names]
    X = X.unflatten(0, list(axes.values()))
    X = X.permute(*[order.index(name) for name in (*rest, *names)], *range(len(order), X.ndim))
    return X.reshape(-1, size_of(axes, names), *X.shape[len(order) :])


@examples(30, 60)
@given(meshes_and_axes(), st.data(), simulations)
def test_a_collective_over_several_axes_equals_that_over_one_axis_of_as_many_ranks(mesh_and_axes, data, simulate):
    """Any tuple of axes, in any order, means one axis whose ranks are theirs, the first slowest."""
    axes, names = mesh_and_axes
    name = data.draw(st.sampled_from(sorted(along(names))))
    n = size_of(axes, names)
    X = draw_stacked(size_of(axes, tuple(axes)), 2, 2 * n)
    got = join_to_one_axis(axes, names, run_on_mesh(axes, along(names)[name], X, simulate=simulate))
    for mine, theirs in zip(got, join_to_one_axis(axes, names, X), strict=True):
        expected = run_on_mesh({"one": n}, along(("one",))[name], theirs)
        torch.testing.assert_close(mine, expected, rtol=1e-14, atol=1e-14)


@examples(14, 40)
@given(meshes_and_axes(), st.data(), simulations)
def test_transposes_on_several_axes_pass_the_dot_product_test(mesh_and_axes, data, simulate):
    axes, names = mesh_and_axes
    f = along(names)[data.draw(st.sampled_from(sorted(along(names))))]
    X = draw_stacked(size_of(axes, tuple(axes)), 2, 2 * size_of(axes, names))
    Y = torch.randn_like(run_on_mesh(axes, f, X))
    transposed = run_on_mesh(axes, lambda x, y: torch.func.vjp(f, x)[1](y)[0], X, Y, simulate=simulate)
    left, right = (run_on_mesh(axes, f, X) * Y).sum(), (X * transposed).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@examples(4, 30)
@given(meshes_and_axes(), st.data())
def test_lockstep_equals_vmap_on_several_axes(mesh_and_axes, data):
    axes, names = mesh_and_axes
    f = along(names)[data.draw(st.sampled_from(sorted(along(names))))]
    X = draw_stacked(size_of(axes, tuple(axes)), 3, 2, 2 * size_of(axes, names))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (torch.sin(f(x)) ** 2).sum()

    for program in (lambda x: torch.vmap(torch.func.grad(loss))(x), lambda x: torch.func.grad(loss)(x[0])):
        got, expected = (run_on_mesh(axes, program, X, simulate=s) for s in ("lockstep", "vmap"))
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@given(shapes)
@settings(max_examples=6)
def test_axis_index_counts_in_the_order_of_the_names(axes):
    n = size_of(axes, tuple(axes))
    for simulate in ("vmap", "lockstep"):
        got = run_on_mesh(axes, lambda: fzero.axes.axis_index(tuple(axes)), simulate=simulate)
        assert got.tolist() == list(range(n))
        backwards = run_on_mesh(axes, lambda: fzero.axes.axis_index(tuple(axes)[::-1]), simulate=simulate)
        assert (
            backwards.tolist()
            == torch.arange(n).reshape(*reversed(axes.values())).permute(*reversed(range(len(axes)))).flatten().tolist()
        )


# Values that are equal along an axis.


@examples(10, 40)
@given(st.integers(1, 4), st.integers(1, 3), simulations)
def test_megatrons_f_and_g_give_the_dense_gradients(tp, layers, simulate):
    """A column and row parallel MLP: value, gradient of the replicated input, and of each part of the weights."""
    g = torch.Generator().manual_seed(layers)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, ups, downs = normal(3, 5), normal(layers, 5, 2 * tp), normal(layers, 2 * tp, 5)

    def loss(x: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor) -> torch.Tensor:
        for up, down in zip(ups, downs, strict=True):
            h = torch.tanh(fzero.collectives.pvary(x, "tp" if parallel else None) @ up)
            x = x + fzero.collectives.psum_invariant(h @ down, "tp" if parallel else None)
        return x.square().mean()

    parallel = False
    expected = torch.func.grad_and_value(loss, argnums=(0, 1, 2))(x, ups, downs)
    parallel = True
    mesh = fzero.mesh(tp=tp, simulate=simulate)

    def program(x: torch.Tensor, ups: torch.Tensor, downs: torch.Tensor) -> Any:
        (gx, gu, gd), value = torch.func.grad_and_value(loss, argnums=(0, 1, 2))(x, ups, downs)
        return gx, PerRank(gu), PerRank(gd), value

    parts = PerRank(torch.stack(ups.chunk(tp, 2))), PerRank(torch.stack(downs.chunk(tp, 1)))
    gx, gu, gd, value = mesh.spmd(program)(x, *parts)
    got = (gx, torch.cat(list(gu.value), 2), torch.cat(list(gd.value), 1)), value
    assert_trees_close(got, expected)


@settings(max_examples=20)
@given(st.integers(1, 4), simulations)
def test_all_gather_invariant_gives_each_rank_the_gradient_of_its_part(tp, simulate):
    x, w = draw_stacked(tp, 2, 3), draw_stacked(2 * tp, 3, seed=1)
    f = lambda x: (fzero.collectives.all_gather_invariant(x, "tp") * w).square().sum()  # noqa: E731
    mesh = fzero.mesh(tp=tp, simulate=simulate)
    got = mesh.spmd(lambda x: PerRank(torch.func.grad(f)(x)))(PerRank(x)).value
    expected = torch.func.grad(lambda x: (x.flatten(0, 1) * w).square().sum())(x)
    torch.testing.assert_close(got, expected)
    second = mesh.spmd(lambda x: PerRank(torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())(x)))(
        PerRank(x)
    )
    outside = torch.func.grad(lambda x: (2 * x.flatten(0, 1) * w * w).square().sum())(x)
    torch.testing.assert_close(second.value, outside)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_invariant_collectives_refuse_values_that_differ_by_rank(simulate):
    mesh = fzero.mesh(tp=2, simulate=simulate)
    x = mesh.local(torch.arange(2.0))
    with pytest.raises(ValueError, match="pvary over 'tp' was given a value that differs by rank"):
        mesh.spmd(lambda x: PerRank(fzero.collectives.pvary(x, "tp")))(x)
    with pytest.raises(ValueError, match="pvary over 'tp' was given a value that differs by rank"):  # the loss varies
        mesh.spmd(
            lambda x: PerRank(torch.func.grad(lambda x: (fzero.collectives.psum_invariant(x, "tp") * y(x)).sum())(x))
        )(x)


def y(x: torch.Tensor) -> torch.Tensor:
    return x.detach() + 1


# Units over different axes.


@examples(3, 12)
@given(st.sampled_from(sorted(ARRANGEMENTS)), stages(), st.integers(1, 2), simulations, st.booleans())
def test_any_arrangement_equals_unsharded_training(name, stage, k, simulate, clip):
    axes, options = ARRANGEMENTS[name]
    opt = optim.adamw(1e-2, eps=1e-3, mask=lambda params: tree.map(lambda p: p.ndim >= 2, params))
    opt = optim.chain(optim.clip_by_global_norm(0.1), opt) if clip else opt
    train_step = train_step_for(parallel_loss, opt, micro_batches=k)
    params = parallel_params()
    mesh = fzero.mesh(simulate=simulate, **axes)
    step = fzero.shard(train_step, stage=stage, mesh=mesh, **options)
    size = 8 * 3 * k
    state, ref = step.init(params, opt), (params, opt.init(params))
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        batch = {name: torch.randn(size, 5, generator=g, dtype=torch.float64) for name in "xy"}
        *ref, expected = train_step(*ref, batch)
        *state, loss = step(*state, mesh.split(batch, step.data_axes))
        assert_trees_close(loss, expected)
    assert_trees_close(step.gather(list(state)), list(ref))


@pytest.mark.slow
@examples(4, 30)
@given(
    trees(),
    st.sampled_from(["hybrid", "hybrid, uneven", "both axes", "three axes", "small leaves on every rank"]),
    stages(),
)
def test_any_tree_on_two_axes_equals_unsharded_training(params, name, stage):
    axes, options = ARRANGEMENTS[name]
    params = tree.map(lambda x: x.double(), params)
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adam(1e-2, eps=1e-3))
    batches = [{"x": torch.linspace(-1, 1 + i, 12, dtype=torch.float64)} for i in range(2)]
    step = train_step_for(loss_of_tree, opt)
    assert_equivalent(step, params, opt, batches, stages=(stage,), meshes=[fzero.mesh(**axes)], **options)


SOME = ("hybrid", "tensor parallel", "experts over dp, the rest over both", "all three")
AT = [*zip(SOME, (3, 2, 1, 0), strict=True)]


@pytest.mark.parametrize("name,stage", cases(AT, itertools.product(SOME, ALL_STAGES)))
def test_bytes_and_elements_on_several_axes_follow_the_formulas(name, stage):
    """A rank holds and moves what the formulas of each unit's own ranks say; the same in both simulations."""
    axes, options = ARRANGEMENTS[name]
    opt = optim.sgd(0.1, momentum=0.9)
    params = parallel_params()
    held = []
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(simulate=simulate, **axes)
        step = fzero.shard(train_step_for(parallel_loss, opt), stage=stage, mesh=mesh, **options)
        state = step.init(params, opt)
        with fzero.collectives.record() as log:
            step(*state, mesh.split({name: torch.ones(8, 5, dtype=torch.float64) for name in "xy"}, step.data_axes))
        held.append((step.state_bytes(*state), sorted(map(str, log.unit_events)), sorted(map(str, log.other_events))))
    assert held[0] == held[1]
    dense = {"up": 40, "down": 40, "bias": 5}
    total = 0
    for leaf, numel in [*dense.items(), *dense.items(), ("router", 20), ("experts", 100)]:
        own, over = numel, axes.copy()
        if leaf in ("up", "down") and "tp" in axes:
            own //= axes["tp"]
        if leaf == "experts" and "ep" in axes:
            own //= over.pop("ep")
        over.pop("tp", None)
        n = axes["shard"] if name == "hybrid" else size_of(over, tuple(over))
        parameters = own / n if stage == 3 else own
        state = own if stage == 0 else own / n
        total += 8 * (parameters + state)
    padding = 8 * 2 * 8 * 10
    assert total <= held[0][0] - 8 <= total + padding  # and a count


@pytest.mark.slow
def test_masks_of_optimizers_see_full_leaves():
    """A mask by size or shape decays the same leaves however they are split."""
    masks = {
        "by size": lambda params: tree.map(lambda p: p.numel() >= 40, params),
        "by shape": lambda params: tree.map(lambda p: p.shape[-1] == 8, params),
    }
    axes, options = ARRANGEMENTS["all three"]
    batch = {name: torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5) for name in "xy"}
    for mask in masks.values():
        for opt in (
            optim.adamw(0.1, eps=1e-3, weight_decay=0.5, mask=mask),
            optim.masked(optim.chain(optim.clip_by_block_rms(0.1), optim.lamb(0.1, eps=1e-3)), mask),
        ):
            step = train_step_for(parallel_loss, opt)
            meshes = [fzero.mesh(**axes)]
            assert_equivalent(
                step, parallel_params(), opt, [batch], stages=either((3,), (0, 3)), meshes=meshes, **options
            )


def test_a_mean_over_an_axis_that_only_splits_leaves_is_refused():
    """A forgotten axis="dp": gradients of the parts would be divided by tp, and summed over nothing."""
    mesh = fzero.mesh(dp=2, tp=2)
    opt = optim.sgd(0.1)
    step = fzero.shard(train_step_for(parallel_loss, opt), stage=3, mesh=mesh, split=parts)
    batch = {name: torch.ones(8, 5, dtype=torch.float64) for name in "xy"}
    with pytest.raises(ValueError, match=r"the step averages over 'tp', along which .* axis=\('dp',\).*\('dp', 'tp'\)"):
        step(*step.init(parallel_params(), opt), mesh.split(batch, "dp"))


def test_a_mesh_without_a_data_axis_is_refused_with_a_remedy():
    mesh, opt = fzero.mesh(tp=2), optim.sgd(0.1)
    step = fzero.shard(train_step_for(parallel_loss, opt), stage=0, mesh=mesh, split=parts)
    batch = {name: PerRank(torch.ones(4, 5, dtype=torch.float64), ()) for name in "xy"}
    with pytest.raises(ValueError, match=r"averages over 'tp', .* such as axis='dp' of fzero.mesh\(dp=1"):
        step(*step.init(parallel_params(), opt), batch)


def test_several_rules_cut_over_an_axis_each():
    mesh = fzero.mesh(a=2, b=2)
    rules = [lambda path, leaf: {"a": 0}, lambda path, leaf: {"b": 1} if leaf.ndim > 1 else None]
    step = fzero.shard(lambda p, s: (p, s), 0, mesh, split=rules)
    params, _ = step.init({"w": torch.arange(16.0).view(4, 4), "v": torch.arange(4.0)}, optim.sgd(0.1))
    assert [(s.axis, s.dims) for s in params["w"].spec.split] == [("a", (0,)), ("b", (1,))]
    assert [s.axis for s in params["v"].spec.split] == ["a"]
    assert torch.equal(step.gather(params)["w"], torch.arange(16.0).view(4, 4))
    with pytest.raises(ValueError, match="two rules split leaf 'w' over 'a'"):
        fzero.shard(lambda p, s: (p, s), 0, mesh, split=(rules[0], rules[0])).init({"w": torch.ones(4)}, optim.sgd(0.1))
    with pytest.raises(TypeError, match=r"split=\[.*'no rule'\]: expected a rule"):
        fzero.shard(lambda p, s: (p, s), 0, mesh, split=[rules[0], "no rule"])


def test_boxes_of_a_mesh_in_another_order_are_refused():
    one, other = fzero.mesh(dp=2, tp=2), fzero.mesh(tp=2, dp=2)
    split = lambda path, leaf: {"tp": 0}  # noqa: E731
    steps = [fzero.shard(lambda p, s: (p, s), 3, mesh, "dp", split=split) for mesh in (one, other)]
    params, _ = steps[0].init({"w": torch.arange(8.0)}, optim.sgd(0.1))
    with pytest.raises(
        ValueError, match="was sharded on a mesh with the axes dp, tp in this order, and this mesh has tp, dp"
    ):
        steps[1].gather(params)


def test_a_box_over_an_axis_that_the_mesh_lacks_is_refused():
    mesh = fzero.mesh(dp=2, tp=2)
    for axes in ("d", ()):
        with pytest.raises(ValueError, match=r"expected some of the mesh's axes, \('dp', 'tp'\)"):
            mesh.spmd(lambda x: fzero.collectives.psum(x, "dp"))(PerRank(torch.ones(2), axes))


def test_wrong_results_of_split_rules_are_refused():
    mesh = fzero.mesh(tp=2)
    for rule, error in (
        ("tp", r"split: the rule gave 'tp' for leaf 'w', expected"),
        ({"tp": None}, r"split: the rule gave {'tp': None} for leaf 'w'"),
        ({"tp": 2}, r"along dimension 2 over 'tp': it has no such dimension"),
        ({"tp": 1}, r"split in 2 equal parts along dimension 1 over 'tp'; pad"),
        ({"pp": 0}, r"axis 'pp' is not bound here"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            mesh.spmd(lambda p, rule=rule: fzero.partition(p, (), split=lambda path, leaf: rule))(
                {"w": torch.ones(4, 3)}
            )


def test_gradients_of_units_over_more_ranks_than_the_mean_are_refused():
    mesh = fzero.mesh(a=2, b=2)

    def program(params: Any, x: torch.Tensor) -> Any:
        boxes = fzero.partition(params, ("a", "b"))
        return fzero.value_and_grad(lambda p, x: (p["w"] * x).mean(), axis="a")(boxes, x)

    with pytest.raises(ValueError, match=r"unit 'w' is sharded over \['a', 'b'\], and the mean is over \['a'\]"):
        mesh.spmd(program)({"w": torch.ones(3)}, mesh.split(torch.ones(4, 3)))


def test_three_axes_move_each_element_once():
    """One collective over a product of axes counts as one, whichever way the simulation runs it."""
    for simulate in ("vmap", "lockstep"):
        mesh = fzero.mesh(a=2, b=2, c=2, simulate=simulate)
        for names, count in itertools.product([("a", "b", "c"), ("a", "c"), ("b",)], [1]):
            with fzero.collectives.record() as log:
                on = mesh.spmd(lambda x, names=names: PerRank(fzero.collectives.all_gather(x, names)))
                on(mesh.split(torch.arange(16.0)))
            n = 2 ** len(names)
            assert [(e.axis, e.elements) for e in log.other_events] == [(",".join(names), 2 * n)] * count


@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_a_collective_without_axis_is_ambiguous_under_two_axes(name):
    """With several axes bound, axis=None means nothing in a hand-written program."""
    with pytest.raises(ValueError, match="ambiguous"):
        fzero.mesh(a=2, b=2).spmd(lambda: COLLECTIVES[name][0](torch.ones(4, 4)))()
