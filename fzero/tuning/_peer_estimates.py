"""Estimates of other tools, for comparison: formulas for model states that count no activations."""

from dataclasses import dataclass
from typing import Any

from fzero._arguments import check_int
from fzero._format import format_bytes
from fzero._tracebacks import api_boundary

__all__ = ["PeerEstimate", "deepspeed_zero2", "deepspeed_zero3", "peer_estimates"]


@dataclass(frozen=True)
class PeerEstimate:
    """The memory of a rank, by another estimator.

    Attributes:
        estimator: the name of the estimator.
        device_bytes: bytes on a device.
        host_bytes: bytes on a host, for all of its ranks; 0 if the estimator gives no number.
        counts: a remark on the parts that the number covers.
    """

    estimator: str
    device_bytes: float
    host_bytes: float
    counts: str

    def __str__(self) -> str:
        host = f", {format_bytes(self.host_bytes)} a host" if self.host_bytes else ""
        return f"{self.estimator}: {format_bytes(self.device_bytes)} a device{host} ({self.counts})"


@api_boundary
def deepspeed_zero2(num_params: int, *, devices_per_host: int, hosts: int = 1, offload: bool = False) -> PeerEstimate:
    """Return the result of DeepSpeed's `estimate_zero2_model_states_mem_needs`, with its buffer factor of 1.5.

    Args:
        num_params: the number of parameters of the model.
        devices_per_host: the number of devices of a host.
        hosts: the number of hosts.
        offload: whether the optimizer state lies on the host.

    Returns:
        A `PeerEstimate`. It counts full gradients, so it is the same for stage 1.

    Raises:
        ValueError: if a number is not an int, or is below 1.

    Example:
        >>> from fzero import tuning
        >>> estimate = tuning.deepspeed_zero2(2_851_000_000, devices_per_host=8)  # T5-3B, an example of DeepSpeed
        >>> round(estimate.host_bytes / 2**30, 2), round(estimate.device_bytes / 2**30, 2)
        (127.45, 15.93)
    """
    _check_counts(num_params=num_params, devices_per_host=devices_per_host, hosts=hosts)
    n = devices_per_host * hosts
    if offload:
        return PeerEstimate(
            "DeepSpeed, ZeRO-2, offload", 2 * num_params, int(num_params * max(4 * n, 16) * 1.5), _STATES
        )
    device = 4 * num_params + int(16 * num_params / n)
    return PeerEstimate("DeepSpeed, ZeRO-2", device, int(num_params * 4 * devices_per_host * 1.5), _STATES)


@api_boundary
def deepspeed_zero3(
    num_params: int,
    largest_layer_params: int,
    *,
    devices_per_host: int,
    hosts: int = 1,
    offload: bool = False,
    offload_params: bool = False,
) -> PeerEstimate:
    """Return the result of DeepSpeed's `estimate_zero3_model_states_mem_needs`, for a model made under `zero.Init`.

    Args:
        num_params: the number of parameters of the model.
        largest_layer_params: the number of parameters of the largest layer.
        devices_per_host: the number of devices of a host.
        hosts: the number of hosts.
        offload: whether the optimizer state lies on the host.
        offload_params: whether the parameters lie on the host, too.

    Returns:
        A `PeerEstimate`.

    Raises:
        ValueError: if `offload_params` is set without `offload`, or a number is not an int, or is below 1.

    Example:
        >>> from fzero import tuning
        >>> estimate = tuning.deepspeed_zero3(2_851_000_000, 32_000_000, devices_per_host=8)  # T5-3B
        >>> round(estimate.device_bytes / 2**30, 2)
        6.09
    """
    if offload_params and not offload:
        raise ValueError(
            "offload_params=True: DeepSpeed offloads parameters with the optimizer's state only: set offload=True"
        )
    _check_counts(
        num_params=num_params, largest_layer_params=largest_layer_params, devices_per_host=devices_per_host, hosts=hosts
    )
    n, largest_layer_bytes = devices_per_host * hosts, 4 * largest_layer_params
    if offload:
        host = int(num_params * (18 if offload_params else 16) / hosts * 1.5)
        device = largest_layer_bytes + (0 if offload_params else int(2 * num_params / n))
        name = "DeepSpeed, ZeRO-3, offload" + (" of parameters too" if offload_params else "")
        return PeerEstimate(name, device, host, _STATES)
    return PeerEstimate(
        "DeepSpeed, ZeRO-3",
        largest_layer_bytes + int(18 * num_params / n),
        int(largest_layer_params * 4 * devices_per_host * 1.5),
        _STATES,
    )


_STATES = "no activations, no buffers"


def _check_counts(**counts: Any) -> None:
    """Check numbers of parameters, of devices and of hosts.

    Raises:
        TypeError: if a tree or a module stands in place of a number of parameters.
        ValueError: if a number is not an int, or is below 1.
    """
    for name, n in counts.items():
        if not isinstance(n, int | float | str | None):
            is_params = name.endswith("params")
            expected = "a number of parameters, fzero.tree.numel(params)" if is_params else "a number"
            raise TypeError(f"{name} is a {type(n).__name__}: expected {expected}")
        check_int(name, n)


@api_boundary
def peer_estimates(
    num_params: int, largest_layer_params: int, *, devices_per_host: int, hosts: int = 1
) -> list[PeerEstimate]:
    """List estimates from the number of parameters alone: by DeepSpeed, by accelerate, and by a rule of thumb.

    Args:
        num_params: the number of parameters of the model.
        largest_layer_params: the number of parameters of the largest layer.
        devices_per_host: the number of devices of a host.
        hosts: the number of hosts.

    Returns:
        A list of `PeerEstimate`.

    Raises:
        ValueError: if a number is not an int, or is below 1.

    Example:
        >>> from fzero import tuning
        >>> for estimate in tuning.peer_estimates(8_030_261_248, 525_336_576, devices_per_host=8, hosts=8):
        ...     print(estimate)
        16 bytes a parameter: 128.5 GB a device (no activations, no sharding)
        accelerate estimate-memory, float32: 128.5 GB a device (4 times the parameters; no activations, no sharding)
        DeepSpeed, ZeRO-2: 34.1 GB a device, 385.5 GB a host (no activations, no buffers)
        DeepSpeed, ZeRO-3: 4.4 GB a device, 25.2 GB a host (no activations, no buffers)
    """
    _check_counts(
        num_params=num_params, largest_layer_params=largest_layer_params, devices_per_host=devices_per_host, hosts=hosts
    )
    return [
        PeerEstimate("16 bytes a parameter", 16 * num_params, 0, "no activations, no sharding"),
        PeerEstimate(
            "accelerate estimate-memory, float32",
            4 * 4 * num_params,
            0,
            "4 times the parameters; no activations, no sharding",
        ),
        deepspeed_zero2(num_params, devices_per_host=devices_per_host, hosts=hosts),
        deepspeed_zero3(num_params, largest_layer_params, devices_per_host=devices_per_host, hosts=hosts),
    ]
