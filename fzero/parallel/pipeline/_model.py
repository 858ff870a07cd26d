"""What a pipeline runs: a model cut at its blocks, called stage by stage, for one micro-batch."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fzero import random, tree
from fzero.axes import Scope, in_micro_batch, scope_here, within
from fzero.graph import loop
from fzero.parallel.schedules import Schedule
from fzero.transforms import gather, remat

__all__ = ["MicroBatchCall", "Model", "Placement", "even", "micro_batch_of", "placed", "without_axis"]

# Which rank holds which blocks, and in which slot: blocks of all ranks are stacked, slot by slot.


@dataclass(frozen=True)
class Placement:
    """Where blocks live.

    A rank's slots are counted through its stages, from the first to the last. Ranks have equally many; where a rank has
    fewer blocks, the rest of its slots are idle.

    Attributes:
        blocks: by rank and slot, the number of the block; None for an idle slot.
        slots: by stage, its slots on the rank that holds it, in order, without idle ones.
        chunks: by the number of a rank's stage (its first, its second), the slots that it may fill.
        stage: by rank and chunk, the stage; None where a rank holds fewer.
    """

    blocks: tuple[tuple[int | None, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    stage: tuple[tuple[int | None, ...], ...]

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return sum(len(slots) for slots in self.slots)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By block, the rank and the slot."""
        found = {b: (r, s) for r, row in enumerate(self.blocks) for s, b in enumerate(row) if b is not None}
        return tuple([found[b] for b in range(self.depth)])

    def stack(self, blocks: Sequence[Any]) -> list[Any]:
        """Stack blocks by slot: leaves `[ranks, ...]`. An idle slot has a copy of some block, which nobody uses."""
        rows = [[b for b in column if b is not None] for column in zip(*self.blocks, strict=True)]
        stacked = []
        for column, some in zip(zip(*self.blocks, strict=True), rows, strict=True):
            chosen = [blocks[some[0] if b is None else b] for b in column]
            stacked.append(tree.map(lambda *xs: torch.stack(xs), *chosen))
        return stacked

    def unstack(self, slots: Sequence[Any]) -> list[Any]:
        """List the blocks of stacked slots: views of their leaves."""
        return [tree.map(lambda x, r=r: x[r], slots[s]) for r, s in self.places]


def even(depth: int, stages: int) -> tuple[int, ...]:
    """Deal blocks to stages as evenly as can be; those in the middle get what is left, for embedding and head."""
    least, left = divmod(depth, stages)
    middle = sorted(range(stages), key=lambda s: (abs(2 * s - (stages - 1)), s))[:left]
    return tuple([least + (s in middle) for s in range(stages)])


def placed(schedule: Schedule, counts: Sequence[int]) -> Placement:
    """Place blocks on the ranks of a schedule.

    Args:
        schedule: says which rank holds which stage.
        counts: by stage, how many blocks it has.
    """
    ranks = range(schedule.ranks)
    mine = [[s for s, rank in enumerate(schedule.home) if rank == r] for r in ranks]
    chunks, slot = [], 0
    for k in range(max(map(len, mine))):
        size = max([counts[stages[k]] for stages in mine if k < len(stages)])
        chunks.append(tuple(range(slot, slot + size)))
        slot += size
    first = [sum(counts[:s]) for s in range(schedule.stages)]
    rows: list[list[int | None]] = [[None] * slot for _ in ranks]
    slots: list[tuple[int, ...]] = [()] * schedule.stages
    for r in ranks:
        for k, s in enumerate(mine[r]):
            slots[s] = chunks[k][: counts[s]]
            for j, place in enumerate(slots[s]):
                rows[r][place] = first[s] + j
    stage = tuple([(*stages, *[None] * (len(chunks) - len(stages))) for stages in mine])
    return Placement(tuple(map(tuple, rows)), tuple(slots), tuple(chunks), stage)


Number = int | torch.Tensor
HANDED = ("index", "batch")  # what a block is handed by name, if it takes it


