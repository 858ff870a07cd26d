"""The repeated blocks of a module, rematerialised: in a copy of it that owns no storage, for `fzero.nn.functional`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fzero.sharding import cut_units, facts, is_box
from fzero.transforms import gather, remat

__all__ = ["boxes_to_blocks", "rematerialise"]

Save = str | Callable[[Any], bool] | None


def rematerialise(module: torch.nn.Module, save: Save, mutable: frozenset[str]) -> tuple[str, ...]:
    """Have each repeated block of a module run again in the backward pass; return their names.

    They are the numbered children that hold parameters or modules, as in `fzero.sharding.default_units`, the
    outermost ones.

    Raises:
        ValueError: if there is none.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, m in module.named_modules():
        head, _, last = name.rpartition(".")
        outermost = not any(key.isdigit() for key in head.split("."))
        if last.isdigit() and outermost and (next(m.parameters(), None) is not None or any(m.children())):
            found[name] = m
    if not found:
        raise ValueError(
            f"remat: {type(module).__name__} has no repeated blocks (numbered children, as a ModuleList has, that hold "
            "parameters): call fzero.remat on the function that is to run again"
        )
    for name, m in found.items():
        own = frozenset([key.removeprefix(f"{name}.") for key in mutable if key.startswith(f"{name}.")])
        m.forward = _Forward(m, save, own, m.__dict__.get("forward"))
    return tuple(found)


class _Forward:
    """The forward pass of a block, called in its module's place.

    Attributes:
        boxes: the boxes of the block's parameters, by name, for the time of a call.
    """

    def __init__(
        self, block: torch.nn.Module, save: Save, mutable: frozenset[str], own: Callable[..., Any] | None
    ) -> None:
        self.block, self.mutable, self.own = block, mutable, own
        self.save = save
        self.boxes: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        params = {**dict(self.block.named_parameters()), **self.boxes}
        buffers = dict(self.block.named_buffers())
        # copies, which stay as they are until the second run
        before = {name: x.clone() if name in self.mutable else x for name, x in buffers.items()}
        out, new = remat(self.body, self.save)(params, before, *args, **kwargs)
        for name, x in new.items():
            buffers[name].copy_(x.detach())
        return out

    def body(self, params: Any, buffers: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the block on tensors of its own: it runs twice, and would write its statistics twice."""
        new = {name: buffers[name].clone() for name in sorted(self.mutable)}
        state = {f"block.{name}": x for name, x in {**params, **buffers, **new}.items()}
        return torch.func.functional_call(_Bare(self.block, self.own), state, args, kwargs), new


class _Bare(torch.nn.Module):
    """A block that runs its own forward, in whose place a `_Forward` stands."""

    def __init__(self, block: torch.nn.Module, own: Callable[..., Any] | None) -> None:
        super().__init__()
        self.block, self.own = block, own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward."""
        return type(self.block).forward(self.block, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)


@contextmanager
def boxes_to_blocks(
    module: torch.nn.Module, blocks: Sequence[str], state: dict[str, Any]
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend each box that holds parameters of one block alone to that block, and gather the others.

    Yields:
        `state` with whole tensors, and tensors without storage in the places of those that the blocks gather.
    """
    if not any(is_box(x) for x in state.values()):
        yield state
        return
    names = list(state)
    entries: list[Any] = list(state.values())
    shared = _shared(module)
    lent: dict[str, dict[str, Any]] = {}
    for uid, _, members in cut_units(names, entries):
        own = [names[at] for at, _ in members]
        block = next((b for b in blocks if all(name.startswith(f"{b}.") for name in own)), None)
        if block is None or any(name in shared for name in own):
            continue
        for at, index in members:
            lent.setdefault(block, {})[names[at]] = entries[at]
            entries[at] = torch.empty(facts(uid).shapes[index], dtype=facts(uid).dtype, device="meta")
    whole = gather(dict(zip(names, entries, strict=True)))
    forwards: list[Any] = []
    try:
        for block, boxes in lent.items():
            forward: Any = module.get_submodule(block).forward
            forward.boxes = {name.removeprefix(f"{block}."): x for name, x in boxes.items()}
            forwards.append(forward)
        yield whole
    finally:
        for forward in forwards:
            forward.boxes = {}


def _shared(module: torch.nn.Module) -> set[str]:
    """Name the parameters that a module has at several places."""
    places: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), []).append(name)
    return {name for found in places.values() if len(found) > 1 for name in found}
