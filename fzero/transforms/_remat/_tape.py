"""A tape of operations' results: those that are drawn or kept in the forward pass are handed out in the recomputation.

`RandomTape` and `Player` are dispatch modes, so they lie below the transforms of torch.func and see the tensors that
hold the values. The tape keeps tensors, and writes a `Script`, which says which operation each belongs to.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero._torch import OpOverload, TorchDispatchMode, storage_id
from fzero.tree import flatten, tensors, unflatten

__all__ = ["Chosen", "Player", "RandomTape", "Script", "Tape", "is_matmul"]

Chosen = Callable[[OpOverload], bool]
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "convolution"}


def is_matmul(op: OpOverload) -> bool:
    """Return whether an operation is a matrix product, a convolution or an attention."""
    name = _name(op)
    return name in _MATMULS or name.startswith("_scaled_dot_product_")


def _name(op: OpOverload) -> str:
    """Name an operation without its overload; dropout is in place or not, as its input is tracked or not."""
    return op.name().removeprefix("aten::").split(".")[0].rstrip("_")


def _draws(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a call draws random numbers; attention without dropout draws none, whatever its tag says."""
    return torch.Tag.nondeterministic_seeded in op.tags and _given(op, args, kwargs, "dropout_p") != 0


def _given(op: OpOverload, args: Any, kwargs: Any, name: str) -> Any:
    """Return what a call gives for an argument: its default where it gives nothing, None where there is none."""
    for i, a in enumerate(op._schema.arguments):
        if a.name == name:
            return args[i] if i < len(args) else kwargs.get(name, a.default_value)
    return None


class _Kept(int):
    """Stands for a tensor: its number among those kept."""


class _Entry(NamedTuple):
    """An operation on the tape: its call, and its results, with tensors as `_Kept`."""

    call: str
    drawn: bool
    results: list[Any]
    structure: Any


class Script(NamedTuple):
    """A recording without its tensors.

    Attributes:
        entries: the operations, in their order.
        kept: the number of tensors that were kept.
        written: the numbers of those kept whose original was written into later.
    """

    entries: tuple[_Entry, ...]
    kept: int
    written: frozenset[int]


def _call_of(op: OpOverload, args: Any, kwargs: Any) -> str:
    given = ", ".join([f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in tensors([args, kwargs])])
    return f"{_name(op)}({given})"


def _is_dropout(op: OpOverload) -> bool:
    return _name(op) == "native_dropout"  # its mask is enough


def _is_mask(op: OpOverload) -> bool:
    return _name(op) == "bernoulli"  # 0 or 1, which fits in a byte


def _dropped(mask: torch.Tensor, x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    return x.clone() if train is False else x * mask * (0.0 if p == 1 else 1 / (1 - p))


class Tape(list[torch.Tensor]):
    """The tensors that a recorder keeps; a type of its own, so that it is not taken for somebody else's list."""


class RandomTape(TorchDispatchMode):
    """Keeps the results of the operations that draw random numbers, and of those `chosen`.

    Attributes:
        kept: the tensors that it kept.
    """

    def __init__(self, chosen: Chosen | None) -> None:
        super().__init__()
        self.chosen = chosen
        self.kept = Tape()
        self._entries: list[_Entry] = []
        self._written: set[int] = set()
        self._storages: dict[int, list[int]] = {}  # storage -> which of those kept lie in it

    def script(self) -> Script:
        """Return the recording without its tensors."""
        return Script(tuple(self._entries), len(self.kept), frozenset(self._written))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = _draws(func, args, kwargs)
        if self._storages and func._schema.is_mutable:
            self._copy_written(func, args, kwargs)
        out = func(*args, **kwargs)
        if not drawn and not (self.chosen is not None and not func._schema.is_mutable and self.chosen(func)):
            return out
        call = _call_of(func, args, kwargs)
        if func._schema.is_mutable or _is_mask(func):  # it writes into its first argument, and so may later ones
            self._entries.append(_Entry(call, drawn, [_Kept(len(self.kept))], flatten(out)[1]))
            self.kept.append(out.to(torch.bool) if _is_mask(func) else out.clone())
            return out
        results, structure = flatten(out[1] if _is_dropout(func) else out)
        for i, x in enumerate(results):
            if isinstance(x, torch.Tensor):
                self._storages.setdefault(storage_id(x), []).append(len(self.kept))
                results[i] = _Kept(len(self.kept))
                self.kept.append(x)
        self._entries.append(_Entry(call, drawn, results, structure))
        return out

    def _copy_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                for x in tensors([args[i] if i < len(args) else kwargs.get(a.name)]):
                    for j in self._storages.pop(storage_id(x), []):
                        self.kept[j] = self.kept[j].clone()
                        self._written.add(j)


class Player(TorchDispatchMode):
    """Hands out the tensors that a `RandomTape` kept, in order.

    Args:
        script: the recorder's script.
        kept: the tensors.
        chosen: the recorder's choice; None to play only the operations that draw.

    Raises:
        RuntimeError: if the operations are not those of the recording.
    """

    def __init__(self, script: Script, kept: Sequence[torch.Tensor], chosen: Chosen | None) -> None:
        super().__init__()
        self.written, self.kept, self.chosen = script.written, kept, chosen
        self.entries = [e for e in script.entries if e.drawn or chosen is not None]
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs) and not (
            self.chosen is not None and not func._schema.is_mutable and self.chosen(func)
        ):
            return func(*args, **kwargs)
        call = _call_of(func, args, kwargs)
        entry = self.entries[self.position] if self.position < len(self.entries) else None
        if entry is None or entry.call != call:
            self._differs(call, entry)
        assert entry is not None
        self.position += 1
        if func._schema.is_mutable:
            return args[0].copy_(self.kept[entry.results[0]])
        if _is_mask(func):
            return self.kept[entry.results[0]].to(args[0].dtype)
        results = [self._handed_out(x) if isinstance(x, _Kept) else x for x in entry.results]
        if _is_dropout(func):
            return _dropped(results[0], *args), results[0]
        return unflatten(entry.structure, results)

    def _handed_out(self, i: int) -> torch.Tensor:
        # a new tensor, which autograd takes for the operation's own; a copy if it will be written into
        return self.kept[i].clone() if i in self.written else self.kept[i].detach()

    def finish(self) -> None:
        """Check that all was handed out.

        Raises:
            RuntimeError: if an operation of the recording did not run.
        """
        if self.position < len(self.entries):
            self._differs("no further operation", self.entries[self.position])

    def _differs(self, call: str, entry: _Entry | None) -> None:
        before = entry.call if entry is not None else "no further operation"
        raise RuntimeError(
            f"remat: the recomputation ran {call} where the forward pass ran {before}, so the kept results cannot "
            "be used: the block must run the same operations both times. It may depend on state outside its arguments, "
            "or torch chose another way to compute a matrix product: then leave out save="
        )
