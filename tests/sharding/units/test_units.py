"""Laws of rules by size: they cover each leaf once, keep to their sizes, and change no number."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.sharding.units import _units
from fzero.sharding.units._subtrees import divide_tree
from fzero.testing import assert_equivalent, trees
from tests.helpers import ALL_STAGES, cases, either, examples, mlp_batch, mlp_loss, mlp_params, train_step_for

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def floats(params: Any) -> dict[str, torch.Tensor]:
    paths, leaves, _ = tree.flatten_with_paths(params)
    return {p: x for p, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor) and x.is_floating_point()}


def zeros(*shape: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(shape, device="meta")}


def mixture(layers: int, d: int = 16, f: int = 8, experts: int = 64) -> Any:
    """The model of DeepSpeed's pull request 6649: an expert is three matrices, a layer 197 leaves."""

    def expert() -> Any:
        return {"gate": zeros(f, d), "up": zeros(f, d), "down": zeros(d, f)}

    def layer() -> Any:
        dense = {name: zeros(d, d) for name in "qkvo"}
        return {**dense, "router": zeros(experts, d), "experts": [expert() for _ in range(experts)]}

    return {"embed": zeros(64, d), "layers": [layer() for _ in range(layers)]}


# Pieces of a tree.


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    """Leaves of a tree, by paths of up to four keys, with their sizes."""
    keys = draw(st.lists(st.lists(st.sampled_from("ab01"), min_size=1, max_size=4), min_size=1, max_size=14))
    return {".".join(path): draw(st.integers(0, 9)) for path in sorted(keys)}


@examples(75, 300)
@given(sizes(), st.integers(1, 30), st.integers(0, 30))
def test_pieces_cover_each_leaf_once_and_keep_to_their_sizes(numels, least, room):
    most = least + room
    result = divide_tree(numels, least, most)
    assert Counter(itertools.chain(*[x.paths for x in result])) == Counter([*numels])
    assert len({x.name for x in result}) == len(result)
    for piece in result:
        assert piece.numel == sum(numels[path] for path in piece.paths)
        assert piece.numel <= most or len(piece.paths) == 1


@examples(60, 300)
@given(sizes(), st.integers(1, 30))
def test_without_an_upper_size_pieces_are_no_smaller_than_asked(numels, least):
    result = divide_tree(numels, least)
    assert all(x.numel >= least for x in result) or len(result) == 1


@examples(75, 300)
@given(sizes(), st.integers(1, 30))
def test_units_by_size_never_cut_a_small_subtree(numels, least):
    """They do not cut one that is just large enough, whose children are all too small."""
    home = {path: piece.name for piece in divide_tree(numels, least) for path in piece.paths}
    nodes = {path.rsplit(".", depth)[0] for path in numels for depth in range(1, path.count(".") + 1)}
    for node in nodes:
        below = [path for path in numels if path.startswith(f"{node}.")]
        if sum(numels[path] for path in below) < least and node not in numels:
            assert len({home[path] for path in below}) == 1, node


def test_a_piece_is_named_by_its_subtrees():
    numels = {"a.x": 1, "a.y": 1, "b.0.w": 4, "b.1.w": 4, "b.2.w": 4, "c": 1}
    assert [x.name for x in divide_tree(numels, 2, 8)] == ["a", "b.0", "b.1", "b.2 to c"]
    assert [x.name for x in divide_tree(numels, 5, 8)] == ["a", "b.0 to b.1", "b.2 to c"]
    assert [x.name for x in divide_tree(numels, 99, 99)] == ["params"]


