"""Gradients, state, parameters and updates of other shapes are refused: torch would broadcast one onto the other."""

import dataclasses
import re
from typing import Any

import pytest
import torch

import fzero
from fzero import optim, tree
from tests.helpers import ALL_STAGES, cases
from tests.optim.table import TABLE

OTHERS = [(4,), (), (1, 4), (1,), (3,), (0,), (4, 4, 4)]  # torch broadcasts most of them with [4, 4]
PRECISION = fzero.Precision(param=torch.bfloat16)
WRAPPED = {
    "chain": optim.chain(optim.clip(1.0), optim.sgd(0.1)),
    "leafwise": optim.leafwise(optim.adam(0.1)),
    "loss scale": optim.dynamic_loss_scale(optim.adam(0.1)),
    "offload to the host": optim.offload(optim.adam(0.1), ratio=0.5),
    "offload, delayed": optim.offload(optim.adam(0.1), ratio=0.5, delay=1),
    "offload, updated on the device": optim.offload(optim.adam(0.1), ratio=0.5, update_on="device"),
    "somebody's": optim.Optimizer(lambda params: (), lambda grads, state, params=None: (grads, state)),
    "a copy": dataclasses.replace(optim.sgd(0.1)),
}
OPTIMIZERS: dict[str, optim.Optimizer] = {**{name: row.optimizer for name, row in TABLE.items()}, **WRAPPED}


def params_of(shape: tuple[int, ...] = (4, 4), dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"a": {"w": torch.ones(shape, dtype=dtype), "b": None}, "c": torch.ones(2, 2, dtype=dtype)}


def refusal(shape: tuple[int, ...], kind: str = "parameter", expected: tuple[int, ...] = (4, 4)) -> str:
    texts = [re.escape(str([*s])) for s in (shape, expected)]
    return rf"opt.update: gradient leaf 'a.w' is {texts[0]}, and its {kind} is {texts[1]}: (take|make) the "


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_of_another_shape_than_its_parameter_is_refused(name):
    opt, params = OPTIMIZERS[name], params_of()
    state = opt.init(params)
    for shape in OTHERS:
        with pytest.raises(ValueError, match=refusal(shape)):
            opt.update(params_of(shape), state, params)
        with pytest.raises(ValueError, match=refusal(shape)):
            opt.update(params_of(shape), state, params=params)
    with pytest.raises(ValueError, match=r"trees differ in structure.*'a\.w'"):
        opt.update({"a": {"b": None}, "c": torch.ones(2, 2)}, state, params)


# an optimizer on full leaves of this test's own: what it does to its state is its own affair
STATEFUL = [name for name, row in TABLE.items() if "on_full_leaves" not in row.optimizer.name]
MEANS = r"and its state has (rows|columns) of shape .*: expected .*; make the state by opt.init"


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("with_params", [False, True])
def test_no_update_broadcasts_onto_a_state_of_another_shape(name, with_params):
    """Either the state is refused by its leaf, or it holds nothing of the parameters' shapes."""
    opt, refused = TABLE[name].optimizer, 0
    for shape in OTHERS:
        grads, state = params_of(shape), opt.init(params_of())
        try:
            updates, new = opt.update(grads, state, grads if with_params else None)
        except ValueError as error:
            needs = re.search("needs? the parameters", str(error)) and not with_params
            assert needs or re.search(f"{refusal(shape, 'state')}|gradient leaf 'a.w' is .*{MEANS}", str(error)), error
            refused += 1
            continue
        assert [x.shape for x in tree.tensors(updates)] == [x.shape for x in tree.tensors(grads)]
        assert [x.shape for x in tree.tensors(new)] == [x.shape for x in tree.tensors(state)]
    holds = any(x.ndim for x in tree.tensors(opt.init(params_of())))
    assert not holds or refused == len(OTHERS)


def test_master_weights_of_another_shape_are_refused():
    opt = optim.master_weights(optim.sgd(0.1), PRECISION)
    state, params = opt.init(params_of((4,))), params_of((4, 4), torch.bfloat16)
    with pytest.raises(ValueError, match=refusal((4, 4), expected=(4,))):
        opt.update(params_of(), state, params)
    with pytest.raises(ValueError, match=refusal((4,))):
        opt.update(params_of((4,)), opt.init(params_of()), params)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_a_sharded_step_refuses_a_gradient_of_another_shape(stage, jit):
    """On shards the shapes are those of a rank's shard, `[k]`."""
    opt, mesh = optim.chain(optim.clip(1.0), optim.sgd(0.1, momentum=0.9)), fzero.mesh(dp=2)

    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["a"]["w"] @ p["a"]["w"]).square().mean())(params, x)
        grads = tree.map(lambda g: g[..., 0] if g.numel() > 1 else g, grads)  # as a forgotten `keepdim=True`
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    params, state = step.init({"a": {"w": torch.ones(4, 4)}}, opt)
    run = fzero.jit(step) if jit else step
    shapes = r"\[4\], and its parameter is \[4, 4\]" if stage == 0 else r"\[\], and its parameter is \[8\]"
    with pytest.raises(ValueError, match=f"opt.update: gradient leaf 'a.w' is {shapes}: take the gradients"):
        run(params, state, mesh.split(torch.ones(4, 4)))


@pytest.mark.parametrize("pieces_of", ["parameters", "gradients"])
def test_boxes_offloaded_at_other_ratios_have_equal_shapes(pieces_of):
    """With `offload(params=True)` a part of a rank's parameters lies on the host, and its gradient does not."""
    opt = optim.chain(optim.clip(1.0), optim.offload(optim.sgd(0.1), ratio=0.5, params=True))
    step = fzero.shard(lambda p, s: (p, s), stage=3, mesh=fzero.mesh(dp=2))
    params, _ = step.init({"w": torch.ones(64, 8)}, opt)
    grads, _ = step.init({"w": torch.ones(64, 8)}, optim.sgd(0.1))
    assert len(params["w"].pieces) == 2 and len(grads["w"].pieces) == 1
    trees = (params, grads) if pieces_of == "parameters" else (grads, params)
    optim.clip(1.0).update(trees[1], (), trees[0])
    short = {"w": fzero.sharding.Shard(grads["w"].data[..., :-1], grads["w"].spec_id)}
    with pytest.raises(ValueError, match=r"gradient leaf 'w' is \[2, 255\], and its parameter is \[2, 256\]"):
        optim.clip(1.0).update(short, (), params)


def test_gradients_that_are_none_pass_and_vmap_sees_one_model_shapes():
    """A gradient may be None, as for a frozen leaf; and N models' gradients have each the shapes of one model."""
    opt, params = optim.adam(0.1), {"w": torch.ones(4, 4), "frozen": torch.ones(2)}
    updates, _ = opt.update({"w": torch.ones(4, 4), "frozen": None}, opt.init(params), params)
    assert updates["frozen"] is None and updates["w"].shape == (4, 4)
    grads = {"w": torch.ones(3, 4, 4), "frozen": torch.ones(3, 2)}
    updates, _ = torch.vmap(lambda g: opt.update(g, opt.init(params), params))(grads)
    assert updates["w"].shape == (3, 4, 4)
