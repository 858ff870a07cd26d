"""The random functions of torch that draw by key in a seeded function."""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init

from fzero.random import _draws, _dropouts, _tensors

__all__ = ["BODIES", "DRAWS"]

DRAWS: dict[Any, Callable[..., Any]] = {
    torch.dropout: _dropouts.dropout,
    torch.feature_dropout: _dropouts.feature_dropout,
    torch.alpha_dropout: _dropouts.alpha_dropout,
    torch.feature_alpha_dropout: _dropouts.feature_alpha_dropout,
    torch.dropout_: _dropouts.in_place(_dropouts.dropout),
    torch.feature_dropout_: _dropouts.in_place(_dropouts.feature_dropout),
    torch.alpha_dropout_: _dropouts.in_place(_dropouts.alpha_dropout),
    torch.feature_alpha_dropout_: _dropouts.in_place(_dropouts.feature_alpha_dropout),
    torch.native_dropout: _dropouts.native_dropout,
    torch.rrelu: _dropouts.rrelu,
    torch.rrelu_: _dropouts.in_place(_dropouts.rrelu),
    F.scaled_dot_product_attention: _dropouts.attention,
    torch.rand: _tensors.new(_draws.uniform),
    torch.randn: _tensors.new(_draws.normal),
    torch.rand_like: _tensors.new_like(_draws.uniform),
    torch.randn_like: _tensors.new_like(_draws.normal),
    torch.randint: _tensors.randint,
    torch.randint_like: _tensors.randint_like,
    torch.randperm: _tensors.randperm,
    torch.bernoulli: _tensors.bernoulli,
    torch.Tensor.bernoulli: _tensors.bernoulli,
    torch.normal: _tensors.normal,
    torch.Tensor.uniform_: _tensors.uniform_,
    torch.Tensor.normal_: _tensors.normal_,
    torch.Tensor.exponential_: _tensors.exponential_,
    torch.Tensor.bernoulli_: _tensors.bernoulli_,
    init.uniform_: _tensors.init_uniform,
    init.normal_: _tensors.init_normal,
    init.kaiming_uniform_: _tensors.init_kaiming_uniform,
}
"""torch's function -> the function that answers its calls."""


def _body(f: Any) -> Any:
    """Copy a function of torch.nn.functional without its first question, whether a mode wants the whole call.

    A mode that says yes is switched off in the call, and would not be asked about the draws that the body makes.
    """
    no = {name: lambda *_: False for name in f.__globals__ if name.startswith("has_torch_function")}
    body = types.FunctionType(f.__code__, {**f.__globals__, **no}, f.__name__, f.__defaults__, f.__closure__)
    body.__kwdefaults__ = f.__kwdefaults__
    return body


BODIES: dict[Any, Any] = {
    f: _body(f)
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
