"""Which children of a module are its repeated blocks."""

from typing import Any

import torch

__all__ = ["blocks_of", "own_names"]


def blocks_of(module: torch.nn.Module, chosen: str | None) -> tuple[str, ...]:
    """Name a module's repeated blocks.

    Args:
        module: the module.
        chosen: the name of the list that holds them; None for the only one.

    Raises:
        ValueError: if there is no such list, or several and none was chosen; or if the parameters of the blocks differ.
    """
    lists = _lists(module)
    kind = type(module).__name__
    if chosen is not None and chosen not in lists:
        raise ValueError(f"blocks={chosen!r}: {kind} has no such list of blocks; it has {_listed(lists)}")
    if not lists:
        raise ValueError(
            f"{kind} has no repeated blocks: expected a ModuleList or Sequential of two modules or more of one class, "
            "with parameters"
        )
    if chosen is None and len(lists) > 1:
        raise ValueError(
            f"{kind} has {len(lists)} lists of blocks: {_listed(lists)}. A pipeline is cut at one of them: say which, "
            f"blocks={next(iter(lists))!r}; the others run whole, on the ranks that hold its ends"
        )
    names = lists[chosen if chosen is not None else next(iter(lists))]
    _check_alike(module, names)
    return names


def _lists(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the outermost lists of modules of one class, by name, with the names of their members."""
    found: dict[str, tuple[str, ...]] = {}
    for name, m in module.named_modules():
        inside = any(name.startswith(f"{other}." if other else "") for other in found)
        if inside or not isinstance(m, torch.nn.ModuleList | torch.nn.Sequential) or len(m) < 2:
            continue
        if len({type(child) for child in m}) == 1 and all(any(True for _ in child.parameters()) for child in m):
            found[name] = tuple([f"{name}.{key}" if name else key for key, _ in m.named_children()])
    return found


def _listed(lists: dict[str, tuple[str, ...]]) -> str:
    return ", ".join([f"{name!r} with {len(names)}" for name, names in lists.items()]) or "none"


def _check_alike(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    first = _facts(module.get_submodule(names[0]))
    for name in names[1:]:
        own = _facts(module.get_submodule(name))
        differing = [key for key in [*first, *own] if first.get(key) != own.get(key)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"blocks {names[0]!r} and {name!r} differ in {key!r}: {first.get(key, 'missing')} and "
                f"{own.get(key, 'missing')}. The blocks of a pipeline are stacked, so their parameters have the same "
                "names, shapes and dtypes"
            )


def _facts(block: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(p.shape), p.dtype) for name, p in block.named_parameters()}


def own_names(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Check that blocks own their parameters, that all are trained, and that the module asks its blocks for one output.

    Raises:
        ValueError: if a parameter of a block is frozen or shared; or if the configuration asks for further outputs.
    """
    places: dict[int, list[str]] = {}
    for key, p in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), []).append(key)
    for name in names:
        for key, p in module.get_submodule(name).named_parameters():
            others = [x for x in places[id(p)] if not x.startswith(f"{name}.")]
            if others:
                raise ValueError(
                    f"'{name}.{key}' is {others[0]!r} too: a block of a pipeline shares no parameter, for its rank "
                    "alone holds it"
                )
            if not p.requires_grad:
                raise ValueError(
                    f"'{name}.{key}' is frozen (requires_grad=False), and a pipeline has no place for a block's "
                    "constants: let it be trained, with a mask in the optimizer (optim.masked)"
                )
    config = getattr(module, "config", None)
    for flag in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, flag, False):
            raise ValueError(
                f"config.{flag} is set: blocks would leave these outputs on their own ranks, and a loss at the end of "
                "the model would go without them: set it to False"
            )
