"""Checks of the arguments of `functional` and `apply`: modules that can be pure functions, and dicts of tensors."""

import torch

from fzero._torch.modules import attributes, gradient_hooks, has_backward_hook
from fzero.layout.boxes import is_box
from fzero.nn._written import tensors_in

__all__ = ["check_module", "check_tensors", "explain_old_function"]

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "SyncBatchNorm"}


def check_module(module: object) -> None:
    """Check that a module can be taken apart.

    Raises:
        TypeError: if it is no module, or one inside it is wrapped or compiled, or it holds a DTensor.
        ValueError: if a tensor is uninitialised or has a hook, a module has a hook on its backward pass, or an
            attribute holds a computed tensor.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module")
    for name, m in module.named_modules():
        _check_kind(name, m)
        _check_backward_hook(name, m)
        _check_attributes(name, m)
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(x):
            raise ValueError(f"{name!r} is not initialised: run the lazy module once on a batch first")
        if type(x).__name__ == "DTensor" or type(x.data).__name__ == "DTensor":
            raise TypeError(f"{name!r} is a DTensor: pass a plain module; fzero.shard does the sharding")
        _check_hooks(name, x)


def _check_kind(name: str, module: torch.nn.Module) -> None:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if wrapper := kinds & WRAPPERS:
        raise TypeError(
            f"module {name!r} is {wrapper.pop()}, whose own synchronisation does not work under torch.func: pass the "
            "plain module; fzero.shard does the sharding"
        )
    if "OptimizedModule" in kinds:
        raise TypeError(f"module {name!r} is compiled; pass the plain module and compile the sharded step")


def _check_backward_hook(name: str, module: torch.nn.Module) -> None:
    if has_backward_hook(module):
        raise ValueError(
            f"module {name!r} has a hook on its backward pass (register_full_backward_hook), which torch.func refuses: "
            "remove it, and read or change the gradients that fzero.value_and_grad returns"
        )


def _check_attributes(name: str, module: torch.nn.Module) -> None:
    for attribute, value in attributes(module).items():
        if any(x.grad_fn is not None for x in tensors_in(value)):  # a copy of it would have no gradient
            path = f"{name}.{attribute}" if name else attribute
            raise ValueError(
                f"attribute {path!r} holds a tensor that was computed of parameters: delete it if an earlier call "
                "left it there, and have torch.nn.utils.parametrizations compute weights, not a hook (weight_norm)"
            )


def _check_hooks(name: str, x: torch.Tensor) -> None:
    # Which gradient a hook should see is not said anywhere: DDP's hooks see this rank's, FSDP's the reduced shard.
    for method in gradient_hooks(x):
        raise ValueError(
            f"{name!r} has a hook on its gradient ({method}), which torch.func never calls: remove it, and change the "
            "gradients between fzero.value_and_grad and opt.update, by a link of the optimizer's chain. A mask of "
            f"rows goes into the loss: p = params[{name!r}]; p = torch.where(mask, p, p.detach())"
        )


def check_tensors(given: object, names: frozenset[str], what: str, kind: str, boxes: bool) -> None:
    """Check that a dict holds tensors of these names.

    Args:
        given: the dict.
        names: the names that a module of class `kind` has.
        what: the name of the dict.
        kind: the name of the module's class.
        boxes: whether boxes may stand for tensors.

    Raises:
        TypeError: if it is no dict, or holds anything but tensors.
        ValueError: if names are missing or unknown.
    """
    if not isinstance(given, dict):
        raise TypeError(
            f"{what} is a {type(given).__name__}: expected a dict of tensors by name, as fzero.nn.functional returns it"
        )
    for name, x in given.items():
        if is_box(x) and not boxes:
            raise TypeError(
                f"{kind} was given {x!r} for {name!r}, which is a box and not a tensor: call it inside "
                "fzero.value_and_grad, or on fzero.gather(params)"
            )
        if name in names and not is_box(x) and not isinstance(x, torch.Tensor):
            raise TypeError(f"{what}: {name!r} is a {type(x).__name__}, expected a tensor")
    if given.keys() != names:
        missing, extra = sorted(names - given.keys()), sorted(given.keys() - names)
        raise ValueError(f"{what} do not match the module {kind}: missing {missing}, and not its own {extra}")


def explain_old_function(error: RuntimeError, name: str) -> None:
    """Say what to do where a module applies an `autograd.Function` of torch's older form.

    Raises:
        RuntimeError: if the error is of one.
    """
    if "must override the setup_context staticmethod" in str(error):
        raise RuntimeError(
            f"fzero.nn.functional: {name} applies an autograd.Function, or an operator of a library, without "
            "setup_context, which torch.func cannot differentiate; the traceback names the line. It may have another "
            "way in evaluation mode, functional(module.eval()), or by its configuration; else replace that module, or "
            "give the Function a setup_context"
        ) from error
