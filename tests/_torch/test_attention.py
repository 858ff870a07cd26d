"""torch's kernels of attention and the definition agree, on parts of the keys, and on their gradients."""

from typing import Any

import pytest
import torch

from fzero._torch import attention, partial_attention, partial_attention_grad


def values_of(t: int, s: int, groups: int = 1, width: int = 8) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(t + s)
    shapes = (2, 4, t, 8), (2, 4 // groups, s, 8), (2, 4 // groups, s, width)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_the_attention_kernel_has_the_numbers_of_its_definition(groups, kind, monkeypatch):
    """One query attends to nothing. If this fails, torch's kernel for CPUs has another meaning."""
    values = values_of(6, 6 if kind == "causal" else 9, groups)
    keep = torch.rand(2, 1, 6, 9, generator=torch.Generator().manual_seed(0)) < 0.5 if kind == "mask" else None
    if keep is not None:
        keep[:, :, 2] = False
        keep[:, :, 3] = True
    options = (keep, kind == "causal", 0.3)
    out, log_sum = partial_attention(*values, *options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    finite = torch.where(log_sum == -torch.inf, 0.0, log_sum)
    grads = partial_attention_grad(grad, *values, keep, out, finite, *options[1:])
    assert keep is None or (bool((log_sum[:, :, 2] == -torch.inf).all()) and not out[:, :, 2].any())

    monkeypatch.setattr(attention, "_has_cpu_kernel", lambda q, v: False)
    result = partial_attention(*values, *options)
    for x, y in zip((out, log_sum), result, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for x, y in zip(grads, partial_attention_grad(grad, *values, keep, out, finite, *options[1:]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_attention_with_wider_values_has_torchs_numbers():
    """There is no kernel: the gradients are those of autograd."""
    values = [x.requires_grad_() for x in values_of(5, 5, groups=2, width=6)]
    options: Any = (None, True, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(*values, is_causal=True, scale=0.3, enable_gqa=True)
    grad = torch.randn_like(expected)
    inner = [x.detach() for x in values]
    out, log_sum = partial_attention(*inner, *options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grads = partial_attention_grad(grad, *inner, None, out, log_sum, True, 0.3)
    for x, y in zip(grads, torch.autograd.grad(expected, values, grad), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_the_attention_kernel_runs_on_fake_tensors():
    """Plans on the device "meta" need it."""
    values = [x.to("meta") for x in values_of(6, 9)]
    out, log_sum = partial_attention(*values, None, False, 1.0)
    assert out.shape == (2, 4, 6, 8) and log_sum.shape == (2, 4, 6) and out.is_meta
