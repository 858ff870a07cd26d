"""When local SGD pays: the step of one replica, and its share of an average over the replicas."""

from dataclasses import dataclass

from fzero._format import format_bytes, format_seconds
from fzero.graph import transfer_seconds
from fzero.tuning._row import TableRow
from fzero.tuning.machines import Machine

__all__ = ["LocalSgdEstimate"]

_FLOAT32_BYTES = 4
_STATES = 2  # the anchor and the outer momentum


@dataclass(frozen=True)
class LocalSgdEstimate:
    """The time and the memory of `fzero.local_sgd.local_steps` with an outer momentum.

    Attributes:
        row: the plan of a replica's step.
        elements: the parameters of the model.
        replicas: the number of replicas.
        every: the steps between two averages.
        machine: the machine. Its bandwidth along the axis "replica" is that between replicas, if it has one.
    """

    row: TableRow
    elements: int
    replicas: int
    every: int
    machine: Machine

    @property
    def shard_bytes(self) -> float:
        """The bytes of a rank's shard of the parameters in float32: what it sends to the other replicas."""
        config = self.row.config
        return _FLOAT32_BYTES * self.elements / (config.world if config.stage else config.tp * config.pp)

    @property
    def peak_bytes(self) -> float:
        """The bytes of a device, with the anchor and the outer momentum."""
        return self.row.peak_bytes + _STATES * self.shard_bytes

    @property
    def average_seconds(self) -> float:
        """The seconds of an average, an all_reduce of the shards that nothing hides."""
        axes = (("replica", self.replicas), *self.row.config.axes.items())
        hardware = self.machine.as_hardware()._replace(axes=axes)
        return transfer_seconds("all_reduce", self.shard_bytes, ("replica",), hardware)

    @property
    def seconds(self) -> float:
        """The seconds of a step, with its share of an average."""
        return self.row.seconds + self.average_seconds / self.every

    def __str__(self) -> str:
        return (
            f"local SGD, {self.replicas} replicas that average every {self.every} steps: "
            f"{format_seconds(self.seconds)} a step, {format_seconds(self.average_seconds / self.every)} of it for the "
            f"average, and {format_bytes(self.peak_bytes)} a device: {self.row.config}"
        )
