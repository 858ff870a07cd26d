"""What a module's forward pass writes besides its result reaches nobody: it is refused, or named in a notice."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero import optim
from fzero._notice import warn_once
from fzero.nn import functional
from tests.helpers import ALL_STAGES, LEAST, cases


@pytest.fixture
def notices(caplog):
    """The notices of a test, each of which is shown once in a process."""
    warn_once.cache_clear()
    return lambda: [r.getMessage() for r in caplog.records if r.name == "fzero"]


class Leaving(nn.Module):
    """A block whose forward pass does something besides, inside a larger module."""

    def __init__(self, does: Callable[[Any, torch.Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.does = does
        for name, x in attributes.items():
            setattr(self, name, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w * x
        self.does(self, y)
        return y


def call(does: Callable[[Any, torch.Tensor], Any], remat: bool = False, **attributes: Any) -> tuple[nn.Module, Any]:
    """Differentiate a module with such a block, and return the module and the gradients."""
    module = nn.Sequential(nn.Linear(3, 3), Leaving(does, **attributes))
    apply, params, buffers = functional(module, remat=remat)
    loss = fzero.value_and_grad(lambda p, x: apply(p, buffers, x)[0].square().sum())
    return module, loss(params, torch.ones(2, 3))[1]


LEFT = {
    "an attribute": (lambda m, y: setattr(m, "aux", y.sum()), {}),
    "an attribute that was a tensor": (lambda m, y: setattr(m, "aux", y.sum()), {"aux": torch.zeros(())}),
    "an attribute that was None": (lambda m, y: setattr(m, "aux", y.sum()), {"aux": None}),
    "a list": (lambda m, y: m.aux.append(y.sum()), {"aux": []}),
    "a list that was not empty": (lambda m, y: m.aux.append(y.sum()), {"aux": [torch.zeros(())]}),
    "a dict of lists": (lambda m, y: m.aux["losses"].append(y.sum()), {"aux": {"losses": []}}),
    "a new tuple": (lambda m, y: setattr(m, "aux", (y, y.sum())), {}),
    "a buffer that it makes": (lambda m, y: m.register_buffer("aux", torch.zeros(2)), {}),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_tensor_that_forward_stores_in_an_attribute_is_named(notices, case):
    does, attributes = LEFT[case]
    module = nn.Sequential(nn.Linear(3, 3), Leaving(does, **attributes))
    apply, params, buffers = functional(module)
    apply(params, buffers, torch.ones(2, 3))  # nothing is differentiated
    (message,) = notices()
    assert "left a tensor in its attribute '1.aux'" in message and "have forward return it" in message
    held = vars(module[1]).get("aux", attributes.get("aux"))
    assert held is attributes.get("aux")  # the user's module was not run


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("case", [case for case in LEFT if case != "a buffer that it makes"])
def test_an_attribute_that_depends_on_the_parameters_is_refused(case, is_first):
    does, attributes = LEFT[case]
    apply, params, buffers = functional(nn.Sequential(nn.Linear(3, 3), Leaving(does, **attributes)))
    loss = fzero.value_and_grad(lambda p, x: apply(p, buffers, x)[0].square().sum())
    if not is_first:  # an evaluation looked at the attributes before
        apply(params, buffers, torch.ones(2, 3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"left a tensor in its attribute '1\.aux', which depends on the param"):
            loss(params, torch.ones(2, 3))


def test_an_attribute_stored_within_a_vmap_over_samples_is_refused():
    apply, params, buffers = functional(Leaving(LEFT["an attribute"][0]))
    each = fzero.value_and_grad(lambda p, x: torch.func.vmap(lambda row: apply(p, buffers, row)[0].sum())(x).mean())
    with pytest.raises(RuntimeError, match="attribute 'aux', which depends on the parameters"):
        each(params, torch.ones(2, 3))


class Balanced(nn.Module):
    """A layer that leaves its auxiliary loss in an attribute, as older mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.aux = nn.Linear(3, 3), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate(x)
        self.aux = y.square().mean()
        return y


