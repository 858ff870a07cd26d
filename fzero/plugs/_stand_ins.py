"""Stand-ins: a model's tensors between sharded steps, without values; an operation on one is an error, not a no-op."""

from typing import Any

import torch

from fzero._torch.running_transforms import without_function_modes

__all__ = ["guard"]

# The operations that a stand-in allows. Any other one needs values, or would change values that are not there.
_METADATA = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_shared", "untyped_storage", "data_ptr", "type"),
    *("__repr__", "__hash__", "__len__"),
)


class _StandIn(torch.Tensor):
    """A tensor on the meta device, whose shape and dtype may be read."""

    fzero_name = "a tensor"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that reads metadata alone, and refuse any other, since a stand-in has no values."""
        owner: Any = getattr(func, "__self__", None)  # of a property, its descriptor
        name = f"{owner.__name__}.{func.__name__}" if func.__name__ in ("__get__", "__set__") else func.__name__
        stand_in = next((x for x in args if isinstance(x, _StandIn)), None)
        tensor_text = "a tensor of the model" if stand_in is None else repr(stand_in.fzero_name)
        if name == "requires_grad_" or name == "requires_grad.__set__":
            arguments = (*args[1:], *(kwargs or {}).values(), True)[0]
            if stand_in is not None and arguments != stand_in.requires_grad:
                raise RuntimeError(
                    f"requires_grad of {tensor_text} was changed to {arguments} between sharded steps, which have the "
                    "parameters that were trainable at the start: freeze parameters before the model is sharded"
                )
            return stand_in
        is_read = name.endswith(".__get__") or name in _METADATA or (name == "grad.__set__" and args[1] is None)
        if not is_read:
            raise RuntimeError(
                f"{name} on {tensor_text}: between sharded steps each rank has only shards of the model's tensors, and "
                "no values here. Read them from a copy with all weights, full_model(...) of the plug, which all ranks "
                "call; nothing between steps can change them"
            )
        with without_function_modes():
            result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and name != "grad.__get__":  # such as .data and .T
            _guard_tensor(result, stand_in.fzero_name if stand_in is not None else cls.fzero_name)
        return result


class _ParameterStandIn(_StandIn, torch.nn.Parameter):
    """A parameter on the meta device."""


def guard(model: torch.nn.Module) -> None:
    """Let operations on a model's stand-ins, which are on the meta device, be errors that name them."""
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        _guard_tensor(x, name)


def _guard_tensor(x: torch.Tensor, name: str) -> None:
    kinds = {torch.Tensor: _StandIn, torch.nn.Parameter: _ParameterStandIn}
    if x.is_meta and type(x) in kinds:
        x.__class__ = kinds[type(x)]
        vars(x)["fzero_name"] = name
