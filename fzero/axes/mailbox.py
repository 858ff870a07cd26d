"""Messages between ranks in lockstep: one rank posts, another collects, and nobody else is asked.

Posting waits for nobody, as on real processes with a buffer. Who collects what nobody has posted waits, and so is named
if nobody can go on. What nobody collects is found when the ranks have ended.
"""

from collections import deque
from collections.abc import Iterable

import torch

from fzero._torch import user_line
from fzero.axes._run import DivergedError, Letter, RankGroup, RankStatus, group_of, shown

__all__ = ["check_received", "collect", "post"]


def post(group: str, rank: int, to: int, tag: int, x: torch.Tensor) -> None:
    """Send a tensor to another rank of a group.

    Args:
        group: the group's key.
        rank: the sender's place in the group.
        to: the receiver's.
        tag: by which the receiver tells messages apart.
        x: of any shape.
    """
    g, letter = group_of(group), Letter(rank, to, tag)
    receiver = g.members[to]
    if g.awaited.get(receiver) == letter:
        del g.awaited[receiver]
        g.run.give(receiver, x.detach().clone())
    else:
        g.mail.setdefault(letter, deque()).append(x.detach().clone())


def collect(group: str, rank: int, source: int, tag: int, like: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor from another rank of a group.

    Args:
        group: the group's key.
        rank: the receiver's place in the group.
        source: the sender's.
        tag: of the message.
        like: a tensor of the shape and the dtype that are to arrive.

    Raises:
        ValueError: if another shape or dtype arrives.
        DivergedError: if nobody sends.
    """
    g, letter = group_of(group), Letter(source, rank, tag)
    if g.mail.get(letter):
        x = g.mail[letter].popleft()
    else:
        me = g.members[rank]
        what = f"receive of a message from rank {g.members[source]} with tag {tag} over {g.axis!r} of {shown([like])}"
        g.run.pause(me, RankStatus(what, user_line()))
        g.awaited[me] = letter
        x = g.run.await_gift(me)
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(
            f"the message from rank {g.members[source]} to rank {g.members[rank]} with tag {tag} over {g.axis!r} is "
            f"{shown([x])}, and the receiver expects {shown([like])}"
        )
    return x


def check_received(groups: Iterable[RankGroup]) -> None:
    """Check, when all ranks have ended, that each message was received.

    Raises:
        DivergedError: if one was not. Names its ranks.
    """
    for g in groups:
        for letter, left in g.mail.items():
            if left:
                raise DivergedError(
                    f"ranks diverged: rank {g.members[letter.sender]} sent rank {g.members[letter.receiver]} a message "
                    f"with tag {letter.tag} over {g.axis!r} of {shown(left)}, and all ended before it was received"
                )
