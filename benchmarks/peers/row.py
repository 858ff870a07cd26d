"""What is measured of one system on one model; apart from what measures it, which replaces the process's allocator."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Row", "quartiles"]


@dataclass
class Row:
    """One system on one model: bytes of a rank, seconds."""

    system: str
    stage: int
    variant: str
    model: str
    micro_batches: int
    ranks: int
    state: int  # parameters and moments, by ZeRO's formula
    peak: int = 0  # of a steady step
    life: int = 0  # the most until the third step ended, making the model and compiling among it; 0 if not measured
    build: float = 0.0  # seconds to make the step and run it once, compilation with it
    sent: int = 0
    collectives: int = 0
    seconds: list[float] = field(default_factory=list)  # a step's, one a round
    processor: list[float] = field(default_factory=list)  # of all ranks together, one a round
    losses: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of a step, the median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Seconds of a step, below which a quarter and three quarters of the rounds lie."""
        return quartiles(self.seconds)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile of some values."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
