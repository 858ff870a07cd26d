"""Functions that a module holds, in attributes and as hooks, refer to the copy of it that `apply` runs."""

import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import fzero
from fzero.nn import functional


class Scaled(nn.Module):
    """A module whose functions refer to it, each in another way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(2.0)), nn.Linear(2, 2)
        inner, run = self.inner, self.inner.forward
        scaled = {
            "a lambda": lambda x: self.scale * x,
            "a submodule": lambda x: inner.weight.sum() * x,
            "a default": lambda x, inner=inner: inner.weight.sum() * x,
            "a default by keyword": lambda x, *, inner=inner: inner.weight.sum() * x,
            "a method": lambda x: run(x),
            "a function in a function": lambda x: (lambda y: self.scale * y)(x),
        }
        f = {**scaled, "a list": [scaled["a lambda"]], "a partial": functools.partial(_times, of=lambda: self.scale)}
        self.f = f.get(how, lambda x: x)
        if how == "a hook":
            self.inner.register_forward_hook(lambda m, args, out: out + self.scale * args[0])
            self.f = run
        if how == "a hook before":
            self.inner.register_forward_pre_hook(lambda m, args: (args[0] * self.scale,))
        if how == "forward":
            self.inner.forward = lambda x: run(x) * self.scale
        if how == "forward as a method":
            self.inner.forward = MethodType(lambda inner, x: run(x) * inner.weight.sum(), self.inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.f[0] if isinstance(self.f, list) else self.f
        return f(x) + self.inner(x)


def _times(x: torch.Tensor, of: Any) -> torch.Tensor:
    return of() * x


FUNCTIONS = ["a lambda", "a submodule", "a default", "a default by keyword", "a method", "a function in a function"]
FORWARDS = ["forward", "forward as a method"]


@pytest.mark.parametrize("how", [*FUNCTIONS, "a list", "a partial", "a hook", "a hook before", *FORWARDS])
def test_a_function_that_refers_to_its_module_is_trained_through(how):
    torch.manual_seed(0)
    module, x = Scaled(how), torch.randn(3, 2)
    apply, params, buffers = functional(module)
    module(x).sum().backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()}
    grads = torch.func.grad(lambda p: apply(p, buffers, x)[0].sum())(params)
    grad_fn = fzero.value_and_grad(lambda p: apply(p, buffers, x)[0].sum())
    meshes = [fzero.mesh(dp=2), fzero.mesh(dp=2, simulate="lockstep")]
    for got in (grads, *[mesh.spmd(lambda p: grad_fn(p)[1])(params) for mesh in meshes]):
        assert got.keys() == expected.keys()
        for name, g in got.items():
            torch.testing.assert_close(g, expected[name], msg=name)


SHARED = nn.Linear(2, 2)


def test_a_function_that_holds_a_parameter_or_reads_the_module_as_a_global_is_refused():
    module = nn.Sequential(nn.Linear(2, 2))
    weight = module[0].weight
    handle = module[0].register_forward_hook(lambda m, args, out: out * weight.sum())
    with pytest.raises(
        ValueError, match=r"module '0' holds the function .*<lambda> \(.*py:\d+\), which holds '0.weight'"
    ):
        functional(module)
    handle.remove()
    functional(module)
    module = nn.Sequential(SHARED)
    module.f = [functools.partial(lambda m, x: (lambda: SHARED(x))(), module)]
    with pytest.raises(ValueError, match=r"the module holds the function .* reads the global 'SHARED', a part of the"):
        functional(module)


def test_a_forward_hook_on_a_module_still_runs():
    module, records = nn.Linear(2, 2), []
    module.register_forward_hook(lambda m, args, out: records.append(out.shape))
    apply, params, buffers = functional(module)
    apply(params, buffers, torch.ones(3, 2))
    assert records == [(3, 2)]
