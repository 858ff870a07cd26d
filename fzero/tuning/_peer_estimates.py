"""What other estimators say, for comparison: formulas of model states that count no activations."""

from dataclasses import dataclass

from fzero._tracebacks import api_boundary
from fzero.graph import size

__all__ = ["PeerEstimate", "deepspeed_zero2", "deepspeed_zero3", "peer_estimates"]


@dataclass(frozen=True)
class PeerEstimate:
    """What an estimator says that a rank holds.

    Attributes:
        by: the estimator.
        device_bytes: of a rank.
        host_bytes: of a whole machine; 0 where it says nothing.
        counts: what it counts.
    """

    by: str
    device_bytes: float
    host_bytes: float
    counts: str

    def __str__(self) -> str:
        host = f", {size(self.host_bytes)} of a host" if self.host_bytes else ""
        return f"{self.by}: {size(self.device_bytes)} of a device{host} ({self.counts})"


@api_boundary
def deepspeed_zero2(parameters: int, *, near: int, hosts: int = 1, offload: bool = False) -> PeerEstimate:
    """Say what DeepSpeed's `estimate_zero2_model_states_mem_needs` says, with its buffer factor of 1.5.

    Args:
        parameters: of the model.
        near: devices of a host.
        hosts: with so many devices each.
        offload: whether the optimizer's state lies on the host.

    Returns:
        A `PeerEstimate`. It counts whole gradients, so it is the same for stage 1.

    Example:
        >>> from fzero import tuning
        >>> said = tuning.deepspeed_zero2(2_851_000_000, near=8)  # T5-3B, as in DeepSpeed's documentation
        >>> round(said.host_bytes / 2**30, 2), round(said.device_bytes / 2**30, 2)
        (127.45, 15.93)
    """
    n = near * hosts
    if offload:
        return PeerEstimate(
            "DeepSpeed, ZeRO-2, offload", 2 * parameters, int(parameters * max(4 * n, 16) * 1.5), STATES
        )
    device = 4 * parameters + int(16 * parameters / n)
    return PeerEstimate("DeepSpeed, ZeRO-2", device, int(parameters * 4 * near * 1.5), STATES)


@api_boundary
def deepspeed_zero3(
    parameters: int, largest: int, *, near: int, hosts: int = 1, offload: bool = False, offload_params: bool = False
) -> PeerEstimate:
    """Say what DeepSpeed's `estimate_zero3_model_states_mem_needs` says, of a model made under `zero.Init`.

    Args:
        parameters: of the model.
        largest: parameters of the largest layer.
        near: devices of a host.
        hosts: with so many devices each.
        offload: whether the optimizer's state lies on the host.
        offload_params: whether the parameters do, too.

    Returns:
        A `PeerEstimate`.

    Raises:
        ValueError: if the parameters alone are to lie on the host.

    Example:
        >>> from fzero import tuning
        >>> said = tuning.deepspeed_zero3(2_851_000_000, 32_000_000, near=8)  # T5-3B
        >>> round(said.device_bytes / 2**30, 2)
        6.09
    """
    if offload_params and not offload:
        raise ValueError("offload_params=True: DeepSpeed offloads parameters with the optimizer's state; offload=True")
    n, big = near * hosts, 4 * largest
    if offload:
        host = int(parameters * (18 if offload_params else 16) / hosts * 1.5)
        device = big + (0 if offload_params else int(2 * parameters / n))
        name = "DeepSpeed, ZeRO-3, offload" + (" of parameters too" if offload_params else "")
        return PeerEstimate(name, device, host, STATES)
    return PeerEstimate("DeepSpeed, ZeRO-3", big + int(18 * parameters / n), int(largest * 4 * near * 1.5), STATES)


STATES = "no activations, no buffers"


@api_boundary
def peer_estimates(parameters: int, largest: int, *, near: int, hosts: int = 1) -> list[PeerEstimate]:
    """List what is said of a model by formulas of its parameters alone: of DeepSpeed, accelerate, and by rule of thumb.

    Args:
        parameters: of the model.
        largest: parameters of the largest layer.
        near: devices of a host.
        hosts: with so many devices each.

    Returns:
        A list of `PeerEstimate`.

    Example:
        >>> from fzero import tuning
        >>> for said in tuning.peer_estimates(8_030_261_248, 525_336_576, near=8, hosts=8):
        ...     print(said)
        16 bytes a parameter: 128.5 GB of a device (no activations, no sharding)
        accelerate estimate-memory, float32: 128.5 GB of a device (4 times the parameters; no activations, no sharding)
        DeepSpeed, ZeRO-2: 34.1 GB of a device, 385.5 GB of a host (no activations, no buffers)
        DeepSpeed, ZeRO-3: 4.4 GB of a device, 25.2 GB of a host (no activations, no buffers)
    """
    return [
        PeerEstimate("16 bytes a parameter", 16 * parameters, 0, "no activations, no sharding"),
        PeerEstimate(
            "accelerate estimate-memory, float32",
            4 * 4 * parameters,
            0,
            "4 times the parameters; no activations, no sharding",
        ),
        deepspeed_zero2(parameters, near=near, hosts=hosts),
        deepspeed_zero3(parameters, largest, near=near, hosts=hosts),
    ]