def train(module: nn.Module, loss_of: Callable[..., Any], jit: bool, **options: Any) -> float:
    """Train a step on two ranks, and return the loss at the new parameters."""
    apply, params, buffers = functional(module, **options)

    def train_step(params: Any, state: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_of(apply, buffers))(params, x)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    opt, mesh, x = optim.sgd(0.1), fzero.mesh(dp=2), torch.arange(12.0).view(4, 3) / 10
    step = fzero.shard(train_step, 3, mesh)
    run = fzero.jit(step, backend="fx", **LEAST) if jit else step
    params, state = step.init(params, opt)
    params, state, _ = run(params, state, mesh.split(x))
    return run(params, state, mesh.split(x))[2].item()


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_an_auxiliary_loss_in_an_attribute_is_refused_with_a_remedy_that_works(jit, notices):
    torch.manual_seed(0)
    balanced = Balanced()
    module = nn.Sequential(nn.Linear(3, 3), balanced)

    def stale(apply: Any, buffers: Any) -> Any:
        return lambda p, x: apply(p, buffers, x)[0].sum() + balanced.aux  # of the user's module

    with pytest.raises(RuntimeError, match=r"\(module\(\*args\), module.get_submodule\('1'\).aux\)\)"):
        train(module, stale, jit)

    def run_returned(apply: Any, buffers: Any) -> Any:
        run = apply.method(lambda module, *args: (module(*args), module.get_submodule("1").aux))

        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            (y, aux), _ = run(p, buffers, x)
            return y.sum() + aux

        return loss

    def run_by_hand(apply: Any, buffers: Any) -> Any:
        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            y = apply(p, buffers, x)[0]
            return y.sum() + y.square().mean()

        return loss

    same = nn.Sequential(module[0], copy.deepcopy(balanced.gate))
    assert train(module, run_returned, jit) == pytest.approx(train(same, run_by_hand, jit), rel=1e-5)
    assert not notices()
    with pytest.raises(RuntimeError, match=r"ignore_writes=\['1.aux'\]\)"):
        train(module, run_by_hand, jit)
    train(module, run_by_hand, jit, ignore_writes=["1.aux"])


def test_a_tensor_that_a_block_under_remat_stores_is_refused():
    with pytest.raises(ValueError, match="held elsewhere than in its result"):
        call(LEFT["an attribute"][0], remat=True)


def test_forward_is_checked_once_for_each_structure_of_arguments(notices):
    class Switch(nn.Module):
        def forward(self, x: torch.Tensor, aux: Any = None) -> torch.Tensor:
            if aux is not None:
                self.aux = x.sum()
            return x

    apply, params, buffers = functional(Switch())
    x = torch.ones(2)
    apply(params, buffers, x)
    assert not notices()
    for _ in range(2):
        apply(params, buffers, x, aux=x)
        assert len(notices()) == 1


