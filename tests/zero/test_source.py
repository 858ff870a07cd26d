"""The leaves that init takes: a tree, a module, weights that require grad, views. It keeps, copies or refuses them."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import nn, optim, tree
from fzero.graph._one_rank import planned_mesh
from fzero.testing import assert_trees_close, stages, trees
from tests.helpers import ALL_STAGES, cases, examples, train_step_for
from tests.memory import peak_bytes

DTYPES = [torch.float64, torch.float32, torch.int64, torch.bool]
RULES = [None, lambda path, leaf: None, lambda path, leaf: None if len(path) % 2 else "odd"]


def step_on(stage: int, train_step: Any = lambda p, s: (p, s), **options: Any) -> fzero.zero.ShardedStep:
    return fzero.shard(train_step, stage, fzero.mesh(dp=2), **options)


def storages(values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree.tensors(values) if x.numel()}


def frozen_state(params: Any) -> Any:
    """A state that is the parameters themselves, as a slow copy of them starts."""
    return {"slow": params, "count": torch.zeros(())}


SLOW = optim.Optimizer(frozen_state, lambda grads, state, params=None: (grads, state), exact_on_shards=True)


@examples(20, 40)
@given(trees(dtypes=DTYPES), stages(), st.sampled_from(RULES), st.booleans(), st.booleans())
def test_init_shares_no_memory_with_its_arguments(values, stage, units, by_function, keeps):
    """It shares none at any stage, by any rule, in any dtype; nor with what a function hands out that it holds."""
    before = tree.map(torch.clone, values)
    step = step_on(stage, units=units)
    opt = SLOW if keeps else optim.adam(0.1)
    results = step.init((lambda: values) if by_function else values, opt)
    assert not storages(results) & storages(values)
    assert_trees_close(step.gather(results[0]), before, rtol=0)
    for x in tree.tensors(results):
        if x.numel():
            x.zero_()
    assert_trees_close(values, before, rtol=0)
    moved = step.partition(values)
    assert not storages(moved) & storages(values)
    assert_trees_close(step.gather(moved), before, rtol=0)


@pytest.mark.parametrize("units", RULES)
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_a_jitted_step_does_not_change_the_tensors_given_to_init(stage, units):
    """It overwrites its arguments, and these are not the caller's."""
    given_params = {"w": torch.ones(3, 2), "scale": torch.ones(()), "b": torch.zeros(2)}
    before = tree.map(torch.clone, given_params)
    opt = optim.chain(optim.sgd(0.1, momentum=0.9), optim.params_ema(0.9))
    train_step = train_step_for(lambda p, x: (x @ p["w"] * p["scale"] + p["b"]).square().mean(), opt)
    step = fzero.jit(step_on(stage, train_step, units=units), backend="fx")
    params, state = step.init(given_params, opt)
    for _ in range(2):
        params, state, _ = step(params, state, step.mesh.split(torch.ones(4, 3)))
    assert_trees_close(given_params, before, rtol=0)


@examples(15, 30)
@given(trees(dtypes=DTYPES), stages(), st.sampled_from(RULES), st.booleans())
def test_init_with_donate_takes_over_the_leaves(values, stage, units, tie):
    values = {**values, "again": values["first"]} if tie else values
    expected = tree.map(torch.clone, values)
    step = step_on(stage, units=units)
    opt = optim.adam(0.1)
    plain = step.init(values, opt)
    leaves = tree.tensors(values)
    memory = {x.data_ptr() for x in leaves if x.numel()}
    got = step.init(values, opt, donate=True)
    assert_trees_close(list(got), list(plain), rtol=0)
    assert_trees_close(step.gather(got[0]), expected, rtol=0)
    for x in leaves:
        with pytest.raises(fzero.errors.DonatedError):
            x.numel()
    for again in (values, leaves):
        with pytest.raises(
            fzero.errors.DonatedError, match=r"params leaf '.*' was donated to step.init\(..., donate=True\)"
        ):
            step.init(again, opt)
    moved = [x for x in tree.tensors(got[0]) if x.numel() and x.data_ptr() not in memory]
    if stage == 0:  # no second copy
        assert {x.data_ptr() for x in tree.tensors(got[0]) if x.numel()} == memory
    elif stage < 3:  # but for units of several leaves, which lie side by side
        together = Counter(x.untyped_storage().data_ptr() for x in tree.tensors(got[0]))
        assert all(together[x.untyped_storage().data_ptr()] > 1 for x in moved)


