"""The parameters of modules: those of a module, or an init function for those of a module on the meta device."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from fzero._arguments import check_callable
from fzero._torch.types import NamedTensors
from fzero._tracebacks import api_boundary

__all__ = ["initializer", "is_on_meta", "stand_ins", "trainable_params"]


def _copy_to_meta(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters and buffers are meta tensors; tied tensors stay tied."""
    return copy.deepcopy(module, stand_ins(module))


def stand_ins(module: torch.nn.Module) -> dict[int, Any]:
    """Map the id of each parameter and buffer of a module to a meta tensor like it."""
    result: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    for p in module.parameters():
        result[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return result


def trainable_params(module: torch.nn.Module) -> NamedTensors:
    """Return a module's trainable parameters by name, not copied; a tied parameter has one name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def is_on_meta(module: torch.nn.Module) -> bool:
    """Return whether a module's trainable parameters are on the meta device, and must be initialized.

    Raises:
        ValueError: if some parameters are on the meta device and some have values. The message names one of each.
    """
    params = trainable_params(module)
    meta_names = [name for name, p in params.items() if p.is_meta]
    real_names = [name for name, p in params.items() if not p.is_meta]
    if meta_names and real_names:
        raise ValueError(
            f"the module is partly on the meta device: {meta_names[0]!r} has no values, and {real_names[0]!r} has. "
            "step.init keeps all weights of a module, or draws all if it has none: load or fill "
            f'{meta_names[0]!r} first, or move the module to the meta device, module.to("meta"), to draw all weights '
            "anew"
        )
    return bool(meta_names)


@api_boundary
def initializer(
    module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None = None, device: torch.device | str = "cpu"
) -> Callable[[], NamedTensors]:
    """Make an init function for a module that was built on the meta device, for `step.init`.

    The init function allocates each submodule's own parameters and lets the submodule fill them, in the order of the
    submodules. It does not repeat anything else that a constructor does. If that matters, give `step.init` an init
    function that calls the constructor.

    Args:
        module: a module built under `with torch.device("meta"):`; it stays as it is.
        init: fills the parameters of a submodule in place; by default its `reset_parameters()`. For a model of
            transformers pass its `_init_weights`.
        device: where the new parameters are drawn. On the CPU the values are the same for every mesh; `mesh.device` is
            faster where that is an accelerator.

    Returns:
        A function without arguments that returns the trainable parameters by name, as `functional` names them.

    Raises:
        ValueError: when called, if a submodule has parameters of its own and no `reset_parameters`. The message names
            the submodule.

    Example:
        >>> with torch.device("meta"):
        ...     module = torch.nn.Linear(3, 2)
        >>> {name: p.shape for name, p in initializer(module)().items()}
        {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module, built on the meta device")
    if init is not None:
        check_callable("init", init, "a function that fills a submodule, such as model._init_weights")

    def make() -> NamedTensors:
        """Return the module's parameters, initialised one submodule after the other, so that few exist at a time."""
        params: dict[int, torch.nn.Parameter] = {}  # id of a meta parameter -> its replacement
        clone = _copy_to_meta(module)
        for name, m in clone.named_modules():
            own_params = dict(m.named_parameters(recurse=False))
            tied = [params[id(p)] for p in own_params.values() if id(p) in params]
            for key, p in own_params.items():
                if id(p) not in params:
                    params[id(p)] = torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                m._parameters[key] = params[id(p)]
            if len(tied) < len(own_params):
                old_values = [p.detach().clone() for p in tied]
                _initialize_submodule(name, m, init)
                for p, values in zip(tied, old_values, strict=True):  # the first submodule's values stay
                    p.detach().copy_(values)
        return {name: p.detach() for name, p in clone.named_parameters() if p.requires_grad}

    return make


def _initialize_submodule(name: str, module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None) -> None:
    fill = init or getattr(type(module), "reset_parameters", None)
    if fill is None:
        parameters = ", ".join([key for key, _ in module.named_parameters(recurse=False)])
        raise ValueError(
            f"submodule {name!r} ({type(module).__name__}) has parameters of its own ({parameters}) and no "
            "reset_parameters: pass init=, a function that fills a submodule's parameters, or build the module in an "
            "init function: step.init(lambda: fzero.nn.functional(Model()).params, opt)"
        )
    with torch.no_grad():
        fill(module)
