"""Checks of a user's arguments. Each error names the argument, the value given and the value expected."""

from collections.abc import Sequence
from typing import Any, TypeGuard

__all__ = ["check_choice", "check_int", "is_int", "name_of"]


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int. A bool is none: `micro_batches=True` is a mistake, not 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def name_of(f: Any) -> str:
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
        ValueError: if the value is no int, or is out of range.

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


def check_choice(name: str, value: Any, choices: Sequence[str | bool | None]) -> None:
    """Check that the user chose one of several values.

    Raises:
        ValueError: if the value is none of the choices. The int 1 is not the choice True.

    Example:
        >>> check_choice("reduce", "max", ("mean", "weighted", "sum"))
        Traceback (most recent call last):
        ValueError: reduce='max': expected "mean", "weighted" or "sum"
        >>> check_choice("moments", "fp8", ("int8",))
        Traceback (most recent call last):
        ValueError: moments='fp8': expected "int8"
    """
    if any(isinstance(value, type(choice)) and value == choice for choice in choices):
        return
    *rest, last = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
    expected = f"{', '.join(rest)} or {last}" if rest else last
    raise ValueError(f"{name}={value!r}: expected {expected}")
