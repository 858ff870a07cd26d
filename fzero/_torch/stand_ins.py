"""Private torch APIs that give the results of operations on stand-ins, without a call of the operation each time.

They exist in torch 2.11, 2.13 and 2.15. If torch changes one of them, `tests/_torch/test_stand_ins.py` shows which.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from fzero._torch.memory import storage_id

__all__ = ["StandInCache", "make_alias"]


def make_alias(x: FakeTensor) -> FakeTensor:
    """Return a stand-in for the same memory, which keeps its shape when the shape of `x` is changed in place."""
    with _below_stand_ins():
        return _as_stand_in(x, x.fake_mode, x.fake_device)


_below_stand_ins = torch._C._DisableTorchDispatch  # pyright: ignore[reportAttributeAccessIssue]
_warn_of_reads = torch._C._set_warn_deprecated_on_mutable_data_ptr  # pyright: ignore[reportAttributeAccessIssue]
_refuse_reads = torch._C._set_throw_on_mutable_data_ptr  # pyright: ignore[reportAttributeAccessIssue]
_wrap: Any = torch.Tensor._make_subclass  # it detaches the tensor, in the tensor's memory


def _as_stand_in(x: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """Return a stand-in on a device with the memory and the metadata of a tensor, below the modes of stand-ins.

    It does the work of `FakeTensor(mode, x, device)` without checking its arguments, which takes five times as long.
    """
    out = _wrap(FakeTensor, x, False, dispatch_device=True, device_for_backend_keys=device)
    out.__dict__.update(_state_on(device))
    out.fake_mode = mode
    return out


@functools.cache
def _state_on(device: torch.device) -> dict[str, Any]:
    """Return the attributes that torch gives a new stand-in on a device."""
    return dict(FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), device).__dict__)


class _Metadata(NamedTuple):
    """The metadata of a result: `base` is the position of the operand that it is a view of; None for new memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int | None


class _UnknownError(Exception):
    """A result does not follow from the operands' metadata, as far as the cache knows."""


_Table = dict[Any, tuple[type, list[_Metadata | None]] | None]  # by operation and operands; None if it is not known
_MAX_ENTRIES = 20_000  # some kilobytes each
_SHARED = defaultdict[torch.dtype, _Table](dict)  # by the default dtype, which quotients of integers have


def _is_fixed(func: OpOverload | Callable[..., Any]) -> bool:
    """Return whether an operation is one of torch's or fzero's own, which nobody defines anew."""
    return isinstance(func, OpOverload) and func.namespace in ("aten", "prims", "_c10d_functional", "fzero")


