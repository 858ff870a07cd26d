"""Parameters from an init function or a meta module: the values of an ordinary call, and never the whole tree."""

import cProfile
import itertools
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.graph._one_rank import planned_mesh
from fzero.testing import assert_trees_close, stages, trees
from tests.helpers import ALL_STAGES, cases, either, examples
from tests.memory import peak_bytes
from tests.zero.helpers import ARRANGEMENTS, parallel_params

MESHES = [{"dp": 1}, {"dp": 3}, {"dp": 8}, {"a": 2, "b": 3}]


def step_on(stage: int, simulate: str = "vmap", options: Any = None, **axes: int) -> fzero.zero.ShardedStep:
    return fzero.shard(lambda p, s: (p, s), stage, fzero.mesh(simulate=simulate, **axes), **(options or {}))


def random_like(values: Any) -> Any:
    """Draw a tree anew, by random operations of several kinds, some in place, some through views, some in vain."""

    def draw(path: str, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return torch.ones(x.shape, dtype=x.dtype)
        y = torch.empty(x.shape, dtype=x.dtype)
        torch.nn.init.uniform_(y, -1, 1)
        torch.rand(3)
        if x.ndim:
            y[: x.shape[0] // 2] = torch.randn(x.shape[0] // 2, *x.shape[1:], dtype=x.dtype)
            y.view(-1)[:1].zero_()
        return y.mul_(2) if len(path) % 2 else y + torch.randn_like(y)

    return tree.map_with_path(draw, values)


@pytest.mark.slow
@examples(8, 60)
@given(trees(dtypes=[torch.float64, torch.float32, torch.int64]), stages(), st.sampled_from(MESHES), st.integers(0, 9))
def test_an_init_function_gives_what_an_ordinary_call_gives(values, stage, axes, seed):
    """Values, random numbers drawn, layout, optimizer state; for every mesh."""
    opt = optim.adam(0.1)
    # integer leaves have no optimizer state worth the name
    step = step_on(stage, **axes)
    torch.manual_seed(seed)
    expected = step.init(random_like(values), opt)
    after = torch.rand(())
    torch.manual_seed(seed)
    got = step.init(lambda: random_like(values), opt)
    assert torch.rand(()) == after
    assert_trees_close(list(got), list(expected), rtol=0)
    assert tree.flatten(got)[1] == tree.flatten(expected)[1]


SIMULATED = ("vmap", "lockstep")
ALL = itertools.product(sorted(ARRANGEMENTS), SIMULATED)


@pytest.mark.parametrize("name,simulate", cases(zip(sorted(ARRANGEMENTS), itertools.cycle(SIMULATED)), ALL))
def test_init_from_a_function_gathers_to_its_values_on_any_axes(name, simulate):
    axes, options = ARRANGEMENTS[name]
    step = step_on(3, simulate, options, **axes)
    assert_trees_close(step.gather(step.init(parallel_params, optim.sgd(0.1))[0]), parallel_params(), rtol=0)


@pytest.mark.parametrize("seeding", ["again", "after a draw", "of a generator", "with fork_rng", "once, first"])
def test_an_init_function_may_seed(seeding, caplog):
    """Draws come after seeds in a deferred run, so what seeds between draws is run whole."""

    def init() -> Any:
        actual, g = [], torch.Generator().manual_seed(0)
        if seeding == "once, first":
            torch.manual_seed(5)
        for i in range(2):
            if seeding == "again" or (seeding == "after a draw" and i):
                torch.manual_seed(7)
            if seeding == "with fork_rng":
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(7)
                    actual.append(torch.randn(3))
            actual.append(torch.randn(4))
            if seeding == "of a generator":
                actual.append(torch.randn(3, generator=g.manual_seed(1)))
        return {"w": actual}

    step = step_on(3, dp=2)
    torch.manual_seed(0)
    expected, after = init(), torch.rand(())
    torch.manual_seed(0)
    assert_trees_close(step.gather(step.init(init, optim.sgd(0.1))[0]), expected, rtol=0)
    assert torch.rand(()) == after


def test_captured_tensors_stay_tied():
    w = torch.nn.Parameter(torch.randn(4)).detach()
    params, _ = step_on(3, dp=2).init(lambda: {"a": w, "b": w, "c": w.clone()}, optim.sgd(0.1))
    assert isinstance(params["b"], fzero.sharding.Slot) and isinstance(params["c"], fzero.sharding.Shard)


def test_a_view_is_written_after_its_bases_last_use():
    def init() -> Any:
        w = torch.ones(6)
        head, other = w.view(2, 3)[0], torch.zeros(3)
        for _ in range(3):
            other = other + torch.randn(3)
        head.mul_(0).add_(other)
        return {"w": w, "rest": [other, torch.ones(100)[:2]]}

    step = step_on(3, "vmap", {"units": lambda path, leaf: None if "rest" in path else path}, dp=2)
    torch.manual_seed(0)
    expected = init()
    torch.manual_seed(0)
    params, _ = step.init(init, optim.sgd(0.1))
    assert_trees_close(step.gather(params), expected, rtol=0)
    assert params["rest"][1].untyped_storage().nbytes() == 8  # not the hundred


def test_an_init_function_works_with_a_dimension_split_over_two_axes():
    split = lambda path, leaf: {"tp": -2, "ep": 0} if leaf.ndim == 2 else None  # noqa: E731
    init = lambda: {"w": torch.arange(24.0).view(8, 3), "b": torch.ones(3)}  # noqa: E731
    for simulate in ("vmap", "lockstep"):
        step = step_on(3, simulate, {"axis": ("dp", "ep"), "split": split}, dp=2, ep=2, tp=2)
        for how in (init, init()):
            params, _ = step.init(how, optim.sgd(0.1))
            assert params["w"].spec.shapes == ((2, 3),)
            assert_trees_close(step.gather(params), init(), rtol=0)
    with pytest.raises(ValueError, match=r"leaf 'w' is float32 \[2, 3\], and cannot be split in 4 equal parts"):
        step.init({"w": torch.ones(2, 3)}, optim.sgd(0.1))


def test_split_rules_see_each_full_leaf_of_an_init_function():
    """A rule that differs within a unit, or by size, cuts alike whether the tree or a function is given."""
    over = lambda path, leaf: "a" if leaf.numel() > 20 else ("a", "b")  # noqa: E731
    split = lambda path, leaf: {"tp": 0} if leaf.ndim == 2 else None  # noqa: E731
    init = lambda: {"u": [{"v": torch.ones(4, 8), "w": torch.ones(4, 4), "x": torch.ones(5)}]}  # noqa: E731
    options = {"axis": ("a", "b"), "over": over, "split": split}
    for stage in ALL_STAGES:
        step = step_on(stage, "vmap", options, a=2, b=2, tp=2)
        one, other = step.init(init, optim.adam(0.1)), step.init(init(), optim.adam(0.1))
        assert tree.flatten(one)[1] == tree.flatten(other)[1]
    assert one[0]["u"][0]["v"].spec.axes == ("a",) and one[0]["u"][0]["w"].spec.axes == ("a", "b")


def test_tied_leaves_of_an_init_function_stay_tied():
    def init() -> Any:
        w = torch.randn(5, 3)
        return {"embed": w, "blocks": [{"w": torch.randn(4)}], "head": w, "none": None, "n": torch.tensor(2)}

    step = step_on(3, dp=2)
    params, _ = step.init(init, optim.sgd(0.1))
    assert params["head"].spec is params["embed"].spec
    whole = step.gather(params)
    assert whole["head"] is whole["embed"] and whole["n"].item() == 2 and whole["none"] is None


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)


class Model(torch.nn.Module):
    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = torch.nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight


def test_a_modules_constructor_is_an_init_function():
    def init() -> Any:
        return fzero.nn.functional(Model()).params

    step = step_on(3, dp=4)
    torch.manual_seed(0)
    expected = init()
    torch.manual_seed(0)
    assert_trees_close(step.gather(step.init(init, optim.sgd(0.1))[0]), expected, rtol=0)


@pytest.mark.slow
def test_a_module_on_the_meta_device_fills_itself():
    with torch.device("meta"):
        module = Model()
    values = []
    for axes in either(MESHES[1::2], MESHES):
        for stage in either((3,), ALL_STAGES):
            torch.manual_seed(0)
            step = step_on(stage, **axes)
            values.append(step.gather(step.init(module, optim.sgd(0.1))[0]))
    torch.manual_seed(0)
    expected = fzero.nn.initializer(module)()
    for got in values:
        assert_trees_close(got, expected, rtol=0)
    assert all(p.is_meta for p in module.parameters())
    assert expected["blocks.0.up.weight"].std() > 0.01 and expected["blocks.0.norm.weight"].eq(1).all()
    assert expected.keys() == fzero.nn.functional(module).params.keys()


def test_a_module_without_reset_parameters_is_named():
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = torch.nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), Scale())
    message = r"submodule '1' \(Scale\) has parameters of its own \(s\) and no reset_parameters: pass init="
    with pytest.raises(ValueError, match=message):
        step_on(3, dp=2).init(module, optim.sgd(0.1))
    fill = lambda m: [p.fill_(2) for p in m.parameters(recurse=False)]  # noqa: E731
    step = step_on(3, dp=2)
    params, _ = step.init(fzero.nn.initializer(module, init=fill), optim.sgd(0.1))
    assert step.gather(params)["1.s"].tolist() == [2, 2, 2]


