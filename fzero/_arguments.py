"""Checks of a user's arguments. Each error names the argument, the value given and the value expected."""

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

__all__ = [
    "check_callable",
    "check_choice",
    "check_int",
    "check_path",
    "check_remat",
    "did_you_mean",
    "function_name",
    "is_int",
    "show_value",
]


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int. A bool is none: `micro_batches=True` is a mistake, not 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def function_name(f: Any) -> str:
    """Return the name of the user's function for a message, "f" if it has none."""
    return getattr(f, "__name__", "f")


def check_int(name: str, value: Any, minimum: int = 1, meaning: str = "", maximum: int | None = None) -> int:
    """Check an int that the user gave, and return it.

    Args:
        name: the name of the argument.
        value: what the user gave for it.
        minimum: the least int that is allowed.
        meaning: what the int means, such as "the number of experts", for the message.
        maximum: the largest int that is allowed, if one is.

    Raises:
        ValueError: if the value is not an int, or is out of range.

    Example:
        >>> check_int("micro_batches", 4)
        4
        >>> check_int("k", 9, 1, "the number of experts of a token", maximum=8)
        Traceback (most recent call last):
        ValueError: k=9: expected the number of experts of a token, an int from 1 to 8
    """
    if is_int(value) and minimum <= value and (maximum is None or value <= maximum):
        return value
    expected = f"an int, at least {minimum:,}" if maximum is None else f"an int from {minimum:,} to {maximum:,}"
    raise ValueError(f"{name}={value!r}: expected {f'{meaning}, ' if meaning else ''}{expected}")


def check_callable(name: str, value: Any, expected: str = "a function") -> None:
    """Check a function that the user gave, before it is called.

    Args:
        name: the name of the argument.
        value: what the user gave for it.
        expected: what is called, such as "a function (path, leaf) -> name", or how the call is written.

    Raises:
        TypeError: if the value cannot be called, such as the tree of a call with swapped arguments.

    Example:
        >>> check_callable("f", {"w": 1.0}, "a function of leaves, as in fzero.tree.map(f, tree)")
        Traceback (most recent call last):
        TypeError: f is {'w': 1.0}: expected a function of leaves, as in fzero.tree.map(f, tree)
    """
    if not callable(value):
        raise TypeError(f"{name} is {show_value(value)}: expected {expected}")


def show_value(value: Any) -> str:
    """Describe a value in a message: one with a long text by its type.

    Example:
        >>> show_value([0.5]), show_value([*range(100)])
        ('[0.5]', 'a list')
    """
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else f"a {type(value).__name__}"


def check_choice(name: str, value: Any, choices: Sequence[str | bool | None]) -> None:
    """Check that the user chose one of several values.

    Raises:
        ValueError: if the value is none of the choices. The int 1 is not the choice True.

    Example:
        >>> check_choice("reduce", "max", ("mean", "weighted", "sum"))
        Traceback (most recent call last):
        ValueError: reduce='max': expected "mean", "weighted" or "sum"
        >>> check_choice("moments", "int9", ("int8",))
        Traceback (most recent call last):
        ValueError: moments='int9': expected "int8"; did you mean "int8"?
    """
    if any(isinstance(value, type(choice)) and value == choice for choice in choices):
        return
    *rest, last = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
    expected = f"{', '.join(rest)} or {last}" if rest else last
    raise ValueError(f"{name}={value!r}: expected {expected}{did_you_mean(value, choices)}")


def check_path(name: str, value: Any, expected: str, call: str = "") -> str:
    """Check a path that the user gave, and return it as text.

    Args:
        name: the name of the argument.
        value: what the user gave for it.
        expected: what lies at the path, such as "the path of a folder".
        call: the call in the order of its arguments, such as "fzero.save(path, values)".

    Raises:
        TypeError: if the value is no path, such as the tree of a call with swapped arguments.
        ValueError: if the path is empty, or has the character NUL.

    Example:
        >>> check_path("folder", "runs/gpt", "the path of a folder")
        'runs/gpt'
        >>> check_path("path", {"w": 1.0}, "the path of a folder", "fzero.save(path, values)")
        Traceback (most recent call last):
        TypeError: path is a dict: expected the path of a folder, as in fzero.save(path, values)
    """
    expected += f", as in {call}" if call else ""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str):
        is_short = value is None or isinstance(value, int | float | bytes)
        raise TypeError(
            f"{name}={value!r}: expected {expected}"
            if is_short
            else f"{name} is a {type(value).__name__}: expected {expected}"
        )
    if not text or "\0" in text:
        raise ValueError(f"{name}={text!r}: expected {expected}")
    return text


def check_remat(name: str, value: Any) -> None:
    """Check which results a block saves if it runs again in the backward pass.

    Args:
        name: the name of the argument.
        value: what the user gave for it: a bool, None, a name, or a function of an operation.

    Raises:
        ValueError: if the value is none of these.

    Example:
        >>> check_remat("remat", "matmul")
        Traceback (most recent call last):
        ValueError: remat='matmul': expected True, False, "matmuls", "host", or a function of an operation; did you ...
    """
    is_save = name == "save"  # of a block that runs again in any case
    is_usual = value is None or (isinstance(value, bool) and not is_save)
    if not (is_usual or callable(value) or value in ("matmuls", "host")):
        usual = "None" if is_save else "True, False"
        hint = did_you_mean(value, ("matmuls", "host"))
        raise ValueError(f'{name}={value!r}: expected {usual}, "matmuls", "host", or a function of an operation{hint}')


def did_you_mean(value: Any, choices: Iterable[Any], template: str = '"{}"', cutoff: float = 0.6) -> str:
    """Return "; did you mean X?" for an error, X being the choice that is nearest to a value; "" if none is near.

    Args:
        value: what the user gave.
        choices: what there is; those that are not strings are left out.
        template: how a choice is written in the error, with "{}" in its place.
        cutoff: how alike they are at least, from 0 to 1.

    Example:
        >>> did_you_mean("fxx", ["inductor", "fx"])
        '; did you mean "fx"?'
    """
    names = [choice for choice in choices if isinstance(choice, str)]
    lower = {name.lower(): name for name in reversed(names)}
    matches = difflib.get_close_matches(value.lower(), lower, 1, cutoff) if isinstance(value, str) else []
    return f"; did you mean {template.format(lower[matches[0]])}?" if matches else ""
