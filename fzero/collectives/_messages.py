"""Messages from one rank to another: send and receive.

A message has a tag, by which the receiver tells it from other messages. `start_send` and `start_receive` are for
schedules, which know where to wait. `send` and `receive` are for rank programs, and are each other's transposes: in a
backward pass the receiver sends the gradient back. Ranks of a vmap run one program, and use `ppermute` instead.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fzero._arguments import is_int
from fzero._torch import is_tracing, rank_group
from fzero._torch.types import Tensors
from fzero._tracebacks import api_boundary
from fzero.axes import Axis, Binding, is_lockstep, lockstep, resolve_axes
from fzero.collectives import _record
from fzero.collectives._sums import check_dim
from fzero.collectives._table import LinearMap, MessageOptions, RankOperation, add_rows, apply
from fzero.collectives.gloo import PendingMessages, wait

__all__ = ["receive", "send", "start_receive", "start_send"]


_FIRST_TAG = 1 << 21  # above the tags of fzero.collectives.gloo
_TAGS = 1 << 29


def start_send(x: torch.Tensor, to: int, tag: int, binding: Binding) -> PendingMessages:
    """Start to send a tensor to rank `to` of an axis. Do not write into the tensor before the wait for the message."""
    x = x.detach().contiguous()
    _record.add(kind="send", binding=binding, numel_in=x.numel(), numel_out=x.numel(), dtype=x.dtype, unit="")
    if is_lockstep(binding.group):
        lockstep.send(binding.group, binding.rank, to, tag, x)
        return PendingMessages([], lambda: x)
    group: Any = rank_group(binding.group)
    requests = [dist.isend(x, group=group, group_dst=to, tag=_FIRST_TAG + tag)] if x.numel() else []
    return PendingMessages(requests, lambda: x)


def start_receive(like: torch.Tensor, source: int, tag: int, binding: Binding) -> PendingMessages:
    """Start to receive a tensor of `like`'s shape, dtype and device from rank `source` of an axis."""
    if is_lockstep(binding.group):
        return PendingMessages([], lambda: lockstep.receive(binding.group, binding.rank, source, tag, like))
    x, group = torch.empty_like(like, memory_format=torch.contiguous_format), rank_group(binding.group)
    requests = [dist.irecv(x, group=group, group_src=source, tag=_FIRST_TAG + tag)] if x.numel() else []
    return PendingMessages(requests, lambda: x)


# messages of rank programs that may not be sent yet, by process group
_OUTGOING: "WeakKeyDictionary[Any, list[PendingMessages]]" = WeakKeyDictionary()
_MAX_OUTGOING = 64  # with more messages, wait for the oldest


def _refuse_vmap(n: int, options: MessageOptions, xs: Tensors) -> Tensors:
    raise RuntimeError(
        "fzero.collectives.send and fzero.collectives.receive: ranks simulated by vmap run one program, so all ranks "
        'would send or receive; use fzero.collectives.ppermute, or fzero.mesh(..., simulate="lockstep")'
    )


def _check_untraced(name: str) -> None:
    if is_tracing():
        raise RuntimeError(
            f"fzero.collectives.{name} cannot be traced into a graph: use fzero.collectives.ppermute there, or "
            f"fzero.pipeline, whose messages can be traced"
        )


def _send(binding: Binding, options: MessageOptions, xs: Tensors) -> Tensors:
    _check_untraced("send")
    (x,) = xs
    message = start_send(x, options.peer, options.tag, binding)
    if message.requests:
        outgoing = _OUTGOING.setdefault(rank_group(binding.group), [])
        outgoing.append(message)
        while len(outgoing) > _MAX_OUTGOING:
            wait(outgoing.pop(0))
    return [x.new_zeros(())]


def _receive(binding: Binding, options: MessageOptions, xs: Tensors) -> Tensors:
    _check_untraced("receive")
    like = xs[0].new_empty(options.shape, dtype=options.dtype)
    return [wait(start_receive(like, options.peer, options.tag, binding))]


def _transpose_options(options: MessageOptions) -> MessageOptions:
    return options._replace(tag=options.tag ^ 1)


add_rows(
    LinearMap("send", RankOperation("", _refuse_vmap, _send), "receive", transpose_options=_transpose_options),
    LinearMap("receive", RankOperation("", _refuse_vmap, _receive), "send", transpose_options=_transpose_options),
)


