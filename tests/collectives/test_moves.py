"""Laws of the moves: a copy each way, each the transpose of the other, under every transform and simulation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import PerRank
from fzero.collectives._spaces import to_device, to_host
from fzero.testing import _awkward_shapes, world_sizes
from tests.helpers import examples

Move = Callable[[torch.Tensor], torch.Tensor]


def up(x: torch.Tensor) -> torch.Tensor:
    return to_device(x, "cpu")


MOVES: dict[str, Move] = {"to_host": to_host, "to_device": up}
OTHER: dict[str, Move] = {"to_host": up, "to_device": to_host}
names = st.sampled_from(sorted(MOVES))


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operations(f: Callable[..., Any], *xs: torch.Tensor) -> list[str]:
    """The moves in the graph of a function, in order."""
    targets = [str(n.target) for n in make_fx(f)(*xs).graph.nodes]
    return [t.split(".")[1] for t in targets if t.startswith("fzero.to_")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", sorted(MOVES))
def test_a_move_between_memories_copies(name, shape, dtype):
    """Values, shape and dtype stay, and the memory is another: where both are one memory, too."""
    x = normal(shape).mul(3).to(dtype)
    y = MOVES[name](x)
    assert torch.equal(x, y) and y.dtype == dtype and y.shape == x.shape
    assert not x.numel() or y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", sorted(MOVES))
def test_a_move_of_a_view_takes_the_view_only(name):
    x = normal((4, 6))
    for view in (x.T, x[:, 1:4], x[0].expand(3, 6)):
        y = MOVES[name](view)
        assert torch.equal(y, view) and y.untyped_storage().nbytes() == y.nbytes


@examples(10, 20)
@given(names, _awkward_shapes())
def test_to_host_and_to_device_are_each_others_transposes(name, shape):
    """This holds for values and for operations: the backward pass of a move is the other move, once."""
    x, y = normal(shape), normal(shape, 1)
    moved, transposed = torch.func.vjp(MOVES[name], x)
    assert torch.equal(moved, x) and torch.equal(transposed(y)[0], y)

    def pull_back(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(MOVES[name], x)[1](y)[0]

    other = next(n for n in MOVES if n != name)
    assert operations(MOVES[name], x) == [name]
    assert operations(pull_back, x, y)[-1:] == [other]


@examples(10, 20)
@given(names, _awkward_shapes())
def test_derivatives_through_a_move_equal_those_without(name, shape):
    """grad, jvp, the gradient of a gradient, per-sample gradients, jvp of grad."""
    f, x, t = MOVES[name], normal((2, *shape)), normal((2, *shape), 1)

    def loss(f: Move) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (torch.sin(f(torch.cos(x))) ** 3).sum()

    def twice(f: Move) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.func.grad(lambda x: torch.func.grad(loss(f))(x).square().sum())

    programs: list[Callable[[Move], torch.Tensor]] = [
        lambda f: torch.func.grad(loss(f))(x),
        lambda f: torch.func.jvp(f, (x,), (t,))[1],
        lambda f: twice(f)(x),
        lambda f: torch.vmap(f)(x),
        lambda f: torch.vmap(f, in_dims=-1, out_dims=-1)(x),
        lambda f: torch.vmap(torch.func.grad(loss(f)))(x),
        lambda f: torch.func.jvp(torch.func.grad(loss(f)), (x,), (t,))[1],
    ]
    for program in programs:
        assert torch.equal(program(f), program(lambda x: x.clone()))


def test_torchs_own_backward_goes_through_moves():
    x = normal((3,)).requires_grad_()
    (up(to_host(x) * 2) * 3).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [6, 6, 6]


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
@examples(6, 12)
@given(name=names, n=world_sizes(5), shape=_awkward_shapes())
def test_each_rank_moves_its_own_tensor(simulate, name, n, shape):
    """It sends nothing between ranks, and its gradient is that of the program without it."""
    X = normal((n, *shape))
    mesh = fzero.mesh(dp=n, simulate=simulate)

    def program(f: Move) -> Callable[[torch.Tensor], Any]:
        return lambda x: PerRank(torch.func.grad(lambda x: torch.sin(fzero.collectives.psum(f(x), "dp")).sum())(x))

    with fzero.collectives.record() as log:
        moved = mesh.spmd(lambda x: PerRank(MOVES[name](x)))(PerRank(X)).value
    assert torch.equal(moved, X) and not log.unit_events
    got, expected = (mesh.spmd(program(f))(PerRank(X)).value for f in (MOVES[name], torch.clone))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("simulate", ["vmap", "lockstep"])
def test_a_moved_replicated_value_stays_replicated(simulate):
    mesh = fzero.mesh(dp=3, simulate=simulate)
    assert mesh.spmd(lambda x: to_host(x) + 1)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(), (0, 2), (5,)], ids=str)
def test_a_move_of_a_fake_tensor_has_the_device_of_the_copy(shape):
    """A step of another device can then be planned: the device's stand-in is not needed for its shapes."""
    with FakeTensorMode():
        x = torch.empty(shape, dtype=torch.bfloat16)
        assert to_host(x).device.type == "cpu" and to_host(x).shape == shape
        meta = to_host(torch.empty(shape, device="meta"))
        assert meta.is_meta and meta.shape == shape
    meta = torch.empty(shape, device="meta", dtype=torch.bfloat16)
    for f in MOVES.values():
        assert f(meta).is_meta and f(meta).dtype == torch.bfloat16


@pytest.mark.parametrize("name", sorted(MOVES))
def test_the_custom_operations_of_moves_pass_opcheck(name):
    op = torch.ops.fzero.to_host if name == "to_host" else torch.ops.fzero.to_device
    arguments = () if name == "to_host" else (torch.device("cpu"),)
    for x in (normal((3, 2)), normal(()), normal((0,)), normal((4, 4)).T):
        torch.library.opcheck(op, (x, *arguments), test_utils=("test_schema", "test_faketensor"))
