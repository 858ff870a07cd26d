"""Interned values: equal values have one number, which traced code and graphs hold in place of the value.

Dynamo cannot trace an ordinary object, and a graph's node takes no object as an argument. Both take an int.
"""

from typing import Generic, TypeVar

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """The numbers of immutable values of one kind, such as specs. The values live as long as the process.

    Example:
        >>> registry = Registry[str]()
        >>> registry.number("a"), registry.number("b"), registry.number("a")
        (0, 1, 0)
        >>> registry.value(1)
        'b'
    """

    def __init__(self) -> None:
        self._values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """Return the number of a value; equal values have the same number."""
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(value)
        return self._numbers[value]

    def value(self, number: int) -> T:
        """Return the value with this number."""
        return self._values[number]
