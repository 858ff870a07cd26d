"""A jitted step donates its parameters and state, and nothing else; what shares their memory is refused."""

from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from tests.graph.helpers import bitwise, copy_graph
from tests.helpers import ALL_STAGES, LEAST, cases, mlp_batch, mlp_loss, mlp_params, train_step_for


def make_sharded(stage: int) -> tuple[Any, Any, Any, Any]:
    opt = optim.adam(1e-2)
    step = fzero.jit(
        fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=fzero.mesh(dp=2)), backend="fx", **LEAST
    )
    return step, *step.init(mlp_params(), opt), step.mesh.split(mlp_batch(4))


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_sharded_step_donates_its_parameters_and_state_and_nothing_else(stage):
    step, params, state, batch = make_sharded(stage)
    held = [x.untyped_storage().data_ptr() for x in tree.tensors((params, state))]
    old = tree.tensors((params, state))
    new_params, new_state, loss = step(params, state, batch)
    assert [x.untyped_storage().data_ptr() for x in tree.tensors((new_params, new_state))] == held
    for x in old:
        with pytest.raises(fzero.errors.DonatedError, match=r"argument [01].* was donated to jit\(train_step\)"):
            x.numel()
    assert not {id(x) for x in old} & {id(x) for x in tree.tensors((new_params, new_state))}
    assert loss.ndim == 0 and len(tree.tensors(batch)) == 2
    for gone, name in ((params, "argument 0"), (state, "argument 1")):
        for use in (
            tree.tensors,
            step.gather,
            lambda x: optim.apply_updates(x, x),
            lambda x: step(x, new_state, batch),
        ):
            with pytest.raises(fzero.errors.DonatedError, match=rf"{name}.*was donated to jit\(train_step\)"):
                use(gone)
    step(new_params, new_state, batch)


def test_reading_a_donated_box_raises():
    step, params, state, batch = make_sharded(3)
    step(params, state, batch)
    box = params["scale"]
    assert "Shard('scale'" in repr(box)
    with pytest.raises(fzero.errors.DonatedError, match="argument 0 was donated"):
        box.data  # noqa: B018


def test_arguments_survive_if_none_is_donated():
    step, params, state, batch = make_sharded(3)
    keep = fzero.jit(step.step, donate=(), backend="fx")
    first, second = keep(params, state, batch), keep(params, state, batch)
    bitwise(first, second)


def test_a_plain_function_donates_nothing_by_default():
    x = torch.ones(3)
    assert fzero.jit(lambda x: x + 1, backend="fx")(x).tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]


def test_donated_values_may_be_exchanged_returned_and_tied():
    def swap(p: Any) -> Any:
        return {"a": p["b"], "b": p["a"]}, p["a"][:1], p["b"]

    f = fzero.jit(swap, donate=0, backend="fx")
    new, part, whole = f({"a": torch.zeros(2), "b": torch.ones(2)})
    assert [new["a"].tolist(), new["b"].tolist(), part.tolist(), whole.tolist()] == [[1, 1], [0, 0], [0], [1, 1]]
    w = torch.ones(2)
    tied = fzero.jit(lambda p: tree.map(lambda x: x + 1, p), donate=0, backend="fx")({"a": w, "b": [w]})
    assert tied["a"] is tied["b"][0] and tied["a"].tolist() == [2, 2]
    untied = fzero.jit(lambda p: {"a": p["a"] + 1, "b": p["b"] * 3}, donate=0, backend="fx")
    w = torch.ones(2)
    got = untied({"a": w, "b": w})
    assert [got["a"].tolist(), got["b"].tolist()] == [[2, 2], [3, 3]]


def test_memory_shared_with_a_donated_argument_is_an_error():
    f = fzero.jit(lambda p, x: p + x.sum(), donate=0, backend="fx")
    x = torch.ones(4)
    for other in (x.view(2, 2), x[1:], x[3:].expand(5), x.detach()):
        with pytest.raises(ValueError, match=r"argument 0 and argument 1 share memory"):
            f(x, other)
    assert x.tolist() == [1, 1, 1, 1]
    parts = torch.zeros(6).split(3)  # parts of one buffer are no trouble, such as what step.gather returns
    assert f(*parts).tolist() == [0, 0, 0]


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_init_and_gather_give_memory_of_their_own(stage):
    """No later step overwrites what the user keeps: the initial parameters, or a gathered best."""
    opt, mine = optim.sgd(0.1), mlp_params()
    step = fzero.jit(
        fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=fzero.mesh(dp=2)), backend="fx", **LEAST
    )
    state, before = step.init(mine, opt), copy_graph(mine)
    best = step.gather(state[0])
    *state, _ = step(*state, step.mesh.split(mlp_batch(4)))
    bitwise(mine, before)
    bitwise(best, before)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_without_memory_are_named_and_not_taken_to_share_it(stage):
    mesh, opt = fzero.mesh(dp=2), optim.adamw(0.1)

    def train_step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"] @ p["v"]).mean())(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    step = fzero.shard(train_step, stage, mesh)
    state = step.init({name: torch.zeros(4, 4, device="meta") for name in ("w", "v")}, opt)
    with pytest.raises(ValueError, match=r"argument 0, .*'[wv]' is on the meta device and has no memory"):
        fzero.jit(step, backend="fx")(*state, mesh.split(torch.ones(4, 4)))


def test_overlapping_and_inference_tensors_are_not_written_into():
    p, a = torch.arange(5.0).unfold(0, 3, 1), torch.arange(9.0).reshape(3, 3)
    expected = p + a
    bitwise(fzero.jit(lambda p, a: p + a, donate=0, backend="fx")(p, a), expected)
    with torch.inference_mode():
        x = torch.ones(2)
    with pytest.raises(ValueError, match=r"argument 0 was made under torch\.inference_mode"):
        fzero.jit(lambda x: x + 1, donate=0, backend="fx")(x)
    with pytest.raises(ValueError, match="argument 0 is on the meta device"):
        fzero.jit(lambda x: x + 1, backend="fx")(torch.ones(2, device="meta"))


def test_a_result_of_another_dtype_gets_memory_of_its_own():
    x = torch.full((3,), 1.5)
    got = fzero.jit(lambda p: (p.half() * 2).double(), donate=0, backend="fx")(x)
    assert got.dtype == torch.float64 and got.tolist() == [3, 3, 3]
    with pytest.raises(fzero.errors.DonatedError):
        x.numel()


def test_a_step_that_fails_midway_says_that_its_state_is_lost():
    step, params, state, batch = make_sharded(2)
    step.plan(params, state, batch)
    (entry,) = step._entries.values()

    def fails(args: list[Any]) -> Any:
        raise KeyboardInterrupt

    entry.executable = fails
    with pytest.raises(KeyboardInterrupt):
        step(params, state, batch)
    with pytest.raises(fzero.errors.DonatedError, match="failed midway"):
        step(params, state, batch)
