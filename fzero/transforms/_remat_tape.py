"""A tape of operations' results: the forward pass records them, and the recomputation replays them.

`RandomTape` and `TapeReplayer` are dispatch modes, so they run below the transforms of torch.func and see the tensors
that hold the values. The tape keeps tensors, and writes an `OperationLog`, which lists the operation of each tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero._format import format_tensor
from fzero._torch import OpOverload, TorchDispatchMode, storage_id
from fzero.tree import flatten, tensors, unflatten

__all__ = ["OperationLog", "RandomTape", "SaveFilter", "Tape", "TapeReplayer", "is_matmul"]

SaveFilter = Callable[[OpOverload], bool]
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "convolution"}


def is_matmul(op: OpOverload) -> bool:
    """Return whether an operation is a matrix product, a convolution or an attention."""
    name = _operation_name(op)
    return name in _MATMULS or name.startswith("_scaled_dot_product_")


def _operation_name(op: OpOverload) -> str:
    """Return an operation's name without overload and in-place suffix.

    Dropout may be in place in one run and not in the other, since this depends on whether autograd tracks its input.
    """
    return op.name().removeprefix("aten::").split(".")[0].rstrip("_")


def _draws_random(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a call draws random numbers. Attention without dropout draws none, despite its tag."""
    return torch.Tag.nondeterministic_seeded in op.tags and _argument_value(op, args, kwargs, "dropout_p") != 0


def _argument_value(op: OpOverload, args: Any, kwargs: Any, name: str) -> Any:
    """Return the value of an argument in a call: its default if it is omitted, None if the operation has none."""
    for i, a in enumerate(op._schema.arguments):
        if a.name == name:
            return args[i] if i < len(args) else kwargs.get(name, a.default_value)
    return None


class _TapeIndex(int):
    """Stands for a tensor: its index on the tape."""


class _TapeEntry(NamedTuple):
    """An operation on the tape: its call, and its results, with `_TapeIndex` in place of tensors."""

    call: str
    drawn: bool
    results: list[Any]
    structure: Any


class OperationLog(NamedTuple):
    """A recording without its tensors.

    Attributes:
        entries: the operations, in order.
        size: the number of tensors on the tape.
        overwritten: the indices of tensors whose originals were written into later.
    """

    entries: tuple[_TapeEntry, ...]
    size: int
    overwritten: frozenset[int]


def _call_text(op: OpOverload, args: Any, kwargs: Any) -> str:
    tensors_text = ", ".join([format_tensor(x.dtype, x.shape) for x in tensors([args, kwargs])])
    return f"{_operation_name(op)}({tensors_text})"


def _is_dropout(op: OpOverload) -> bool:
    return _operation_name(op) == "native_dropout"  # its mask determines its result


def _is_mask(op: OpOverload) -> bool:
    return _operation_name(op) == "bernoulli"  # 0 or 1, which fits in a byte


def _apply_dropout(mask: torch.Tensor, x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    if train is False:
        return x.clone()
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


class Tape(list[torch.Tensor]):
    """The tensors that a recorder keeps. This type tells a tape from a user's list."""


class RandomTape(TorchDispatchMode):
    """Keeps the results of operations that draw random numbers, and of operations that `save_filter` selects.

    Attributes:
        tape: the tensors that it kept.
    """

    def __init__(self, save_filter: SaveFilter | None) -> None:
        super().__init__()
        self.save_filter = save_filter
        self.tape = Tape()
        self._entries: list[_TapeEntry] = []
        self._overwritten: set[int] = set()
        self._storages: dict[int, list[int]] = {}  # storage -> the indices of the tensors in it

    def log(self) -> OperationLog:
        """Return the recording without its tensors."""
        return OperationLog(tuple(self._entries), len(self.tape), frozenset(self._overwritten))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep its results if it draws random numbers or the filter says so."""
        kwargs = kwargs or {}
        draws = _draws_random(func, args, kwargs)
        if self._storages and func._schema.is_mutable:
            self._copy_written(func, args, kwargs)
        out = func(*args, **kwargs)
        if not draws and not (self.save_filter is not None and not func._schema.is_mutable and self.save_filter(func)):
            return out
        call = _call_text(func, args, kwargs)
        if func._schema.is_mutable or _is_mask(func):  # keep a copy: later operations may write into the result too
            self._entries.append(_TapeEntry(call, draws, [_TapeIndex(len(self.tape))], flatten(out)[1]))
            self.tape.append(out.to(torch.bool) if _is_mask(func) else out.clone())
            return out
        results, structure = flatten(out[1] if _is_dropout(func) else out)
        for i, x in enumerate(results):
            if isinstance(x, torch.Tensor):
                self._storages.setdefault(storage_id(x), []).append(len(self.tape))
                results[i] = _TapeIndex(len(self.tape))
                self.tape.append(x)
        self._entries.append(_TapeEntry(call, draws, results, structure))
        return out

    def _copy_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                for x in tensors([args[i] if i < len(args) else kwargs.get(a.name)]):
                    for j in self._storages.pop(storage_id(x), []):
                        self.tape[j] = self.tape[j].clone()
                        self._overwritten.add(j)


class TapeReplayer(TorchDispatchMode):
    """Replays the tensors that a `RandomTape` kept, in order.

    Args:
        log: the operations that the tape recorded.
        tape: the tensors.
        save_filter: the recorder's filter; None to replay only the operations that draw.

    Raises:
        RuntimeError: if the operations are not those of the recording.
    """

    def __init__(self, log: OperationLog, tape: Sequence[torch.Tensor], save_filter: SaveFilter | None) -> None:
        super().__init__()
        self.overwritten, self.tape, self.save_filter = log.overwritten, tape, save_filter
        self.entries = [e for e in log.entries if e.drawn or save_filter is not None]
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the results that the tape has of an operation, or run one that was not kept."""
        kwargs = kwargs or {}
        if not _draws_random(func, args, kwargs) and not (
            self.save_filter is not None and not func._schema.is_mutable and self.save_filter(func)
        ):
            return func(*args, **kwargs)
        call = _call_text(func, args, kwargs)
        entry = self.entries[self.position] if self.position < len(self.entries) else None
        if entry is None or entry.call != call:
            self._raise_mismatch(call, entry)
        assert entry is not None
        self.position += 1
        if func._schema.is_mutable:
            return args[0].copy_(self.tape[entry.results[0]])
        if _is_mask(func):
            return self.tape[entry.results[0]].to(args[0].dtype)
        results = [self._replay(x) if isinstance(x, _TapeIndex) else x for x in entry.results]
        if _is_dropout(func):
            return _apply_dropout(results[0], *args), results[0]
        return unflatten(entry.structure, results)

    def _replay(self, i: int) -> torch.Tensor:
        # a new tensor object, which autograd attaches to the operation; a copy if it will be written into
        return self.tape[i].clone() if i in self.overwritten else self.tape[i].detach()

    def finish(self) -> None:
        """Check that every entry was replayed.

        Raises:
            RuntimeError: if an operation of the recording did not run.
        """
        if self.position < len(self.entries):
            self._raise_mismatch("no further operation", self.entries[self.position])

    def _raise_mismatch(self, call: str, entry: _TapeEntry | None) -> None:
        expected = entry.call if entry is not None else "no further operation"
        raise RuntimeError(
            f"remat: the recomputation ran {call} where the forward pass ran {expected}, so the saved results cannot "
            "be used: the block must run the same operations both times. It may depend on state outside its arguments, "
            "or torch may have computed a matrix product in another way: then leave out save="
        )
