"""remat: a block keeps only its inputs for the backward pass, and runs again there.

One Function does it all: a block, or what was derived from it (its vjp, the jvp of that, mapped over a batch, ...), is
a function of tensors that runs below all transforms, where nothing is tracked and nothing stays alive. Its backward
pass, its jvp and its vmap rule are the same Function, applied to what they derive. So each order of differentiation
keeps inputs only.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero._torch import in_transform, storage_id
from fzero._torch.levels import is_mapped_now
from fzero.random._seeded import draw_from, next_key
from fzero.transforms._remat._block import Block, Chosen, called, check_given
from fzero.transforms._remat._tape import Player, Recorder, is_matmul

__all__ = ["remat"]

Tensors = Sequence[torch.Tensor]
Tuples = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class _Vjp:
    """Derives `(inputs, cotangents) -> gradients`, of the inputs that want one, for the outputs that have one."""

    inputs: int
    wanted: tuple[int, ...]
    given: tuple[int, ...]

    def of(self, f: Tuples) -> Tuples:
        def pulled(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.inputs], self.wanted, xs))
                return tuple([ys[i] for i in self.given])

            pull: Any = torch.func.vjp(partial, *[tensors[i] for i in self.wanted])[1]
            # lets go of what each operation kept as soon as it is done, unless this is differentiated again
            return pull(tuple(tensors[self.inputs :]), retain_graph=torch.is_grad_enabled())

        return pulled


@dataclass(frozen=True)
class _Jvp:
    """Derives `(inputs, tangents) -> tangents`, of the inputs that have one, and of the outputs that can."""

    inputs: int
    given: tuple[int, ...]
    wanted: tuple[int, ...]

    def of(self, f: Tuples) -> Tuples:
        def pushed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def partial(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                ys = f(*_put(tensors[: self.inputs], self.given, xs))
                return tuple([ys[i] for i in self.wanted])

            return torch.func.jvp(partial, tuple([tensors[i] for i in self.given]), tuple(tensors[self.inputs :]))[1]

        return pushed


@dataclass(frozen=True)  # not a NamedTuple: torch.func would take it for a tree, and copy it
class _Map:
    """Maps over a batch; afterwards `batched` says which outputs have it."""

    dims: tuple[int | None, ...]
    randomness: str
    batched: list[bool]

    def of(self, f: Tuples) -> Tuples:
        def one(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = f(*xs)
            self.batched[:] = [is_mapped_now(y) for y in ys]
            return ys

        def mapped(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ys = torch.vmap(one, in_dims=self.dims, randomness=self.randomness)(*xs)
            # what is not batched stays so: along an axis it is equal on all ranks
            return tuple([y if batched else y[0] for y, batched in zip(ys, self.batched, strict=True)])

        return mapped


def _tracked(f: Tuples, wanted: Sequence[int], check: bool) -> Tuples:
    """Run `f` within a vjp of its own, so that torch takes composite operations apart in the same way in each run.

    It does that in another way for what is differentiated, or mapped and not differentiated. Without this, what is
    kept in the forward pass might belong to other operations than those of the recomputation, or be laid out otherwise.
    """

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def partial(*xs: torch.Tensor) -> Any:
            ys = f(*_put(tensors, wanted, xs))
            if check:
                check_given(ys, xs)
            return xs[0], ys

        tracked: Any = torch.func.vjp(partial, *[tensors[i] for i in wanted], has_aux=True)
        return tracked[2]

    return run


def _put(xs: Tensors, places: Sequence[int], new: Tensors) -> list[torch.Tensor]:
    out = list(xs)
    for i, x in zip(places, new, strict=True):
        out[i] = x
    return out


@dataclass(frozen=True)
class _Work:
    """A block and what is derived from it, step by step; `kept` tensors of the forward pass come before its inputs."""

    block: Block
    steps: tuple[Any, ...] = ()
    kept: int = 0
    first: bool = True  # whether this is the forward pass

    def then(self, step: Any) -> "_Work":
        return replace(self, steps=(*self.steps, step))

    def derived(self, step: Any) -> "_Work":
        return replace(self, steps=(*self.steps, step), kept=self.block.kept, first=False)

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        block = self.block
        if self.first:
            tape = Recorder(block.script, block.save)
        else:
            # tangents are made by matrix products too, so that those of the block cannot be told from them
            selective = not any(isinstance(step, _Jvp) for step in self.steps)
            tape = Player(block.script, tensors[: self.kept], block.save if selective else None)

        def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return block.run(xs, tape, first=self.first)

        if self.first:
            block.tracked = any(block.differentiated) and (block.save is not None or len(self.steps) > 0)
        if block.tracked:
            f = _tracked(f, [i for i, d in enumerate(block.differentiated) if d], check=self.first)
        for step in self.steps:
            f = step.of(f)
        versions = [x._version for x in tensors]
        out = tuple(f(*[x.detach() for x in tensors[self.kept :]]))
        if isinstance(tape, Player):
            tape.finish()
            return out
        if versions != [x._version for x in tensors]:
            raise RuntimeError("remat: the block writes into an argument in place: let it return a new value instead")
        block.check_escapes([*out, *tape.kept])
        block.kept = len(tape.kept)
        given = {storage_id(x) for x in tensors}  # writing into a result must not reach an argument
        out = tuple([y.clone() if storage_id(y) in given else y for y in out])
        return (*out, *[x.detach() for x in tape.kept])


class _Remat(torch.autograd.Function):
    """Runs a block, or what is derived from one, below all transforms."""

    @staticmethod
    def forward(work: _Work, *tensors: torch.Tensor) -> Any:
        return work.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.work, tensors = inputs[0], inputs[1:]
        ctx.inputs = len(tensors) - ctx.work.kept
        if ctx.work.first:
            ctx.outputs = len(output) - ctx.work.block.kept
            tensors = (*output[ctx.outputs :], *tensors)
        else:
            ctx.outputs = len(output)
        ctx.floats = [i for i, y in enumerate(output[: ctx.outputs]) if y.is_floating_point() or y.is_complex()]
        ctx.mark_non_differentiable(*[y for i, y in enumerate(output) if i not in ctx.floats])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        skip = 1 + ctx.work.kept
        given = tuple([i for i in ctx.floats if grads[i] is not None])
        wanted = tuple([i for i, needed in enumerate(ctx.needs_input_grad[skip:]) if needed])
        found: list[Any] = [None] * (skip + ctx.inputs)
        if given and wanted:
            work = ctx.work.derived(_Vjp(ctx.inputs, wanted, given))
            gradients: Any = _Remat.apply(work, *ctx.saved_tensors, *[grads[i] for i in given])
            for i, g in zip(wanted, gradients, strict=True):
                found[skip + i] = g
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        skip = 1 + ctx.work.kept
        given = tuple([i for i, t in enumerate(tangents[skip:]) if t is not None])
        found: list[Any] = [None] * (ctx.outputs + (ctx.work.block.kept if ctx.work.first else 0))
        if given and ctx.floats:
            work = ctx.work.derived(_Jvp(ctx.inputs, given, tuple(ctx.floats)))
            pushed: Any = _Remat.apply(work, *ctx.saved_tensors, *[tangents[skip + i] for i in given])
            for i, t in zip(ctx.floats, pushed, strict=True):
                found[i] = t
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: _Work, *tensors: torch.Tensor) -> Any:
        dims = tuple(in_dims[1 + work.kept :])
        # a vmap that the forward pass did not run under (jacrev's, over cotangents) must not draw anew for each
        known = any(d is not None for d in dims[: work.block.inputs])
        step = _Map(dims, info.randomness if known else "same", [])
        out: Any = _Remat.apply(work.then(step), *tensors)
        batched = [0 if b else None for b in step.batched]
        return out, (*batched, *[None] * (len(out) - len(batched)))


def remat(block: Callable[..., Any], save: str | Chosen | None = None) -> Callable[..., Any]:
    """Make a function that computes what `block` does, and runs it again for the backward pass instead of remembering.

    Between the passes only the block's arguments are alive (rematerialisation, activation checkpointing). Arguments may
    hold boxes: the block is handed whole leaves, which are gathered for it alone, and gathered again for the backward
    pass. So `fzero.remat(block)(params["blocks"][i], x)` inside `value_and_grad(loss_fn, gather=False)` holds the whole
    parameters of one block at a time. Derivatives of any order, `vmap`, and plain autograd work, and `remat` nests.

    Random numbers that torch's generators draw in the block are kept for the second run, a byte for each element of a
    dropout mask; those that are drawn by a key (`fzero.random`, also in a `seeded` function around it) cost nothing.
    Under `torch.compile` the block is called as it is: the compiler decides what is computed again.

    Args:
        block: a pure function of trees: all that is differentiated must be an argument. Constants may be captured.
        save: what is kept besides: None for nothing; "matmuls" for the results of matrix products, convolutions and
            attention, so that only the cheap rest is computed again; or a function that is given an aten operation
            (`torch.ops.aten.mm.default`) and says whether to keep its results. Forward-mode derivatives (`jvp`)
            compute these again.

    Returns:
        A function of the block's arguments.

    Raises:
        ValueError: if the block uses a tensor that a running transform tracks, or that requires grad, and that is
            not an argument; if it leaves one that depends on its arguments elsewhere than in its result (an attribute,
            a list, a hook that collects); or if `save` is none of these.
        TypeError: if an argument or a result holds an object that is neither a tensor nor a simple constant, such as
            the key-value cache of a language model, which the block would write into twice.
        RuntimeError: if the block writes into an argument in place, or runs other operations the second time than those
            whose results were kept.

    Example:
        >>> import torch
        >>> def block(p, x):
        ...     return x + torch.tanh(x @ p["w"])
        >>> p, x = {"w": torch.eye(2)}, torch.ones(1, 2)
        >>> loss = lambda p: remat(block)(p, x).sum()
        >>> torch.func.grad(loss)(p)["w"].equal(torch.func.grad(lambda p: block(p, x).sum())(p)["w"])
        True
    """
    chosen = is_matmul if save == "matmuls" else save
    if isinstance(chosen, str) or not (chosen is None or callable(chosen)):
        raise ValueError(f'save={save!r}: expected None, "matmuls", or a function of an operation')

    @functools.wraps(block)
    def drawing(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return draw_from(key, block, *args, **kwargs)

    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        key = next_key()  # inside a seeded function: both runs draw from this key, which becomes an argument
        f, args = (block, args) if key is None else (drawing, (key, *args))
        if torch.compiler.is_dynamo_compiling() or not (torch.is_grad_enabled() or in_transform()):
            return called(f, args, kwargs)
        call = Block(f, chosen, args, kwargs)
        out: Any = _Remat.apply(_Work(call), *call.tensors)
        call.tensors.clear()
        return call.result(out)

    return rematerialised
