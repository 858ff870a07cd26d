"""What torch's context_parallel lacks on CPUs: its own ring, given to the kernel that a CPU has.

torch 2.13 replaces `scaled_dot_product_attention` by one of DTensors, and its dispatcher runs a ring for the kernels of
GPUs. A CPU's kernel is another operation, of which the dispatcher says "does not have a sharding strategy registered".
Here that operation runs the same ring, torch's code, on the CPU's kernel; all else of context_parallel is as it is.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as cp

__all__ = ["serve_cpu"]

aten: Any = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TOKENS = 2


def _local(xs: Any) -> list[Any]:
    return [x.to_local() if isinstance(x, DTensor) else x for x in xs]


def _wrapped(xs: Any, like: DTensor) -> tuple[Any, ...]:
    mesh, placements = like.device_mesh, like.placements
    return tuple([DTensor.from_local(x, mesh, placements, run_check=False) for x in xs])


def _forward(_: Any, args: Any, kwargs: Any) -> Any:
    like = args[0]
    q, k, v, dropout, causal, *_ = (*_local(args), *(0.0, False)[len(args) - 3 :])
    group = like.device_mesh.get_group()
    options = {"dropout_p": dropout, "scale": kwargs.get("scale")}
    out, log_sum = cp._templated_ring_attention(group, TOKENS, FORWARD, q, k, v, is_causal=causal, **options)
    return _wrapped((out, log_sum), like)


def _backward(_: Any, args: Any, kwargs: Any) -> Any:
    like = args[1]
    grad, q, k, v, out, log_sum, dropout, causal, *_ = _local(args)
    group, scale = like.device_mesh.get_group(), kwargs.get("scale")
    values: Any = {"query": q, "key": k, "value": v, "out": out, "logsumexp": log_sum}
    grads = cp._templated_ring_attention_backward(
        *(group, TOKENS, BACKWARD, grad, "grad_out"), **values, is_causal=causal, dropout_p=dropout, scale=scale
    )
    return _wrapped(grads[:3], like)


def serve_cpu() -> None:
    """Let context_parallel serve the kernel of CPUs, from its next use on."""
    cp.custom_ops.update({FORWARD: _forward, BACKWARD: _backward})