@dataclass(frozen=True)
class Model:
    """A model cut at its blocks.

    Attributes:
        block: `(p, x) -> x`; it may also take `index`, the number of the block, and `batch`, the micro-batch.
        first: `(rest, batch) -> x`: what comes before the blocks.
        last: `(rest, x, batch) -> (total, weight)`, or a mean: what comes after them.
        remat: whether each block runs again in the backward pass, or what it saves then (see `fzero.remat`).
    """

    block: Callable[..., Any]
    first: Callable[..., Any]
    last: Callable[..., Any]
    remat: Any = False

    @cached_property
    def _asks(self) -> tuple[str, ...]:
        """Which of `HANDED` the block takes."""
        try:
            names = inspect.signature(self.block).parameters
        except (TypeError, ValueError):  # a builtin
            return ()
        return tuple([name for name in HANDED if name in names])

    @cached_property
    def _block(self) -> Callable[..., Any]:
        def whole(p: Any, key: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
            p = tree.map_with_path(_own, gather(p)) if kwargs.pop("stacked") else gather(p)
            return self.block(p, *args, **kwargs) if key is None else random.seeded(self.block)(key, p, *args, **kwargs)

        if self.remat is False:
            return whole
        return remat(whole, save=None if self.remat is True else self.remat)

    def run_block(self, p: Any, x: Any, index: Number, call: "MicroBatchCall", stacked: bool) -> Any:
        """Run one block.

        Args:
            p: its parameters, whole or in boxes.
            x: what it is given.
            index: its number.
            call: for which micro-batch.
            stacked: whether leaves of `p` are `[1, ...]`, a rank's part of those of all ranks.
        """
        handed = {"index": index, "batch": call.batch}
        key = None if call.key is None else random.fold_in(call.key, index + 1)
        return self._block(p, key, x, stacked=stacked, **{name: handed[name] for name in self._asks})

    def run_first(self, rest: Any, call: "MicroBatchCall") -> Any:
        """Run what comes before the blocks."""
        return self._seeded(self.first, call, 0)(rest, call.batch)

    def run_last(self, rest: Any, x: Any, call: "MicroBatchCall", blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run what comes after the blocks, and return a total and its weight.

        Raises:
            TypeError: if it returns neither these nor a mean.
        """
        out = self._seeded(self.last, call, blocks + 1)(rest, x, call.batch)
        total, weight = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
        if not isinstance(total, torch.Tensor) or total.ndim or not total.is_floating_point():
            given = tree.show(total) if isinstance(total, torch.Tensor) else type(total).__name__
            raise TypeError(
                "fzero.pipeline: last(rest, x, batch) must return (total, weight), the sum of the losses and of their "
                f"weights, or a mean over the micro-batch, each 0-d; it returned {given}"
            )
        total = total.to(torch.promote_types(total.dtype, torch.float32))  # in half precision a count has 8 or 11 bits
        weight = torch.ones_like(total) if weight is None else torch.as_tensor(weight).to(total.dtype)
        return total, weight.detach()

    def run_outputs(self, rest: Any, x: Any, call: "MicroBatchCall", blocks: int) -> Any:
        """Run what comes after the blocks, and return what it gives for each example.

        Raises:
            TypeError: if that is no tree of tensors with dimensions.
        """
        out = self._seeded(self.last, call, blocks + 1)(rest, x, call.batch)
        for path, v in zip(*tree.flatten_with_paths(out)[:2], strict=True):
            if not isinstance(v, torch.Tensor) or not v.ndim:
                given = tree.show(v) if isinstance(v, torch.Tensor) else type(v).__name__
                raise TypeError(
                    "fzero.pipeline: outputs asks last(rest, x, batch) for a tree of tensors [b, ...], of the b "
                    f"examples of a micro-batch; {tree.place('what it returned', path)} is {given}"
                )
        return out

    @staticmethod
    def _seeded(f: Callable[..., Any], call: "MicroBatchCall", number: Number) -> Callable[..., Any]:
        if call.key is None:
            return f
        key = random.fold_in(call.key, number)
        return lambda *args: random.seeded(f)(key, *args)


@dataclass(frozen=True)
class MicroBatchCall:
    """One micro-batch, on its way through a model.

    Attributes:
        batch: the micro-batch.
        number: which one it is; a tensor where that is not known while tracing, or differs by rank.
        key: of the random numbers of the whole loss, or None.
    """

    batch: Any
    number: Number
    key: torch.Tensor | None

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Call `f(*args)` as a part of the loss of this micro-batch."""
        return in_micro_batch(self.number, f, *args)


def _own(path: str, w: torch.Tensor) -> torch.Tensor:
    """Return a rank's own leaf of a block, of its part `[1, ...]` of those of all ranks.

    Raises:
        ValueError: if it has those of all ranks: then every rank would run the first rank's blocks.
    """
    if w.shape[:1] != (1,):
        raise ValueError(
            f"fzero.pipeline: {tree.place('a block', path)} is {tree.show(w)} on each rank, and a rank's part of what "
            "is stacked is [1, ...]: blocks are not split by rank; give loss.stack(params, mesh) to step.init, and "
            "fzero.shard(..., split=loss.split)"
        )
    return w[0]


def micro_batch_of(batch: Any, count: int, number: Number, in_a_turn: bool = False) -> Any:
    """Return a micro-batch: equal parts of all leaves along dimension 0. Leaves of shape [] are in each.

    Args:
        batch: of all micro-batches.
        count: how many there are.
        number: which one.
        in_a_turn: whether the number is that of a traced turn.

    Raises:
        ValueError: if a leaf does not divide by `count`. The message names it.
    """

    def part(path: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.ndim:
            return x
        size, left = divmod(x.shape[0], count)
        if left:
            raise ValueError(
                f"fzero.pipeline: {tree.place('the batch', path)} is {list(x.shape)}: dimension 0 of a rank's part "
                f"must divide by micro_batches={count}; drop or pad the last batch, or cut it in other parts"
            )
        if isinstance(number, torch.Tensor):
            return loop.part(x, number, 0, size) if in_a_turn else _at(x, number, count)
        return x.narrow(0, number * size, size)

    return tree.map_with_path(part, batch)


def _at(x: torch.Tensor, number: torch.Tensor, count: int) -> torch.Tensor:
    """Return one of `count` parts of a tensor, where its number is a tensor, which may differ by rank."""
    return x.unflatten(0, (count, -1)).index_select(0, number.reshape(1)).squeeze(0)


def without_axis(name: str, f: Callable[..., Any], *args: Any) -> Any:
    """Call `f(*args)` where the axes of the running step are the others: ranks along this one share one batch."""
    scope = scope_here()
    if scope is None:
        return f(*args)
    axes = scope.axes
    names: Sequence[str] = [a.name for a in axes.each] if axes.default is None else axes.default
    default = tuple([n for n in names if n != name])
    inner: Scope = scope._replace(axes=axes._replace(default=default))
    return within(inner, f, *args)
