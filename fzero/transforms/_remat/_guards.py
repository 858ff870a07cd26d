"""Guards of a rematerialised block: tensors that it captures, or leaves elsewhere, would lose their gradients.

The block runs below all transforms that run at its call, on tensors that require no grad. So a tensor that a transform
tracks, or that requires grad, is none of its arguments.
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
from fzero._torch.levels import is_foreign, is_wrapped
from fzero.transforms._remat._tape import Tape

__all__ = ["Guard", "check_captured", "check_given"]

_CUTS = (torch.Tensor.detach, torch.detach)  # a tensor that is held after these is meant to have no gradient


class Guard(TorchFunctionMode):
    """Refuses tensors that the block was not given and whose gradient, or batch, would be lost.

    Args:
        given: in the first run, the arguments that are differentiated: the guard also remembers, by weak references,
            the tensors that are computed of them. None in a later run.
    """

    def __init__(self, given: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self.strict = given is not None  # the first run: a tensor that requires grad comes from outside
        self.given = {id(x) for x in given or ()}
        self.made: dict[int, weakref.ref[torch.Tensor]] = {}

    def _is_made(self, x: torch.Tensor) -> bool:
        ref = self.made.get(id(x))
        return id(x) in self.given or (ref is not None and ref() is x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in (*args, *kwargs.values()):
            for y in x if isinstance(x, list | tuple) else (x,):
                if isinstance(y, torch.Tensor) and (is_foreign(y) or (self.strict and _requires_grad(y))):
                    raise ValueError(_captured(y))
        out = func(*args, **kwargs)
        if self.strict and func not in _CUTS and any(self._is_made(x) for x in tree.tensors((args, kwargs))):
            for y in tree.tensors(out):
                if y.is_floating_point():
                    self.made[id(y)] = weakref.ref(y)
        return out

    def check_escapes(self, results: Sequence[torch.Tensor]) -> None:
        """Refuse tensors that were computed of the arguments and are held elsewhere than in the results of the run.

        Raises:
            ValueError: if there is one.
        """
        known = {id(y) for y in results} | {id(y._base) for y in results}

        def alive() -> list[torch.Tensor]:
            return [x for ref in self.made.values() if (x := ref()) is not None and id(x) not in known]

        if alive():
            gc.collect()  # lets go of those that only a cycle holds
            for x in (found := alive()):
                holders = [h for h in gc.get_referrers(x) if h is not found]
                if all(isinstance(h, Tape | types.FrameType) for h in holders):
                    continue  # a block around this one, or torch itself: it is the base of a view, say
                raise ValueError(
                    f"remat: a tensor {_shown(x)} that the block computed of its arguments is held elsewhere than in "
                    "its result: by an attribute, a list, or a hook that collects (output_attentions, "
                    "output_router_logits of transformers). Its gradient would be lost: have the block return it, or "
                    "detach() it"
                )


def _requires_grad(x: torch.Tensor) -> bool:
    return not is_wrapped(x) and x.requires_grad


def check_given(ys: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
    """Refuse results that depend on a tensor that requires grad and is not among `own`.

    Raises:
        ValueError: if there is one.
    """
    known = {id(x) for x in own}
    todo = [y.grad_fn for y in ys if y.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise ValueError(_captured(leaf))
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        todo += following


def check_captured(block: Any) -> None:
    """Refuse differentiated tensors that are seen in a function's closure, whether it uses them or not.

    Raises:
        ValueError: if there is one.
    """
    for _ in range(10):
        if isinstance(block, functools.partial):
            held, following = [block.args, block.keywords], block.func
        elif isinstance(block, types.MethodType):
            held, following = [block.__self__], block.__func__
        else:
            cells = getattr(block, "__closure__", None) or ()
            held = [c.cell_contents for c in cells if _filled(c)]
            following = getattr(block, "__wrapped__", None)
        for x in tree.tensors(held):
            if is_wrapped(x) or (x.requires_grad and torch.is_grad_enabled()):
                raise ValueError(_captured(x))
        if following is None:
            return
        block = following


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _shown(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _captured(x: torch.Tensor) -> str:
    return (
        f"remat: the block uses a tensor {_shown(x)} that it was not given as an argument, and that is differentiated, "
        "or differs by rank or example: in the backward pass it would be lost; pass it as an argument"
    )