CHANGED = {
    "a counter": (lambda: 0, lambda m: setattr(m, "state", m.state + 1), "from 0 to 1"),
    "a flag": (lambda: True, lambda m: setattr(m, "state", False), "from True to False"),
    "a word": (lambda: "warm", lambda m: setattr(m, "state", "hot"), "from 'warm' to 'hot'"),
    "a list": (lambda: [], lambda m: m.state.append(3), r"from \[\] to \[3\]"),
    "a nested dict": (lambda: {"a": {"b": 0}}, lambda m: m.state["a"].update(b=2), "from .*'b': 0}} to .*'b': 2}}"),
    "a set": (lambda: {1}, lambda m: m.state.add(2), r"from \{1\} to \{1, 2\}"),
    "an object": (lambda: SimpleNamespace(n=0), lambda m: setattr(m.state, "n", 1), "from {'n': 0} to {'n': 1}"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_value_that_forward_changes_is_named_and_a_trace_refuses_it(notices, case):
    start, change, text = CHANGED[case]

    def made() -> Any:
        return functional(nn.Sequential(nn.Linear(3, 3), Leaving(lambda m, y: change(m), state=start())))

    apply, params, buffers = made()
    jitted = fzero.jit(lambda p, x: apply(p, buffers, x)[0], backend="fx")
    message = rf"Sequential's forward pass changed its attribute '1\.state' {text}, and a jitted step would keep"
    with pytest.raises(RuntimeError, match=message):
        jitted(params, torch.ones(2, 3))
    assert not notices()
    eager, *_ = made()
    eager(params, buffers, torch.ones(2, 3))
    (notice,) = notices()
    assert "changed its attribute '1.state' from" in notice and "0-d integer buffer" in notice


class Alternating(nn.Module):
    """A module that negates its output at each second call, by a number or by a buffer."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.w = nn.Linear(3, 3)
        if isinstance(count, torch.Tensor):
            self.register_buffer("count", count)
        else:
            self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w(x)
        if isinstance(self.count, int):
            self.count += 1
            return -y if self.count % 2 else y
        self.count += 1
        return torch.where(self.count % 2 == 1, -y, y)


def test_a_counter_is_refused_under_jit_and_a_buffer_counts():
    torch.manual_seed(0)
    apply, params, buffers = functional(Alternating(0))
    x = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"ignore_writes=\['count'\].*trouble.md#a-module-that-writes-to-itself"):
        fzero.jit(lambda p, x: apply(p, buffers, x)[0], backend="fx")(params, x)
    apply(params, buffers, x)  # a trace looks again after a call that was not traced
    with pytest.raises(RuntimeError, match="from 1 to 2, and a jitted step would keep"):
        fzero.plan(lambda p, x: apply(p, buffers, x)[0], params, x)
    counting, _, buffers = functional(Alternating(torch.tensor(0)))
    step = fzero.jit(lambda p, b, x: counting(p, b, x), backend="fx", donate=())
    for sign in (-1, 1, -1):
        y, buffers = step(params, buffers, x)
        torch.testing.assert_close(y, sign * torch.nn.functional.linear(x, params["w.weight"], params["w.bias"]))


def test_an_attribute_that_the_user_declares_constant_is_kept_at_its_value(notices):
    module = nn.Sequential(nn.Linear(3, 3), Alternating(0))
    with pytest.raises(TypeError, match=r"expected a list of paths, \['1.count'\]"):
        functional(module, ignore_writes="1.count")
    for pattern in ("1.count", "*.count"):
        apply, params, buffers = functional(module, ignore_writes=[pattern])
        fzero.jit(lambda p, x, apply=apply, buffers=buffers: apply(p, buffers, x)[0], backend="fx")(
            params, torch.ones(2, 3)
        )
    assert not notices()
    with pytest.raises(RuntimeError, match=r"'1\.count'"):
        apply, params, buffers = functional(module, ignore_writes=["count"])
        fzero.jit(lambda p, x: apply(p, buffers, x)[0], backend="fx")(params, torch.ones(2, 3))


def test_an_attribute_that_forward_fills_once_is_allowed(notices):
    does: Any = lambda m, y: setattr(m, "size", y.shape[-1])  # noqa: E731
    for attributes in ({}, {"size": None}):
        apply, params, buffers = functional(Leaving(does, **attributes))
        fzero.jit(lambda p, x, apply=apply, buffers=buffers: apply(p, buffers, x)[0], backend="fx")(
            params, torch.ones(3)
        )
    assert not notices()


utils: Any = torch.nn.utils

OWN = {
    "lstm": lambda: nn.LSTM(3, 3),
    "gru": lambda: nn.GRU(3, 3),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "spectral norm": lambda: utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "spectral norm by a hook": lambda: utils.spectral_norm(nn.Linear(3, 3)),
    "weight norm": lambda: utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: utils.parametrizations.orthogonal(nn.Linear(3, 3)),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 3, dropout=0.0),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("remat", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("name", OWN)
def test_torchs_own_modules_store_no_attributes_in_forward(notices, name, remat):
    torch.manual_seed(0)
    apply, params, buffers = functional(Only(OWN[name]()), remat=remat)
    x = torch.randn(4, 3)
    y, _ = apply(params, buffers, x)
    assert y.shape == x.shape and not notices()


class Only(nn.Module):
    """A module in a list, so that it is a repeated block."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([module])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return y[0] if isinstance(y, tuple) else y


def replace(m: Any, y: torch.Tensor) -> None:
    m.w = nn.Parameter(m.w.detach() * 2)


def write(m: Any, y: torch.Tensor) -> None:
    with torch.no_grad():
        m.w.mul_(2)


def make(m: Any, y: torch.Tensor) -> None:
    m.late = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "does,message",
    [
        (replace, r"replaced parameter '1\.w', whose gradient would be lost"),
        (write, r"wrote parameter '1\.w' in place: change it in the train step"),
        (make, r"made parameter '1\.late\.bias', which would not be trained"),
    ],
)
def test_a_parameter_that_forward_writes_is_refused_by_name(does, message):
    with pytest.raises(RuntimeError, match=message):
        call(does)


def test_a_constant_buffer_that_a_jitted_step_writes_is_named():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scratch += 1
            return x

    apply, params, buffers = functional(Counts())
    with pytest.raises(RuntimeError, match="wrote buffer 'scratch' in place"):
        fzero.jit(lambda x: apply(params, buffers, x)[0], backend="fx")(torch.ones(3))


def test_a_module_in_inference_mode_runs():
    with torch.inference_mode():
        module = nn.BatchNorm1d(3)
        apply, params, buffers = functional(module)
        assert apply(params, buffers, torch.randn(4, 3))[0].shape == (4, 3)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("remat", [False, True])
def test_a_hook_on_a_parameters_gradient_is_refused_by_name(method, remat):
    module = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3))
    handle = getattr(module[1].weight, method)(lambda x: None)
    with pytest.raises(ValueError, match=rf"'1\.weight' has a hook on its gradient \({method}\)"):
        functional(module, remat=remat)
    handle.remove()
    functional(module)