class StandInCache:
    """Runs operations on stand-ins, and repeats the metadata of a result for operands of the same metadata.

    The metadata of results depends on the operands' metadata alone. A model has many equal layers, and torch takes ten
    times as long to find metadata as to make a stand-in. A cache serves one trace. All caches share the metadata of
    torch's and fzero's own operations, so that the next trace of a model finds it.
    """

    def __init__(self) -> None:
        self._table: _Table = {}  # of other operations, which a user may define anew, and of functions

    def call(self, func: OpOverload | Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the results of an operation, or of a pure function, on stand-ins.

        Args:
            func: an operation or a function whose results' metadata follows from the operands' metadata.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        operands: list[FakeTensor] = []
        try:
            key = (
                func,
                _argument_key(args, operands),
                _argument_key(tuple(kwargs.items()), operands),
                _first_in_memory(operands),
            )
        except _UnknownError:
            return func(*args, **kwargs)
        if not operands or (isinstance(func, OpOverload) and func._schema.is_mutable):
            return func(*args, **kwargs)
        table = _SHARED[torch.get_default_dtype()] if _is_fixed(func) else self._table
        if key not in table:
            out = func(*args, **kwargs)
            if len(table) >= _MAX_ENTRIES:
                table.clear()
            table[key] = _result_metadata(out, operands)
            return out
        entry = table[key]
        if entry is None:
            return func(*args, **kwargs)
        kind, metadata = entry
        results = [None if x is None else _make_stand_in(x, operands) for x in metadata]
        return results[0] if kind is FakeTensor else kind(results)


def _argument_key(x: Any, operands: list[FakeTensor]) -> Any:
    """Return a key for an argument, and list the stand-ins in it.

    Raises:
        _UnknownError: if the argument is a tensor of another kind, or has a value.
    """
    kind = type(x)
    if kind is FakeTensor:
        if x.constant is not None or x.layout is not torch.strided or x.dtype.is_complex or x.is_neg():
            raise _UnknownError
        operands.append(x)
        return x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device
    if kind is tuple or kind is list:
        return kind, tuple([_argument_key(y, operands) for y in x])
    if isinstance(x, torch.Tensor):
        raise _UnknownError
    return kind, x  # the numbers 1, 1.0 and True are equal


def _first_in_memory(operands: list[FakeTensor]) -> tuple[int, ...]:
    """Return for each operand the first operand in the same memory: a view of one is then a view of the other."""
    ids = [storage_id(x) for x in operands] if len(operands) > 1 else []
    return tuple([ids.index(i) for i in ids])


def _result_metadata(out: Any, operands: list[FakeTensor]) -> tuple[type, list[_Metadata | None]] | None:
    """Return the metadata of an operation's results; None if they could not be made from it."""
    results = [out] if type(out) is FakeTensor else list(out)
    if any(x is not None and type(x) is not FakeTensor for x in results):
        return None
    bases = {storage_id(x): i for i, x in reversed([*enumerate(operands)])}
    metadata = [None if x is None else _tensor_metadata(x, bases) for x in results]
    rebuilt = [None if x is None else _make_stand_in(x, operands) for x in metadata]
    is_known = all(x is None or _is_equal(x, y, bases) for x, y in zip(results, rebuilt, strict=True))
    ids = [storage_id(x) for x in results if x is not None and storage_id(x) not in bases]
    is_known = is_known and len(set(ids)) == len(ids) and not any(x is y for x in results for y in operands)
    return (type(out), metadata) if is_known else None


def _tensor_metadata(x: FakeTensor, bases: dict[int, int]) -> _Metadata:
    base = bases.get(storage_id(x))
    return _Metadata(
        shape=tuple(x.shape),
        stride=x.stride(),
        offset=int(x.storage_offset()),
        dtype=x.dtype,
        device=x.fake_device,
        base=base,
    )


def _is_equal(x: FakeTensor, rebuilt: Any, bases: dict[int, int]) -> bool:
    """Return whether a stand-in that was made from metadata is like the one that torch made."""
    has_bytes = x.untyped_storage().nbytes() == rebuilt.untyped_storage().nbytes()
    plain = x.layout is torch.strided and not (x.dtype.is_complex or x.is_neg() or x.requires_grad)
    return plain and has_bytes and x.constant is None and _tensor_metadata(x, bases) == _tensor_metadata(rebuilt, bases)


def _make_stand_in(metadata: _Metadata, operands: list[FakeTensor]) -> FakeTensor:
    """Make a stand-in of some metadata: in new memory, or in that of an operand."""
    mode: FakeTensorMode = operands[0].fake_mode
    if metadata.base is None:
        with _below_stand_ins():
            x = torch.empty_strided(metadata.shape, metadata.stride, dtype=metadata.dtype, device="meta")
            out = _as_stand_in(x, mode, metadata.device)
            (_warn_of_reads if mode._allow_unsafe_data_ptr_access else _refuse_reads)(out)
            return out
    # a CPU's view reads no data; the kernel of another device may be missing from this build of torch
    with _below_stand_ins() if metadata.device.type == "cpu" else in_kernel_invocation_manager(mode):
        x = torch.as_strided(operands[metadata.base], metadata.shape, metadata.stride, metadata.offset)
        return _as_stand_in(x, mode, metadata.device)
