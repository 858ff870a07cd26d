"""Messages from one rank to another: send and receive, and those that a pipeline schedule lists."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fzero._torch import group_of, is_tracing
from fzero.axes import Axis, Binding, is_lockstep, mailbox, resolve
from fzero.collectives import _record
from fzero.collectives._table import LinearMap, Post, Tensors, add_row, apply
from fzero.collectives.gloo import PendingMessages, wait
from fzero.parallel.schedules import Instruction, Message, Schedule, Value

__all__ = ["StageMessages", "receive", "send", "start_receive", "start_send"]

# Messages from one rank to another, of which no other rank needs to know: send and receive.
#
# A message has a tag, by which the receiver tells it from others. `start_send` and `start_receive` are for schedules,
# which know where to wait. `send` and `receive` are for rank programs, and each other's transposes: in a backward pass
# the receiver sends the gradient back. Ranks of a vmap run one program, so there `ppermute` takes their place.


FIRST_TAG = 1 << 21  # above those of fzero.collectives.gloo
TAGS = 1 << 29


def start_send(x: torch.Tensor, to: int, tag: int, binding: Binding) -> PendingMessages:
    """Start to send a tensor to the rank at place `to` of an axis. Until it is waited for, it must not be written."""
    x = x.detach().contiguous()
    _record.add("send", binding, x.numel(), x.numel(), x.dtype, "")
    if is_lockstep(binding.group):
        mailbox.post(binding.group, binding.rank, to, tag, x)
        return PendingMessages([], lambda: x)
    group: Any = group_of(binding.group)
    works = [dist.isend(x, group=group, group_dst=to, tag=FIRST_TAG + tag)] if x.numel() else []
    return PendingMessages(works, lambda: x)


def start_receive(like: torch.Tensor, source: int, tag: int, binding: Binding) -> PendingMessages:
    """Start to receive a tensor like `like`, whose values do not matter, from the rank at place `source` of an axis."""
    if is_lockstep(binding.group):
        return PendingMessages([], lambda: mailbox.collect(binding.group, binding.rank, source, tag, like))
    x, group = torch.empty_like(like, memory_format=torch.contiguous_format), group_of(binding.group)
    works = [dist.irecv(x, group=group, group_src=source, tag=FIRST_TAG + tag)] if x.numel() else []
    return PendingMessages(works, lambda: x)


# ---------------------------------------------------------------- as linear maps


# messages of rank programs that may not have left yet, by process group
_LEAVING: "WeakKeyDictionary[Any, list[PendingMessages]]" = WeakKeyDictionary()
MOST = 64  # of them; beyond, the oldest is waited for


def _by_vmap(n: int, options: Post, xs: Tensors) -> Tensors:
    raise RuntimeError(
        "fzero.collectives.send and fzero.collectives.receive: ranks simulated by vmap run one program, in "
        "which none does what another "
        'does not; use fzero.collectives.ppermute, or fzero.mesh(..., simulate="lockstep")'
    )


def _check_untraced(name: str) -> None:
    if is_tracing():
        raise RuntimeError(
            f"fzero.collectives.{name} cannot be traced into a graph: use fzero.collectives.ppermute there, or "
            f"fzero.pipeline, whose own can"
        )


def _send(binding: Binding, options: Post, xs: Tensors) -> Tensors:
    _check_untraced("send")
    (x,) = xs
    sent = start_send(x, options.peer, options.tag, binding)
    if sent.works:
        leaving = _LEAVING.setdefault(group_of(binding.group), [])
        leaving.append(sent)
        while len(leaving) > MOST:
            wait(leaving.pop(0))
    return [x.new_zeros(())]


def _receive(binding: Binding, options: Post, xs: Tensors) -> Tensors:
    _check_untraced("receive")
    like = xs[0].new_empty(options.shape, dtype=options.dtype)
    return [wait(start_receive(like, options.peer, options.tag, binding))]


def _back(options: Post) -> Post:
    return options._replace(tag=options.tag ^ 1)


add_row(LinearMap("send", "", _by_vmap, _send, transpose="receive", replicated=False, dual=_back))
add_row(LinearMap("receive", "", _by_vmap, _receive, transpose="send", replicated=False, dual=_back))


def _posted(name: str, x: torch.Tensor, peer: int, axis: str, tag: int) -> tuple[Axis, Post]:
    (found,) = resolve(axis)
    if not isinstance(peer, int) or not 0 <= peer < found.size or (found.group and peer == found.rank):
        raise ValueError(
            f"fzero.collectives.{name} over {axis!r}: the other rank is {peer!r}, expected another place along "
            f"the axis's {found.size}"
        )
    if not isinstance(tag, int) or not 0 <= tag < TAGS // 2:
        wanted = f"expected an int from 0 to {TAGS // 2 - 1}"
        raise ValueError(f"fzero.collectives.{name} over {axis!r}: tag={tag!r}, {wanted}")
    return found, Post(peer, 2 * tag, tuple(x.shape), x.dtype)


def send(x: torch.Tensor, to: int, axis: str, *, tag: int = 0) -> torch.Tensor:
    """Send a tensor to one rank, which calls `receive`. Nobody waits, and no other rank takes part.

    For schedules of one's own, on real processes and on ranks in lockstep. It is a linear map, whose transpose is
    `receive`: where the sender's loss depends on the ticket, its backward pass receives the gradient of `x`.

    Args:
        x: of any shape and dtype.
        to: the place along the axis of the rank that receives it.
        axis: the name of an axis.
        tag: tells messages between two ranks apart; those of one tag arrive in their order.

    Returns:
        A ticket: a zero of shape [] and the dtype of `x`. Add it to the loss if the receiver's loss is to be
        differentiated with respect to `x`.

    Raises:
        ValueError: if `to` is no other place along the axis, or `tag` out of range.
        RuntimeError: if ranks are a vmap, or the program is traced.
        DivergedError: in lockstep, if nobody receives it.

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
    found, post = _posted("send", x, to, axis, tag)
    return apply(found.token, "send", found.binding, post, x)[0]


