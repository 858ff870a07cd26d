"""Steps of a derivation as data: the vjp of a function of tensors, its jvp, its map over a batch.

Each step makes of a function of a flat list of tensors another one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero._torch.levels import is_mapped_now
from fzero.collectives._copies import Exposed
from fzero.transforms._remat._guards import check_given

__all__ = ["Batched", "Jvp", "Map", "Step", "Tuples", "Vjp", "tracked"]

Tensors = Sequence[torch.Tensor]
Tuples = Callable[..., tuple[torch.Tensor, ...]]
Batched = tuple[bool, ...]
"""For each output whether it has the batch of a map."""


@dataclass(frozen=True)
class Vjp:
    """Derives `(inputs, cotangents) -> gradients`, of the inputs that want one, for the outputs that have one.

    Attributes:
        inputs: how many there are.
        wanted: those that want a gradient.
        given: the outputs that have one.
        exposed: what to check of the graph, by axis.
    """

    inputs: int
    wanted: tuple[int, ...]
    given: tuple[int, ...]
    exposed: Mapping[str, Exposed] | None = None

    def of(self, f: Tuples, batched: list[Batched]) -> Tuples:
        """Return the vjp of `f`."""

        def pulled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.inputs], self.wanted, xs))
                out = tuple([ys[i] for i in self.given])
                for exposed in (self.exposed or {}).values():
                    results = {1 + i: y for i, y in zip(self.given, out, strict=True)}  # the first is no tensor
                    exposed.check(results, dict(zip(self.wanted, xs, strict=True)))
                return out

            _, pull = torch.func.vjp(partial, *[tensors[i] for i in self.wanted])  # pyright: ignore
            # lets go of the tensors of each operation as soon as it is done, unless this is differentiated again
            return pull(tuple(tensors[self.inputs :]), retain_graph=torch.is_grad_enabled())

        return pulled


@dataclass(frozen=True)
class Jvp:
    """Derives `(inputs, tangents) -> tangents`, of the inputs that have one, and of the outputs that can."""

    inputs: int
    given: tuple[int, ...]
    wanted: tuple[int, ...]

    def of(self, f: Tuples, batched: list[Batched]) -> Tuples:
        """Return the jvp of `f`."""

        def pushed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.inputs], self.given, xs))
                return tuple([ys[i] for i in self.wanted])

            at = tuple([tensors[i] for i in self.given])
            _, tangents = torch.func.jvp(partial, at, tuple(tensors[self.inputs :]))  # pyright: ignore
            return tangents

        return pushed


@dataclass(frozen=True)  # not a NamedTuple: torch.func would take it for a tree, and copy it
class Map:
    """Maps over a batch."""

    dims: tuple[int | None, ...]
    randomness: str

    def of(self, f: Tuples, batched: list[Batched]) -> Tuples:
        """Return `f` mapped over a batch; when it runs, it adds to `batched` which outputs have it."""

        def one(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = f(*xs)
            batched.append(tuple([is_mapped_now(y) for y in ys]))
            return ys

        def mapped(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = torch.vmap(one, in_dims=self.dims, randomness=self.randomness)(*xs)
            # an output without the batch stays so: along an axis it is equal on all ranks
            return tuple([y if has_it else y[0] for y, has_it in zip(ys, batched[-1], strict=True)])

        return mapped


Step = Vjp | Jvp | Map


def tracked(f: Tuples, wanted: Sequence[int], check: bool) -> Tuples:
    """Run `f` within a vjp of its own, so that torch takes composite operations apart in the same way in each run.

    It does that in another way for a tensor that is differentiated, or mapped and not differentiated. Without this, the
    results that are kept in the forward pass might belong to other operations than those of the recomputation, or be
    laid out otherwise.

    Args:
        f: the function.
        wanted: which of its arguments are differentiated.
        check: whether to refuse results that depend on others which require grad.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def partial(*xs: torch.Tensor) -> Any:
            ys = f(*_put(tensors, wanted, xs))
            if check:
                check_given(ys, xs)
            return xs[0], ys

        _, _, outputs = torch.func.vjp(partial, *[tensors[i] for i in wanted], has_aux=True)  # pyright: ignore
        return outputs

    return run


def _put(xs: Tensors, places: Sequence[int], new: Tensors) -> list[torch.Tensor]:
    out = list(xs)
    for i, x in zip(places, new, strict=True):
        out[i] = x
    return out