def test_a_hook_on_a_buffers_gradient_is_refused_by_name():
    module = nn.Module()
    module.register_buffer("b", torch.ones(2, requires_grad=True))
    module.get_buffer("b").register_hook(lambda g: g)
    with pytest.raises(ValueError, match="'b' has a hook on its gradient"):
        functional(module)


@pytest.mark.parametrize("method", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_on_a_backward_pass_is_refused_by_name(method):
    module = nn.Sequential(nn.Linear(3, 3))
    getattr(module[0], method)(lambda *_: None)
    with pytest.raises(ValueError, match="module '0' has a hook on its backward pass"):
        functional(module)


@pytest.mark.parametrize("stage", cases((2, 3), ALL_STAGES))
def test_the_mask_that_replaces_a_gradient_hook_has_its_effect(stage):
    torch.manual_seed(0)
    module, ids = nn.Embedding(5, 3).double(), torch.tensor([[0, 1], [4, 2], [1, 1], [3, 0]])
    mask = torch.tensor([True, False, True, True, False])[:, None]
    apply, params, buffers = functional(module)

    def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
        masked = {"weight": torch.where(mask, params["weight"], params["weight"].detach())}
        return apply(masked, buffers, ids)[0].square().mean()

    mesh = fzero.mesh(dp=2)
    opt = optim.sgd(1.0)

    def train_step(p: Any, s: Any, ids: torch.Tensor) -> Any:
        updates, s = opt.update(fzero.value_and_grad(loss)(p, ids)[1], s, p)
        return optim.apply_updates(p, updates), s

    step = fzero.shard(train_step, stage, mesh)
    sharded, state = step.init(params, opt)
    weight = step.gather(step(sharded, state, mesh.split(ids))[0])["weight"]
    module.weight.register_hook(lambda g: g * mask)
    module(ids).square().mean().backward()
    torch.testing.assert_close(params["weight"] - weight, module.weight.grad)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_computed_tensor_in_an_attribute_is_refused_by_name():
    module = nn.Sequential(nn.Linear(3, 3), Leaving(LEFT["a list"][0], aux=[]))
    module(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"attribute '1\.aux' holds a tensor that was computed"):
        functional(module)
    with pytest.raises(ValueError, match=r"'weight' holds a tensor.*parametrizations, not a hook"):
        functional(torch.nn.utils.weight_norm(nn.Linear(3, 3)))


def test_values_that_are_no_tensors_are_refused_by_name():
    module = nn.Linear(3, 3)
    apply, params, buffers = functional(module)
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match="params is a Linear: expected a dict of tensors"):
        apply(module, buffers, x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="params is a Functional: expected a dict of tensors"):
        apply(functional(module), buffers, x)  # pyright: ignore[reportArgumentType]
    for wrong in (module, None, params["bias"].numpy()):
        with pytest.raises(TypeError, match=f"params: 'bias' is a {type(wrong).__name__}, expected a tensor"):
            apply({**params, "bias": wrong}, buffers, x)  # pyright: ignore[reportArgumentType]