def receive(
    like: torch.Tensor, source: int, axis: str, *, tag: int = 0, ticket: torch.Tensor | None = None
) -> torch.Tensor:
    """Wait for a tensor that one rank sends with `send`.

    Args:
        like: a tensor of the shape and the dtype of what is sent, on the device where it is to lie.
        source: the place along the axis of the rank that sends it.
        axis: the name of an axis.
        tag: of the message.
        ticket: a number of shape [] and of the dtype that is differentiated. Where it is given, a derivative with
            respect to it sends the sender the gradient of what it sent, and is zero.

    Returns:
        What was sent.

    Raises:
        ValueError: if `source` is no other place along the axis, `tag` out of range, or the ticket no number. In
            lockstep also if another shape or dtype arrives.
        RuntimeError: if ranks are a vmap, or the program is traced.
        DivergedError: in lockstep, if nobody sends.

    Example:
        >>> import fzero, torch
        >>> def loss(w, x):  # rank 0 has a layer, and rank 1 what follows it
        ...     if fzero.axes.axis_index().item() == 0:
        ...         return fzero.collectives.send(w * x, 1, "pp")
        ...     return fzero.collectives.receive(x, 0, "pp", ticket=w).square().sum() * w
        >>> mesh = fzero.mesh(pp=2, simulate="lockstep")
        >>> grads = mesh.spmd(lambda w, x: fzero.PerRank(torch.func.grad(loss)(w, x)))
        >>> grads(torch.tensor(3.0), mesh.split(torch.tensor([1.0, 1.0]))).value  # w x = 3; its gradient is 2 x 3 x 3
        tensor([18.,  9.])
    """
    found, post = _posted("receive", like, source, axis, tag)
    held = like.new_zeros(()) if ticket is None else ticket
    if held.ndim:
        raise ValueError(f"fzero.collectives.receive: the ticket is {list(held.shape)}: expected a number of shape []")
    return apply(found.token, "receive", found.binding, post, held)[0]


# Messages between pipeline stages, sent and received as a schedule says.


@dataclass
class StageMessages:
    """The messages of one rank: what its stages have made, what it sends, and what it receives.

    Attributes:
        schedule: which rank has which stage.
        binding: of the axis along which the ranks lie.
        forms: tensors of the shapes and dtypes of a value's leaves, on any device.
        device: where what arrives is to lie.
        ready: values that have arrived or were made here, or the messages that bring them.
        in_flight: messages that are being sent.
    """

    schedule: Schedule
    binding: Binding
    forms: Sequence[torch.Tensor]
    device: torch.device
    ready: dict[Value, list[Any]] = field(default_factory=dict)
    in_flight: dict[Message, list[PendingMessages]] = field(default_factory=dict)

    def put(self, value: Value, xs: Sequence[torch.Tensor]) -> None:
        """Keep what a stage has made for the next stage, or for the message that is sent."""
        self.ready[value] = list(xs)

    def take(self, value: Value) -> list[torch.Tensor]:
        """Return what another stage has made, waiting for it if it is on its way."""
        found = self.ready.pop(value)
        return [wait(x) if isinstance(x, PendingMessages) else x for x in found]

    def execute(self, instruction: Instruction) -> None:
        """Start to send or to receive a message, or wait until one has left."""
        message = instruction.of
        assert isinstance(message, Message)
        if instruction.kind == "receive":
            self.ready[_value(message)] = [
                start_receive(torch.empty_like(x, device=self.device), message.sender, tag, self.binding)
                for x, tag in zip(self.forms, self._tags(message), strict=True)
            ]
        elif instruction.kind == "send":
            self.send(message)
        else:
            for sent in self.in_flight.pop(message):
                wait(sent)

    def send(self, message: Message) -> None:
        """Start to send a message, if that has not been done."""
        xs = self.ready.pop(_value(message), None)
        if xs is not None:
            tags = self._tags(message)
            self.in_flight[message] = [
                start_send(x, message.receiver, tag, self.binding) for x, tag in zip(xs, tags, strict=True)
            ]

    def _tags(self, message: Message) -> list[int]:
        """Return a tag for each leaf, that no other message has."""
        number = message.stage * self.schedule.micro_batches + message.micro_batch
        first = (2 * number + (message.kind == "G")) * len(self.forms)
        return list(range(first, first + len(self.forms)))


def _value(message: Message) -> Value:
    return Value(message.kind, message.stage, message.micro_batch)
