"""Refuse a step that changes Python's state while it is traced: its Python runs once, so the change happens once."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fzero import _torch

__all__ = ["refuse_python_state"]


@contextmanager
def refuse_python_state(name: str, f: Callable[..., Any]) -> Iterator[None]:
    """Check that the code in this block, which traces the user's function, leaves Python's state as it is.

    It compares the numbers, texts and lists that the function itself reads as nonlocal or global variables, and the
    states of `random` and `numpy.random`.

    Raises:
        RuntimeError: if one of them changed. The message names it.
    """
    variables, numbers = _function_variables(f), _generator_states()
    lengths = {key: len(value) for key, value in variables.items() if isinstance(value, list)}
    yield
    for generator, state in _generator_states().items():
        if state != numbers[generator]:
            raise RuntimeError(
                f"fzero.jit: {name} draws from {generator} while it is traced, and every step would use the same "
                "number: draw with torch.rand, or pass the number as a tensor, an argument of the step"
            )
    for key, value in _function_variables(f).items():
        known = variables.get(key)
        if isinstance(value, list) and any(_torch.is_stand_in(x) for x in value[lengths.get(key, 0) :]):
            raise RuntimeError(
                f"fzero.jit: {name} puts a tensor into the list {key!r}, and Python runs only while the step is "
                "traced, where tensors have no values: return the tensor as a result of the step"
            )
        if isinstance(value, int | float | str) and isinstance(known, int | float | str) and _differ(known, value):
            raise RuntimeError(
                f"fzero.jit: {name} changes the variable {key!r}, from {known!r} to {value!r}, and Python runs only "
                "while the step is traced, so later steps would read the old value: make it a tensor, an argument and "
                "a result of the step"
            )


def _differ(a: float | str, b: float | str) -> bool:
    """Return whether two plain values differ; nan, which differs from itself, is one value."""
    return a != b and not (a != a and b != b)


def _function_variables(f: Callable[..., Any]) -> dict[str, Any]:
    """Return the nonlocal and global variables of a function's code, by name."""
    code = getattr(f, "__code__", None)
    if code is None:
        return {}
    cells = zip(code.co_freevars, getattr(f, "__closure__", None) or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    names = getattr(f, "__globals__", {})
    return {**{name: names[name] for name in code.co_names if name in names}, **values}


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not ...
    except ValueError:  # the variable is assigned later
        return False


def _generator_states() -> dict[str, Any]:
    """Return the states of Python's and numpy's global generators, by their names."""
    states: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states
