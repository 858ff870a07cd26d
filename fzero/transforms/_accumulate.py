"""Micro-batches: split the batch into equal parts, and sum gradients over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import tree
from fzero._dtypes import at_least_float32
from fzero.axes import call_in_micro_batch
from fzero.graph import loop
from fzero.sharding import PerRank, Shard, Slot, is_box

__all__ = ["MicroBatches", "accumulate", "find_micro_batches"]

_LossOf = Callable[[int | torch.Tensor], Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]]]


def accumulate(
    loss_of: _LossOf,
    variables: list[torch.Tensor],
    dtypes: list[torch.dtype],
    micro_batches: int,
    is_looped: bool,
    in_float32: bool,
    autograd: bool,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Sum the values and gradients of the micro-batches, and stack their aux.

    Args:
        loss_of: maps the number of a micro-batch to its loss, `variables -> (loss, aux)`.
        variables: the tensors to differentiate.
        dtypes: the dtypes in which to sum, one for each variable.
        micro_batches: the number of micro-batches.
        is_looped: whether a trace records one micro-batch, as the body of a loop.
        in_float32: whether the values are summed in float32 at least.
        autograd: whether torch.autograd differentiates, in place of torch.func.

    Returns:
        `(value, aux, gradients)`.
    """

    def widen(value: torch.Tensor) -> torch.Tensor:
        return at_least_float32(value) if in_float32 else value

    def run(j: int | torch.Tensor) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
        differentiate = _value_and_grad_by_autograd if autograd else _value_and_grad
        value, aux, gradients = differentiate(loss_of(j), variables, j)
        return widen(value), aux, gradients

    def forward(j: torch.Tensor) -> tuple[torch.Tensor, Any]:
        auxes: list[Any] = []
        outputs: Any = torch.func.vjp(_loss_and_tensors(loss_of(j), j, auxes), variables, has_aux=True)
        return widen(outputs[0]), _put_tensors(outputs[2], auxes.pop())

    if is_looped:
        return _record_iteration(run, forward, dtypes, micro_batches)
    total, aux, gradients = run(0)
    auxes = [aux]
    if micro_batches > 1:  # later gradients are cast to these dtypes as they are added
        _consume_into(gradients, lambda g, dtype: g.to(dtype), dtypes)
    for j in range(1, micro_batches):
        value, aux, new = run(j)
        total = total + value
        auxes.append(aux)
        _consume_into(gradients, torch.add, new)
    return total, auxes[0] if micro_batches == 1 else tree.map(_stack_leaves, *auxes), gradients


def _record_iteration(
    run: Callable[[torch.Tensor], tuple[torch.Tensor, Any, list[torch.Tensor]]],
    forward: Callable[[torch.Tensor], tuple[torch.Tensor, Any]],
    dtypes: list[torch.dtype],
    micro_batches: int,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Record one micro-batch as an iteration of a loop, and its additions to the sums of earlier iterations."""
    iteration = loop.iteration(micro_batches)

    def add_up(share: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return loop.LoopSum.with_share(share, iteration, dtype).after()

    value, aux, gradients = run(iteration)
    _consume_into(gradients, add_up, list(dtypes))
    total = add_up(value, value.dtype)
    stacked = tree.map(lambda x: loop.rows(x, iteration, micro_batches) if isinstance(x, torch.Tensor) else x, aux)

    run_index = loop.run_again(iteration)
    other_value, other_aux = forward(run_index)
    _check_alike(aux, other_aux)
    first, second = [value, *tree.tensors(aux)], [other_value, *tree.tensors(other_aux)]
    return loop.check_equal_runs(total, run_index, first, second), stacked, gradients


def _check_alike(aux: Any, other: Any) -> None:
    """Check that two micro-batches return trees of one structure, with equal values in all leaves but tensors."""
    (leaves, structure), (other_leaves, other_structure) = tree.flatten(aux), tree.flatten(other)
    if structure != other_structure:
        raise loop.NotScannableError("the aux of the second micro-batch differs in structure from the first one's")
    for a, b in zip(leaves, other_leaves, strict=True):
        are_tensors = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
        if are_tensors != (True, True) and (any(are_tensors) or not _are_equal(a, b)):
            raise loop.NotScannableError(f"the aux of the second micro-batch has {b!r} where the first one's has {a!r}")


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two values are surely equal; False for values such as numpy arrays, whose `==` is not a bool."""
    try:
        return a is b or bool(a == b)
    except Exception:
        return False


def _value_and_grad(
    loss_of: Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]],
    variables: list[torch.Tensor],
    j: int | torch.Tensor,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Return the value, aux and gradients of micro-batch j."""
    auxes: list[Any] = []  # the full aux: torch.func returns only its tensors
    gradients, (value, tensors) = torch.func.grad_and_value(_loss_and_tensors(loss_of, j, auxes), has_aux=True)(
        variables
    )
    return value, _put_tensors(tensors, auxes.pop()), gradients


def _value_and_grad_by_autograd(
    loss_of: Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]],
    variables: list[torch.Tensor],
    j: int | torch.Tensor,
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Return the results of `_value_and_grad`, from torch.autograd."""
    auxes: list[Any] = []
    leaves = [x.detach().requires_grad_() for x in variables]
    with torch.enable_grad():
        loss, tensors = _loss_and_tensors(loss_of, j, auxes)(leaves)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        else:
            gradients = [torch.zeros_like(x) for x in variables]
    return loss.detach(), _put_tensors([x.detach() for x in tensors], auxes.pop()), list(gradients)


