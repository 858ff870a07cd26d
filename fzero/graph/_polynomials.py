"""The integers of a graph as polynomials of the length of a batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

__all__ = ["Polynomial", "Sample", "Shapes", "argument_shapes", "fit_all", "integers_in", "map_integers"]

Shapes = tuple[tuple[int, ...], ...]


def argument_shapes(tensors: Sequence[torch.Tensor]) -> Shapes:
    """Return the shapes of a call's arguments."""
    return tuple([tuple(x.shape) for x in tensors])


class Polynomial(NamedTuple):
    """An integer that depends on a length: `constant + linear * length + square * length**2`."""

    constant: int
    linear: int = 0
    square: int = 0

    def at(self, length: Any) -> Any:
        """Return the integer at a length, which may be symbolic."""
        if not self.linear and not self.square:
            return self.constant
        value = self.linear * length if self.linear else 0
        value = value + self.square * length * length if self.square else value
        return value + self.constant if self.constant else value


class Sample(NamedTuple):
    """The integers of a graph at a length."""

    length: int
    numbers: tuple[int, ...]


def map_integers(x: Any, f: Callable[[int], Any], g: Callable[[Node], Any] = lambda node: node) -> Any:
    """Apply `f` to the integers in the arguments of a node, and `g` to the nodes."""
    if isinstance(x, Node):
        return g(x)
    if isinstance(x, list | tuple):
        return tuple([map_integers(y, f, g) for y in x]) if isinstance(x, tuple) else [map_integers(y, f, g) for y in x]
    if isinstance(x, dict):
        return {name: map_integers(y, f, g) for name, y in x.items()}
    if isinstance(x, slice):
        return slice(*[map_integers(y, f, g) for y in (x.start, x.stop, x.step)])
    return f(x) if isinstance(x, int) and not isinstance(x, bool) else x


def integers_in(x: Any) -> list[int]:
    """List the integers in the arguments of a node."""
    numbers: list[int] = []
    map_integers(x, numbers.append)
    return numbers


def fit_all(samples: Sequence[Sample]) -> tuple[Polynomial, ...] | None:
    """Fit a polynomial of the length to each integer of the samples; None if an integer has none."""
    lengths = [s.length for s in samples]
    polynomials = [_fit_polynomial(lengths, values) for values in zip(*[s.numbers for s in samples], strict=True)]
    return None if any(p is None for p in polynomials) else tuple([p for p in polynomials if p is not None])


def _fit_polynomial(lengths: Sequence[int], values: Sequence[int]) -> Polynomial | None:
    """Return the simplest polynomial through some points: a constant, a multiple of the length or its square, a line.

    Through three points or more it may be a parabola: then only one polynomial of degree at most 2 fits.
    """
    (x, y, *_), (a, b, *_) = lengths, values
    if a == b == values[-1] and len({*values}) == 1:
        return Polynomial(a)
    tries = [Polynomial(0, a // x)] if a % x == 0 else []
    if a % x**2 == 0:
        tries.append(Polynomial(0, 0, a // x**2))
    slope, remainder = divmod(b - a, y - x)
    if not remainder:
        tries.append(Polynomial(a - slope * x, slope))
    if len(lengths) > 2 and not remainder:
        z, c = lengths[2], values[2]
        curve, remainder = divmod((c - a) * (y - x) - (b - a) * (z - x), (z - x) * (z - y) * (y - x))
        linear = slope - curve * (x + y)
        if not remainder:
            tries.append(Polynomial(a - linear * x - curve * x * x, linear, curve))
    return next((p for p in tries if all(p.at(n) == v for n, v in zip(lengths, values, strict=True))), None)
