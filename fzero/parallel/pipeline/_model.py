"""The model of a pipeline: its first part, its blocks and its last part, called for one micro-batch."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from fzero import random, tree
from fzero._dtypes import at_least_float32
from fzero._tracebacks import is_message
from fzero.axes import Scope, call_in_micro_batch, call_in_scope, current_scope
from fzero.graph import loop
from fzero.transforms import gather, remat

__all__ = ["BLOCK_KEYWORDS", "MicroBatchCall", "Model", "call_without_axis", "take_micro_batch"]


_Index = int | torch.Tensor
BLOCK_KEYWORDS = ("index", "batch")  # keyword arguments that a block receives if its signature has them


@dataclass(frozen=True)
class Model:
    """A model as three functions: the part before its blocks, a block, and the part after them.

    Attributes:
        block: `(p, x) -> x`; it may also take `index`, the number of the block, and `batch`, the micro-batch.
        first: `(rest, batch) -> x`: the part before the blocks.
        last: `(rest, x, batch) -> (total, weight)`, or a mean: the part after the blocks.
        remat: True to run each block again in the backward pass, or a value for `fzero.remat(save=)`.
    """

    block: Callable[..., Any]
    first: Callable[..., Any]
    last: Callable[..., Any]
    remat: Any = False

    @cached_property
    def _keywords(self) -> tuple[str, ...]:
        """The names in `BLOCK_KEYWORDS` that the block takes."""
        try:
            names = inspect.signature(self.block).parameters
        except (TypeError, ValueError):  # a builtin
            return ()
        return tuple([name for name in BLOCK_KEYWORDS if name in names])

    @cached_property
    def _block(self) -> Callable[..., Any]:
        def run_gathered(p: Any, key: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
            p = tree.map_with_path(_own_part, gather(p)) if kwargs.pop("stacked") else gather(p)
            block = self.block if key is None else partial(random.seeded(self.block), key)
            return _call_part("block(p, x)", block, p, *args, **kwargs)

        if self.remat is False:
            return run_gathered
        return remat(run_gathered, save=None if self.remat is True else self.remat)

    def run_block(self, p: Any, x: Any, index: _Index, call: "MicroBatchCall", stacked: bool) -> Any:
        """Run one block.

        Args:
            p: its parameters, full or in boxes.
            x: its input.
            index: its index.
            call: the micro-batch.
            stacked: whether leaves of `p` are `[1, ...]`, this rank's part of stacked leaves.
        """
        values = {"index": index, "batch": call.batch}
        key = None if call.key is None else random.fold_in(call.key, index + 1)
        return self._block(p, key, x, stacked=stacked, **{name: values[name] for name in self._keywords})

    def run_first(self, rest: Any, call: "MicroBatchCall") -> Any:
        """Run the part before the blocks."""
        return _call_part("first(rest, batch)", self._seed_call(self.first, call, 0), rest, call.batch)

    def run_last(self, rest: Any, x: Any, call: "MicroBatchCall", blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the part after the blocks, and return a total and its weight.

        Raises:
            TypeError: if `last` returns neither these nor a mean.
        """
        out = _call_part("last(rest, x, batch)", self._seed_call(self.last, call, blocks + 1), rest, x, call.batch)
        total, weight = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        if not isinstance(total, torch.Tensor) or total.ndim or not total.is_floating_point():
            actual = tree.show(total) if isinstance(total, torch.Tensor) else type(total).__name__
            raise TypeError(
                "fzero.pipeline: last(rest, x, batch) must return (total, weight), the sum of the losses and of their "
                f"weights, or a mean over the micro-batch, each 0-d; it returned {actual}"
            )
        # a count in half precision would have 8 or 11 bits only
        total = at_least_float32(total)
        weight = (
            torch.ones_like(total) if weight is None else torch.as_tensor(weight, device=total.device).to(total.dtype)
        )
        return total, weight.detach()

    def run_outputs(self, rest: Any, x: Any, call: "MicroBatchCall", blocks: int) -> Any:
        """Run the part after the blocks, and return its result for each example.

        Raises:
            TypeError: if the result is not a tree of tensors with dimensions.
        """
        out = _call_part("last(rest, x, batch)", self._seed_call(self.last, call, blocks + 1), rest, x, call.batch)
        for path, v in zip(*tree.flatten_with_paths(out)[:2], strict=True):
            if not isinstance(v, torch.Tensor) or not v.ndim:
                actual = tree.show(v) if isinstance(v, torch.Tensor) else type(v).__name__
                raise TypeError(
                    "fzero.pipeline: for outputs, last(rest, x, batch) must return a tree of tensors [b, ...], for the "
                    f"b examples of a micro-batch; {tree.leaf_name('what it returned', path)} is {actual}"
                )
        return out

    @staticmethod
    def _seed_call(f: Callable[..., Any], call: "MicroBatchCall", index: _Index) -> Callable[..., Any]:
        if call.key is None:
            return f
        key = random.fold_in(call.key, index)
        return lambda *args: random.seeded(f)(key, *args)


