"""Messages between ranks in lockstep: one rank posts a tensor, and another collects it.

A post returns at once, like a buffered send between processes. A rank that collects a message waits until it is posted;
if no rank can go on, the error names this rank. Messages that were never collected raise an error at the end.
"""

from collections import deque
from collections.abc import Iterable

import torch

from fzero._torch import user_line
from fzero.axes._run import DivergedError, MessageKey, RankGroup, RankStatus, describe, group_of

__all__ = ["check_received", "collect", "post"]


def post(group: str, rank: int, to: int, tag: int, x: torch.Tensor) -> None:
    """Send a tensor to another rank of a group.

    Args:
        group: the group's key.
        rank: the sender's index in the group.
        to: the receiver's index in the group.
        tag: a number that identifies the message for the receiver.
        x: a tensor of any shape.
    """
    g, key = group_of(group), MessageKey(rank, to, tag)
    receiver = g.members[to]
    if g.expected.get(receiver) == key:
        del g.expected[receiver]
        g.run.deliver(receiver, x.detach().clone())
    else:
        g.mail.setdefault(key, deque()).append(x.detach().clone())


def collect(group: str, rank: int, source: int, tag: int, like: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor from another rank of a group.

    Args:
        group: the group's key.
        rank: the receiver's index in the group.
        source: the sender's index in the group.
        tag: the tag of the message.
        like: a tensor of the expected shape and dtype.

    Raises:
        ValueError: if the message has another shape or dtype.
        DivergedError: if no rank sends the message.
    """
    g, key = group_of(group), MessageKey(source, rank, tag)
    if g.mail.get(key):
        x = g.mail[key].popleft()
    else:
        me = g.members[rank]
        name = (
            f"receive of a message from rank {g.members[source]} with tag {tag} over {g.axis!r} of {describe([like])}"
        )
        g.run.pause(me, RankStatus(name, user_line()))
        g.expected[me] = key
        x = g.run.await_delivery(me)
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(
            f"the message from rank {g.members[source]} to rank {g.members[rank]} with tag {tag} over {g.axis!r} is "
            f"{describe([x])}, and the receiver expects {describe([like])}"
        )
    return x


def check_received(groups: Iterable[RankGroup]) -> None:
    """Check that each message was received, after all ranks have ended.

    Raises:
        DivergedError: if a message was not received. The text names its sender and receiver.
    """
    for g in groups:
        for key, messages in g.mail.items():
            if messages:
                raise DivergedError(
                    f"ranks diverged: rank {g.members[key.sender]} sent rank {g.members[key.receiver]} a message "
                    f"with tag {key.tag} over {g.axis!r} of {describe(messages)}, and all ended before it was received"
                )