def _message_options(name: str, x: torch.Tensor, peer: int, axis: str, tag: int) -> tuple[Axis, MessageOptions]:
    check_dim(name, x, 0, min_ndim=0)
    (bound,) = resolve_axes(axis)
    if not is_int(peer) or not 0 <= peer < bound.size or (bound.group and peer == bound.rank):
        raise ValueError(
            f"fzero.collectives.{name} over {axis!r}: the peer is {peer!r}, expected another rank of the axis, "
            f"0 to {bound.size - 1}"
        )
    if not is_int(tag) or not 0 <= tag < _TAGS // 2:
        expected = f"expected an int from 0 to {_TAGS // 2 - 1}"
        raise ValueError(f"fzero.collectives.{name} over {axis!r}: tag={tag!r}, {expected}")
    return bound, MessageOptions(peer, 2 * tag, tuple(x.shape), x.dtype)


@api_boundary
def send(x: torch.Tensor, to: int, axis: str, *, tag: int = 0) -> torch.Tensor:
    """Send a tensor to one rank, which calls `receive`. The sender does not wait, and no other rank takes part.

    It is for the user's own schedules, on real processes and on ranks in lockstep. It is a linear map, whose transpose
    is `receive`: if the sender's loss depends on the ticket, its backward pass receives the gradient of `x`.

    Args:
        x: a tensor of any shape and dtype.
        to: the receiver's rank along the axis.
        axis: the name of an axis.
        tag: tells messages between two ranks apart; messages with one tag arrive in order.

    Returns:
        A ticket: a zero of shape [] and the dtype of `x`. Add it to the loss if the receiver's loss is to be
        differentiated with respect to `x`.

    Raises:
        TypeError: if `x` is not a tensor.
        ValueError: if `to` is not another rank of the axis, or `tag` is out of range.
        RuntimeError: if the ranks are simulated by vmap, or the program is traced.
        DivergedError: in lockstep, if no rank receives the message.

    Example:
        >>> import fzero, torch
        >>> def program(x):
        ...     if fzero.axes.axis_index().item() == 0:
        ...         return fzero.PerRank(x + fzero.collectives.send(2 * x, 1, "pp"))
        ...     return fzero.PerRank(fzero.collectives.receive(x, 0, "pp"))
        >>> mesh = fzero.mesh(pp=2, simulate="lockstep")
        >>> mesh.spmd(program)(mesh.split(torch.tensor([3.0, 4.0]))).value
        tensor([[3.],
                [6.]])
    """
    bound, options = _message_options("send", x, to, axis, tag)
    return apply(bound.token, "send", bound.binding, options, x)[0]


@api_boundary
def receive(
    like: torch.Tensor, source: int, axis: str, *, tag: int = 0, ticket: torch.Tensor | None = None
) -> torch.Tensor:
    """Wait for a tensor that one rank sends with `send`.

    Args:
        like: a tensor of the shape and dtype of the message, on the device for the result.
        source: the sender's rank along the axis.
        axis: the name of an axis.
        tag: the message's tag.
        ticket: a tensor of shape [] and of the differentiated dtype. A derivative with respect to it is zero, and sends
            the gradient of the message back to the sender. None sends no gradient.

    Returns:
        The received tensor.

    Raises:
        TypeError: if `like` or the ticket is not a tensor.
        ValueError: if `source` is not another rank of the axis, `tag` is out of range, or the ticket is not of shape
            []. In lockstep also if another shape or dtype arrives.
        RuntimeError: if the ranks are simulated by vmap, or the program is traced.
        DivergedError: in lockstep, if no rank sends the message.

    Example:
        >>> import fzero, torch
        >>> def loss(w, x):  # rank 0 has a layer, and rank 1 the rest of the model
        ...     if fzero.axes.axis_index().item() == 0:
        ...         return fzero.collectives.send(w * x, 1, "pp")
        ...     return fzero.collectives.receive(x, 0, "pp", ticket=w).square().sum() * w
        >>> mesh = fzero.mesh(pp=2, simulate="lockstep")
        >>> grads = mesh.spmd(lambda w, x: fzero.PerRank(torch.func.grad(loss)(w, x)))
        >>> grads(torch.tensor(3.0), mesh.split(torch.tensor([1.0, 1.0]))).value  # w x = 3; its gradient is 2 x 3 x 3
        tensor([18.,  9.])
    """
    bound, options = _message_options("receive", like, source, axis, tag)
    x = like.new_zeros(()) if ticket is None else ticket
    check_dim("receive(ticket=)", x, 0, min_ndim=0)
    if x.ndim:
        raise ValueError(
            f"fzero.collectives.receive: the ticket is {list(x.shape)}: expected a tensor of shape [], such as x.sum()"
        )
    return apply(bound.token, "receive", bound.binding, options, x)[0]
