"""The steps of a derivation as data: a vjp, a jvp, or a map over a batch.

Each step turns a function of a flat list of tensors into another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero._torch.levels import is_mapped
from fzero._torch.types import Tensors
from fzero.collectives import DeferredCheck
from fzero.transforms._remat_guards import check_sources

__all__ = ["BatchFlags", "Jvp", "Map", "Step", "TupleFunction", "Vjp", "within_vjp"]


TupleFunction = Callable[..., tuple[torch.Tensor, ...]]
BatchFlags = tuple[bool, ...]
"""For each output whether it has the batch dimension of a map."""


@dataclass(frozen=True)
class Vjp:
    """Derives `(inputs, cotangents) -> gradients`.

    Attributes:
        num_inputs: the number of inputs.
        wrt: the inputs to differentiate with respect to.
        outputs: the outputs that have a cotangent.
        deferred_checks: the checks of the block's autograd graph, by axis.
    """

    num_inputs: int
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]
    deferred_checks: Mapping[str, DeferredCheck] | None = None

    def derive(self, f: TupleFunction, batch_flags: list[BatchFlags]) -> TupleFunction:
        """Return the vjp of `f`."""

        def vjp(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def f_of_wrt(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_replace_at(tensors[: self.num_inputs], self.wrt, xs))
                out = tuple([ys[i] for i in self.outputs])
                for deferred_check in (self.deferred_checks or {}).values():
                    results = {1 + i: y for i, y in zip(self.outputs, out, strict=True)}  # output 0 is not a tensor
                    deferred_check.check(results, dict(zip(self.wrt, xs, strict=True)))
                return out

            _, vjp_fn = torch.func.vjp(f_of_wrt, *[tensors[i] for i in self.wrt])  # pyright: ignore
            # frees each operation's residuals once it has run, unless this is differentiated again
            return vjp_fn(tuple(tensors[self.num_inputs :]), retain_graph=torch.is_grad_enabled())

        return vjp


@dataclass(frozen=True)
class Jvp:
    """Derives `(inputs, tangents) -> tangents`.

    Attributes:
        num_inputs: the number of inputs.
        wrt: the inputs that have a tangent.
        outputs: the outputs whose dtype can have a tangent.
    """

    num_inputs: int
    wrt: tuple[int, ...]
    outputs: tuple[int, ...]

    def derive(self, f: TupleFunction, batch_flags: list[BatchFlags]) -> TupleFunction:
        """Return the jvp of `f`."""

        def jvp(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def f_of_wrt(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_replace_at(tensors[: self.num_inputs], self.wrt, xs))
                return tuple([ys[i] for i in self.outputs])

            primals = tuple([tensors[i] for i in self.wrt])
            _, tangents = torch.func.jvp(f_of_wrt, primals, tuple(tensors[self.num_inputs :]))  # pyright: ignore
            return tangents

        return jvp


@dataclass(frozen=True)  # not a NamedTuple: torch.func would treat it as a tree, and copy it
class Map:
    """Maps over a batch, with the arguments of `torch.vmap`.

    Attributes:
        dims: the batch dimension of each input; None for an input without the batch.
        randomness: as in `torch.vmap`.
    """

    dims: tuple[int | None, ...]
    randomness: str

    def derive(self, f: TupleFunction, batch_flags: list[BatchFlags]) -> TupleFunction:
        """Return `f` mapped over a batch; each run appends to `batch_flags` which outputs have the batch."""

        def run_and_note_batch(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = f(*xs)
            batch_flags.append(tuple([is_mapped(y) for y in ys]))
            return ys

        def vmapped(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = torch.vmap(run_and_note_batch, in_dims=self.dims, randomness=self.randomness)(*xs)
            # an output without the batch stays without it: along an axis it is equal on all ranks
            return tuple([y if has_batch else y[0] for y, has_batch in zip(ys, batch_flags[-1], strict=True)])

        return vmapped


Step = Vjp | Jvp | Map


def within_vjp(f: TupleFunction, wrt: Sequence[int], check: bool) -> TupleFunction:
    """Run `f` within a vjp of its own, so that torch decomposes composite operations in the same way in each run.

    The decomposition differs for a tensor that is differentiated, or mapped and not differentiated. Otherwise results
    saved in the forward pass might have other strides than the recomputation's results, or belong to other operations.

    Args:
        f: the function.
        wrt: the indices of the differentiated arguments.
        check: whether to refuse results that depend on other tensors that require grad.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def f_of_wrt(*xs: torch.Tensor) -> Any:
            ys = f(*_replace_at(tensors, wrt, xs))
            if check:
                check_sources(ys, xs)
            return xs[0], ys

        _, _, outputs = torch.func.vjp(f_of_wrt, *[tensors[i] for i in wrt], has_aux=True)  # pyright: ignore
        return outputs

    return run


def _replace_at(xs: Tensors, indices: Sequence[int], new: Tensors) -> list[torch.Tensor]:
    out = list(xs)
    for i, x in zip(indices, new, strict=True):
        out[i] = x
    return out
