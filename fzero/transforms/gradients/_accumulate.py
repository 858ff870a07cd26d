"""Micro-batches: the batch in equal parts, and gradients summed over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero.axes import in_micro_batch
from fzero.graph import loop
from fzero.sharding import PerRank, Shard, Slot, is_box

__all__ = ["MicroBatches", "accumulate", "micro_batches_of"]

LossOf = Callable[[int | torch.Tensor], Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]]]


def accumulate(
    loss_of: LossOf,
    variables: list[torch.Tensor],
    dtypes: list[torch.dtype],
    micro_batches: int,
    looped: bool,
    in_float32: bool,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Sum the values and the gradients of the micro-batches, and stack what else they return.

    Args:
        loss_of: maps the number of a micro-batch to its loss, `variables -> (loss, aux)`.
        variables: what is differentiated.
        dtypes: in which to sum, one for each variable.
        micro_batches: how many there are.
        looped: whether a trace is to record one of them, as the body of a loop.
        in_float32: whether the values are summed in float32 at least.

    Returns:
        `(value, aux, gradients)`.
    """

    def widened(value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.promote_types(value.dtype, torch.float32)) if in_float32 else value

    def run(j: int | torch.Tensor) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
        value, aux, gradients = _differentiated(loss_of(j), variables, j)
        return widened(value), aux, gradients

    def forward(j: torch.Tensor) -> tuple[torch.Tensor, Any]:
        returned: list[Any] = []
        found: Any = torch.func.vjp(_with_tensors(loss_of(j), j, returned), variables, has_aux=True)
        return widened(found[0]), _with(found[2], returned.pop())

    if looped:
        return _in_a_loop(run, forward, dtypes, micro_batches)
    total, aux, gradients = run(0)
    auxes = [aux]
    if micro_batches > 1:  # what is added takes the dtype of what it is added to
        _in_place(gradients, lambda g, dtype: g.to(dtype), dtypes)
    for j in range(1, micro_batches):
        value, aux, new = run(j)
        total = total + value
        auxes.append(aux)
        _in_place(gradients, torch.add, new)
    return total, auxes[0] if micro_batches == 1 else tree.map(_stacked, *auxes), gradients


