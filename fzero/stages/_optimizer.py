"""What a sharded step checks of the optimizer that it makes a state for, and of that state."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._notice import notice
from fzero.optim._pair import check_pair, of_torch

__all__ = ["check_device", "check_no_torch_optimizer", "check_optimizer", "noted"]


def check_optimizer(opt: Any, stage: int, on_shards: bool) -> None:
    """Check that an optimizer is a pair, and one that a stage can run: on shards only an elementwise one."""
    check_pair(opt, "init")
    elementwise = getattr(opt, "elementwise", None)  # a third-party pair does not say
    if not on_shards:
        return
    if elementwise is None:
        notice(
            f"fzero: {type(opt).__name__} does not say whether it is elementwise and is taken to be: "
            "fzero.testing.check_elementwise(opt) finds out"
        )
    if elementwise is False:
        raise ValueError(
            f"stage={stage} runs the optimizer on flat shards, and this one declares elementwise=False: "
            "it needs whole leaves; give them to it with optim.whole(opt), or use stage=0"
        )


def noted(make: Callable[[], Any]) -> Any:
    """Call `make()`, and add advice to the error of a pair that takes trees apart by itself."""
    try:
        return make()
    except ValueError as error:
        if "differs by rank" in str(error):
            error.add_note("A pair that takes trees apart by itself keeps unboxed state: wrap it, optim.leafwise(pair)")
        raise


def check_device(params: Any, opt_state: Any) -> None:
    """Check that no state was made without memory for parameters that have it."""
    if not any(x.is_meta for x in tree.tensors(params)):
        check_memory("opt_state", opt_state)


def check_memory(what: str, values: Any) -> None:
    """Check that no leaf of a tree is on the meta device, beside parameters that have values.

    Raises:
        ValueError: if one is. The message names it.
    """
    if not any(x.is_meta for x in tree.tensors(values)):
        return
    paths, leaves, _ = tree.flatten_with_paths(values)
    path = next(p for p, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor) and x.is_meta)
    raise ValueError(
        f"{what} leaf {path!r} is on the meta device, and the parameters have values: give step.init the module "
        "itself, or a function that makes zeros, and then read the parameters into what it returned"
    )


def check_no_torch_optimizer(train_step: Callable[..., Any]) -> None:
    """Check that a train step runs no optimizer of torch.optim, which would change nothing and say nothing.

    Raises:
        TypeError: if one is among what it refers to, and it calls a `step` or an `update`.
    """
    if not inspect.isfunction(train_step) or not {"step", "update"} & set(train_step.__code__.co_names):
        return
    seen = inspect.getclosurevars(train_step)
    for name, x in {**seen.globals, **seen.nonlocals}.items():
        if isinstance(x, torch.optim.Optimizer):
            raise TypeError(f"train_step calls {name!r}: {of_torch(x)}")
