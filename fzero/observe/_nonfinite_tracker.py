"""The tracker looks at the results of each operation, and tracks non-finite ones by their memory."""

import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero._format import format_tensor
from fzero._torch.call_site import current_call_site
from fzero._torch.memory import Memory, is_real, tensor_memory
from fzero._torch.watched import WatchedOperation
from fzero.axes import bound_axes
from fzero.observe._value_graph import Edge, NonFiniteResult, NonFiniteValue, ValueCause, ValueGraph

__all__ = ["NonFiniteTracker", "nonfinite_kind"]


_OVERWRITE = ("aten::copy_", "aten::fill_", "aten::zero_")  # operations that overwrite a tensor without reading it


_MESSAGES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::")


class _Kind(NamedTuple):
    """The kinds of non-finite elements in a tensor: nan, inf, -inf."""

    nan: bool
    above: bool
    below: bool

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        return " and ".join([name for name, has in zip(("nan", "inf", "-inf"), self, strict=True) if has])


_FINITE = _Kind(False, False, False)


def nonfinite_kind(x: torch.Tensor) -> _Kind:
    """Return which kinds of non-finite elements a tensor holds."""
    if not is_real(x) or not (x.is_floating_point() or x.is_complex()):
        return _FINITE
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    elif x.itemsize == 1:  # torch lacks the kernels for 8-bit floats
        x = x.float()
    if bool(torch.isfinite(x).all()):
        return _FINITE
    return _Kind(bool(x.isnan().any()), bool(x.isposinf().any()), bool(x.isneginf().any()))


class _NonFiniteMemory(NamedTuple):
    """Memory of a non-finite value. If the value is only `expected`, that function records it once it is read."""

    memory: Memory
    number: int
    expected: Callable[[bool], int] | None = None