def test_an_init_function_that_cannot_be_traced_runs_unsharded_with_a_notice(caplog):
    def reads_data() -> Any:
        w = torch.randn(4, 4)
        return {"w": w if w.sum().item() > 0 else -w}

    torch.manual_seed(0)
    expected = reads_data()
    torch.manual_seed(0)
    step = step_on(3, dp=2)
    params, _ = step.init(reads_data, optim.sgd(0.1))
    assert_trees_close(step.gather(params), expected, rtol=0)
    assert "reads_data cannot be traced, so every rank holds the whole tree" in caplog.text
    assert "sharded: DataDependentError: " in caplog.text


def test_an_init_function_that_returns_a_module_is_refused_without_a_notice(caplog):
    with pytest.raises(TypeError, match=r"returned a module, Linear: pass the module itself"):
        step_on(3, dp=2).init(lambda: torch.nn.Linear(2, 2), optim.sgd(0.1))
    assert not caplog.text


def test_a_profiler_goes_on_and_init_is_still_traced(caplog):
    """A trace sets a profile function of its own, in whose place cProfile's was called, which cannot be."""
    profiler, records = cProfile.Profile(), []
    step = step_on(3, dp=2)
    profiler.enable()
    step.init(lambda: {"w": torch.randn(4)}, optim.sgd(0.1))
    math.hypot(3.0, 4.0)
    profiler.disable()
    assert "hypot" in str(profiler.getstats())
    previous = sys.getprofile()
    sys.setprofile(lambda frame, event, function: records.append(event))
    try:
        step.init(lambda: {"w": torch.randn(4)}, optim.sgd(0.1))
        records.clear()
        math.hypot(3.0, 4.0)
    finally:
        sys.setprofile(previous)
    assert "c_call" in records
    assert "cannot be traced" not in caplog.text


