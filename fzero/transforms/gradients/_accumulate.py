"""Micro-batches: the batch in equal parts, and gradients summed over them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero.axes.scope import in_micro_batch
from fzero.layout.boxes import is_box

__all__ = ["accumulate", "micro_batches_of"]


def accumulate(
    loss_of: Callable[..., Any],
    variables: list[list[list[torch.Tensor]]],
    batches: list[list[Any]],
    dtypes: list[list[list[torch.dtype]]],
) -> tuple[list[torch.Tensor], Any, list[list[list[torch.Tensor]]]]:
    """Sum gradients over the micro-batches, in these dtypes, list values, and stack what else they return."""
    values, grads, auxes = [], None, []
    for j, batch in enumerate(batches):
        rest: list[Any] = []  # what torch.func cannot carry out: aux with its tensors (None is none) taken out

        def loss_and_tensors(xs: Any, j: int = j, batch: list[Any] = batch, rest: list[Any] = rest) -> Any:
            loss, aux = in_micro_batch(j, loss_of, batch, xs) if j else loss_of(batch, xs)
            rest.append(aux)
            return loss, tree.tensors(aux)

        g, (v, tensors) = torch.func.grad_and_value(loss_and_tensors, has_aux=True)(variables)
        found, (leaves, structure) = iter(tensors), tree.flatten(rest.pop())
        auxes.append(tree.unflatten(structure, [next(found) if isinstance(x, torch.Tensor) else x for x in leaves]))
        values.append(v)
        if grads is None:
            grads = g if len(batches) == 1 else _cast(g, dtypes)
        else:
            for mine, new in zip(grads, g, strict=True):
                for xs, ys in zip(mine, new, strict=True):
                    for i in range(len(xs)):  # one at a time, so that each summand is freed at once
                        xs[i], ys[i] = xs[i] + ys[i], None
    assert grads is not None
    return (
        values,
        auxes[0] if len(auxes) == 1 else tree.map(_stack, *auxes),
        grads,
    )


def _cast(grads: Any, dtypes: list[list[list[torch.dtype]]]) -> Any:
    """Cast the first gradients, one at a time; what is added to them takes their dtype."""
    for mine, theirs in zip(grads, dtypes, strict=True):
        for xs, kinds in zip(mine, theirs, strict=True):
            for i, dtype in enumerate(kinds):
                xs[i] = xs[i].to(dtype)
    return grads


def _stack(*xs: Any) -> Any:
    return torch.stack(xs) if isinstance(xs[0], torch.Tensor) else xs[-1]


def micro_batches_of(
    args: Sequence[Any],
    fixed: list[Any],
    nums: Sequence[int],
    batch_argnums: int | Sequence[int] | None,
    micro_batches: int,
) -> list[list[Any]]:
    """Cut the batch arguments in equal parts along dimension 0: for each micro-batch, the arguments of f."""
    if micro_batches == 1:
        return [fixed]
    if batch_argnums is None:
        plain = [bool(tree.tensors(a)) and not any(is_box(x) for x in tree.flatten(a, is_box)[0]) for a in args]
        cut_at = [i for i in range(len(args)) if i not in nums and plain[i]]
        if len(cut_at) > 1:
            raise ValueError(
                f"micro_batches={micro_batches}: arguments {cut_at} are not differentiated; say with batch_argnums= "
                "which of them are the batch"
            )
    else:
        cut_at = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
        if any(not 0 <= i < len(args) or i in nums for i in cut_at):
            raise ValueError(
                f"batch_argnums={batch_argnums}: expected positions below {len(args)} of arguments that are not "
                "differentiated"
            )
    sizes = {}
    for i in cut_at:
        for path, x in zip(*tree.flatten_with_paths(fixed[i])[:2], strict=True):
            if isinstance(x, torch.Tensor):
                sizes[f"argument {i}" + (f", leaf {path!r}" if path else "")] = x.shape[0] if x.ndim else "0-d"
    if not sizes:
        raise ValueError(
            f"micro_batches={micro_batches} found no tensor to cut: pass the batch by position, not by keyword"
        )
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"micro_batches={micro_batches} cuts the batch along dimension 0, and its leaves' sizes differ: {sizes}; "
            "say which arguments are the batch with batch_argnums="
        )
    (size,) = set(sizes.values())
    if isinstance(size, str) or size % micro_batches:
        raise ValueError(
            f"micro_batches={micro_batches} does not divide a rank's part of the batch: {next(iter(sizes))} of the "
            f"differentiated function has size {size}"
        )
    m = size // micro_batches

    def part(x: Any, j: int) -> Any:
        return x.narrow(0, j * m, m) if isinstance(x, torch.Tensor) else x

    return [
        [tree.map(lambda x, j=j: part(x, j), a) if i in cut_at else a for i, a in enumerate(fixed)]
        for j in range(micro_batches)
    ]
