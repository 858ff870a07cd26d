"""Check shapes where trees are combined element by element: torch would broadcast another shape without a word."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.optim.checks._roles import mark_role, mark_state, role_of
from fzero.sharding import Shard, is_box
from fzero.tree import Tree

__all__ = ["REMEDIES", "check_gradients_like", "check_updates", "checks_gradients", "checks_params"]

_ORDER = "opt.update(grads, opt_state, params)"

REMEDIES = {
    "parameter": "take the gradients of these parameters, with fzero.value_and_grad for instance",
    "state": "make the state by opt.init(params) of the parameters that the gradients are of",
}


def checks_gradients(update: Callable[..., Any]) -> Callable[..., Any]:
    """Make an optimizer's update check its gradients against the parameters, if it is given parameters, and its state.

    The update then raises TypeError for the state of another optimizer, and ValueError for arguments in another order.
    """
    if getattr(update, "checks_gradients", False):  # the optimizer is a copy of another
        return update

    @functools.wraps(update)
    def checked(grads: Tree, state: Tree, *args: Any, **kwargs: Any) -> Any:
        """Call the update, with errors that say which argument stands in whose place."""
        params = args[0] if args else kwargs.get("params")
        if params is not None:
            _check_order(update, grads, params)
            try:
                check_gradients_like(params, grads, "parameter")
            except ValueError as error:
                error.add_note(f"The arguments are {_ORDER}")
                raise
        try:
            updates, new_state = update(grads, state, *args, **kwargs)
        except AttributeError as error:
            if error.obj is not state:
                raise
            raise TypeError(_other_state(update, state, f"which has no {error.name!r}")) from error
        if type(new_state) is not type(state) and hasattr(state, "_fields") and hasattr(new_state, "_fields"):
            raise TypeError(_other_state(update, state, f"and updates {type(new_state).__name__}"))
        mark_role(updates, "updates")
        mark_state(state, new_state)
        return updates, new_state

    vars(checked)["checks_gradients"] = True
    return api_boundary(checked, f"The arguments are {_ORDER}")


def checks_params(init: Callable[..., Any]) -> Callable[..., Any]:
    """Make an optimizer's init refuse a module or a generator in place of parameters, with a TypeError."""
    if getattr(init, "checks_params", False):  # the optimizer is a copy of another
        return init

    @functools.wraps(init)
    def checked(params: Tree) -> Tree:
        """Make the state of these parameters."""
        if isinstance(params, torch.nn.Module) or inspect.isgenerator(params):
            raise TypeError(
                f"opt.init was given a {type(params).__name__} as params: expected a tree of tensors, such as "
                "dict(module.named_parameters()); step.init(module, opt) takes a module"
            )
        if isinstance(params, tuple) and (functions := [x for x in params if callable(x)]):
            raise TypeError(tree.not_a_tensor("params", "0", functions[0]))
        return init(params)

    vars(checked)["checks_params"] = True
    return api_boundary(checked, "opt.init(params) makes the state of these parameters")


def _check_order(update: Callable[..., Any], grads: Any, params: Any) -> None:
    """Check that the gradients are a tree and no loss, and that the parameters are not gradients.

    Raises:
        TypeError: if the gradients are a lone tensor, and the parameters a tree.
        ValueError: if the parameters are gradients of `fzero.value_and_grad`.
    """
    if isinstance(grads, torch.Tensor) and not isinstance(params, torch.Tensor) and not is_box(params):
        raise TypeError(
            f"{_optimizer_name(update)} was given {tree.show(grads)} as gradients: expected a tree like the "
            "parameters; fzero.value_and_grad returns (loss, grads), in this order"
        )
    if role_of(params) == "gradients":
        raise ValueError(f"{_optimizer_name(update)} was given gradients as params: the arguments are {_ORDER}")


def _optimizer_name(update: Callable[..., Any]) -> str:
    return getattr(update, "__qualname__", type(update).__name__).split(".")[0]


