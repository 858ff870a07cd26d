"""What a block of remat may not do: capture, keep or write what is not its own, and run otherwise the second time."""

from typing import Any

import pytest
import torch
from torch.func import grad, vmap

import fzero
from fzero.testing import assert_trees_close
from tests.transforms.helpers import SAVES, inputs


def test_a_block_whose_second_run_differs_is_refused():
    p, x = inputs()
    for counts, message in (
        ((1, 2), r"ran mm\(.* where .* ran no further"),
        ((2, 1), r"ran no further .* where .* ran mm\("),
    ):
        products = iter(counts)

        def moody(p, x, products=products):
            for _ in range(next(products)):
                x = x @ p["w"]
            return x

        with pytest.raises(RuntimeError, match=message):
            grad(lambda p, f=moody: fzero.remat(f, "matmuls")(p, x).sum())(p)


def test_a_block_that_writes_into_its_argument_is_refused():
    def writes(p, x):
        return x.mul_(2) @ p["w"]

    p, x = inputs()
    with pytest.raises(RuntimeError, match="remat: the block writes into an argument in place"):
        grad(lambda p: fzero.remat(writes)(p, x * 1).sum())(p)


class Holder:
    """Something that a closure's inspection does not see into."""

    value: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.value


@pytest.mark.parametrize("save", (None, "matmuls"))
@pytest.mark.parametrize("hidden", (False, True))
def test_a_block_that_captures_a_differentiated_tensor_is_refused(save, hidden):
    p, x = inputs()
    w, mesh = p["w"], fzero.mesh(dp=2)

    def loss(w, x):
        holder = Holder()
        holder.value = w
        return fzero.remat(holder if hidden else lambda x: x @ w, save)(x).sum()

    cases = [
        lambda: grad(loss)(w, x),
        lambda: vmap(grad(loss), (None, 0))(w, x[:, None]),
        lambda: loss(w.clone().requires_grad_(), x).backward(),
        lambda: loss(w.clone().requires_grad_(), x.clone().requires_grad_()).backward(),
        lambda: loss(w.clone().requires_grad_() * 2, x.clone().requires_grad_()).backward(),
        lambda: mesh.spmd(fzero.value_and_grad(loss))(w, mesh.split(torch.cat([x, x]))),
        lambda: fzero.jit(grad(loss), backend="fx")(w, x),
        lambda: grad(grad(lambda w: loss(w, x * w.sum())))(w),
    ]
    for case in cases:
        with pytest.raises(ValueError, match=r"a tensor float64 \[4, 4\] that was not given as an argument"):
            case()


def test_a_block_that_captures_the_batch_is_refused():
    p, x = inputs(4)
    mesh = fzero.mesh(dp=2)

    def program(w, x):
        return fzero.value_and_grad(lambda w: fzero.remat(lambda w: x @ w)(w).sum())(w)

    with pytest.raises(ValueError, match="not given as an argument, and that is differentiated, or differs by rank"):
        mesh.spmd(program)(p["w"], mesh.split(x))


def test_a_block_under_remat_may_capture_constants():
    p, x = inputs()
    for save in SAVES:
        f = fzero.remat(lambda w: torch.tanh(x @ w) * p["b"], save)
        expected = grad(lambda w: (torch.tanh(x @ w) * p["b"]).sum())(p["w"])
        assert_trees_close(grad(lambda w, f=f: f(w).sum())(p["w"]), expected)
        assert_trees_close(fzero.jit(grad(lambda w, f=f: f(w).sum()), backend="fx")(p["w"]), expected)


def test_a_block_with_a_mutable_argument_is_refused():
    class DynamicCache:
        pass

    x = inputs()[1]
    with pytest.raises(TypeError, match=r"argument leaf 'past' is a DynamicCache.*use_cache=False"):
        fzero.remat(lambda x, past: x)(x.requires_grad_(), past=DynamicCache())
    with pytest.raises(TypeError, match="argument 1 is a Holder, an object that the block"):
        fzero.remat(lambda x, y: x)(x, Holder())
    with pytest.raises(TypeError, match="result leaf 'y' is a Holder"):
        fzero.remat(lambda x: {"y": Holder()})(x)


class Keeps(torch.nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.w, self.change, self.aux = torch.nn.Parameter(torch.eye(3)), change, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.w)
        self.aux = self.change(h.square().mean())
        return x + h


def test_a_block_that_stores_a_tensor_elsewhere_is_refused():
    """Its gradient would be lost without a word: an auxiliary loss, say, or what a hook collects."""
    held: list[Any] = []

    def block(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        held.append((p**2).sum())
        return x * p

    with pytest.raises(ValueError, match=r"a tensor float32 \[\] that the block computed .* held elsewhere"):
        grad(lambda p: fzero.remat(block)(p, torch.ones(2)).sum() + held[-1])(torch.ones(2))
    for change, refused in [(lambda a: a, True), (torch.Tensor.detach, False), (torch.Tensor.item, False)]:
        apply, params, buffers = fzero.nn.functional(torch.nn.Sequential(Keeps(change)), remat=True)
        loss = lambda p, apply=apply, buffers=buffers: apply(p, buffers, torch.ones(2, 3))[0].sum()  # noqa: E731
        if refused:
            with pytest.raises(ValueError, match="held elsewhere"):
                grad(loss)(params)
        else:
            assert grad(loss)(params)["0.w"].abs().sum() > 0
