"""Copies to the host that are on their way: numbers are the same, and nothing reads one before it has arrived."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import fzero
from fzero import optim
from fzero.collectives import _spaces
from fzero.graph.run import _backends, _program
from tests.checkpoint.states import same_bits
from tests.helpers import cases
from tests.optim.offloading import BF16, Row, Way, small_params, train

ROWS = {
    "masters, clip before": Row(
        lambda o, p: optim.chain(optim.clip_by_global_norm(1.0), o(optim.master_weights(optim.adamw(1e-2), BF16))), BF16
    ),
    "adamw": Row(lambda o, p: o(optim.adamw(1e-2))),
}
OPTIONS: dict[str, Any] = {
    "host": {},
    "device": {"update_on": "device"},
    "a step late": {"delay": 1},
    "parameters, too": {"params": True},
}


class Event(NamedTuple):
    """Stands for a GPU's: the copy is done when it is waited for."""

    value: torch.Tensor
    read: torch.Tensor

    def synchronize(self) -> None:
        self.value.copy_(self.read)


class Late:
    """A device's queue of copies: each reads at once, in the order of the device's work, and writes when waited for."""

    def __init__(self) -> None:
        self.copies = 0

    def __call__(self, x: torch.Tensor) -> _spaces._PendingCopy:
        self.copies += 1
        value = torch.full_like(x, torch.nan if x.is_floating_point() else 7)
        return _spaces._PendingCopy(value, Event(value, x.clone()))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def late(monkeypatch):
    queue = Late()
    monkeypatch.setattr(_spaces, "_enqueue_copy", queue)
    monkeypatch.setattr(_backends, "make_copies_async", partial(_program.make_copies_async, kinds=("cpu",)))
    return queue


MASTERS, PLAIN = ROWS
SOME = [(MASTERS, "parameters, too", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name,option,k", cases(SOME, itertools.product(ROWS, OPTIONS, (1, 2))))
def test_asynchronous_copies_train_bit_for_bit_as_synchronous_ones(late, name, option, k):
    def wrap(optimizer: Any) -> Any:
        return optim.offload(optimizer, 0.6, **OPTIONS[option])

    expected = train(Way(3, 2, k), ROWS[name], small_params(), wrap)
    assert not late.copies
    assert same_bits(train(Way(3, 2, k, jit=True), ROWS[name], small_params(), wrap), expected)
    assert late.copies


@pytest.mark.parametrize("backend", cases(["fx"], ["inductor"]))
def test_offloaded_activations_arrive_before_their_use(late, backend):
    """They do so in a loop over micro-batches, too; compiled pieces read what has arrived."""

    def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = fzero.remat(lambda w, x: torch.tanh(x @ w), save="host")(w, x)
        return x.square().mean()

    def train_step(params: Any, x: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_of, micro_batches=4)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    params = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    x = torch.linspace(-1, 1, 32).view(8, 4)
    step = fzero.shard(train_step, 0, fzero.mesh(dp=1))
    result = fzero.jit(step, backend=backend, donate=())(params, step.mesh.split(x))
    assert late.copies == 8  # of two blocks in four iterations; the batch stays
    torch.testing.assert_close(result, train_step(params, x))


def test_without_a_gpu_no_copy_is_made_asynchronous():
    traced = torch.fx.symbolic_trace(lambda x: x + 1).graph
    for n in traced.nodes:
        n.meta["val"] = torch.ones(2)
    assert _program.make_copies_async(traced) is traced


def test_a_copy_on_a_cpu_is_complete_at_once():
    x = torch.arange(3)
    coming = _spaces.start_to_host(x)
    assert coming.event is None and _spaces.wait_to_host(coming).equal(x) and _spaces.wait_to_host(coming) is not x