def test_init_with_donate_copies_views():
    """No result is made of memory that others still see, or that overlaps."""
    flat, wide = torch.arange(6.0), torch.ones(1, 3).expand(2, 3)
    values = {"a": flat[:2], "b": flat[2:], "wide": wide, "same": flat[2:]}
    step = step_on(0)
    params, _ = step.init(values, optim.sgd(0.1), donate=True)
    assert_trees_close(
        params, {"a": torch.arange(2.0), "b": torch.arange(2.0, 6.0), "wide": torch.ones(2, 3), "same": flat[2:]}
    )
    assert len(storages(params)) == 4 and flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert params["wide"].is_contiguous()


def step_elsewhere(stage: int, ranks: int = 8) -> fzero.zero.ShardedStep:
    """The step as one of many ranks has it, without the others."""
    return fzero.shard(lambda p, s: (p, s), stage, planned_mesh((("dp", ranks),)))


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
@pytest.mark.parametrize("how", ["function", "donated", "kept"])
def test_init_makes_no_second_copy_of_all_parameters(how, stage):
    """Its peak adds parameters P, state S in a rank's layout, one leaf, and shards for the optimizer."""
    width, layers, ranks = 64, 12, 8
    leaf, psi = width * width * 4, layers * width * width * 4

    def make() -> Any:
        return {"blocks": [{"w": torch.randn(width, width)} for _ in range(layers)]}

    step, opt = step_elsewhere(stage, ranks), optim.adam(0.1)
    step.init(make, opt)  # warm
    values: list[Any] = [make]
    if how != "function":
        values = [make()]
    peak = peak_bytes(lambda: step.init(values.pop(), opt, donate=how == "donated"))
    shards = psi // ranks
    held = {0: 3 * psi, 1: psi + 3 * shards, 2: psi + 3 * shards, 3: 3 * shards}[stage]
    whole = psi if stage < 3 else 0  # that were there before, and became the results
    added = {"function": held, "donated": held - whole, "kept": held}[how]
    assert peak <= added + 2 * leaf + 2**14, (peak, added)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.body = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.body.bias.requires_grad_(False)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_init_from_a_module_keeps_its_weights(stage, donate):
    module, step = Model(), step_on(stage)
    expected = tree.map(torch.clone, nn.functional(module).params)
    state = torch.get_rng_state()
    params, opt_state = step.init(module, optim.adam(0.1), donate=donate)
    assert torch.equal(torch.get_rng_state(), state)
    assert_trees_close(step.gather(params), expected, rtol=0)
    if donate:
        with pytest.raises(fzero.errors.DonatedError, match=r"'body.weight' was donated to step.init"):
            module.body.weight.numel()
    else:
        assert torch.equal(module.body.weight, expected["body.weight"])
    assert not any(x.requires_grad or type(x) is not torch.Tensor for x in tree.tensors((params, opt_state)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_partly_on_meta_is_refused(stage):
    module = Model()
    module.body.to("meta")
    message = r"partly on the meta device: 'body.weight' has no values, and 'embed.weight' has"
    with pytest.raises(ValueError, match=message):
        step_on(stage).init(module, optim.sgd(0.1))
    module.embed.to("meta")
    module.head.weight = module.embed.weight
    step_on(stage).init(module, optim.sgd(0.1))  # frozen or not, what has no values is drawn


# Graphs, modes, devices.


@pytest.mark.parametrize("precision", [None, fzero.Precision(param=torch.bfloat16)])
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
def test_parameters_that_require_grad_give_plain_tensors(stage, precision):
    opt = optim.chain(optim.adam(0.1), optim.params_ema(0.9))
    opt = opt if precision is None else optim.master_weights(opt, precision)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            results = step_on(stage, units=RULES[2]).init(dict(Model().named_parameters()), opt)
        for x in tree.tensors(results):
            assert type(x) is torch.Tensor and not x.requires_grad and x.grad_fn is None


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_init_returns_ordinary_tensors_under_inference_mode(stage, simulate):
    """The results are ordinary tensors, which a jitted step may overwrite."""
    opt = optim.adam(0.1)
    train_step = train_step_for(lambda p, x: (x @ p["w"]).square().mean(), opt)
    step = fzero.shard(train_step, stage, fzero.mesh(dp=2, simulate=simulate))
    with torch.inference_mode():
        w = torch.ones(3, 2)
        within = step.init({"w": w}, opt), step.init(lambda: {"w": torch.ones(3, 2)}, opt), step.partition({"w": w})
    for values in (*within, step.init({"w": w}, opt), step.init({"w": w}, opt, donate=True)):
        assert not any(x.is_inference() for x in tree.tensors(values))
    fzero.jit(step, backend="fx")(*within[0], step.mesh.split(torch.ones(4, 3)))


@pytest.mark.parametrize("stage", cases((1, 3), ALL_STAGES))
def test_init_under_a_meta_device_keeps_real_parameters(stage):
    """Real parameters keep a real state; a state without memory is refused, which else would show steps later."""
    step, count = step_on(stage), {"count": torch.zeros((), device="meta")}
    without_memory = optim.Optimizer(lambda params: count, lambda grads, state, params: (grads, state))
    with torch.device("meta"):
        real = step.init({"w": torch.ones(3, 2, device="cpu")}, optim.adam(0.1))
        with pytest.raises(ValueError, match=r"opt_state leaf 'count' is on the meta device, and the parameters have"):
            step.init({"w": torch.ones(3, 2, device="cpu")}, without_memory)
        planned = step.init({"w": torch.ones(3, 2)}, optim.adam(0.1))
    assert step.gather(real[0])["w"].tolist() == [[1, 1]] * 3
    assert not any(x.is_meta for x in tree.tensors(real))
    assert all(x.is_meta for x in tree.tensors(planned) if x.dim())
    read = fzero.tree.map(lambda x: torch.zeros_like(x, device="cpu"), planned[0])
    with pytest.raises(ValueError, match=r"argument 1 leaf 'mu.w(.0)?' is on the meta device, .* give step.init"):
        step(read, planned[1], step.mesh.split(torch.ones(4, 3)))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_unit_whose_leaves_are_on_two_devices_is_refused(stage):
    values = {"a": {"w": torch.ones(2), "b": torch.ones(2, device="meta")}}
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        step_on(stage).init(values, optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"params leaf 'a.b' is on meta, and leaf 'a.w' of the same unit is on cpu"):
        step_on(3).init(values, optim.sgd(0.1))


def test_one_tensor_at_two_paths_with_two_rules_follows_the_first():
    w = torch.arange(4.0)
    step = step_on(3, units=lambda path, leaf: None if path == "b" else path)
    params, _ = step.init({"a": w, "b": w}, optim.sgd(0.1))
    assert isinstance(params["a"], fzero.sharding.Shard) and isinstance(params["b"], fzero.sharding.Slot)
    params, _ = step.init({"b": w, "c": w}, optim.sgd(0.1))
    assert params["b"] is params["c"] and params["b"] is not w


DENSE = {
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        r"params leaf 'w' is torch.sparse_coo, and cannot be sharded: pass a dense",
    ),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"params leaf 'w' is torch.sparse_csr, and cannot be sharded"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        r"params leaf 'w' is quantized, and cannot be sharded",
    ),
    "lazy": (
        lambda: torch.nn.UninitializedParameter(),
        r"params leaf 'w' is not initialised: run the lazy module once",
    ),
    "a number": (lambda: 1.0, r"params leaf 'w' is 1.0: expected a tensor"),
    "a module": (lambda: torch.nn.Linear(2, 2), r"params holds a module: pass the module itself, or fzero.nn"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("stage", cases((0, 3), ALL_STAGES))
@pytest.mark.parametrize("name", DENSE)
def test_init_refuses_leaves_that_cannot_be_sharded(name, stage):
    make, message = DENSE[name]
    with pytest.raises(TypeError, match=message):
        step_on(stage).init({"w": make()}, optim.sgd(0.1))
