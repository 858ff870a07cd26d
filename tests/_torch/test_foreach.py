"""Foreach operations give the numbers of single ones, to the last bit."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fzero import optim, tree
from fzero._torch import foreach
from tests.optim.table import EACH

OPTIMIZERS = EACH | {
    "masked decay": optim.adamw(1e-2, mask=lambda params: tree.map(lambda p: p.ndim >= 2, params)),
    "adamw with a schedule": optim.adamw(lambda count: 1e-2 / (1 + count)),
    "injected": optim.inject_hyperparams(optim.adamw)(1e-2, weight_decay=0.1),
    "clip and scale_by_adam": optim.chain(optim.clip_by_global_norm(0.1), optim.scale_by_adam(), optim.scale(-0.1)),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "add_decayed_weights": optim.chain(optim.add_decayed_weights(0.1), optim.sgd(0.1)),
}


@pytest.fixture
def on_accelerator(monkeypatch):
    """Let the CPU count as an accelerator; list the sizes of the groups."""
    sizes: list[int] = []
    groups = foreach._group_rows

    def note_groups(rows):
        results = list(groups(rows))
        sizes.extend(len(keys) for keys in results)
        return iter(results)

    monkeypatch.setattr(foreach, "is_accelerator", lambda device: True)
    monkeypatch.setattr(foreach, "_group_rows", note_groups)
    return sizes


def params(dtype=torch.float32):
    torch.manual_seed(0)
    tied = torch.randn(3, 4).to(dtype)
    return {
        "a": torch.randn(5, 3).to(dtype),
        "b": [torch.randn(7).to(dtype), torch.randn(2, 2).to(dtype)],
        "tied": (tied, tied),
        "strided": torch.randn(4, 6).to(dtype).T,
        "double": torch.randn(3).double(),
    }


def steps(optimizer, dtype):
    values = params(dtype)
    state = optimizer.init(values)
    for i in range(3):
        grads = tree.map(lambda p, i=i: torch.sin(p * (i + 1)), values)
        updates, state = optimizer.update(grads, state, params=values)
        values = optim.apply_updates(values, updates)
    assert values["tied"][0] is values["tied"][1]
    return tree.tensors((values, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_give_the_numbers_of_single_tensors(name, dtype, monkeypatch, request):
    if name == "injected" and dtype == torch.bfloat16:
        pytest.skip(
            "torch's CPU kernels round a 0-d tensor to bfloat16 if it is the first operand; its GPU kernels do not"
        )
    single = steps(OPTIMIZERS[name], dtype)
    sizes = request.getfixturevalue("on_accelerator")
    grouped = steps(OPTIMIZERS[name], dtype)
    assert sizes and min(sizes) > 1
    for x, y in zip(single, grouped, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_a_group_is_bounded_in_bytes(on_accelerator, monkeypatch):
    monkeypatch.setattr(foreach, "_GROUP_BYTES", 100)
    leaves = [torch.ones(n) for n in (10, 10, 5, 200, 3, 3)]
    assert [len(x) for x in tree.elementwise(lambda x: x * 2, leaves)] == [10, 10, 5, 200, 3, 3]
    assert on_accelerator == [3, 2]


def test_single_operations_are_seen_by_transforms_and_modes(on_accelerator):
    leaves = [torch.ones(2), torch.ones(3)]
    torch.func.vmap(lambda x: tree.elementwise(lambda y: y + y, [x, x * 2]))(torch.ones(4, 2))
    with FlopCounterMode(display=False):
        tree.elementwise(lambda y: y + y, leaves)
    assert on_accelerator == []
    tree.elementwise(lambda y: y + y, leaves)
    assert on_accelerator == [2]


def test_host_tensors_stay_single():
    assert not foreach.can_group([torch.ones(2), torch.ones(3)])
