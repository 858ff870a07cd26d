"""Local SGD and Streaming DiLoCo in plain torch: a list of replicas, written from the papers, not from fzero."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def train(
    start: Tensors,
    loss: Callable[[Tensors, torch.Tensor], torch.Tensor],
    batches: Sequence[Sequence[torch.Tensor]],
    make_inner: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    make_outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    every: int,
    parts: Sequence[Sequence[str]] | None = None,
    delay: int = 0,
    mix: float = 0.0,
) -> tuple[Tensors, list[Tensors], list[list[float]]]:
    """Train replicas apart, and average them as the arguments say.

    Args:
        start: the parameters, by name.
        loss: of a replica's parameters and its batch.
        batches: for each step the batch of each replica.
        make_inner: makes a replica's optimizer.
        make_outer: makes the outer optimizer of a part.
        every: the steps between two averages of a part.
        parts: the names of each part; by default one part.
        delay: the steps from the send of a part to the use of its mean.
        mix: the share of a replica's own parameters.

    Returns:
        The anchor, each replica's parameters, and each step's losses.
    """
    parts = [list(start)] if parts is None else parts
    count = len(batches[0])
    anchor = {name: x.clone() for name, x in start.items()}
    outers = [make_outer([anchor[name] for name in part]) if part else None for part in parts]
    replicas = [{name: x.clone().requires_grad_() for name, x in start.items()} for _ in range(count)]
    inners = [make_inner(list(replica.values())) for replica in replicas]
    means: list[Any] = [None] * len(parts)
    losses: list[list[float]] = []
    for step, batch in enumerate(batches, 1):
        values = []
        for replica, inner, x in zip(replicas, inners, batch, strict=True):
            inner.zero_grad()
            value = loss(replica, x)
            value.backward()
            inner.step()
            values.append(value.item())
        losses.append(values)
        for i, part in enumerate(parts):
            at = (i + 1) * every // len(parts) % every  # the steps at which part i is sent, modulo every
            if step % every == at:
                means[i] = {n: sum([(anchor[n] - r[n]) / count for r in replicas]).detach() for n in part}
            if step > delay and (step - delay) % every == at and means[i] is not None:
                for name in part:
                    anchor[name].grad = means[i][name]
                if outers[i] is not None:
                    outers[i].step()
                with torch.no_grad():
                    for replica in replicas:
                        for name in part:
                            replica[name].copy_((1 - mix) * anchor[name] + mix * replica[name])
    return anchor, [{n: x.detach() for n, x in r.items()} for r in replicas], losses
