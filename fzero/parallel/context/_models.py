"""Check and prepare a transformers model for split sequences."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from fzero._notice import warn_once
from fzero._torch.levels import may_differ
from fzero.axes import axis_if_bound, axis_size, bound_axis, tokens_axis
from fzero.collectives import all_gather_invariant
from fzero.parallel.context._attention import attention
from fzero.parallel.context._layout import positions
from fzero.parallel.context._short_convolution import replace_convolutions, short_convolutions, split_convolution
from fzero.random import next_key

__all__ = ["ContextAxis", "check_model", "install", "notice_split_tokens", "rope_types"]

# What combines tokens besides attention, by the types of modules and by words in the names of their classes.
_MIXERS = torch.nn.modules.conv._ConvNd, torch.nn.RNNBase
_MIXER_NAMES = ("mamba", "rwkv", "recurrent", "recurrence", "deltanet", "linearattention", "shortconv", "retention")
_LAYER_TYPES = {"full_attention", "sliding_attention", "conv"}
_ENDINGS = "Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification"
_UNSUPPORTED = ("position_bias", "head_mask", "indices", "block_mask")
_INSTALLED = "fzero, over "  # the names of the implementations of attention begin so
_MISSING: Any = object()
# Classes of attention that do not hand on a window, and whether the masks of their models have the configuration's.
_WINDOWS_OF_MASKS = {"PhimoeAttention": True, "MoshiAttention": False}
_NO_DOCUMENTS = "{} does not hand keyword arguments on to its attention, so documents do not reach it"


@dataclass(frozen=True)
class ContextAxis:
    """The axis over which the sequences of a checked model of transformers are split.

    Attributes:
        name: the name of the model's class.
        axis: the axis along which tokens are split.
        takes_documents: whether documents reach its attention; None if that is not known before a call.
    """

    name: str
    axis: str
    takes_documents: bool | None = None


def check_model(model: torch.nn.Module, axis: str = "cp") -> ContextAxis:
    """Check that sequences of a model of transformers can be split.

    Args:
        model: a model of transformers with the registry of attention (version 5 or newer).
        axis: the axis along which tokens are split. If no axis of this name is bound, a rank holds all tokens.

    Raises:
        TypeError: if it is not a model of transformers.
        ValueError: if it combines tokens otherwise than by attention and short convolutions, as state-space layers do,
            or has attention of its own, or a head that reads some tokens. The message names the module.
    """
    axis_if_bound(axis)
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise TypeError(
            f"model is a {name}: expected a model of transformers; in a model of your own call "
            "fzero.parallel.context.attention and positions"
        )
    split = {id(m) for _, convolution in short_convolutions(model) for m in convolution.modules()}
    for path, module in model.named_modules():
        if id(module) in split:
            continue
        if isinstance(module, _MIXERS) or any(word in type(module).__name__.lower() for word in _MIXER_NAMES):
            raise ValueError(f"{name}: {path!r} is a {type(module).__name__}, which combines tokens without attention")
        if any(attribute.startswith("create_position_ids") for attribute in dir(module)):
            raise ValueError(f"{name}: {path!r} numbers tokens by the padding before them, on any rank")
        if "dynamic" in rope_types(module):
            raise ValueError(f"{name}: {path!r} has rope_type='dynamic', which reads the longest sequence in Python")
    text = config.get_text_config()
    if other := sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES):
        raise ValueError(f"{name} has layers of type {other[0]!r}: expected layers of {sorted(_LAYER_TYPES)}")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} attends from a decoder to an encoder: only attention of one sequence can be split")
    if not name.endswith(_ENDINGS):
        raise ValueError(f"{name} reads the results of some tokens: expected a model that treats all tokens alike")
    signature = inspect.signature(model.forward)
    if "Pooling" in str(signature.return_annotation) and getattr(model, "pooler", _MISSING) is not None:
        raise ValueError(f"{name} pools some tokens: build it without, as add_pooling_layer=False does for many models")
    parameters = signature.parameters
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "position_ids" not in parameters or not has_kwargs or not model._can_set_attn_implementation():  # type: ignore[operator]
        raise ValueError(f"{name} has attention of its own, not the registry's: its sequences cannot be split")
    return ContextAxis(name, axis)


def rope_types(module: Any) -> set[Any]:
    """Return the types of a rotary embedding: one, or one for each type of layer; `{None}` for another module."""
    types = getattr(module, "rope_type", None)
    return set(types.values()) if isinstance(types, dict) else {types}


def install(model_copy: torch.nn.Module, context: ContextAxis) -> None:
    """Make a copy of a model attend across the ranks of an axis, and number its tokens."""
    from transformers import AttentionInterface

    name = f"{_INSTALLED}{context.axis}"
    AttentionInterface.register(name, partial(_attend, context))
    model_copy.set_attn_implementation(name)  # type: ignore[operator]
    replace_convolutions(model_copy, split_convolution(context.name, context.axis))
    for module in model_copy.modules():
        if "longrope" in rope_types(module):
            module.forward = _use_longest_position(module.forward, context.axis)
    model_copy.forward = _with_positions(model_copy.forward, context)


def _use_longest_position(run: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """Let a rotary embedding, which chooses its frequencies by the largest position, see that of all ranks."""

    @wraps(run)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if axis_if_bound(axis) is None:
            return run(x, position_ids, *args, **kwargs)
        largest = all_gather_invariant(position_ids.amax().reshape(1), axis).amax()
        all_positions = torch.cat([position_ids, largest.expand(*position_ids.shape[:-1], 1)], -1)
        angles = run(x, all_positions, *args, **kwargs)
        return tuple([part[..., :-1, :] for part in angles])

    return forward


def notice_split_tokens(model: torch.nn.Module) -> None:
    """Log a notice if a model of transformers runs where tokens are split, and does not attend across the ranks.

    It is not an error: the model may encode whole sequences beside the split ones.
    """
    axis, config = tokens_axis(), getattr(model, "config", None)
    if axis is None or not hasattr(model, "set_attn_implementation") or config is None:
        return
    if not str(config._attn_implementation).startswith(_INSTALLED):
        warn_once(
            f"fzero.nn.functional: {type(model).__name__} runs in a program whose tokens are split over {axis!r}, "
            f"and attends within each rank's tokens: pass context={axis!r}, unless it gets whole sequences"
        )


def _with_positions(run: Callable[..., Any], context: ContextAxis) -> Callable[..., Any]:
    """Fill in the positions of this rank's tokens, and refuse what belongs to whole sequences."""
    signature = inspect.signature(run)

    @wraps(run)
    def forward(*args: Any, documents: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run the model on a part of the tokens, with their positions in the full sequence."""
        arguments = signature.bind(*args, **kwargs).arguments
        extra_kwargs: dict[str, Any] = arguments.get("kwargs", {})
        tokens = _check_inputs(context, arguments, extra_kwargs)
        if (
            extra_kwargs.get("shift_labels") is not None
            and arguments.get("labels") is None
            and "labels" in signature.parameters
        ):
            kwargs["labels"] = extra_kwargs["shift_labels"]
        if arguments.get("position_ids") is None:
            kwargs["position_ids"] = positions(tokens.shape[1], context.axis, device=tokens.device).unsqueeze(0)
        if "use_cache" in signature.parameters:
            kwargs["use_cache"] = False
        if documents is not None and context.takes_documents is False:
            raise ValueError(_NO_DOCUMENTS.format(context.name))
        return run(*args, documents=documents, **kwargs)

    return forward


def _check_inputs(context: ContextAxis, arguments: Mapping[str, Any], extra_kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Check the arguments of a model's forward pass; return its tokens."""
    tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
    if tokens is None:
        raise ValueError(f"{context.name} needs input_ids or inputs_embeds")
    if arguments.get("attention_mask") is not None:
        raise ValueError(
            "attention_mask of whole sequences has no meaning on split ones: padding at the end of a causal "
            "model's sequences needs none, and else pass documents, in which padding has a number of its own"
        )
    is_split = axis_size(axis_if_bound(context.axis)) > 1
    if is_split and not may_differ(tokens, bound_axis(context.axis).token):
        raise ValueError(
            f"{context.name}: the ranks of {context.axis!r} got the same tokens {list(tokens.shape)}: split them by "
            f"fzero.parallel.context.split(mesh, batch, axis={context.axis!r}), which also takes batches of "
            "fzero.data.batches, or take this rank's, x[:, context.positions(t)]"
        )
    shifts = context.name.endswith(("ForCausalLM", "LMHeadModel"))
    if is_split and shifts and arguments.get("labels") is not None and extra_kwargs.get("shift_labels") is None:
        raise ValueError(
            f"labels: {context.name} shifts them, but the next token of a part is on another rank: shift them "
            "before they are split, batch['shift_labels'] = fzero.parallel.context.shift_labels(tokens), and pass "
            "shift_labels="
        )
    return tokens


def _attend(
    context: ContextAxis,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    documents: torch.Tensor | None = _MISSING,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = _MISSING,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' registry asks: from `[b, h, t, d]` to `[b, t, h, e]`."""
    name = f"{context.name}: {type(module).__name__}"
    if documents is _MISSING and context.takes_documents is None:
        raise ValueError(_NO_DOCUMENTS.format(name))
    _check_call(name, attention_mask, kwargs)
    random_key = _dropout_key(name, dropout)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    y = attention(
        query,
        key,
        value,
        causal=bool(causal),
        window=_layer_window(name, module, sliding_window, causal),
        documents=None if documents is _MISSING else documents,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
        key=random_key,
        axis=context.axis,
    )
    return y.transpose(1, 2).contiguous(), None


def _check_call(name: str, attention_mask: Any, kwargs: Mapping[str, Any]) -> None:
    """Check what a model hands on to its attention."""
    if other := [word for word in _UNSUPPORTED if kwargs.get(word) is not None]:
        raise ValueError(f"{name} attends with {other[0]}, which attention of split sequences does not have")
    if attention_mask is not None:
        raise ValueError(f"{name} makes an attention mask of its own, which has no meaning on split sequences")


def _dropout_key(name: str, dropout: float) -> torch.Tensor | None:
    """Return the key that decides which weights are dropped, None if none are."""
    random_key = next_key() if dropout else None
    if dropout and random_key is None:
        raise ValueError(
            f"{name} drops attention weights, p={dropout}: call apply within fzero.random.seeded, or set the "
            "configuration's dropout of attention to 0"
        )
    return random_key


def _layer_window(name: str, module: Any, sliding_window: Any, causal: Any) -> int | None:
    """Return the window of a layer's attention, None if it has none."""
    config: Any = getattr(module, "config", None)
    if sliding_window is _MISSING and _has_window(config):
        in_masks = _WINDOWS_OF_MASKS.get(type(module).__name__)
        if in_masks is None:
            raise ValueError(f"{name} does not hand its window on to its attention")
        sliding_window = config.sliding_window if in_masks else None
    window = None if sliding_window is _MISSING else sliding_window
    if window is not None and not causal and _has_window(config):
        return config.sliding_window + 1  # as in transformers' masks, which include this distance
    return window


def _has_window(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
