"""Guards of a block under remat: they refuse tensors whose gradients would be lost.

A tensor's gradient is lost if the block captures the tensor, or computes it and stores it outside its results. The
block runs below all transforms that are active at its call, on tensors that do not require grad. So a tensor that a
transform tracks, or that requires grad, cannot be an argument.
"""

import functools
import gc
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fzero import tree
from fzero._format import format_tensor
from fzero._torch.levels import is_foreign, is_wrapped
from fzero.transforms._remat_tape import Tape

__all__ = ["Guard", "check_captured", "check_sources"]

_DETACH = (torch.Tensor.detach, torch.detach)  # results of these may be stored: the user wants no gradient for them


class Guard(TorchFunctionMode):
    """Refuses captured tensors whose gradient, or batch, would be lost.

    Args:
        inputs: in the first run the arguments that are differentiated. The guard then also records weak references to
            the tensors computed from them. None in a later run.
    """

    def __init__(self, inputs: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self.strict = inputs is not None  # in the first run a tensor that requires grad must be captured
        self.input_ids = {id(x) for x in inputs or ()}
        self.results: dict[int, weakref.ref[torch.Tensor]] = {}

    def _depends_on_inputs(self, x: torch.Tensor) -> bool:
        ref = self.results.get(id(x))
        return id(x) in self.input_ids or (ref is not None and ref() is x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a tensor that the block captures and that needs a gradient; note the results of all others."""
        kwargs = kwargs or {}
        for x in (*args, *kwargs.values()):
            for y in x if isinstance(x, list | tuple) else (x,):
                if isinstance(y, torch.Tensor) and (is_foreign(y) or (self.strict and _requires_grad(y))):
                    raise ValueError(_capture_message(y))
        out = func(*args, **kwargs)
        if (
            self.strict
            and func not in _DETACH
            and any(self._depends_on_inputs(x) for x in tree.tensors((args, kwargs)))
        ):
            for y in tree.tensors(out):
                if y.is_floating_point():
                    self.results[id(y)] = weakref.ref(y)
        return out

    def check_escapes(self, results: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that were computed from the arguments and are stored outside the results of the run.

        Raises:
            ValueError: if there is one.
        """
        result_ids = {id(y) for y in results} | {id(y._base) for y in results}

        def find_escapes() -> list[torch.Tensor]:
            return [x for ref in self.results.values() if (x := ref()) is not None and id(x) not in result_ids]

        if (tensors := find_escapes()) and _are_stored(tensors, tensors):
            del tensors
            gc.collect()  # frees tensors that only a reference cycle holds, in a second where there are many objects
            for x in (tensors := find_escapes()):
                if not _are_stored([x], tensors):
                    continue
                raise ValueError(
                    f"remat: a tensor {_describe_tensor(x)} that the block computed from its arguments is held "
                    "elsewhere than in its result: by an attribute, a list, or a hook that collects tensors "
                    "(output_attentions or output_router_logits of transformers). Its gradient "
                    "would be lost: return it from the block, or detach() it"
                )


def _are_stored(tensors: list[torch.Tensor], escapes: list[torch.Tensor]) -> bool:
    """Return whether others than an outer block, or torch (as the base of a view), hold some of the tensors."""
    lists = (id(tensors), id(escapes))
    return any(id(h) not in lists and not isinstance(h, Tape | types.FrameType) for h in gc.get_referrers(*tensors))


def _requires_grad(x: torch.Tensor) -> bool:
    return not is_wrapped(x) and x.requires_grad


def check_sources(ys: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse results that depend on a tensor that requires grad and is not among `inputs`.

    Raises:
        ValueError: if there is one.
    """
    input_ids = {id(x) for x in inputs}
    todo = [y.grad_fn for y in ys if y.grad_fn is not None]
    visited = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in input_ids:
            raise ValueError(_capture_message(leaf))
        sources = {n for n, _ in node.next_functions if n is not None} - visited
        visited |= sources
        todo += sources


def check_captured(block: Any) -> None:
    """Refuse differentiated tensors in a function's closure, whether the function uses them or not.

    Raises:
        ValueError: if there is one.
    """
    for _ in range(10):
        if isinstance(block, functools.partial):
            contents, inner = [block.args, block.keywords], block.func
        elif isinstance(block, types.MethodType):
            contents, inner = [block.__self__], block.__func__
        else:
            cells = getattr(block, "__closure__", None) or ()
            contents = [c.cell_contents for c in cells if _has_contents(c)]
            inner = getattr(block, "__wrapped__", None)
        for x in tree.tensors(contents):
            if is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled()):
                raise ValueError(_capture_message(x))
        if inner is None:
            return
        block = inner


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _describe_tensor(x: torch.Tensor) -> str:
    return format_tensor(x.dtype, x.shape)


def _capture_message(x: torch.Tensor) -> str:
    return (
        f"remat: the block uses a tensor {_describe_tensor(x)} that was not given as an argument, and that is "
        "differentiated, or differs by rank or example: the backward pass would lose it; pass it as an argument"
    )
