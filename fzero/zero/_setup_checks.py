"""Checks when a sharded step is made, and its state: the train step, the optimizer, and leaves without values."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import did_you_mean
from fzero._notice import warn_once
from fzero.axes import LayoutRules
from fzero.graph import Jitted
from fzero.optim import Optimizer, OptimizerLike, torch_optimizer_message
from fzero.ranks import Mesh
from fzero.sharding import Shard, Slot, is_box, traced_spec

__all__ = ["check_not_meta", "check_optimizer", "check_splits", "check_train_step"]


def check_optimizer(opt: OptimizerLike, optimizer: Optimizer, stage: int, on_shards: bool) -> None:
    """Check that the stage can run an optimizer: on shards, it must be exact there. A notice names the `opt`."""
    if not on_shards:
        return
    if optimizer.exact_on_shards is None:
        warn_once(
            f"fzero: {type(opt).__name__} does not declare whether it is exact on shards, and is assumed to be: "
            "fzero.testing.is_exact_on_shards(opt) checks it"
        )
    if optimizer.exact_on_shards is False:
        raise ValueError(
            f"stage={stage} runs the optimizer on flat shards, and this optimizer declares exact_on_shards=False: "
            "it needs whole leaves; wrap it with optim.on_full_leaves(opt), or use stage=0"
        )


def check_splits(boxes: Any, rules: LayoutRules, mesh: Mesh, data_axes: Sequence[str]) -> None:
    """Check that every name in the rules of `split` finds a leaf, since a leaf that is not split trains on wrong sums.

    A notice names an axis over which nothing is split.

    Args:
        boxes: the boxes of the parameters within a step.
        rules: the step's rules for layouts.
        mesh: the step's mesh.
        data_axes: the axes over which batches are split.

    Raises:
        ValueError: if a name finds no leaf, or a rule's axis is a misspelt axis of the mesh.
    """
    for axis in set(rules.named_axes) - set(mesh.axis_names):
        if hint := did_you_mean(axis, mesh.axis_names, cutoff=0.75):  # a mesh without an axis of the kind is no mistake
            raise ValueError(f"split: a rule splits leaves over {axis!r}, which is not an axis of {mesh!r}{hint}")
    paths, leaves, _ = tree.flatten_with_paths(boxes, is_box)
    if unused := rules.unused_names(paths, mesh.axis_names):
        ends = sorted({path.rpartition(".")[2] for path in paths} | set(paths))
        raise ValueError(
            f"split: no parameter has the name {unused[0]!r}, so it would not be split, and be wrong in sums over the "
            f"ranks: expected ends of paths such as {paths[0]!r}{did_you_mean(unused[0], ends)}"
        )
    split = {s.axis for x in leaves if isinstance(x, Shard | Slot) for s in traced_spec(x.spec_id).split}
    for name, size in mesh.shape:
        if size > 1 and name not in {*data_axes, *split, *rules.pipeline_axes}:
            warn_once(
                f"fzero.shard: axis={tuple(data_axes)} does not average over {name!r}, and split= splits no parameter "
                f"over it, so the {size} ranks along {name!r} compute the same"
            )


def check_not_meta(name: str, values: Any) -> None:
    """Check that no leaf of a tree is on the meta device, given that the parameters have values.

    Raises:
        ValueError: if a leaf is on the meta device. The message names it.
    """
    if not any(x.is_meta for x in tree.tensors(values)):
        return
    paths, leaves, _ = tree.flatten_with_paths(values)
    path = next(p for p, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor) and x.is_meta)
    raise ValueError(
        f"{name} leaf {path!r} is on the meta device, and the parameters have values: give step.init the module "
        "itself, or a function that makes zeros, and then load the parameters into its result"
    )


def check_train_step(train_step: Callable[..., Any]) -> None:
    """Check that a train step is a plain function that runs no optimizer of torch.optim, which would change nothing.

    Raises:
        TypeError: if it is jitted, sharded or a module. Also if the step's globals or closure hold an optimizer of
            torch.optim, and the step calls a `step` or an `update`.
    """
    if isinstance(train_step, Jitted):
        raise TypeError(
            f"train_step is {train_step.name}, jitted already, and a jitted step is not compiled within another: "
            "shard first, then jit, step = fzero.jit(fzero.shard(train_step, stage=2, mesh=mesh))"
        )
    if hasattr(train_step, "param_argnums"):
        raise TypeError(f"train_step is {train_step!r}, sharded already: step.train_step is the function of one device")
    if isinstance(train_step, torch.nn.Module):
        raise TypeError(
            f"train_step is a module, {type(train_step).__name__}: fzero.shard takes a function, (params, opt_state, "
            "batch) -> (params, opt_state, loss); apply = fzero.nn.functional(module).apply makes a function of the "
            "module, for the loss"
        )
    if not inspect.isfunction(train_step) or not {"step", "update"} & set(train_step.__code__.co_names):
        return
    closure = inspect.getclosurevars(train_step)
    for name, x in {**closure.globals, **closure.nonlocals}.items():
        if isinstance(x, torch.optim.Optimizer):
            raise TypeError(f"train_step calls {name!r}: {torch_optimizer_message(x)}")