@dataclass(frozen=True)
class MicroBatchCall:
    """One micro-batch, and the key of its random numbers.

    Attributes:
        batch: the micro-batch.
        index: its index; a tensor if it differs by rank, or is not known while tracing.
        key: the key of the whole loss's random numbers, or None.
    """

    batch: Any
    index: _Index
    key: torch.Tensor | None

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Call `f(*args)` as part of this micro-batch's loss."""
        return call_in_micro_batch(self.index, f, *args)


def _call_part(name: str, f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a part of the model. An error of torch or of the user's code gets a note that shows the arguments."""
    try:
        return f(*args, **kwargs)
    except Exception as error:
        if not is_message(error, error.__traceback__):
            names = name.partition("(")[2].rstrip(")").split(", ")
            arguments_text = [f"{word} is {_show_argument(x)}" for word, x in zip(names, args, strict=False)]
            error.add_note(f"fzero.pipeline calls {name}: {'; '.join(arguments_text)}")
        raise


def _show_argument(x: Any) -> str:
    return f"a dict of {', '.join(map(repr, x))}" if isinstance(x, dict) else tree.show(x)


def _own_part(path: str, w: torch.Tensor) -> torch.Tensor:
    """Return this rank's leaf of a block, from its part `[1, ...]` of the stacked leaf.

    Raises:
        ValueError: if the leaf is not split by rank: then every rank would run the first rank's blocks.
    """
    if w.shape[:1] != (1,):
        raise ValueError(
            f"fzero.pipeline: {tree.leaf_name('a block', path)} is {tree.show(w)} on each rank, expected this rank's "
            "part [1, ...] of a stacked leaf. The blocks are not split by rank: pass loss.stack(params, mesh) to "
            "step.init, and use fzero.shard(..., split=loss.split)"
        )
    return w[0]


def take_micro_batch(batch: Any, count: int, index: _Index, in_loop: bool = False) -> Any:
    """Return one micro-batch: one of equal parts of all leaves along dimension 0. Leaves of shape [] are in each part.

    Args:
        batch: all micro-batches.
        count: the number of micro-batches.
        index: the index of the micro-batch to return.
        in_loop: whether `index` is the index of an iteration in a traced loop.

    Raises:
        ValueError: if a leaf does not divide by `count`. The message names the leaf.
    """

    def part(path: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.ndim:
            return x
        size, remainder = divmod(x.shape[0], count)
        if remainder:
            raise ValueError(
                f"fzero.pipeline: {tree.leaf_name('the batch', path)} is {list(x.shape)}: dimension 0 of a rank's part "
                f"must divide by micro_batches={count}; drop or pad the last batch, or change micro_batches"
            )
        if isinstance(index, torch.Tensor):
            return loop.loop_slice(x, index, 0, size) if in_loop else _part_at(x, index, count)
        return x.narrow(0, index * size, size)

    return tree.map_with_path(part, batch)


def _part_at(x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Return one of `count` equal parts of a tensor. The part's index is a tensor, which may differ by rank."""
    return x.unflatten(0, (count, -1)).index_select(0, index.reshape(1).to(x.device)).squeeze(0)


def call_without_axis(name: str, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` in a scope whose default axes exclude this one, since its ranks share one batch."""
    scope = current_scope()
    if scope is None:
        return f(*args)
    axes = scope.axes
    names: Sequence[str] = [a.name for a in axes.each] if axes.default is None else axes.default
    default = tuple([n for n in names if n != name])
    inner: Scope = scope._replace(axes=axes._replace(default=default))
    return call_in_scope(inner, f, *args)
