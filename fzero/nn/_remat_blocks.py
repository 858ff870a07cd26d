"""Remat of a module's repeated blocks, for `fzero.nn.functional`: applied to a copy that owns no storage."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fzero.sharding import is_box, sharded_units, traced_spec
from fzero.transforms import gather, remat

__all__ = ["give_boxes_to_blocks", "remat_blocks", "repeated_blocks", "undo_remat_blocks"]

_Save = str | Callable[[Any], bool] | None


def repeated_blocks(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Find the repeated blocks of a module by name: the outermost numbered children with parameters or modules."""
    blocks: dict[str, torch.nn.Module] = {}
    for name, m in module.named_modules():
        head, _, last = name.rpartition(".")
        outermost = not any(key.isdigit() for key in head.split("."))
        if last.isdigit() and outermost and (next(m.parameters(), None) is not None or any(m.children())):
            blocks[name] = m
    return blocks


def remat_blocks(module: torch.nn.Module, save: _Save, mutable: frozenset[str]) -> tuple[str, ...]:
    """Make each repeated block of a module run again in the backward pass, and return the blocks' names.

    The repeated blocks are the outermost numbered children that hold parameters or modules, as in
    `fzero.sharding.default_units`.

    Raises:
        ValueError: if the module has no repeated blocks.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(
            f"remat: {type(module).__name__} has no repeated blocks (numbered children with parameters, such as those "
            "of a ModuleList): call fzero.remat on the function that is to run again"
        )
    for name, m in blocks.items():
        buffer_names = frozenset([key.removeprefix(f"{name}.") for key in mutable if key.startswith(f"{name}.")])
        m.forward = _Forward(m, save, buffer_names, m.__dict__.get("forward"))
    return tuple(blocks)


def undo_remat_blocks(module: torch.nn.Module, blocks: Sequence[str]) -> None:
    """Let blocks run once again."""
    for name in blocks:
        m = module.get_submodule(name)
        forward: Any = m.__dict__.pop("forward")
        if forward.run is not None:
            m.forward = forward.run


class _Forward:
    """The forward pass of a block under remat, which replaces the block's `forward`.

    Attributes:
        boxes: the boxes of the block's parameters, by name, during a call.
    """

    def __init__(
        self, block: torch.nn.Module, save: _Save, mutable: frozenset[str], run: Callable[..., Any] | None
    ) -> None:
        self.block, self.mutable, self.run = block, mutable, run
        self.save = save
        self.boxes: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        params = {**dict(self.block.named_parameters()), **self.boxes}
        buffers = dict(self.block.named_buffers())
        # copies, so that the second run reads the same values
        before = {name: x.clone() if name in self.mutable else x for name, x in buffers.items()}
        out, new = remat(self.body, self.save)(params, before, *args, **kwargs)
        for name, x in new.items():
            buffers[name].copy_(x.detach())
        return out

    def body(self, params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the block on copies of its statistics, since it runs twice and would update them twice."""
        new = {name: buffers[name].clone() for name in sorted(self.mutable)}
        state = {f"block.{name}": x for name, x in {**params, **buffers, **new}.items()}
        return torch.func.functional_call(_OriginalForward(self.block, self.run), state, args, kwargs), new


class _OriginalForward(torch.nn.Module):
    """Runs a block's original forward, which a `_Forward` has replaced."""

    def __init__(self, block: torch.nn.Module, run: Callable[..., Any] | None) -> None:
        super().__init__()
        self.block, self.run = block, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's original forward."""
        return type(self.block).forward(self.block, *args, **kwargs) if self.run is None else self.run(*args, **kwargs)


@contextmanager
def give_boxes_to_blocks(
    module: torch.nn.Module, blocks: Sequence[str], state: dict[str, Any]
) -> Iterator[dict[str, torch.Tensor]]:
    """Give each box to the block that owns all of its parameters, and gather the other boxes.

    Yields:
        `state` with full tensors, and with meta tensors in place of parameters that the blocks gather themselves.
    """
    if not any(is_box(x) for x in state.values()):
        yield state
        return
    names = list(state)
    entries: list[Any] = list(state.values())
    shared_names = _shared_names(module)
    boxes_of_block: dict[str, dict[str, Any]] = {}
    for spec_id, _, members in sharded_units(names, entries):
        paths = [names[position] for position, _ in members]
        block = next((b for b in blocks if all(name.startswith(f"{b}.") for name in paths)), None)
        if block is None or any(name in shared_names for name in paths):
            continue
        for position, index in members:
            boxes_of_block.setdefault(block, {})[names[position]] = entries[position]
            spec = traced_spec(spec_id)
            entries[position] = torch.empty(spec.shapes[index], dtype=spec.dtype, device="meta")
    full = gather(dict(zip(names, entries, strict=True)))
    forwards: list[Any] = []
    try:
        for block, boxes in boxes_of_block.items():
            forward: Any = module.get_submodule(block).forward
            forward.boxes = {name.removeprefix(f"{block}."): x for name, x in boxes.items()}
            forwards.append(forward)
        yield full
    finally:
        for forward in forwards:
            forward.boxes = {}


def _shared_names(module: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that a module holds under several names."""
    names_by_id: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(p), []).append(name)
    return {name for names in names_by_id.values() if len(names) > 1 for name in names}
