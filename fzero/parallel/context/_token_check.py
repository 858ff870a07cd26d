"""Check that a model of transformers combines tokens by attention alone: a forward pass on tensors without numbers.

Attention returns each token's own value there. The number of tokens is a prime that is no other size of the model, so
that an operation along a dimension of this size is one along tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fzero._notice import warn_once
from fzero._torch import TorchDispatchMode, user_line
from fzero.parallel.context._models import ContextAxis
from fzero.parallel.context._short_convolution import replace_convolutions

__all__ = ["check_tokens"]

_aten = torch.ops.aten
_PROBE = "fzero, one token"  # the name of the implementation of attention
_SAMPLES, _FIRST, _LAST = 2, 53, 1000


def check_tokens(model: torch.nn.Module, context: ContextAxis) -> ContextAxis:
    """Check that no operation of a model's forward pass reads several tokens, but for its attention.

    A model whose forward pass does not run on tensors without numbers is not checked, and a notice says so.

    Args:
        model: a copy of the model, which the check changes.
        context: the axis over which its sequences are split.

    Returns:
        `context`, and whether documents reach the model's attention.

    Raises:
        ValueError: if an operation reads several tokens. The message names it and its line.
    """
    from transformers import AttentionInterface

    tokens = _token_count(model)
    if tokens is None:
        return context
    have_documents: list[bool] = []
    AttentionInterface.register(_PROBE, partial(_own_value, have_documents))
    watch = _AlongTokens(tokens)
    state = {n: torch.empty_like(x, device="meta") for n, x in [*model.named_parameters(), *model.named_buffers()]}
    positions = torch.arange(tokens, device="meta").unsqueeze(0)
    inputs = {"input_ids": torch.zeros(_SAMPLES, tokens, dtype=torch.int64, device="meta"), "position_ids": positions}
    try:
        model.set_attn_implementation(_PROBE)  # type: ignore[operator]
        replace_convolutions(model, partial(_own_input, have_documents))
        with watch, torch.no_grad():
            torch.func.functional_call(model, state, (), {**inputs, "use_cache": False, "documents": None})
    except _SeveralTokensError as found:
        raise ValueError(
            f"{context.name}: {found}, which combines tokens without attention: the neighbours of a part's tokens are "
            "on other ranks"
        ) from None
    except Exception as error:  # such as an operation that reads numbers
        warn_once(
            f'fzero.nn.functional(context="{context.axis}"): {context.name} does not run on tensors without numbers '
            f"({type(error).__name__}), so its operations along tokens were not looked for: compare one step with the "
            "unsharded one"
        )
        return context
    return replace(context, takes_documents=all(have_documents))


class _SeveralTokensError(Exception):
    """An operation that reads several tokens."""


def _own_value(
    have_documents: list[bool],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the value of each token itself, `[b, t, h, e]`, in the place of attention."""
    have_documents.append("documents" in kwargs)
    y = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return y.transpose(1, 2).contiguous(), None


def _own_input(have_documents: list[bool], hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return each token itself, `[b, channels, t]`, in the place of a short convolution."""
    have_documents.append("documents" in kwargs)
    return hidden_states.clone()


def _token_count(model: torch.nn.Module) -> int | None:
    """Return a prime that is not a size of the model's tensors."""
    sizes = {n for x in [*model.parameters(), *model.buffers()] for n in x.shape}
    config: Any = model.config
    sizes |= {n for n in vars(config.get_text_config()).values() if isinstance(n, int)}
    longest = getattr(config.get_text_config(), "max_position_embeddings", _LAST) or _LAST
    primes = (n for n in range(_FIRST, min(_LAST, longest)) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return next((n for n in primes if n not in sizes and _SAMPLES * n not in sizes), None)


class _AlongTokens(TorchDispatchMode):
    """Raises at an operation that reads several tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read_dims = _READS.get(func.overloadpacket)
        x = args[0] if args else None
        if read_dims is not None and isinstance(x, torch.Tensor):
            bound = _bound_arguments(func, args, kwargs or {})
            if any(-x.ndim <= d < x.ndim and x.shape[d] == self.tokens for d in read_dims(bound, x, out)):
                name = str(func.overloadpacket).removeprefix("aten.")
                raise _SeveralTokensError(
                    f"{name} of a tensor {list(x.shape)} along its {self.tokens} tokens, at {user_line()}"
                )
        return out


def _bound_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operator by name, with defaults."""
    schema = func._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**defaults, **{a.name: x for a, x in zip(schema, args, strict=False)}, **kwargs}


_Reads = Callable[[dict[str, Any], torch.Tensor, Any], Iterable[int]]


def _named_dims(name: str = "dim") -> _Reads:
    """The dimensions that an argument names. None if it names none: a mean over all tokens is one number of a loss."""

    def read(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterable[int]:
        dims = args.get(name)
        if dims is None:
            return ()
        return (dims,) if isinstance(dims, int) else dims

    return read


def _shortened_dims(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterable[int]:
    """The dimension of a slice, if it leaves elements out."""
    return [args["dim"]] if out.shape != x.shape else []


def _padded_dims(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterable[int]:
    widths = args["pad"] if "pad" in args else args["padding"]  # those of the last dimension come first
    return [d for d in range(x.ndim) if any(widths[2 * (x.ndim - 1 - d) :][:2])]


def _kernel_dims(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterator[int]:
    """The dimensions along which a kernel has several elements."""
    weight = args["weight"]
    return (x.ndim - i for i in range(1, x.ndim - 1) if weight.shape[-i] > 1)


def _last_dim(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterable[int]:
    return [x.ndim - 1]


def _indexed_dims(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterable[int]:
    return [d for d, index in enumerate(args["indices"]) if index is not None]


def _beyond_channels(args: dict[str, Any], x: torch.Tensor, out: Any) -> Iterable[int]:
    return range(2, x.ndim)


_READS: dict[Any, _Reads] = {
    **dict.fromkeys((_aten.constant_pad_nd, _aten.reflection_pad1d, _aten.replication_pad1d), _padded_dims),
    _aten.slice: _shortened_dims,
    **dict.fromkeys((_aten.roll, _aten.flip), _named_dims("dims")),
    **dict.fromkeys((_aten.select, _aten.index_select, _aten.gather), _named_dims()),
    _aten.unfold: _named_dims("dimension"),
    **dict.fromkeys((_aten.cumsum, _aten.cumprod, _aten.logcumsumexp, _aten.cummax, _aten.cummin), _named_dims()),
    **dict.fromkeys(
        (_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.max, _aten.min, _aten.prod, _aten.var), _named_dims()
    ),
    **dict.fromkeys(
        (_aten.std, _aten.logsumexp, _aten.linalg_vector_norm, _aten._softmax, _aten.sort, _aten.topk), _named_dims()
    ),
    **dict.fromkeys((_aten._fft_r2c, _aten._fft_c2c), _named_dims()),
    _aten.convolution: _kernel_dims,
    **dict.fromkeys((_aten.mm, _aten.bmm), _last_dim),
    _aten.index: _indexed_dims,
    **dict.fromkeys((_aten.native_group_norm, _aten.native_batch_norm), _beyond_channels),
}
