"""Groups of leaves with optimizers of their own, and one state for all."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from fzero.testing import assert_trees_close
from tests.helpers import ALL_STAGES, LEAST, cases

PARAMS = {
    "w": torch.arange(15.0).view(5, 3) / 9,
    "b": torch.ones(3),
    "head": {"v": torch.linspace(-1, 1, 3).view(3, 1)},
}
X = torch.arange(40.0).view(8, 5) / 40


def mask_of_names(*names: str) -> Any:
    return lambda params: tree.map_with_path(lambda path, _: path in names, params)


KINDS: dict[str, Any] = {
    "adamw": (lambda rate: optim.adamw(rate, weight_decay=rate)),
    "scheduled": (lambda rate: optim.adamw(optim.linear(rate, 0.0, 9))),
    "momentum": (lambda rate: optim.sgd(rate, momentum=0.9)),
    "clipped": (lambda rate: optim.chain(optim.clip(rate), optim.lion(rate, weight_decay=0.1))),
    "lamb": (lambda rate: optim.lamb(rate, weight_decay=0.1)),
}


def groups_of(kind: str) -> tuple[Any, Any]:
    """The groups with one state, and as a chain with a state for each."""
    groups = [(KINDS[kind](0.1), mask_of_names("w")), (KINDS[kind](0.01), mask_of_names("b", "head.v"))]
    return optim.by_group(*groups), optim.chain(*[optim.masked(*group) for group in groups])


def step_for(opt: Any) -> Any:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ p["w"] + p["b"]) @ p["head"]["v"] - 1).square().mean()

    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss)(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    return train_step


def test_groups_are_a_chain_of_masked_optimizers_with_one_state():
    for kind in KINDS:
        one, two = groups_of(kind)
        state, apart = (PARAMS, one.init(PARAMS)), (PARAMS, two.init(PARAMS))
        for _ in range(3):
            state, apart = step_for(one)(*state, X)[:2], step_for(two)(*apart, X)[:2]
        assert_trees_close(state[0], apart[0])
        assert tree.numel(state[1]) * 2 == tree.numel(apart[1])
        assert tree.flatten(state[1])[1] == tree.flatten(KINDS[kind](0.1).init(PARAMS))[1]


@pytest.mark.parametrize("way", ["vmap", "lockstep", "jit"])
@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_by_group_holds_and_saves_each_moment_once_at_every_stage(stage, way, tmp_path):
    opt, _ = groups_of("adamw")
    mesh = fzero.mesh(dp=2, simulate="lockstep" if way == "lockstep" else "vmap")
    rules: Any = {"units": lambda path, leaf: "all"}  # a shard holds leaves of both groups
    step = fzero.shard(step_for(opt), stage, mesh, **rules)
    run = fzero.jit(step, backend="fx", **LEAST) if way == "jit" else step
    params, state = step.init(PARAMS, opt)
    expected: Any = (PARAMS, opt.init(PARAMS))
    single = fzero.shard(step_for(optim.adamw(0.1)), stage, mesh, **rules)
    assert fzero.zero.state_bytes(state, mesh) == fzero.zero.state_bytes(single.init(PARAMS, optim.adamw(0.1))[1], mesh)
    for _ in range(3):
        params, state, _ = run(params, state, mesh.split(X))
        expected = step_for(opt)(*expected, X)[:2]
    assert_trees_close((step.gather(params), step.gather(state)), expected)
    fzero.save(tmp_path, state, mesh)
    assert sorted(fzero.checkpoint.leaves(tmp_path)) == sorted(
        ["count", *[f"{m}.{p}" for m in ("mu", "nu") for p in LEAVES]]
    )


LEAVES = tree.flatten_with_paths(PARAMS)[0]


def test_by_group_refuses_optimizers_whose_states_cannot_be_shared():
    with pytest.raises(TypeError, match=r"expected pairs \(opt, mask\)"):
        optim.by_group(optim.sgd(0.1))  # pyright: ignore[reportArgumentType]
    for masks, text in (
        ([mask_of_names("w"), mask_of_names("b")], r"leaf 'head.v' is in the groups \[\]"),
        ([mask_of_names("w", "b"), mask_of_names("b", "head.v")], r"leaf 'b' is in the groups \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=text):
            optim.by_group(*[(optim.sgd(0.1), mask) for mask in masks]).init(PARAMS)
    both = mask_of_names("w"), mask_of_names("b", "head.v")
    with pytest.raises(ValueError, match=r"group 1 is not like the state of group 0.*optim\.chain"):
        optim.by_group((optim.adamw(0.1), both[0]), (optim.sgd(0.1), both[1])).init(PARAMS)
    with pytest.raises(ValueError, match="neither a count nor like the parameters"):
        optim.by_group(*[(optim.adafactor(0.1), mask) for mask in both]).init(PARAMS)
