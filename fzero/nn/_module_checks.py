"""Checks of the arguments of `functional` and `apply`: modules that can become pure functions, and dicts of tensors."""

from typing import Any

import torch

from fzero._torch import is_old_function_error
from fzero._torch.modules import attributes, gradient_hooks, has_backward_hook
from fzero.nn._module_writes import tensors_in
from fzero.sharding import is_box

__all__ = ["check_module", "check_one_device", "check_order", "check_tensors", "explain_old_function"]


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "SyncBatchNorm"}


def check_module(module: object, is_copied: bool = True) -> None:
    """Check that a module can be taken apart.

    Args:
        module: the module.
        is_copied: whether `apply` runs a copy of it.

    Raises:
        TypeError: if it is not a module. Also if a module in it is wrapped or compiled, or holds a DTensor.
        ValueError: if a tensor is uninitialised or has a hook, a module has a hook on its backward pass, or an
            attribute holds a computed tensor.
    """
    if not isinstance(module, torch.nn.Module):
        call = ""
        if isinstance(module, type) and issubclass(module, torch.nn.Module):
            call = f"; call the class, fzero.nn.functional({module.__name__}(...))"
        raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module{call}")
    for name, m in module.named_modules():
        _check_kind(name, m)
        _check_backward_hook(name, m)
        if is_copied:
            _check_attributes(name, m)
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(x):
            raise ValueError(f"{name!r} is not initialised: run the lazy module once on a batch first")
        if type(x).__name__ == "DTensor" or type(x.data).__name__ == "DTensor":
            raise TypeError(f"{name!r} is a DTensor: pass a plain module; fzero.shard does the sharding")
        _check_hooks(name, x)


def _check_kind(name: str, module: torch.nn.Module) -> None:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if wrapper := kinds & _WRAPPERS:
        raise TypeError(
            f"module {name!r} is {wrapper.pop()}, whose own synchronisation does not work under torch.func: pass the "
            "plain module; fzero.shard does the sharding"
        )
    if "OptimizedModule" in kinds:
        raise TypeError(f"module {name!r} is compiled; pass the plain module and compile the sharded step")


def _check_backward_hook(name: str, module: torch.nn.Module) -> None:
    if has_backward_hook(module):
        raise ValueError(
            f"module {name!r} has a hook on its backward pass (register_full_backward_hook), which torch.func does "
            "not support: remove it, and read or change the gradients that fzero.value_and_grad returns"
        )


def _check_attributes(name: str, module: torch.nn.Module) -> None:
    for attribute, value in attributes(module).items():
        if any(x.grad_fn is not None for x in tensors_in(value)):  # a copy of it would have no gradient
            path = f"{name}.{attribute}" if name else attribute
            raise ValueError(
                f"attribute {path!r} holds a tensor that was computed from parameters: delete it if an earlier "
                "call left it there, and compute weights with torch.nn.utils.parametrizations, not a hook (weight_norm)"
            )


def _check_hooks(name: str, x: torch.Tensor) -> None:
    # It is ambiguous which gradient a hook should see: DDP's hooks see this rank's gradient, FSDP's the reduced shard.
    for method in gradient_hooks(x):
        raise ValueError(
            f"{name!r} has a hook on its gradient ({method}), which torch.func never calls: remove it, and change the "
            "gradients between fzero.value_and_grad and opt.update, in a transform of the optimizer's chain. A mask of "
            f"rows goes into the loss: p = params[{name!r}]; p = torch.where(mask, p, p.detach())"
        )


def check_order(params: Any, buffers: Any, param_names: frozenset[str], buffer_names: frozenset[str]) -> None:
    """Check that parameters and buffers are not in each other's place.

    Raises:
        TypeError: if they are.
    """
    if not isinstance(params, dict) or not isinstance(buffers, dict) or params.keys() == param_names:
        return
    if params.keys() == buffer_names and buffers.keys() == param_names:
        raise TypeError("params are the buffers, and buffers the parameters: apply(params, buffers, *inputs)")


def check_tensors(tensors: object, names: frozenset[str], label: str, kind: str, boxes: bool) -> None:
    """Check that a dict holds tensors of the expected names.

    Args:
        tensors: the dict.
        names: the expected names, those of a module of class `kind`.
        label: the name of the dict, for messages.
        kind: the name of the module's class.
        boxes: whether boxes may stand for tensors.

    Raises:
        TypeError: if `tensors` is not a dict, or holds anything but tensors.
        ValueError: if names are missing or unknown.
    """
    if not isinstance(tensors, dict):
        raise TypeError(
            f"{label} is a {type(tensors).__name__}: expected a dict of tensors by name, as fzero.nn.functional "
            "returns, in the call apply(params, buffers, *inputs)"
        )
    for name, x in tensors.items():
        if is_box(x) and not boxes:
            raise TypeError(
                f"{kind} was given {x!r} for {name!r}, which is a box and not a tensor: call it inside "
                "fzero.value_and_grad, or on fzero.gather(params)"
            )
        if name in names and not is_box(x) and not isinstance(x, torch.Tensor):
            raise TypeError(f"{label}: {name!r} is a {type(x).__name__}, expected a tensor")
    if tensors.keys() != names:
        missing, extra = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
        raise ValueError(f"{label} do not match the module {kind}: missing {missing}, unknown {extra}")


def check_one_device(params: dict[str, Any], buffers: dict[str, Any], kind: str) -> None:
    """Check that the buffers of a module of class `kind` lie where its parameters lie; numbers need not.

    Raises:
        ValueError: if a buffer lies elsewhere. The message names it.
    """
    devices = {x.device: name for name, x in params.items() if not is_box(x)}
    if len(devices) != 1:
        return
    for name, x in buffers.items():
        if not is_box(x) and x.ndim and x.device not in devices:
            device, parameter = next(iter(devices.items()))
            raise ValueError(
                f"{kind}: buffer {name!r} is on {x.device}, and parameter {parameter!r} is on {device}: "
                "buffers = mesh.device_put(buffers) after fzero.nn.functional"
            )


def explain_old_function(error: RuntimeError, name: str) -> None:
    """Explain the error of a module that applies an `autograd.Function` of torch's older form.

    Raises:
        RuntimeError: if `error` is such an error.
    """
    if is_old_function_error(error):
        raise RuntimeError(
            f"fzero.nn.functional: {name} applies an autograd.Function, or an operator of a library, without "
            "setup_context, which torch.func cannot differentiate. The traceback names its line. Evaluation mode, "
            "functional(module.eval()), or the module's configuration may select another implementation. Otherwise "
            "replace that module, or give the Function a setup_context"
        ) from error