def _in_a_loop(
    run: Callable[[torch.Tensor], tuple[torch.Tensor, Any, list[torch.Tensor]]],
    forward: Callable[[torch.Tensor], tuple[torch.Tensor, Any]],
    dtypes: list[torch.dtype],
    micro_batches: int,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Record one micro-batch as a turn of a loop, with what it adds to the turns before."""
    turn = loop.turn(micro_batches)

    def summed(share: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        before = loop.sum_before(share, turn, dtype)
        return loop.sum_after(torch.add(before, share), before)

    value, aux, gradients = run(turn)
    _in_place(gradients, summed, list(dtypes))
    total = summed(value, value.dtype)
    stacked = tree.map(lambda x: loop.rows(x, turn, micro_batches) if isinstance(x, torch.Tensor) else x, aux)

    again = loop.again(turn)
    other_value, other_aux = forward(again)
    _check_alike(aux, other_aux)
    first, second = [value, *tree.tensors(aux)], [other_value, *tree.tensors(other_aux)]
    return loop.compared(total, again, first, second), stacked, gradients


def _check_alike(aux: Any, other: Any) -> None:
    """Check that two micro-batches return the same tree, and in it the same values that are no tensors."""
    (leaves, structure), (others, another) = tree.flatten(aux), tree.flatten(other)
    if structure != another:
        raise loop.NotScannable("the aux of the second micro-batch is another tree than that of the first")
    for a, b in zip(leaves, others, strict=True):
        tensors = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
        if tensors != (True, True) and (any(tensors) or not _equal(a, b)):
            raise loop.NotScannable(f"the aux of the second micro-batch has {b!r} where that of the first has {a!r}")


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values are known to be equal; of an array of numpy that is not asked."""
    try:
        return a is b or bool(a == b)
    except Exception:
        return False


def _differentiated(
    loss_of: Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]],
    variables: list[torch.Tensor],
    j: int | torch.Tensor,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Return the value, aux and gradients of micro-batch j."""
    returned: list[Any] = []  # aux as it is: torch.func carries out only its tensors
    gradients, (value, tensors) = torch.func.grad_and_value(_with_tensors(loss_of, j, returned), has_aux=True)(
        variables
    )
    return value, _with(tensors, returned.pop()), gradients


def _with(tensors: list[torch.Tensor], aux: Any) -> Any:
    """Put tensors in the places of those of a tree."""
    left, (leaves, structure) = iter(tensors), tree.flatten(aux)
    return tree.unflatten(structure, [next(left) if isinstance(x, torch.Tensor) else x for x in leaves])


def _with_tensors(
    loss_of: Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]], j: int | torch.Tensor, returned: list[Any]
) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]:
    """Make a function of the variables to the loss of micro-batch j and the tensors of aux, which `returned` gets."""

    def loss_and_tensors(xs: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss, aux = in_micro_batch(j, loss_of, xs)
        returned.append(aux)
        return loss, tree.tensors(aux)

    return loss_and_tensors


def _in_place(xs: list[Any], f: Callable[[Any, Any], Any], ys: list[Any]) -> None:
    """Put `f(x, y)` in the place of each x, one at a time and letting go of y, so that each is freed at once."""
    others = ys[::-1]
    ys.clear()
    for i in range(len(xs)):
        xs[i] = f(xs[i], others.pop())


def _stacked(*xs: Any) -> Any:
    return torch.stack(xs) if isinstance(xs[0], torch.Tensor) else xs[-1]


@dataclass(frozen=True)
class MicroBatches:
    """How the arguments of the loss function are cut.

    Attributes:
        count: k, the number of micro-batches.
        argnums: the positions of the arguments that are cut.
        size: of one micro-batch, along dimension 0.
    """

    count: int
    argnums: Sequence[int] = ()
    size: int = 0

    def part(self, arg: Any, i: int, j: int | torch.Tensor) -> Any:
        """Return what argument i is for micro-batch j."""

        def narrowed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if isinstance(j, torch.Tensor):
                return loop.part(x, j, 0, self.size)
            return x.narrow(0, j * self.size, self.size)

        return tree.map(narrowed, arg) if i in self.argnums else arg


def micro_batches_of(
    args: Sequence[Any], nums: Sequence[int], batch_argnums: int | Sequence[int] | None, count: int
) -> MicroBatches:
    """Find the arguments that are the batch, and cut them in equal parts along dimension 0.

    Args:
        args: of the loss function.
        nums: the positions of those that are differentiated.
        batch_argnums: the positions of the batch, if they were given.
        count: k.

    Raises:
        ValueError: if it is unclear which arguments are the batch, or k does not divide its size. Names them.
    """
    if count == 1:
        return MicroBatches(1)
    argnums = _batch_positions(args, nums, batch_argnums, count)
    sizes = {}
    for i in argnums:
        for path, x in zip(*tree.flatten_with_paths(args[i])[:2], strict=True):
            if isinstance(x, torch.Tensor):
                sizes[f"argument {i}" + (f", leaf {path!r}" if path else "")] = x.shape[0] if x.ndim else "0-d"
    if not sizes:
        raise ValueError(f"micro_batches={count} found no tensor to cut: pass the batch by position, not by keyword")
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"micro_batches={count} cuts the batch along dimension 0, and its leaves' sizes differ: {sizes}; "
            "say which arguments are the batch with batch_argnums="
        )
    (size,) = set(sizes.values())
    if isinstance(size, str) or size % count:
        raise ValueError(
            f"micro_batches={count} does not divide a rank's part of the batch: {next(iter(sizes))} of the "
            f"differentiated function has size {size}"
        )
    return MicroBatches(count, argnums, size // count)


def _batch_positions(
    args: Sequence[Any], nums: Sequence[int], batch_argnums: int | Sequence[int] | None, count: int
) -> list[int]:
    """List the positions of the arguments that are cut: those given, or the only one that may be the batch."""
    may_be_cut = [i for i, x in enumerate(args) if i not in nums or isinstance(x, PerRank)]
    if batch_argnums is not None:
        chosen = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
        if any(i not in may_be_cut for i in chosen):
            raise ValueError(
                f"batch_argnums={batch_argnums}: expected positions below {len(args)} of arguments that are not "
                "differentiated, or that are fzero.PerRank"
            )
        return chosen
    found = [i for i in may_be_cut if tree.tensors(args[i]) and not _holds_units(args[i])]
    if len(found) > 1:
        raise ValueError(
            f"micro_batches={count}: each of the arguments {found} may be the batch; say with batch_argnums= which of "
            "them are"
        )
    return found


def _holds_units(arg: Any) -> bool:
    return any(isinstance(x, Shard | Slot) for x in tree.flatten(arg, is_box)[0])