def _other_state(update: Callable[..., Any], state: Any, reason: str) -> str:
    return (
        f"{_optimizer_name(update)} was given {type(state).__name__}, {reason}: make the state with "
        f"step.init(params, opt) of the same optimizer, and pass the arguments as {_ORDER}"
    )


def check_gradients_like(like: Tree, grads: Tree, kind: str) -> None:
    """Check that gradients have the structure and the shapes of parameters, or of a state with a leaf for each.

    A gradient may be None. Shards may be in other pieces.

    Args:
        like: the parameters, or the tree of the state.
        grads: the gradients.
        kind: the word for a leaf of `like`: "parameter" or "state".

    Raises:
        ValueError: if they differ. The message names the first path.
    """
    mismatch = _first_shape_mismatch(grads, like, ("grads", f"the {kind}"))
    if mismatch is not None:
        path, shape, expected = mismatch
        raise ValueError(
            f"opt.update: {tree.leaf_name('gradient', path)} is {shape}, and its {kind} is {expected}: {REMEDIES[kind]}"
        )


def check_updates(params: Tree, updates: Tree) -> None:
    """Check that updates have the structure and the shapes of parameters, and that they are not gradients.

    Raises:
        ValueError: if they differ, the message names the first path; or if the arguments are other trees of the step.
        TypeError: if the parameters are an optimizer.
    """
    order = "optim.apply_updates(params, updates), with updates, opt_state = " + _ORDER
    if (role := role_of(params)) in ("gradients", "updates"):
        raise ValueError(f"apply_updates was given {role} as params: {order}")
    if role_of(updates) == "gradients":
        raise ValueError(
            f"apply_updates was given gradients as updates, and adding them would raise the loss: {order}; to add them "
            "on purpose, fzero.tree.map(torch.add, params, grads)"
        )
    if hasattr(params, "update") and hasattr(params, "init"):
        raise TypeError(f"apply_updates was given an optimizer as params: {order}")
    if isinstance(updates, tuple) and not isinstance(params, tuple):
        raise ValueError(f"apply_updates was given a tuple of {len(updates)} as updates: {order}")
    mismatch = _first_shape_mismatch(params, updates, ("params", "updates"))
    if mismatch is not None:
        path, expected, shape = mismatch
        raise ValueError(
            f"leaf {path!r} is {expected}, and its update is {shape}: an update has the shape of its "
            "parameter; pass the updates that opt.update returned for gradients of these parameters"
        )


def _first_shape_mismatch(
    values: Tree, other_values: Tree, names: tuple[str, str]
) -> tuple[str, list[int], list[int]] | None:
    """Return the path and both shapes of the first pair of leaves or shards whose shapes differ.

    Messages call the two trees by `names`.

    Raises:
        ValueError: if the trees differ in structure, or only one has a box at a path.
    """
    if _have_same_shapes(values, other_values):
        return None
    entries = tree.flatten(values, is_box)[0]
    others = tree.leaves_up_to(values, other_values, is_box, names)
    for i, (x, y) in enumerate(zip(entries, others, strict=True)):
        if is_box(x) and isinstance(y, torch.Tensor):
            raise tree.structure_error(values, other_values, names=names)
        shapes = _full_shape(x), _full_shape(y)
        if shapes[0] != shapes[1] and None not in shapes:
            return tree.flatten_with_paths(values, is_box)[0][i], [*(shapes[0] or ())], [*(shapes[1] or ())]
    return None


def _have_same_shapes(values: Tree, other_values: Tree) -> bool:
    """Return whether the trees have one structure, boxes included, and equal shapes: nearly always, and quickly."""
    (xs, structure), (ys, other_structure) = tree.flatten(values), tree.flatten(other_values)
    if structure != other_structure:
        return False
    pairs = zip(xs, ys, strict=True)
    return all(isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape for x, y in pairs)


def _full_shape(x: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor, or that of a shard's pieces together; None for anything else."""
    if isinstance(x, torch.Tensor):
        return tuple(x.shape)
    if not isinstance(x, Shard):
        return None
    first, *rest = [tuple(piece.shape) for piece in x.pieces]
    return (*first[:-1], sum([shape[-1] for shape in (first, *rest)])) if rest else first
