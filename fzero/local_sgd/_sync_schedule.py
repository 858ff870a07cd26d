"""When the parts of a model are averaged: each part once in every H steps, one part after the other."""

from dataclasses import dataclass

from fzero._arguments import check_int, is_int
from fzero._tracebacks import api_boundary_of_class

__all__ = ["SyncSchedule"]


@api_boundary_of_class
@dataclass(frozen=True)
class SyncSchedule:
    """When each part of the parameters is sent, and when its mean is used.

    Attributes:
        every: H, the number of steps between two sends of one part.
        parts: the number of parts. They are sent at equal distances within the H steps, the last one at their end.
        delay: the number of steps between the send of a part and the use of its mean.

    Example:
        >>> schedule = SyncSchedule(every=10, parts=2, delay=1)
        >>> [(step, schedule.parts_to_send(step), schedule.parts_to_apply(step)) for step in (4, 5, 6, 10, 11)]
        [(4, (), ()), (5, (0,), ()), (6, (), (0,)), (10, (1,), ()), (11, (), (1,))]
    """

    every: int
    parts: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_int("every", self.every)
        check_int("parts", self.parts)
        if self.parts > self.every:
            raise ValueError(f"parts={self.parts}: expected at most every={self.every}, one part for each step")
        if not is_int(self.delay) or not 0 <= self.delay < self.every:
            raise ValueError(
                f"delay={self.delay!r}: expected a number of steps from 0 to every - 1 = {self.every - 1}, so that a "
                "part's mean is used before the part is sent again"
            )

    def to_list(self) -> list[int]:
        """Return the numbers, as a checkpoint holds them."""
        return [self.every, self.parts, self.delay]

    @classmethod
    def from_list(cls, numbers: list[int]) -> "SyncSchedule":
        """Return the schedule of which a checkpoint holds the numbers."""
        return cls(*numbers)

    def parts_to_send(self, step_number: int) -> tuple[int, ...]:
        """List the parts that are sent after step number `step_number`; the first step has number 1."""
        return tuple(
            [
                part
                for part in range(self.parts)
                if step_number > 0 and (step_number - self._part_offset(part)) % self.every == 0
            ]
        )

    def parts_to_apply(self, step_number: int) -> tuple[int, ...]:
        """List the parts whose mean is used after step number `step_number`."""
        return self.parts_to_send(step_number - self.delay) if step_number > self.delay else ()

    def parts_in_flight(self, step_number: int) -> tuple[int, ...]:
        """List the parts that were sent by step number `step_number`, and whose mean is used after it.

        Example:
            >>> SyncSchedule(every=10, parts=2, delay=3).parts_in_flight(12)
            (1,)
        """
        return tuple(
            sorted(
                {
                    part
                    for step in range(step_number - self.delay + 1, step_number + 1)
                    for part in self.parts_to_send(step)
                }
            )
        )

    def is_boundary(self, step_number: int) -> bool:
        """Return whether all replicas hold the same parameters after step number `step_number`."""
        return step_number == 0 or (self.parts == 1 and self.delay == 0 and step_number % self.every == 0)

    def _part_offset(self, part: int) -> int:
        return (part + 1) * self.every // self.parts
