"""Interned values: equal values have one id, which traced code and graphs hold in place of the value.

Dynamo cannot trace an ordinary object, and a graph's node takes no object as an argument. Both take an int.
"""

from typing import Generic, TypeVar

__all__ = ["Registry"]

_T = TypeVar("_T")


class Registry(Generic[_T]):
    """The ids of immutable values of one kind, such as specs. The values live as long as the process.

    Example:
        >>> registry = Registry[str]()
        >>> registry.id_of("a"), registry.id_of("b"), registry.id_of("a")
        (0, 1, 0)
        >>> registry.value(1)
        'b'
    """

    def __init__(self) -> None:
        self._values: list[_T] = []
        self._numbers: dict[_T, int] = {}

    def id_of(self, value: _T) -> int:
        """Return the id of a value; equal values have the same id."""
        if value not in self._numbers:
            self._numbers[value] = len(self._values)
            self._values.append(value)
        return self._numbers[value]

    def value(self, value_id: int) -> _T:
        """Return the value with this id."""
        return self._values[value_id]
