"""MatmulPrecision: which linear layers of a module multiply in float8, and how their copies in `apply` do so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fzero._arguments import check_choice
from fzero._tracebacks import api_boundary_of_class
from fzero.nn._float8 import SCALINGS, SIZE_MULTIPLE, float8_linear
from fzero.nn._remat_blocks import repeated_blocks

__all__ = ["MatmulPrecision", "MatmulPrecisionLike", "install_matmuls", "read_matmul_precision"]

_Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
_ROUTERS = ("gate", "router")  # their few products decide which expert a token gets


@api_boundary_of_class
@dataclass(frozen=True)
class MatmulPrecision:
    """How the linear layers of a module multiply.

    Attributes:
        kind: "float8", as `fzero.nn.float8_linear` does.
        scaling: "tensorwise" or "rowwise".
        layers: a rule `(path, weight) -> bool` for the layers that multiply so, by the path of their weights. None for
            linear layers within repeated blocks, but for routers; so heads and embeddings stay exact. In a module
            without such layers it is all but the first and the last one. Sizes that are not multiples of 16 stay exact.

    Raises:
        ValueError: if `kind` or `scaling` is none of these.

    Example:
        >>> mlp = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
        >>> MatmulPrecision("float8").paths(mlp)
        ('1.weight', '2.weight')
        >>> MatmulPrecision("float8", scaling="rowwise", layers=lambda path, weight: path != "0.weight").paths(mlp)
        ('1.weight', '2.weight', '3.weight')
    """

    kind: Literal["float8"]
    scaling: str = "tensorwise"
    layers: Callable[[str, torch.Tensor], bool] | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.kind != "float8":
            raise ValueError(f"matmul_precision={self.kind!r}: expected 'float8', the only kind")
        check_choice("scaling", self.scaling, SCALINGS)
        if self.layers is not None and not callable(self.layers):
            raise TypeError(f"layers={self.layers!r}: expected a rule, a function (path, weight) -> bool")

    def paths(self, module: torch.nn.Module) -> tuple[str, ...]:
        """List the paths of the weights whose layers multiply in float8.

        Raises:
            ValueError: if the rule names no layer, or one whose sizes are not multiples of 16.
        """
        weights = {path: _module_weight(m) for path, m in _linear_layers(module).items()}
        names = (
            _default_layers(module, weights)
            if self.layers is None
            else [p for p, w in weights.items() if self.layers(p, w)]
        )
        for path in names if self.layers is not None else ():
            if not _has_multiple_sizes(weights[path]):
                raise ValueError(
                    f"matmul_precision: {path!r} has the shape {list(weights[path].shape)}: float8 products need "
                    f"multiples of {SIZE_MULTIPLE}; leave it out, layers=lambda path, weight: not any(n % 16 for n in "
                    "weight.shape)"
                )
        if not names:
            raise ValueError(
                f"matmul_precision: no layer of {type(module).__name__} is chosen: {self._layer_advice(weights)}"
            )
        return tuple(names)

    def _layer_advice(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Return which layers can be chosen, for an error."""
        usable = [path for path, w in weights.items() if _has_multiple_sizes(w)]
        if usable:
            return f"choose some of {usable}: fzero.nn.MatmulPrecision({self.kind!r}, layers=lambda path, weight: ...)"
        if weights:
            return f"none of its linear layers, {list(weights)}, has sizes that are multiples of {SIZE_MULTIPLE}"
        return "it has no linear layers; leave matmul_precision= out"

    def linears(self, module: torch.nn.Module) -> dict[str, _Linear]:
        """Return the function that replaces `torch.nn.functional.linear`, by the name of the layer."""
        return dict.fromkeys([path.rpartition(".")[0] for path in self.paths(module)], self.linear)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute a linear layer. Under `torch.autocast` its operands are cast first, as those of any linear layer."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return float8_linear(x, weight, bias, scaling=self.scaling)


MatmulPrecisionLike = MatmulPrecision | Literal["float8"] | None


def read_matmul_precision(precision: Any) -> MatmulPrecision | None:
    """Return the policy that the argument `matmul_precision` of `functional` names; None for exact products.

    Raises:
        TypeError: if it is none of its kinds.
    """
    if precision is None or isinstance(precision, MatmulPrecision):
        return precision
    if not isinstance(precision, str):
        raise TypeError(f'matmul_precision={precision!r}: expected "float8", an fzero.nn.MatmulPrecision, or None')
    return MatmulPrecision(precision)  # pyright: ignore[reportArgumentType]  # it checks the kind


def _linear_layers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """List the linear layers of a module that run their class's forward pass, by the paths of their weights."""
    called_ids = {id(m) for m in module.modules()}
    for attention in module.modules():
        if isinstance(attention, torch.nn.MultiheadAttention):  # it reads the weight of this layer, and never calls it
            called_ids.discard(id(attention.out_proj))
    linear_modules = [
        (name, m) for name, m in module.named_modules() if id(m) in called_ids and "forward" not in vars(m)
    ]
    return {f"{name}.weight".lstrip("."): m for name, m in linear_modules if _is_linear(m) or _is_transposed(m)}


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward


def _is_transposed(module: torch.nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer whose weight is `[k, n]`."""
    return type(module).__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys()


def _module_weight(module: Any) -> torch.Tensor:
    return module.weight


def _has_multiple_sizes(weight: torch.Tensor) -> bool:
    return all(size % SIZE_MULTIPLE == 0 for size in weight.shape)


def _default_layers(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> list[str]:
    blocks = tuple([f"{name}." for name in repeated_blocks(module)])
    block_layers = [
        path for path in weights if path.startswith(blocks) and path.removesuffix(".weight") + "." not in blocks
    ]
    names = (
        [path for path in block_layers if path.split(".")[-2] not in _ROUTERS] if block_layers else list(weights)[1:-1]
    )
    return [path for path in names if _has_multiple_sizes(weights[path])]


def install_matmuls(module: torch.nn.Module, linears: Mapping[str, _Linear]) -> None:
    """Make layers of a copy of a module, by their names, compute their product by a function."""
    for name, linear in linears.items():
        layer: Any = module.get_submodule(name)
        layer.forward = partial(_forward_linear, layer, linear, _is_transposed(layer))
    for m in module.modules():  # in eval mode torch's own encoders would read the weights, and not call the layers
        if isinstance(m, torch.nn.TransformerEncoderLayer):
            m.activation_relu_or_gelu = 0
        elif isinstance(m, torch.nn.TransformerEncoder):
            m.use_nested_tensor = False


def _forward_linear(layer: Any, linear: _Linear, is_transposed: bool, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight.mT if is_transposed else layer.weight, layer.bias)
