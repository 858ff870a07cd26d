"""Find the children of a module that are its repeated blocks."""

from typing import Any

import torch

__all__ = ["check_ownership", "find_blocks"]


def find_blocks(module: torch.nn.Module, list_name: str | None) -> tuple[str, ...]:
    """Return the names of a module's repeated blocks.

    Args:
        module: the module.
        list_name: the name of the list that holds the blocks. None stands for the module's only list.

    Raises:
        ValueError: if the module has no such list, or if it has several and `list_name` is None. Also if the blocks
            differ in the names, shapes or dtypes of their parameters.
    """
    lists = _module_lists(module)
    kind = type(module).__name__
    if list_name is not None and list_name not in lists:
        raise ValueError(f"blocks={list_name!r}: {kind} has no such list of blocks; it has {_names_in(lists)}")
    if not lists:
        raise ValueError(
            f"{kind} has no repeated blocks: expected a ModuleList or Sequential of at least two modules of one class, "
            "with parameters"
        )
    if list_name is None and len(lists) > 1:
        raise ValueError(
            f"{kind} has {len(lists)} lists of blocks: {_names_in(lists)}. A pipeline is split at one of them: name "
            f"it, as in blocks={next(iter(lists))!r}. The other lists run whole, on the first or the last pipeline "
            "stage"
        )
    names = lists[list_name if list_name is not None else next(iter(lists))]
    _check_alike(module, names)
    return names


def _module_lists(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the outermost lists of at least two modules of one class: by name, the names of the members."""
    block_lists: dict[str, tuple[str, ...]] = {}
    for name, m in module.named_modules():
        inside = any(name.startswith(f"{outer}." if outer else "") for outer in block_lists)
        if inside or not isinstance(m, torch.nn.ModuleList | torch.nn.Sequential) or len(m) < 2:
            continue
        if len({type(child) for child in m}) == 1 and all(any(True for _ in child.parameters()) for child in m):
            block_lists[name] = tuple([f"{name}.{key}" if name else key for key, _ in m.named_children()])
    return block_lists


def _names_in(lists: dict[str, tuple[str, ...]]) -> str:
    return ", ".join([f"{name!r} with {len(names)}" for name, names in lists.items()]) or "none"


def _check_alike(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    expected = _param_meta(module.get_submodule(names[0]))
    for name in names[1:]:
        actual = _param_meta(module.get_submodule(name))
        mismatches = [key for key in [*expected, *actual] if expected.get(key) != actual.get(key)]
        if mismatches:
            key = mismatches[0]
            raise ValueError(
                f"blocks {names[0]!r} and {name!r} differ in {key!r}: {expected.get(key, 'missing')} and "
                f"{actual.get(key, 'missing')}. A pipeline stacks its blocks, so their parameters must have the same "
                "names, shapes and dtypes"
            )


def _param_meta(block: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(p.shape), p.dtype) for name, p in block.named_parameters()}


def check_ownership(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Check that no parameter of a block is shared or frozen, and that the config requests no further outputs.

    Raises:
        ValueError: if a parameter of a block is frozen or shared. Also if `module.config` requests further outputs.
    """
    keys_by_id: dict[int, list[str]] = {}
    for key, p in module.named_parameters(remove_duplicate=False):
        keys_by_id.setdefault(id(p), []).append(key)
    for name in names:
        for key, p in module.get_submodule(name).named_parameters():
            aliases = [x for x in keys_by_id[id(p)] if not x.startswith(f"{name}.")]
            if aliases:
                raise ValueError(
                    f"'{name}.{key}' is {aliases[0]!r} too. A block of a pipeline cannot share a parameter, because "
                    "only the block's rank holds it: untie the two"
                )
            if not p.requires_grad:
                raise ValueError(
                    f"'{name}.{key}' is frozen (requires_grad=False), and a pipeline cannot hold constants of a block. "
                    "Set requires_grad=True, and mask the parameter in the optimizer (optim.masked)"
                )
    config = getattr(module, "config", None)
    for flag in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, flag, False):
            raise ValueError(
                f"config.{flag} is set. Blocks would leave these outputs on their own ranks, where the loss at the "
                "end of the model does not see them: set it to False"
            )
