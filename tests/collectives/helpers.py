"""The collectives, each with its result as a function of all ranks' inputs."""

from typing import Any

import torch
from hypothesis import strategies as st

import fzero


def draw_stacked(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# name -> (the collective, the shape of a rank's input, the same on the stack of all ranks)
COLLECTIVES: dict[str, tuple[Any, Any, Any]] = {
    "psum": (fzero.collectives.psum, lambda n: (3, 2), lambda X: X.sum(0).expand_as(X)),
    "pmean": (fzero.collectives.pmean, lambda n: (5,), lambda X: X.mean(0).expand_as(X)),
    "all_gather": (fzero.collectives.all_gather, lambda n: (3, 2), lambda X: X.flatten(0, 1).expand(len(X), -1, -1)),
    "all_gather dim 1": (
        lambda x: fzero.collectives.all_gather(x, dim=-1),
        lambda n: (3, 2),
        lambda X: torch.cat(list(X), 1).expand(len(X), -1, -1),
    ),
    "psum_scatter": (
        fzero.collectives.psum_scatter,
        lambda n: (2 * n, 3),
        lambda X: X.sum(0).unflatten(0, (len(X), 2)),
    ),
    "psum_scatter dim 1": (
        lambda x: fzero.collectives.psum_scatter(x, dim=1),
        lambda n: (3, 2 * n),
        lambda X: X.sum(0).unflatten(1, (len(X), 2)).movedim(1, 0),
    ),
    "all_to_all": (
        fzero.collectives.all_to_all,
        lambda n: (2 * n, 3),
        lambda X: X.unflatten(1, (len(X), 2)).transpose(0, 1).flatten(1, 2),
    ),
    "all_to_all dims 0, 1": (
        lambda x: fzero.collectives.all_to_all(x, split_dim=0, concat_dim=1),
        lambda n: (2 * n, 3),
        lambda X: torch.stack([torch.cat(list(parts), 1) for parts in X.unflatten(1, (len(X), 2)).transpose(0, 1)]),
    ),
    "all_to_all dims 1, 0": (
        lambda x: fzero.collectives.all_to_all(x, split_dim=-1, concat_dim=0),
        lambda n: (3, 2 * n),
        lambda X: torch.stack([torch.cat([x[:, 2 * r : 2 * r + 2] for x in X]) for r in range(len(X))]),
    ),
    "ppermute": (
        lambda x: fzero.collectives.ppermute(x, perm=[(r, r + 1) for r in range(fzero.axes.axis_size() - 1)]),
        lambda n: (2, 3),
        lambda X: torch.cat([torch.zeros_like(X[:1]), X[:-1]]),
    ),
    "ppermute, a ring": (
        lambda x: fzero.collectives.ppermute(
            x, perm=[(r, (r - 1) % fzero.axes.axis_size()) for r in range(fzero.axes.axis_size())]
        ),
        lambda n: (),
        lambda X: X.roll(-1, 0),
    ),
    "broadcast": (
        lambda x: fzero.collectives.broadcast(x, source=fzero.axes.axis_size() - 1),
        lambda n: (2, 3),
        lambda X: X[-1].expand_as(X),
    ),
}


simulations = st.sampled_from(["vmap", "lockstep"])