def _put_tensors(tensors: list[torch.Tensor], aux: Any) -> Any:
    """Replace the tensors of a tree by `tensors`, in order."""
    new, (leaves, structure) = iter(tensors), tree.flatten(aux)
    return tree.unflatten(structure, [next(new) if isinstance(x, torch.Tensor) else x for x in leaves])


def _loss_and_tensors(
    loss_of: Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]], j: int | torch.Tensor, auxes: list[Any]
) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]:
    """Make a function `variables -> (loss, tensors of aux)` of micro-batch j, which appends its aux to `auxes`."""

    def loss_and_tensors(xs: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss, aux = call_in_micro_batch(j, loss_of, xs)
        auxes.append(aux)
        return loss, tree.tensors(aux)

    return loss_and_tensors


def _consume_into(xs: list[Any], f: Callable[[Any, Any], Any], ys: list[Any]) -> None:
    """Empty `ys` into `xs`: replace each x by `f(x, y)`, one at a time, so that each x and y is freed at once."""
    stack = ys[::-1]
    ys.clear()
    for i in range(len(xs)):
        xs[i] = f(xs[i], stack.pop())


def _stack_leaves(*xs: Any) -> Any:
    return torch.stack(xs) if isinstance(xs[0], torch.Tensor) else xs[-1]


@dataclass(frozen=True)
class MicroBatches:
    """How the arguments of the loss function are split into micro-batches.

    Attributes:
        count: k, the number of micro-batches.
        argnums: the positions of the arguments that are split.
        size: the size of one micro-batch along dimension 0.
    """

    count: int
    argnums: Sequence[int] = ()
    size: int = 0

    def part(self, arg: Any, i: int, j: int | torch.Tensor) -> Any:
        """Return micro-batch j of argument i, or all of an argument that is not split."""

        def narrow(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if isinstance(j, torch.Tensor):
                return loop.loop_slice(x, j, 0, self.size)
            return x.narrow(0, j * self.size, self.size)

        return tree.map(narrow, arg) if i in self.argnums else arg


def find_micro_batches(
    args: Sequence[Any], nums: Sequence[int], batch_argnums: int | Sequence[int] | None, count: int
) -> MicroBatches:
    """Find the arguments that are the batch, and the size of k equal parts along dimension 0.

    Args:
        args: the loss function's arguments.
        nums: the positions of the differentiated arguments.
        batch_argnums: the positions of the batch; None to infer them.
        count: k.

    Raises:
        ValueError: if it is unclear which arguments are the batch, or k does not divide its size. The message names the
            arguments.
    """
    if count == 1:
        return MicroBatches(1)
    argnums = _batch_argnums(args, nums, batch_argnums, count)
    sizes = {}
    for i in argnums:
        for path, x in zip(*tree.flatten_with_paths(args[i])[:2], strict=True):
            if isinstance(x, torch.Tensor):
                sizes[f"argument {i}" + (f", leaf {path!r}" if path else "")] = x.shape[0] if x.ndim else "0-d"
    if not sizes:
        raise ValueError(f"micro_batches={count} found no tensor to split: pass the batch by position, not by keyword")
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"micro_batches={count} splits the batch along dimension 0, but its leaves' sizes differ: {sizes}; "
            "name the arguments that are the batch with batch_argnums="
        )
    (size,) = set(sizes.values())
    if isinstance(size, str) or size % count:
        raise ValueError(
            f"micro_batches={count} does not divide a rank's batch: {next(iter(sizes))} of the "
            f"differentiated function has size {size}; drop or pad the last batch, or choose a divisor of {size}"
        )
    return MicroBatches(count, argnums, size // count)


def _batch_argnums(
    args: Sequence[Any], nums: Sequence[int], batch_argnums: int | Sequence[int] | None, count: int
) -> list[int]:
    """List the positions of the batch: `batch_argnums`, or the only argument that may be the batch."""
    candidates = [i for i, x in enumerate(args) if i not in nums or isinstance(x, PerRank)]
    if batch_argnums is not None:
        argnums = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
        if any(i not in candidates for i in argnums):
            raise ValueError(
                f"batch_argnums={batch_argnums}: expected positions below {len(args)}, of arguments that are not "
                "differentiated or that are fzero.PerRank"
            )
        return argnums
    batches = [i for i in candidates if tree.tensors(args[i]) and not _holds_units(args[i])]
    if len(batches) > 1:
        raise ValueError(
            f"micro_batches={count}: each of the arguments {batches} may be the batch; name the batch with "
            "batch_argnums="
        )
    return batches


def _holds_units(arg: Any) -> bool:
    return any(isinstance(x, Shard | Slot) for x in tree.flatten(arg, is_box)[0])