class NonFiniteTracker:
    """Tracks non-finite values through the operations of one process.

    Attributes:
        graph: the graph of the values.
        rank: the rank of the process; None if ranks are threads.
        size: the number of ranks.
        collective_count: a function that returns how many collectives have run.
    """

    def __init__(self, rank: int | None, size: int, collective_count: Callable[[], int]) -> None:
        self.graph = ValueGraph()
        self.rank, self.size, self.collective_count = rank, size, collective_count
        self._regions: dict[int, list[_NonFiniteMemory]] = {}

    # Events.

    def before(self, operation: WatchedOperation) -> list[Edge]:
        """Return edges to the non-finite values that the operation may overwrite."""
        return [] if operation.name in _OVERWRITE else self._parent_edges(operation.mutated_arguments, operation)

    def record_operation(
        self, operation: WatchedOperation, overwritten: list[Edge], results: Sequence[torch.Tensor]
    ) -> None:
        """Record the non-finite results of an operation."""
        name = operation.name
        if name.startswith(_MESSAGES):
            if not name.startswith("_c10d_functional::wait_tensor"):
                self._record_messages(operation, results)
            return
        if name == "aten::equal" and self.size > 1 and not bound_axes():
            # all ranks have ended: the first one's value stands for all as a result, so it descends from the others'
            for e in self._parent_edges(operation.arguments[1:], operation):
                self._remember(operation.arguments[:1], e.number)
            return
        storages = {tensor_memory(x).storage for x in operation.arguments if is_real(x)}
        new_tensors = [x for x in results if is_real(x) and tensor_memory(x).storage not in storages]
        if "empty" in name:
            self._watch_memory(new_tensors, self._record_early_read(operation))
            return
        if "lift_fresh" in name:  # a constant: torch.tensor(-math.inf)
            new_tensors = [x for x in results if is_real(x)]
        self._record_results(operation, overwritten, new_tensors)

    def record_argument(self, x: torch.Tensor, leaf: str, ranks: tuple[int, ...]) -> None:
        """Record an argument, or a rank's part of one, if it is not finite."""
        kind = nonfinite_kind(x)
        if kind:
            # a mask of -inf in the batch is intended, so it is reported only if nothing else is found
            cause = ValueCause(
                self._event_order(), ranks, leaf, value=str(kind), is_intended=not kind.nan and not kind.above
            )
            self._remember([x], self._add_value(kind.nan, [], cause))

    def record_result(self, x: torch.Tensor, path: str) -> None:
        """Record a result if it is not finite."""
        kind = nonfinite_kind(x)
        if kind:
            parents = self._find_edges(x, kind, WatchedOperation("", [x], [], []))
            self.graph.results.append(NonFiniteResult(path, kind.nan, parents))

    # Operations.

    def _record_results(
        self, operation: WatchedOperation, overwritten: list[Edge], new_tensors: Sequence[torch.Tensor]
    ) -> None:
        """Record whether an operation's results are non-finite, and from which operands they have it."""
        kinds = [(x, nonfinite_kind(x)) for x in (*new_tensors, *operation.mutated_arguments)]
        kind = _Kind(*[any(k[i] for _, k in kinds) for i in range(3)])
        mutated_ids = {id(x) for x in operation.mutated_arguments}
        parents = (
            overwritten + self._parent_edges([x for x in operation.arguments if id(x) not in mutated_ids], operation)
            if kind
            else []
        )
        for x, _ in kinds:
            self._forget(x)
        if not kind:
            return
        parents = list(dict.fromkeys(parents))
        first = not parents or (kind.nan and not any(e.nan for e in parents))
        number = self._add_value(kind.nan, parents, self._value_cause(operation, kind) if first else None)
        self._remember([x for x, k in kinds if k], number)

    def _record_messages(self, operation: WatchedOperation, results: Sequence[torch.Tensor]) -> None:
        """Record the values that are sent to other ranks, and expect values from them. These are recorded when read."""
        collective = self.collective_count()
        is_receive = "recv" in operation.name
        if not is_receive:
            self.graph.operands.setdefault(collective, []).extend(self._parent_edges(operation.arguments, operation))
        cause = self._value_cause(operation, _FINITE, with_inputs=False)

        def record_received(nan: bool) -> int:
            return self._add_value(nan, [], cause, collective)

        self._watch_memory(
            [*results, *operation.mutated_arguments, *(operation.arguments if is_receive else ())], record_received
        )

    def _record_early_read(self, operation: WatchedOperation) -> Callable[[bool], int]:
        """Return a function that records a read of uninitialized memory. It must not keep the tensors alive."""
        operation, cause = WatchedOperation(operation.name, [], [], []), list[ValueCause]()

        def record_read(nan: bool) -> int:
            cause[:] = cause or [self._value_cause(operation, _FINITE, with_inputs=False)]
            return self._add_value(nan, [], cause[0])

        return record_read

    # Memory.

    def _remember(self, xs: Sequence[torch.Tensor], number: int) -> None:
        for x in xs:
            memory = tensor_memory(x)
            self._regions.setdefault(memory.storage, []).append(_NonFiniteMemory(memory, number))

    def _watch_memory(self, xs: Sequence[torch.Tensor], record: Callable[[bool], int]) -> None:
        for x in xs:
            if is_real(x) and (x.is_floating_point() or x.is_complex()):
                memory = tensor_memory(x)
                self._regions.setdefault(memory.storage, []).append(_NonFiniteMemory(memory, -1, record))

    def _forget(self, x: torch.Tensor) -> None:
        """Forget the values in memory that is overwritten."""
        if is_real(x) and x.is_contiguous():
            memory = tensor_memory(x)
            self._prune_memories(memory.storage, lambda m: m.first < memory.first or m.stop > memory.stop)

    def _prune_memories(self, storage: int, keep: Callable[[Memory], bool]) -> list[_NonFiniteMemory]:
        regions = [r for r in self._regions.get(storage, ()) if not r.memory.is_freed and keep(r.memory)]
        if regions:
            self._regions[storage] = regions
        else:
            self._regions.pop(storage, None)
        return regions

    def _parent_edges(self, xs: Sequence[torch.Tensor], operation: WatchedOperation) -> list[Edge]:
        kinds = [(x, nonfinite_kind(x)) for x in xs]
        return [e for x, kind in kinds if kind for e in self._find_edges(x, kind, operation)]

    def _find_edges(self, x: torch.Tensor, kind: _Kind, operation: WatchedOperation) -> list[Edge]:
        """Return edges to the values that a non-finite tensor holds. Record a captured tensor as a new value."""
        memory = tensor_memory(x)
        regions = [
            r
            for r in self._prune_memories(memory.storage, lambda m: True)
            if r.memory.first < memory.stop and r.memory.stop > memory.first
        ]
        numbers = [r.number for r in regions if r.expected is None]
        if not numbers:
            expected = next((r.expected for r in reversed(regions) if r.expected is not None), None)
            numbers = [self._record_captured(kind, operation) if expected is None else expected(kind.nan)]
            self._remember([x], numbers[0])
        return [Edge(n, kind.nan and self.graph.values[n].nan) for n in numbers]

    # Causes.

    def _add_value(
        self, nan: bool, parents: list[Edge], cause: ValueCause | None, collective: int | None = None
    ) -> int:
        self.graph.values.append(NonFiniteValue(nan, parents, cause, collective))
        return len(self.graph.values) - 1

    def _record_captured(self, kind: _Kind, operation: WatchedOperation) -> int:
        """Record a tensor from before the call that is not an argument: one that a function captured."""
        cause = self._value_cause(operation, kind, with_inputs=False)
        leaf = "a tensor that the step captured, or keeps as a constant"
        is_intended = not kind.nan and not kind.above
        return self._add_value(kind.nan, [], ValueCause(**{**vars(cause), "leaf": leaf, "is_intended": is_intended}))

    def _event_order(self) -> tuple[int, int, int]:
        return self.collective_count() if self.rank is not None else 0, self.rank or 0, len(self.graph.values)

    def _value_cause(self, operation: WatchedOperation, kind: _Kind, with_inputs: bool = True) -> ValueCause:
        """Return what is known of the operation that made a value non-finite: its line, code and inputs."""
        site = current_call_site()
        file, _, number = site.line.rpartition(":")
        name = operation.name.split("::")[-1].strip("_")
        return ValueCause(
            order=self._event_order(),
            ranks=tuple(range(self.size)) if site.collective else self._current_rank(),
            operation=f"{name}, in a collective" if site.collective else name,
            value=str(kind),
            inputs=_format_inputs(operation) if with_inputs else "",
            line=site.line,
            code=linecache.getline(file, int(number)).strip() if number else "",
            backward=site.backward,
            is_intended=any(not math.isfinite(x) for x in operation.numbers) or "lift_fresh" in operation.name,
        )

    def _current_rank(self) -> tuple[int, ...]:
        """Return the rank that runs now, as a tuple; an empty one if it is not known."""
        if self.rank is not None:
            return (self.rank,)
        rank, axes = 0, bound_axes()
        for axis in axes:
            rank = rank * axis.size + axis.rank
        return (rank,) if axes or self.size == 1 else ()


def _format_inputs(operation: WatchedOperation) -> str:
    """Format the inputs of an operation: dtypes, shapes, ranges of finite values, and kinds of non-finite ones."""
    return ", ".join([_format_tensor(x) for x in operation.arguments[:3] if is_real(x)])


def _format_tensor(x: torch.Tensor) -> str:
    shape = format_tensor(x.dtype, x.shape)
    if not x.is_floating_point() or x.itemsize == 1:
        return shape
    finite: Any = x.detach()[torch.isfinite(x.detach())]
    parts = [f"{finite.min().item():.4g} to {finite.max().item():.4g}"] if finite.numel() else []
    if kind := nonfinite_kind(x):
        parts.append(str(kind))
    return f"{shape} of {' and '.join(parts)}"