@examples(50, 100)
@given(trees(DTYPES), st.integers(1, 40), st.integers(0, 40), st.booleans())
def test_a_rule_covers_each_leaf_once_and_no_unit_has_two_kinds(params, least, room, is_split):
    assume(result := floats(params))

    def split(path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        return {"ep": 0} if is_split and len(path) % 2 else None

    rule = fzero.sharding.by_size(params, least, least + room, split=split)
    distinct = {id(x): (path, x) for path, x in reversed(result.items())}.values()
    leaves: dict[str, list[str]] = {}
    for path, x in distinct:
        leaves.setdefault(rule(path, x), []).append(path)
    assert {row.name: row.leaves for row in rule.table} == {name: len(paths) for name, paths in leaves.items()}
    for name, elements, count in rule.table:
        assert elements == sum(result[path].numel() for path in leaves[name])
        assert elements <= least + room or count == 1
        assert len({(result[path].dtype, str(split(path, result[path]))) for path in leaves[name]}) == 1


@examples(50, 100)
@given(trees((torch.float32,)), st.integers(1, 20), st.integers(0, 200))
def test_a_tie_is_in_one_unit(params, least, threshold):
    assume(result := floats(params))
    tied = {"first": params, "second": params}
    for rule in (fzero.sharding.by_size(tied, least, 2 * least), fzero.sharding.by_granularity(tied, threshold, 20)):
        for path, x in result.items():
            dot = f".{path}" if path else ""
            assert rule(f"first{dot}", x) == rule(f"second{dot}", x)


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_training_does_not_depend_on_the_units(stage):
    """Each unit of the rule is gathered by itself."""
    params = mlp_params()
    rule = fzero.sharding.by_size(params, 8, 60)
    assert [row.name for row in rule.table] == ["blocks.0", "blocks.1 to scale", "head"]
    assert units_of(params, rule) == {
        "blocks.0": ("blocks.0.w", "blocks.0.b"),
        "blocks.1 to scale": ("blocks.1.w", "blocks.1.b", "scale"),
        "head": ("head.0",),
    }
    train_step = train_step_for(mlp_loss, opt := optim.adamw(0.1))
    batches = [mlp_batch(6, seed) for seed in range(2)]
    assert_equivalent(train_step, params, opt, batches, (stage,), world_sizes=(1, 3), units=rule)


def test_units_do_not_mix_axes():
    params = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}
    rule = fzero.sharding.by_size(params, 100, over=lambda path, leaf: "dp" if path == "b" else ("dp", "ep"))
    assert [rule(path, x) for path, x in params.items()] == ["a to c", "b", "a to c"]
    halves = {"x": {"w": torch.zeros(2), "b": torch.zeros(2).half()}}
    assert [row.name for row in fzero.sharding.by_size(halves, 2, 9).table] == ["x.w", "x.b"]


def test_a_leaf_that_the_rule_does_not_know_is_named_by_the_default_rule():
    rule = fzero.sharding.by_size({"a": torch.zeros(3)}, 1)
    assert rule("h.0.w", torch.zeros(1)) == "h.0"


def test_a_rule_prints_its_table():
    rule = fzero.sharding.by_size({"a": torch.zeros(3), "b": torch.zeros(1200)}, 3)
    assert [line.split() for line in str(rule).splitlines()] == [
        ["unit", "elements", "leaves"],
        ["a", "3", "1"],
        ["b", "1,200", "1"],
        ["2", "units", "1,203", "2"],
    ]


# The model of DeepSpeed's pull request.


@pytest.mark.slow
def test_granularity_tells_no_layer_from_the_root():
    """An expert has 96, a layer 101 and the root 101: layers cannot be asked for."""
    layers = either(12, 48)
    params = mixture(layers)
    counts = {at: len(fzero.sharding.by_granularity(params, at).table) for at in (0, 95, 96, 100, 101)}
    assert counts == {
        **dict.fromkeys((0, 95), layers * 197 + 1),
        **dict.fromkeys((96, 100), layers * (64 + 5) + 1),
        101: 1,
    }
    assert (
        len(fzero.sharding.by_granularity(params, 101, max_numel=20_000 * layers).table) == layers + 1
    )  # by its second limit alone
    assert len(fzero.sharding.by_size(params, 2000, 30_000).table) == layers * 2


def test_direct_leaves_are_a_unit_of_their_own_node_or_each_its_own():
    """They share one unit as long as they are small enough."""
    params = {"a": {"w": torch.zeros(4), "b": torch.zeros(2), "in": {"w": torch.zeros(90)}}, "top": torch.zeros(1)}
    for most, names in ((99, ["a", "a", "a.in", "top"]), (5, ["a.w", "a.b", "a.in.w", "top"])):
        rule = fzero.sharding.by_granularity(params, 5, most)
        assert [rule(path, x) for path, x in floats(params).items()] == names


