"""The random functions of torch that draw by key in a seeded function."""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init

from fzero.random import _draws, _torch_draws

__all__ = ["BODIES", "DRAWS"]


DRAWS: dict[Any, Callable[..., Any]] = {
    torch.dropout: _torch_draws.dropout,
    torch.feature_dropout: _torch_draws.feature_dropout,
    torch.alpha_dropout: _torch_draws.alpha_dropout,
    torch.feature_alpha_dropout: _torch_draws.feature_alpha_dropout,
    torch.dropout_: _torch_draws.in_place(_torch_draws.dropout),
    torch.feature_dropout_: _torch_draws.in_place(_torch_draws.feature_dropout),
    torch.alpha_dropout_: _torch_draws.in_place(_torch_draws.alpha_dropout),
    torch.feature_alpha_dropout_: _torch_draws.in_place(_torch_draws.feature_alpha_dropout),
    torch.native_dropout: _torch_draws.native_dropout,
    torch.rrelu: _torch_draws.rrelu,
    torch.rrelu_: _torch_draws.in_place(_torch_draws.rrelu),
    F.scaled_dot_product_attention: _torch_draws.attention,
    torch.rand: _torch_draws.sized_factory(_draws.uniform),
    torch.randn: _torch_draws.sized_factory(_draws.normal),
    torch.rand_like: _torch_draws.like_factory(_draws.uniform),
    torch.randn_like: _torch_draws.like_factory(_draws.normal),
    torch.randint: _torch_draws.randint,
    torch.randint_like: _torch_draws.randint_like,
    torch.randperm: _torch_draws.randperm,
    torch.bernoulli: _torch_draws.bernoulli,
    torch.Tensor.bernoulli: _torch_draws.bernoulli,
    torch.normal: _torch_draws.normal,
    torch.Tensor.uniform_: _torch_draws.uniform_,
    torch.Tensor.normal_: _torch_draws.normal_,
    torch.Tensor.exponential_: _torch_draws.exponential_,
    torch.Tensor.bernoulli_: _torch_draws.bernoulli_,
    init.uniform_: _torch_draws.init_uniform,
    init.normal_: _torch_draws.init_normal,
    init.kaiming_uniform_: _torch_draws.init_kaiming_uniform,
}
"""torch's function -> the function that replaces it."""


def _copy_body(f: Any) -> Any:
    """Copy a function of torch.nn.functional without its check whether a mode overrides the call.

    A mode that overrides a call is switched off inside it, and so would not see the draws of the body.
    """
    no = {name: lambda *_: False for name in f.__globals__ if name.startswith("has_torch_function")}
    body = types.FunctionType(f.__code__, {**f.__globals__, **no}, f.__name__, f.__defaults__, f.__closure__)
    body.__kwdefaults__ = f.__kwdefaults__
    return body


BODIES: dict[Any, Any] = {
    f: _copy_body(f)
    for f in (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.multi_head_attention_forward,
    )
}
"""torch's Python functions that make draws -> their bodies."""
