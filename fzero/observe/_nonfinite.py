"""nonfinite: run a step once, and report the cause of the first nan or infinity that reaches a result."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.watched import record_node_lines, watch_operations
from fzero._tracebacks import api_boundary
from fzero.collectives import record
from fzero.graph import Jitted, TrainStep, as_step
from fzero.observe._nonfinite_leaves import nonfinite_leaves
from fzero.observe._nonfinite_tracker import NonFiniteTracker
from fzero.observe._value_graph import ValueCause, ValueGraph, explain, pack, unpack
from fzero.ranks import Mesh, gather_texts

__all__ = ["FirstCause", "Nonfinite", "nonfinite"]


@dataclass(frozen=True)
class FirstCause:
    """The argument or the operation that made a non-finite value first.

    Attributes:
        ranks: the ranks that made it.
        leaf: the argument and the leaf that held it; "" if an operation made it.
        operation: the torch operation, such as "log"; "" if an argument held the value.
        value: "nan", "inf", "-inf", or several of them.
        inputs: the inputs of the operation: dtypes, shapes, ranges of finite values, and kinds of non-finite ones.
        line: the user's line, as "file:line"; "" if there is none. In a backward pass, it is the line of the forward
            operation.
        code: the text of that line.
        backward: the node of the backward pass, such as "SqrtBackward0"; "" in a forward pass.
    """

    ranks: tuple[int, ...]
    leaf: str
    operation: str
    value: str
    inputs: str
    line: str
    code: str
    backward: str

    @staticmethod
    def of(cause: ValueCause | None) -> "FirstCause | None":
        """Return the part of an cause that a report shows; None for None."""
        if cause is None:
            return None
        o = cause
        return FirstCause(
            ranks=o.ranks,
            leaf=o.leaf,
            operation=o.operation,
            value=o.value,
            inputs=o.inputs,
            line=o.line,
            code=o.code,
            backward=o.backward,
        )

    def lines(self, size: int) -> list[str]:
        """Return the cause as lines of text, for a mesh of `size` ranks."""
        prefix = f"{self.value} " if self.value else ""
        ranks = f" on {_format_ranks(self.ranks, size)}" if self.ranks and size > 1 else ""
        if self.leaf:
            cause = f"in {self.leaf}" + (f", first read by {self.operation}" if self.operation else "")
        else:
            cause = f"made by {self.operation}"
        lines = [f"{prefix}{cause}{ranks}"]
        if self.inputs:
            lines.append(f"  inputs: {self.inputs}")
        if self.backward:
            lines.append(f"  in the backward pass ({self.backward}) of")
        if self.line:
            lines.append(f"  {self.line}" + (f": {self.code}" if self.code else ""))
        return lines


def _format_ranks(ranks: tuple[int, ...], size: int) -> str:
    if len(ranks) == size:
        return f"all {size} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}"


@dataclass(frozen=True)
class Nonfinite:
    """The report of `fzero.observe.nonfinite`. Print it. It is true as a condition if a result is not finite.

    Attributes:
        name: the name of the step.
        size: the number of ranks.
        results: the paths of the results that are not finite.
        cause: the cause of the first non-finite value that reaches a result; None if all results are finite.
        nan_cause: the operation that made nan of an infinity of `cause`, if one did.
    """

    name: str
    size: int
    results: tuple[str, ...]
    cause: FirstCause | None
    nan_cause: FirstCause | None

    @property
    def rank(self) -> int | None:
        """The first rank that made the non-finite value; None if there is none."""
        return self.cause.ranks[0] if self.cause is not None and self.cause.ranks else None

    @property
    def finite(self) -> bool:
        """Whether all results are finite."""
        return not self.results

    def __bool__(self) -> bool:
        return not self.finite

    def __str__(self) -> str:
        if self.finite:
            return f"{self.name}: all results are finite"
        rest_text = f", and {len(self.results) - 3} more" if len(self.results) > 3 else ""
        lines = [f"{self.name}: not finite: {'; '.join(self.results[:3])}{rest_text}"]
        if self.cause is not None:
            lines += self.cause.lines(self.size)
        if self.nan_cause is not None:
            lines += ["and then " + self.nan_cause.lines(self.size)[0], *self.nan_cause.lines(self.size)[1:]]
        return "\n".join(lines)

    __repr__ = __str__


@api_boundary
def nonfinite(step: Callable[..., Any]) -> Callable[..., Nonfinite]:
    """Make a function that runs a step once, and reports the cause of the first nan or infinity that reaches a result.

    The step runs eagerly, and each operation is inspected. That is slow, and meant for a single step whose loss is not
    finite. Simulated ranks run in lockstep. In a distributed run all ranks must call the function, and get the same
    report. A mask of -inf is not reported unless it reaches a result. Random operations draw new numbers, unless they
    draw by key.

    Args:
        step: a sharded step, a jitted one (its uncompiled step runs), the result of `mesh.spmd`, or any function.

    Returns:
        A function of the step's arguments, which it does not change. It returns a `Nonfinite`: the rank, the argument
        or the operation, and your source line.

    Raises:
        TypeError: if `step` is not a function.
        RuntimeError: when called within a trace, or with a step on the mesh of a plan.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=2)
        >>> f = mesh.spmd(lambda x: fzero.collectives.pmean(x.log().sum()))
        >>> fzero.observe.nonfinite(f)(mesh.split(torch.tensor([1.0, 2.0, 3.0, -4.0])))
        <lambda>: not finite: result
        nan made by log on rank 1 of 2
          inputs: float32 [2] of -4 to 3
    """
    if not callable(step):
        raise TypeError(f"step={step!r}: expected a function")
    inner = as_step(step.step if isinstance(step, Jitted) else step)

    def find(*args: Any, **kwargs: Any) -> Nonfinite:
        """Run the step on the arguments, and return where its first non-finite values came from."""
        mesh = inner.mesh
        if is_tracing() or (mesh is not None and not (mesh.simulated or mesh.distributed)):
            raise RuntimeError("fzero.observe.nonfinite runs a step with real values: call it outside of jit and plan")
        graph = _record_value_graph(inner, args, kwargs)
        graphs = _gather_graphs(graph, mesh)
        results = tuple(dict.fromkeys([r.path for g in graphs for r in g.results]))
        explanation = explain(graphs)
        size = 1 if mesh is None else mesh.size
        return Nonfinite(
            inner.name,
            size=size,
            results=results,
            cause=FirstCause.of(explanation.cause),
            nan_cause=FirstCause.of(explanation.nan_cause),
        )

    return find


def _record_value_graph(step: TrainStep, args: Any, kwargs: Any) -> ValueGraph:
    """Run a step under a tracker, and return the graph of its non-finite values."""
    mesh = step.mesh
    if mesh is not None and mesh.simulated and mesh.simulation != "lockstep":
        step = step.on_mesh(replace(mesh, simulation="lockstep"))
    with record() as log:
        tracker = NonFiniteTracker(
            rank=mesh.rank if mesh is not None and mesh.distributed else None,
            size=1 if mesh is None else mesh.size,
            collective_count=lambda: len(log.events),
        )
        arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        for part in nonfinite_leaves(arguments, mesh):
            tracker.record_argument(part.value, tree.leaf_name("argument", part.path), part.ranks)
        with record_node_lines(), watch_operations(tracker.before, tracker.record_operation):
            out = step(*args, **kwargs)
        for part in nonfinite_leaves(out, mesh):
            tracker.record_result(part.value, tree.leaf_name("result", part.path))
    return tracker.graph


def _gather_graphs(graph: ValueGraph, mesh: Mesh | None) -> list[ValueGraph]:
    """Gather the graphs of all ranks."""
    if mesh is None or not mesh.distributed:
        return [graph]
    texts = gather_texts(json.dumps(pack(graph)), mesh, "fzero.observe.nonfinite")
    return [unpack(json.loads(text)) for text in texts]
