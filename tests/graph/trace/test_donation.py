"""Donated arguments are gone, and say so; nothing else that shares their memory is changed."""

import copy
import io
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fzero
from fzero import optim
from fzero._donated import donated_message
from tests.helpers import ALL_STAGES, LEAST, cases, mlp_batch, mlp_loss, mlp_params, train_step_for

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch.save": lambda x: torch.save({"best": x}, io.BytesIO()),
    "pickle": pickle.dumps,
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "sum": torch.sum,
    "method": lambda x: x.mean(),
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "matmul with another": lambda x: torch.ones(3) @ x,
    "in a list": lambda x: torch.stack([torch.ones(3), x]),
    "written into another": lambda x: torch.ones(3).copy_(x),
    "written": lambda x: x.zero_(),
    "out=": lambda x: torch.add(torch.ones(3), 1, out=x),
    "x[0]": lambda x: x[0],
    "x[0] = 1": lambda x: x.__setitem__(0, 1),
    "len": len,
    "iter": list,
    "bool": bool,
    "float": float,
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "shape": lambda x: x.shape,
    "numel": lambda x: x.numel(),
    "dtype": lambda x: x.dtype,
    "grad": lambda x: x.grad,
    "data": lambda x: x.data,
    "data = y": lambda x: setattr(x, "data", torch.ones(3)),
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64),
    "storage": lambda x: x.untyped_storage(),
    "equal": lambda x: torch.equal(x, x),
    "==": lambda x: x == x,
    "requires_grad_": lambda x: x.requires_grad_(),
    "Parameter": torch.nn.Parameter,
    "optimizer": lambda x: torch.optim.SGD([x], 0.1),
    "load_state_dict": lambda x: torch.nn.Linear(3, 1).load_state_dict({"weight": x, "bias": x}),
    "foreach": lambda x: torch._foreach_add([x], 1),
    "vmap": torch.vmap(lambda x: x),
    "value_and_grad": lambda x: fzero.value_and_grad(lambda p, _: p.sum())(x, None),
    "functional_call": lambda x: torch.func.functional_call(torch.nn.Linear(3, 1), {"weight": x}, (torch.ones(3),)),
}


def is_gone() -> torch.Tensor:
    x = torch.ones(3)
    fzero.jit(lambda x: x + 1, donate=0, backend="fx")(x)
    return x


@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_donated_tensor_raises(name):
    x = is_gone()
    with pytest.raises(
        fzero.errors.DonatedError, match=r"^argument 0 was donated to jit\(<lambda>\): its memory holds"
    ):
        USES[name](x)


def test_a_compiled_function_of_a_donated_tensor_raises():
    with pytest.raises(Exception, match="DonatedError: argument 0 was donated"):  # Dynamo's, which tells of ours
        torch.compile(lambda x: x.sum(), backend="eager")(is_gone())


def test_uses_of_a_donated_tensor_that_cannot_raise_see_no_elements():
    x = is_gone()
    assert torch.func.grad(lambda x: x.sum())(x).shape == (0,)
    with pytest.warns(UserWarning, match="copy construct"):
        assert torch.tensor(x).shape == (0,)


def test_a_donated_tree_can_be_printed_and_kept():
    x = is_gone()
    assert repr({"w": x}) == str({"w": x}) == "{'w': <argument 0 was donated to jit(<lambda>)>}"
    assert isinstance(x, torch.Tensor) and x in [x] and {x: 1}[x] == 1


@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_best_tree_of_an_earlier_step_cannot_be_saved(stage):
    opt = optim.adam(1e-2)
    step = fzero.jit(
        fzero.shard(train_step_for(mlp_loss, opt), stage=stage, mesh=fzero.mesh(dp=2)), backend="fx", **LEAST
    )
    params, state = step.init(mlp_params(), opt)
    for _ in range(2):
        best, best_state = params, state
        params, state, _ = step(params, state, step.mesh.split(mlp_batch(4)))
        for tree in (best, best_state):
            with pytest.raises(fzero.errors.DonatedError, match=r"argument [01].* was donated to jit\(train_step\)"):
                torch.save(tree, io.BytesIO())
    torch.save(step.gather(params), io.BytesIO())


def test_the_repr_of_donated_parameters_says_donated_at_each_leaf():
    opt = optim.sgd(1e-2)
    step = fzero.jit(fzero.shard(train_step_for(mlp_loss, opt), stage=3, mesh=fzero.mesh(dp=2)), backend="fx", **LEAST)
    params, state = step.init(mlp_params(), opt)
    assert "donated" not in repr(params) and "Slot('blocks.0', 1, float64 [7])" in repr(params)
    new, _, _ = step(params, state, step.mesh.split(mlp_batch(4)))
    assert "Slot('blocks.0', 1, donated)" in repr(params) and "float64" not in repr(params)
    assert "donated" not in repr(new)
    with pytest.raises(fzero.errors.DonatedError):
        params["blocks"][0]["b"].numel()


