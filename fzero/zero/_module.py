"""Parameters of modules: those that they have, or, for one built on the meta device, a function that makes them."""

import copy
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["initializer", "on_meta", "stand_ins", "trainable", "without_storage"]

Tensors = dict[str, torch.Tensor]


def without_storage(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters and buffers are meta tensors; tied ones stay tied."""
    return copy.deepcopy(module, stand_ins(module))


def stand_ins(module: torch.nn.Module) -> dict[int, Any]:
    """Make meta tensors like a module's parameters and buffers, by the ids of these."""
    made: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    for p in module.parameters():
        made[id(p)] = torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return made


def trainable(module: torch.nn.Module) -> Tensors:
    """Return a module's trainable parameters themselves, by name; a tied one has one name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def on_meta(module: torch.nn.Module) -> bool:
    """Return whether a module's trainable parameters are on the meta device, and are yet to be filled.

    Raises:
        ValueError: if some are and some have values. Names one of each.
    """
    params = trainable(module)
    absent = [name for name, p in params.items() if p.is_meta]
    present = [name for name, p in params.items() if not p.is_meta]
    if absent and present:
        raise ValueError(
            f"the module is partly on the meta device: {absent[0]!r} has no values, and {present[0]!r} has. step.init "
            "keeps the weights of a module that has them all, and draws those of one that has none: load or fill "
            f'{absent[0]!r} first, or move the module to the meta device, module.to("meta"), and have all drawn anew'
        )
    return bool(absent)


def initializer(
    module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None = None, device: str = "cpu"
) -> Callable[[], Tensors]:
    """Make an init function of a module that was built on the meta device, for `step.init`.

    It gives each submodule memory and has it fill its own parameters, one submodule after the other, in their order.
    Whatever else a constructor does is not repeated: for that, give `step.init` an init function that calls it.

    Args:
        module: a module built under `with torch.device("meta"):`; it stays as it is.
        init: fills the parameters of a submodule in place; by default its `reset_parameters()`. For a model of
            transformers pass its `_init_weights`.
        device: where the parameters are to be.

    Returns:
        A function without arguments that returns the trainable parameters by name, as `functional` names them.

    Raises:
        ValueError: when called, if a submodule has parameters of its own and no `reset_parameters`. The message names
        it.

    Example:
        >>> with torch.device("meta"):
        ...     module = torch.nn.Linear(3, 2)
        >>> {name: p.shape for name, p in initializer(module)().items()}
        {'weight': torch.Size([2, 3]), 'bias': torch.Size([2])}
    """

    def make() -> Tensors:
        made: dict[int, torch.nn.Parameter] = {}  # id of a meta parameter -> what is in its place
        whole = without_storage(module)
        for name, m in whole.named_modules():
            own = dict(m.named_parameters(recurse=False))
            tied = [made[id(p)] for p in own.values() if id(p) in made]
            for key, p in own.items():
                if id(p) not in made:
                    made[id(p)] = torch.nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                m._parameters[key] = made[id(p)]
            if len(tied) < len(own):
                before = [p.detach().clone() for p in tied]
                _fill(name, m, init)
                for p, values in zip(tied, before, strict=True):  # the first submodule's, as where one is assigned
                    p.detach().copy_(values)
        return {name: p.detach() for name, p in whole.named_parameters() if p.requires_grad}

    return make


def _fill(name: str, module: torch.nn.Module, init: Callable[[torch.nn.Module], Any] | None) -> None:
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
