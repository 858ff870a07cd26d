"""The roles of trees within one call of a step: gradients, updates, or a state that an update has replaced.

Such trees have the structure of the parameters or of the state. A step that takes one for another would train
something else without an error, so the functions that take them ask here.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from fzero import tree
from fzero._torch.levels import version_key

__all__ = ["has_role", "is_opt_state", "mark_role", "mark_state", "role_of", "watch_roles"]

_Role = Literal["gradients", "updates", "parameters", "state", "old state"]

# by the ids of tensors; the references show whether an id is still the tensor's, and the versions whether it was
# written, as by an optimizer that makes updates of gradients in place
_Marks = dict[int, tuple["weakref.ref[torch.Tensor]", Any, _Role]]
_MARKS: ContextVar[_Marks | None] = ContextVar("marks", default=None)


def _current_marks() -> _Marks | None:
    return None if torch.compiler.is_dynamo_compiling() else _MARKS.get()


@contextmanager
def watch_roles() -> Iterator[None]:
    """Note the roles of trees in this block, and forget them at its end."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    token = _MARKS.set({})
    try:
        yield
    finally:
        _MARKS.reset(token)


def mark_role(values: Any, role: _Role) -> None:
    """Note the role of a tree's tensors, those of boxes too. Outside of `watch_roles` it does nothing."""
    marks = _current_marks()
    if marks is not None:
        marks.update({id(x): (weakref.ref(x), version_key(x), role) for x in tree.tensors(values)})


def mark_state(old_state: Any, new_state: Any) -> None:
    """Note the tensors of an update's new state, and those of its old state that the new one does not hold."""
    if _current_marks() is None:
        return
    tensor_ids = {id(x) for x in tree.tensors(new_state)}
    mark_role(new_state, "state")
    mark_role([x for x in tree.tensors(old_state) if id(x) not in tensor_ids], "old state")


def role_of(values: Any) -> _Role | None:
    """Return the role of a tree's first tensor that has one; None if none has, and outside of `watch_roles`."""
    marks = _current_marks()
    if not marks:
        return None
    for x in tree.tensors(values):
        role = marks.get(id(x))
        if role is not None and role[0]() is x and role[1] == version_key(x):
            return role[2]
    return None


def has_role(role: _Role) -> bool:
    """Return whether a tree of this role was noted."""
    return any(other == role for *_, other in (_current_marks() or {}).values())


def is_opt_state(values: object) -> bool:
    """Return whether a value is the state of an optimizer of fzero, or of a chain with one, by its class.

    Such a state is a named tuple of `fzero.optim` whose name ends with "State".
    """
    if type(values) is tuple:
        return any(is_opt_state(x) for x in values)
    # only of a named tuple: Dynamo cannot read the module of a built-in class, such as dict
    return isinstance(values, tuple) and _is_optim_class(type(values))


def _is_optim_class(kind: type) -> bool:
    return kind.__module__.startswith("fzero.optim.") and kind.__name__.endswith("State")