def test_a_list_adds_no_level_to_granularity():
    """Of 12 elements in a root with two nodes there are four each."""
    params = {"xs": [{"w": torch.zeros(6)}, {"w": torch.zeros(6)}]}
    assert [len(fzero.sharding.by_granularity(params, at).table) for at in (3, 4)] == [2, 1]


# The default rule.


def units_of(params: Any, rule: Any = None) -> dict[str, tuple[str, ...]]:
    result = fzero.mesh(dp=2).spmd(lambda p: fzero.partition(p, units=rule))(params)
    shards = [x for x in tree.flatten(result, tree.is_box)[0] if isinstance(x, fzero.sharding.Shard)]
    return {x.spec.unit: x.spec.paths for x in shards}


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4))
def test_default_units_of_a_transformer_are_its_layers(layers, experts):
    params = mixture(layers, 4, 2, experts)
    assert list(units_of(params)) == ["embed", *[f"layers.{i}" for i in range(layers)]]


@examples(12, 30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(20, 200))
def test_the_default_rule_of_units_has_a_cap_of_elements(layers, experts, most):
    """A unit of several leaves has at most so many elements, and units that are small enough stay as they are."""
    params = mixture(layers, 4, 2, experts)
    leaves, before = floats(params), units_of(params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_units, "MAX_UNIT_NUMEL", most)
        result = units_of(params)
    assert Counter(itertools.chain(*result.values())) == Counter([*leaves])
    for name, paths in before.items():
        if sum(leaves[path].numel() for path in paths) <= most:
            assert result[name] == paths
    for paths in result.values():
        assert sum(leaves[path].numel() for path in paths) <= most or len(paths) == 1


def test_default_units_hold_at_most_2_to_the_31_elements():
    """A layer of more is divided between its subtrees, unless its own part of a mesh is small enough."""
    params = {"layers": [{"attn": zeros(2**29), "up": zeros(2**30), "down": zeros(2**30)}], "norm": zeros(8)}
    assert list(units_of(params)) == ["layers.0.attn to layers.0.up", "layers.0.down", "norm"]
    mesh = fzero.mesh(dp=2, ep=2)
    step = fzero.shard(lambda p, s, x: (p, s), 3, mesh, units=None, split=lambda p, x: {"ep": 0}, axis=("dp",))
    actual, _ = step.init(params, optim.sgd(0.1))
    names = {x.spec.unit for x in tree.flatten(actual, tree.is_box)[0] if isinstance(x, fzero.sharding.Shard)}
    assert names == {"layers.0", "norm"}


GIVEN: Any = (1e3,)
RULE: Any = "ep"
BAD: dict[str, Any] = {
    "least": (
        lambda p: fzero.sharding.by_size(p, 0),
        ValueError,
        r"min_numel=0: expected a number of elements, an int, at least 1",
    ),
    "least as a float": (lambda p: fzero.sharding.by_size(p, *GIVEN), ValueError, "min_numel=1000.0: expected a num"),
    "most": (lambda p: fzero.sharding.by_size(p, 1, True), ValueError, r"max_numel=True: expected a number"),
    "most below least": (
        lambda p: fzero.sharding.by_size(p, 9, 8),
        ValueError,
        r"min_numel=9 is more than max_numel=8",
    ),
    "no tensor": (lambda p: fzero.sharding.by_size({"a": 1}, 1), TypeError, r"params is .* holds no tensor"),
    "split": (lambda p: fzero.sharding.by_size(p, 1, split=RULE), TypeError, r"split='ep': expected a rule"),
    "threshold": (lambda p: fzero.sharding.by_granularity(p, -1), ValueError, r"threshold=-1: expected a number"),
    "threshold is nan": (lambda p: fzero.sharding.by_granularity(p, float("nan")), ValueError, r"threshold=nan"),
}


@pytest.mark.parametrize("make,error,message", BAD.values(), ids=BAD)
def test_the_error_of_a_unit_rule_names_its_wrong_argument(make, error, message):
    with pytest.raises(error, match=message):
        make({"a": torch.zeros(3)})