def test_module_parameters_and_tied_leaves_are_donated():
    w = torch.nn.Parameter(torch.ones(3))
    f = fzero.jit(lambda p: fzero.tree.map(lambda x: x + 1, p), donate=0, backend="fx")
    with torch.no_grad():
        new = f({"a": w, "b": [w]})
    assert new["a"] is new["b"][0] and new["a"].tolist() == [2, 2, 2] and type(new["a"]) is torch.Tensor
    with pytest.raises(fzero.errors.DonatedError):
        torch.optim.SGD([w], 0.1)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda x: x[:2],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "another shape": lambda x: x.view(3, 1),
    "numpy": lambda x: x.numpy(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "an autograd graph": lambda x: (x * torch.ones(3, requires_grad=True)).sum(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_an_argument_that_shares_memory_with_another_tensor_is_refused_for_donation(name):
    f, x = fzero.jit(lambda x: x + 1, donate=0, backend="fx"), torch.ones(3)
    held = HOLDERS[name](x)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"argument 0 is donated .* shares its memory with something that is not an argument"
        ):
            f(x)
    assert x.tolist() == [1, 1, 1]
    del held
    assert f(f(x)).tolist() == [3, 3, 3]


def test_memory_that_another_thread_releases_at_once_is_donated():
    """A thread of gloo does so after the wait for a collective has returned."""
    f, x = fzero.jit(lambda x: x + 1, donate=0, backend="fx"), torch.ones(3)
    held = [x.detach()]
    thread = threading.Timer(0.02, held.clear)
    thread.start()
    assert f(x).tolist() == [2, 2, 2] and not held
    thread.join()


HANDED_ON: dict[str, tuple[Callable[[Any, Any], Any], str]] = {  # what becomes of a and b, and what may not be shared
    "a": (lambda a, b: (a, a + b), "b"),
    "both": (lambda a, b: (a, b), ""),
    "neither": (lambda a, b: (a + b, b + 1), "ab"),
    "each in the other's place": (lambda a, b: (b, a), "ab"),
    "one in both places": (lambda a, b: (a, a), "b"),
    "in another shape and back": (lambda a, b: (a.view(3, 1).view(3), b), ""),
    "turned twice": (lambda a, b: (a.flip(0).flip(0), b), "a"),
}


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor-whole", marks=pytest.mark.slow)])
@pytest.mark.parametrize("held", "ab")
@pytest.mark.parametrize("name", HANDED_ON)
def test_an_unchanged_argument_may_be_shared(name, held, backend):
    """Nothing is written into it: such as the frozen parameters of a living module."""
    made, written = HANDED_ON[name]
    f = fzero.jit(lambda p: dict(zip("ab", made(p["a"], p["b"]), strict=True)), donate=0, backend=backend)
    params = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    owner, before = params[held].detach(), params[held].clone()
    if held in written:
        with pytest.raises(ValueError, match=f"leaf '{held}' is donated to fzero.jit and shares its memory"):
            f(params)
        return
    expected = dict(zip("ab", made(params["a"], params["b"]), strict=True))
    expected = {name: x.clone() for name, x in expected.items()}
    new = f(params)
    assert all(torch.equal(new[name], x) for name, x in expected.items()) and torch.equal(owner, before)
    with pytest.raises(fzero.errors.DonatedError):
        params[held].sum()
    if new[held].data_ptr() == owner.data_ptr():
        f(new)  # again, and still nothing is written
        assert torch.equal(owner, before)


def test_an_unchanged_argument_may_overlap_an_argument_that_is_read():
    """It may not overlap one that is written into."""
    buffer = torch.arange(4.0)
    f = fzero.jit(lambda p, x: {"a": p["a"], "b": p["b"] + x.sum()}, donate=0, backend="fx")
    new = f({"a": buffer[:2], "b": torch.zeros(())}, buffer)
    assert new["a"].tolist() == [0, 1] and new["b"] == 6 and buffer.tolist() == [0, 1, 2, 3]
    g = fzero.jit(lambda p: {"a": p["a"], "b": p["b"] + 1}, donate=0, backend="fx")
    with pytest.raises(ValueError, match="share memory, and one is donated"):
        g({"a": buffer[:2], "b": buffer[1:3]})
    assert buffer.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("hold", [lambda flat: flat, lambda flat: flat.detach(), lambda flat: (flat * LEAF).sum()])
def test_a_view_is_not_donated_while_the_caller_holds_its_base(hold):
    f = fzero.jit(lambda p: fzero.tree.map(lambda x: x + 1, p), donate=0, backend="fx")
    flat = torch.ones(6)
    params, held = {"a": flat[:2], "b": flat.view(2, 3)[1]}, hold(flat)
    del flat
    with pytest.raises(ValueError, match=r"argument 0, leaf 'a' is donated .* shares its memory .*a view or its base"):
        f(params)
    del held
    params = f(params)
    assert params["a"].tolist() == [2, 2] and params["b"].tolist() == [2, 2, 2]


def test_donation_is_refused_while_the_caller_holds_a_leaf_of_a_unit():
    opt = optim.sgd(0.1)
    jitted = fzero.jit(
        fzero.shard(train_step_for(mlp_loss, opt), stage=1, mesh=fzero.mesh(dp=1)), backend="fx", **LEAST
    )
    params, state = jitted.init(mlp_params(), opt)
    leaf = params["blocks"][0]["b"]
    params["blocks"][0]["b"] = torch.zeros_like(leaf)
    with pytest.raises(ValueError, match=r"'blocks.0.w.*'.*a leaf beside it.*by a clone"):
        jitted(params, state, jitted.mesh.split(mlp_batch(4)))
    leaf = leaf.clone()
    jitted(params, state, jitted.mesh.split(mlp_batch(4)))


LEAF = torch.ones(6, requires_grad=True)


def test_parts_of_one_buffer_may_be_donated_again_and_again():
    """Such as what step.gather returns."""
    buffer = torch.zeros(6)
    params = {"a": buffer[:2], "b": buffer[2:]}
    del buffer
    f = fzero.jit(lambda p: fzero.tree.map(lambda x: x + 1, p), donate=0, backend="fx")
    holders = []
    for i in range(3):
        holders.append(params)  # the dead must not count as holders
        params = f(params)
        assert params["a"].tolist() == [i + 1] * 2 and params["b"].tolist() == [i + 1] * 4


def test_results_that_are_arguments_are_no_donors_of_memory_that_the_caller_keeps():
    x = torch.ones(3)
    same = fzero.jit(lambda x: x, backend="fx")(x)
    with pytest.raises(ValueError, match=r"argument 0 is donated to fzero\.jit and shares its memory"):
        fzero.jit(lambda x: x + 1, donate=0, backend="fx")(same)
    assert x.tolist() == [1, 1, 1]


def test_a_captured_tensor_is_not_overwritten_nor_read_when_it_is_gone():
    x = torch.ones(3)
    f = fzero.jit(lambda p: (p + 1, x * 3), donate=0, backend="fx")
    with pytest.raises(ValueError, match="argument 0 and a tensor that the step captures share memory"):
        f(x)
    assert [y.tolist() for y in f(torch.zeros(3))] == [[1, 1, 1], [3, 3, 3]]
    fzero.jit(lambda p: p + 1, donate=0, backend="fx")(x)
    mine = torch.zeros(3)
    with pytest.raises(fzero.errors.DonatedError, match="argument 0 was donated"):
        f(mine)
    assert mine.tolist() == [0, 0, 0]  # refused before anything was lost


def test_compiled_code_is_not_given_a_captured_tensor_that_is_gone():
    """It would read the memory without asking torch."""
    x = torch.ones(3)
    f = fzero.jit(lambda p: p + x, backend="fx")
    f(torch.zeros(3))
    (entry,) = f._entries.values()
    entry.executable = lambda args: [torch.zeros(3)]
    fzero.jit(lambda p: p + 1, donate=0, backend="fx")(x)
    with pytest.raises(fzero.errors.DonatedError, match="argument 0 was donated"):
        f(torch.zeros(3))


class Labelled(torch.Tensor):
    pass


def test_arguments_of_a_tensor_subclass_are_refused():
    x = torch.ones(3).as_subclass(Labelled)
    with pytest.raises(TypeError, match=r"argument 0, leaf 'x' is a Labelled, and a graph holds plain tensors only"):
        fzero.jit(lambda p: p["x"] + 1, backend="fx")({"x": x})


def test_the_log_lists_the_donated_arguments(caplog):
    opt = optim.sgd(0.1, momentum=0.9)

    def train_step(params: Any, state: Any, batch: Any, averages: Any) -> Any:
        params, state, loss = train_step_for(mlp_loss, opt)(params, state, batch)
        return params, state, loss, fzero.tree.map(lambda x: x + 1, averages)

    step = fzero.shard(train_step, stage=0, mesh=fzero.mesh(dp=2))
    params, state = step.init(mlp_params(), opt)
    averages = {"mean": torch.zeros(3)}
    with caplog.at_level(logging.INFO, "fzero.jit"):
        fzero.jit(step, backend="fx", **LEAST)(params, state, step.mesh.split(mlp_batch(4)), averages)
    assert "the results take over the memory of argument 0 (parameters), argument 1, argument 3" in caplog.text
    with pytest.raises(fzero.errors.DonatedError, match="argument 3, leaf 'mean' was donated"):
        averages["mean"].sum()


def test_a_tensor_that_shares_memory_with_a_numpy_array_is_not_donated():
    """An array keeps the memory that it shows, so it is never freed under it."""
    x = torch.ones(3)
    array = x.numpy()
    f = fzero.jit(lambda x: x + 1, donate=0, backend="fx")
    with pytest.raises(ValueError, match="shares its memory"):
        f(x)
    assert np.array_equal(array, [1, 1, 1])


def test_the_donation_error_after_a_failed_step_advises_no_results():
    message = donated_message("argument 0 was donated to jit(f), which failed midway")
    assert "no results" in message and "Continue with the results" not in message