def test_errors_of_an_init_function_are_raised_unchanged():
    def fails() -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step_on(3, dp=2).init(fails, optim.sgd(0.1))


@pytest.mark.parametrize("order", ["unit by unit", "all weights, then all biases"])
def test_a_traced_init_holds_the_shards_of_a_rank_and_one_leaf(order):
    """Peak of the allocator on one of 8 ranks, without the other seven."""
    width, layers, ranks = 64, 12, 8

    def init() -> Any:
        if order == "unit by unit":
            return {"blocks": [{"w": torch.randn(width, width), "b": torch.zeros(width)} for _ in range(layers)]}
        weights = [torch.randn(width, width).mul_(0.1) for _ in range(layers)]
        return {"blocks": [{"w": w, "b": torch.zeros(width)} for w in weights]}

    step = step_on(3, dp=ranks).on_mesh(planned_mesh((("dp", ranks),)))
    shards = layers * (width * width + width) * 4 // ranks
    leaf = width * width * 4
    step.init(init, optim.sgd(0.1))  # warm
    peak = peak_bytes(lambda: step.init(init, optim.sgd(0.1)))
    whole = shards * ranks
    assert shards < peak <= shards + leaf + 4096 < whole / 2


def test_an_init_function_may_use_several_seeded_generators(caplog):
    """One after the other, each seeded once: none is taken for an earlier one that is gone."""

    def init() -> Any:
        return [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(50)]

    step = step_on(3, dp=2)
    assert_trees_close(step.gather(step.init(init, optim.sgd(0.1))[0]), init(), rtol=0)
    assert "cannot be traced" not in caplog.text
