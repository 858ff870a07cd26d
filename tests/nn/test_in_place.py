"""Modules that are taken apart in place: their results, what they keep, and their weights when they are back."""

from typing import Any

import pytest
import torch

from fzero.nn import full_copy, functional, functional_in_place, put_back

CPU = torch.device("cpu")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        self.runs += 1
        if cache is not None:
            cache.seen.append(x)
        return x + self.layer(x)


class Network(torch.nn.Module):
    """A recurrent module, a parametrized one, tied blocks, statistics and a tensor in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = torch.nn.LSTM(4, 4)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.blocks.append(self.blocks[0])
        self.norm = torch.nn.BatchNorm1d(4)
        self.fixed = torch.nn.Linear(4, 4).requires_grad_(False)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = self.normed(self.rnn(x)[0])
        for block in self.blocks:
            x = block(x, cache)
        self.kept.append(x)
        return self.fixed(self.norm(x.flatten(0, 1)))


class Cache:
    """A mutable object, such as transformers' cache of keys and values."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


def gradients(apply: Any, params: Any, buffers: Any, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda params: apply(params, buffers, x)[0].square().mean())(params)


def test_functional_in_place_equals_functional_and_restores_the_weights():
    module, x = Network(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    expected = gradients(*functional(Network(), remat=True, ignore_writes=["kept", "blocks.*.runs"]), x)
    apply, params, buffers = functional_in_place(module, CPU)
    assert apply.module is module and all(p.is_meta for p in module.parameters())
    assert module.blocks[2] is module.blocks[0] and module.rnn.weight_ih_l0.requires_grad
    torch.testing.assert_close(gradients(apply, params, buffers, x), expected)
    assert len(module.kept) == 1  # what forward left is the module's, without a notice
    module.kept[:] = [torch.ones(1, requires_grad=True) * 2]  # a loss that was not detached
    copied = full_copy(apply, {**params, **buffers})
    put_back(apply, {**params, **buffers})
    assert [float(x) for x in copied.kept] == [2] and copied.kept[0] is not module.kept[0]
    for full in (module, copied):
        torch.testing.assert_close(dict(full.state_dict()), state)
        assert "forward" not in vars(full.blocks[0]) and full.blocks[2] is full.blocks[0]
        assert type(full.rnn.weight_ih_l0) is torch.nn.Parameter and not full.fixed.weight.requires_grad
        torch.testing.assert_close(full.eval()(x), Network().eval()(x))
    again = functional_in_place(module.train(), CPU)  # as often as one likes
    torch.testing.assert_close(gradients(*again, x), expected)


def test_without_gradients_blocks_run_once_and_may_fill_a_cache():
    module, x, cache = Network(), torch.ones(2, 3, 4), Cache()
    apply, params, buffers = functional_in_place(module, CPU)
    with torch.no_grad():
        out, new = apply(params, buffers, x, cache)
    assert [block.runs for block in module.blocks] == [2, 1, 2] and len(cache.seen) == 3
    torch.testing.assert_close(out, Network()(x))
    assert int(new["norm.num_batches_tracked"]) == 1
    with pytest.raises(TypeError, match="is a Cache, an object that the block could write into"):
        apply(params, buffers, x, cache)
