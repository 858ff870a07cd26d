"""LazyLogits: logits of a head that are not computed, in place of a model's, until its own code asks for their loss.

The model's code between the head and `F.cross_entropy` runs as it is: it scales or caps logits, drops the last token,
flattens. `_LazyLogits` keeps the input of the head, and does the same to it. So the shift of labels, ignored labels
and the count of the mean are the model's own, and the loss is taken in chunks of classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F

from fzero._arguments import is_int
from fzero.nn._linear_cross_entropy import LogitMap, LossOptions, head_cross_entropy
from fzero.parallel.tensor import Layers

__all__ = ["check_head", "install_lazy_logits"]

_BY_HAND = (
    "leave chunked_loss out, call the model without its head for its hidden states, and pass these and the head's "
    "weight to fzero.nn.linear_cross_entropy"
)


@dataclass(frozen=True, eq=False)
class _LazyLogits:
    """Logits `[.., v]` that are not computed: the input of their head, its weight, and later changes.

    `torch.nn.functional.cross_entropy` computes their loss in chunks. Shapes, scales, `tanh` and slices of tokens are
    as of a tensor. Anything else needs whole logits, and is an error.

    Attributes:
        model: the name of the model's class, for messages.
        hidden: `[.., d]`, the input of the head.
        weight: `[v, d]`, or this rank's classes along `axis`.
        bias: `[v]`; None for none.
        axis: the axis along which classes are split; None for none.
        classes: v, the number of all classes.
        dtype: the dtype that the model gave to its logits. Their loss is computed in float32 at least.
        maps: the functions that changed the logits one by one, in this order.
    """

    model: str
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    axis: str | None
    classes: int
    dtype: torch.dtype
    maps: tuple[LogitMap, ...] = ()

    # Attributes of a tensor.

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.classes])

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def is_floating_point(self) -> bool:
        return True

    # Operations that change no number.

    def contiguous(self) -> "_LazyLogits":
        return self

    def float(self) -> "_LazyLogits":
        return replace(self, dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> "_LazyLogits":
        """Take another dtype, or that of a tensor; the device stays."""
        values = [*args, *kwargs.values()]
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        dtypes = [x for x in values if isinstance(x, torch.dtype)] + [x.dtype for x in tensors]
        devices = [torch.device(x) for x in values if isinstance(x, str | torch.device)] + [x.device for x in tensors]
        if not (dtypes or devices) or any(x != self.device for x in devices):
            raise self._unsupported_error(f"to({', '.join(map(str, values))})")
        return replace(self, dtype=dtypes[0]) if dtypes else self

    # Operations that move tokens.

    def view(self, *shape: Any) -> "_LazyLogits":
        """Give the tokens another shape; the last dimension must be that of the classes."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if not sizes or sizes[-1] not in (self.classes, -1) or (sizes[-1] == -1 and -1 in sizes[:-1]):
            raise self._unsupported_error(f"view{tuple(sizes)} of {list(self.shape)}")
        if sizes[-1] == -1 and torch.Size(sizes[:-1]).numel() != self.hidden.shape[:-1].numel():
            raise self._unsupported_error(f"view{tuple(sizes)} of {list(self.shape)}")
        return replace(self, hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "_LazyLogits":
        """Flatten dimensions of tokens."""
        if self.ndim < 2 or end_dim % self.ndim == self.ndim - 1:
            raise self._unsupported_error(f"flatten({start_dim}, {end_dim})")
        return replace(self, hidden=self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> "_LazyLogits":
        parts = list(index) if isinstance(index, tuple) else [index]
        if not all(part is Ellipsis or isinstance(part, slice) or is_int(part) for part in parts):
            raise self._unsupported_error(f"[{index}]")
        if parts.count(Ellipsis) > 1:
            raise self._unsupported_error(f"[{index}]")
        dots = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
        after = len(parts) - dots - 1 if dots < len(parts) else 0
        token_index = [*parts[:dots], *[slice(None)] * (self.ndim - dots - after), *parts[len(parts) - after :]]
        if len(token_index) != self.ndim or token_index[-1] != slice(None):
            raise self._unsupported_error(f"[{index}]")
        return replace(self, hidden=self.hidden[tuple(token_index)])

    # Operations that change logits one by one.

    def _with_change(self, change: LogitMap) -> "_LazyLogits":
        return replace(self, maps=(*self.maps, change))

    def __mul__(self, factor: Any) -> "_LazyLogits":
        return self._with_change(partial(torch.mul, other=self._check_number("*", factor)))

    __rmul__ = mul = __mul__

    def __truediv__(self, divisor: Any) -> "_LazyLogits":
        return self._with_change(partial(torch.div, other=self._check_number("/", divisor)))

    div = __truediv__

    def tanh(self) -> "_LazyLogits":
        return self._with_change(torch.tanh)

    def _check_number(self, sign: str, x: Any) -> Any:
        if isinstance(x, Real):
            return x
        raise self._unsupported_error(f"{sign} {type(x).__name__}")

    # Their loss, and all else.

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _FUNCTIONS and isinstance(args[0] if args else kwargs.get("input"), cls):
            return _FUNCTIONS[function](*args, **kwargs)
        logits = next(x for x in [*args, *kwargs.values()] if isinstance(x, cls))
        raise logits._unsupported_error(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_logits_message(self.model, name))

    def _unsupported_error(self, operation: str) -> TypeError:
        return TypeError(_logits_message(self.model, operation))


def _logits_message(model: str, operation: str) -> str:
    return (
        f"chunked_loss=True: {operation} needs the logits of {model}, of which only the cross entropy is computed. For "
        f"predictions call fzero.nn.functional without it; for another loss {_BY_HAND}"
    )


def _cross_entropy(
    input: _LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits `[v]` or `[n, v]`."""
    other = {"weight": weight, "size_average": size_average, "reduce": reduce}
    if names := [name for name, x in other.items() if x is not None]:
        raise input._unsupported_error(f"cross_entropy({names[0]}=)")
    if input.ndim > 2:  # there the classes are dimension 1
        raise input._unsupported_error(f"cross_entropy of {list(input.shape)}")
    options = LossOptions(ignore_index, reduction, label_smoothing, axis=input.axis)
    return head_cross_entropy(
        input.hidden, input.weight, labels=target, bias=input.bias, maps=input.maps, options=options
    )


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {torch.tanh: _LazyLogits.tanh, F.cross_entropy: _cross_entropy}


def check_head(model: torch.nn.Module) -> str:
    """Return the path of a model's output head, a linear layer.

    Args:
        model: a model of transformers for language.

    Raises:
        TypeError: if it is not a model of transformers.
        ValueError: if its head is not a linear layer, or it has none.
    """
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"chunked_loss=True: {name} is not a model of transformers, whose head would be known: in a model of your "
            "own pass the input of its head and the head's weight to fzero.nn.linear_cross_entropy"
        )
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not torch.nn.Linear:
        actual = "no output embedding" if head is None else f"a {type(head).__name__} as its output embedding"
        raise ValueError(f"chunked_loss=True: {name} has {actual}, expected a torch.nn.Linear: {_BY_HAND}")
    return next(path for path, module in model.named_modules() if module is head)


def install_lazy_logits(module: torch.nn.Module, path: str, tp: Layers | None = None) -> None:
    """Make a copy of a model return `_LazyLogits`, and compute its loss of them.

    Args:
        module: the copy.
        path: the path of its head, of `check_head`.
        tp: the layers that are split over an axis.
    """
    head: Any = module.get_submodule(path)
    axis = tp.axis if tp is not None and path in tp.styles else None
    head.forward = partial(_lazy_head, type(module).__name__, head, axis, head.out_features)
    module.forward = _with_check(module.forward, type(module).__name__)


def _lazy_head(model: str, head: Any, axis: str | None, classes: int, input: torch.Tensor) -> _LazyLogits:
    """Take the place of a head's forward pass."""
    dtype = torch.promote_types(input.dtype, head.weight.dtype)
    return _LazyLogits(
        model=model, hidden=input, weight=head.weight, bias=head.bias, axis=axis, classes=classes, dtype=dtype
    )


def _with_check(run: Callable[..., Any], model: str) -> Callable[..., Any]:
    """Check that a forward pass called its head."""

    @wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        values = out.values() if isinstance(out, Mapping) else out
        if not isinstance(out, Mapping | tuple):
            values = [out]
        if not any(isinstance(x, _LazyLogits) for x in values):
            raise ValueError(
                f"chunked_loss=True: {model} returned {type(out).__name__} without the logits of its output embedding, "
                f"which it does not call: {_BY_HAND}"
            )
        return out

    return forward
