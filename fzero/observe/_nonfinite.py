"""nonfinite: run a step once, and name where the first nan or infinity was made that reaches a result."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.watched import lines_of_nodes, watching
from fzero.collectives import record
from fzero.graph import Jitted, TrainStep, step_of
from fzero.observe._trail import Birth, Trail, Watch, explain, kind_of, packed, unpacked
from fzero.ranks import Mesh, gather_texts
from fzero.sharding import PerRank, Shard, axes_of, facts, is_box, own_path, prefix_of

__all__ = ["NonFiniteLeaf", "Nonfinite", "Origin", "nonfinite", "nonfinite_parts"]

# What of a tree is not finite: by leaf and rank, those in boxes too.


class NonFiniteLeaf(NamedTuple):
    """A leaf, or some ranks' part of one, that is not finite: its path, its value, and these ranks."""

    path: str
    value: torch.Tensor
    ranks: tuple[int, ...]


def nonfinite_parts(values: Any, mesh: Mesh | None) -> Iterator[NonFiniteLeaf]:
    """List the leaves of a step's arguments, or results, that are not finite."""
    everywhere = (0,) if mesh is None else (mesh.rank,) if mesh.distributed else tuple(range(mesh.size))
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    for path, x in zip(paths, entries, strict=True):
        if not is_box(x):
            found = [NonFiniteLeaf(path, x, everywhere)] if isinstance(x, torch.Tensor) else []
        elif mesh is None:  # boxes of a program's own ranks
            found = [NonFiniteLeaf(path, y, ()) for y in tree.tensors(x)]
        else:
            found = _parts(path, x, mesh)
        yield from [part for part in found if kind_of(part.value)]


def _parts(path: str, box: Any, mesh: Mesh) -> Iterator[NonFiniteLeaf]:
    """List the parts of a box by leaf and rank; in a simulation they are stacked."""
    paths, leaves, _ = tree.flatten_with_paths(box)
    for inner, x, axes in zip(paths, leaves, axes_of(box, mesh.axis_names), strict=True):
        if not isinstance(x, torch.Tensor) or not kind_of(x):
            continue
        # the path in a box begins with the place of its only child
        place = (
            ".".join([name for name in (path, inner.partition(".")[2]) if name]) if isinstance(box, PerRank) else path
        )
        ranks = [mesh.rank] if mesh.distributed else range(mesh.size)
        placed = [(_row(mesh, axes, rank), rank) for rank in ranks]
        for row, group in itertools.groupby(sorted(placed), key=lambda item: item[0]):
            mine = tuple([rank for _, rank in group])
            part = x if mesh.distributed or not axes else x[row]
            if isinstance(box, Shard):
                part, place = _in_unit(path, box, part, mesh, mine[0])
            yield NonFiniteLeaf(place, part, mine)


def _row(mesh: Mesh, axes: tuple[str, ...], rank: int) -> int:
    """Return a rank's place along axes, the first the slowest."""
    sizes, place = dict(mesh.shape), 0
    here = dict(zip(mesh.axis_names, mesh.coordinates(rank), strict=True))
    for name in axes:
        place = place * sizes[name] + here[name]
    return place


def _in_unit(path: str, box: Shard, x: torch.Tensor, mesh: Mesh, rank: int) -> tuple[torch.Tensor, str]:
    """Return a shard without its padding, and the path of the leaf that its first non-finite element belongs to."""
    known, paths = facts(box.uid), box.spec.paths
    start = _row(mesh, known.axes, rank) * known.shard_numel
    x = x[..., : max(known.numel - start, 0)]
    if not kind_of(x):
        return x, path
    first = start + int((~torch.isfinite(x)).flatten().nonzero()[0])
    index = sum([stop <= first for stop in known.offsets[1:]])
    prefix = prefix_of(path, paths[0])
    if prefix is None:
        return x, path
    places = dict(zip(mesh.axis_names, mesh.coordinates(rank), strict=True))
    return x, own_path(box.spec, index, prefix, places)


# The report on what is not finite in a step's results.


@dataclass(frozen=True)
class Origin:
    """Where a non-finite value was made.

    Attributes:
        ranks: the ranks that made it there.
        leaf: the argument and the path that it stood in; "" of what an operation made.
        operation: the operation of torch, such as "log"; "" of what stood in an argument.
        value: "nan", "inf", "-inf", or several of them.
        given: what the operation was given: dtypes, shapes, ranges of finite values, and what is not finite.
        line: the user's line, as "file:line"; "" where there is none. Of a backward pass, the forward operation's.
        code: the text of that line.
        backward: the node of a backward pass, such as "SqrtBackward0"; "" of a forward pass.
    """

    ranks: tuple[int, ...]
    leaf: str
    operation: str
    value: str
    given: str
    line: str
    code: str
    backward: str

    @staticmethod
    def of(birth: Birth | None) -> "Origin | None":
        """Return what the report keeps of a birth."""
        if birth is None:
            return None
        b = birth
        return Origin(b.ranks, b.leaf, b.operation, b.value, b.given, b.line, b.code, b.backward)

    def lines(self, size: int) -> list[str]:
        """Return it as lines of text, for a mesh of `size` ranks."""
        what = f"{self.value} " if self.value else ""
        place = f" on {_ranks(self.ranks, size)}" if self.ranks and size > 1 else ""
        if self.leaf:
            by = f"in {self.leaf}" + (f", first read by {self.operation}" if self.operation else "")
        else:
            by = f"made by {self.operation}"
        found = [f"{what}{by}{place}"]
        if self.given:
            found.append(f"  given {self.given}")
        if self.backward:
            found.append(f"  in the backward pass ({self.backward}) of")
        if self.line:
            found.append(f"  {self.line}" + (f": {self.code}" if self.code else ""))
        return found


def _ranks(ranks: tuple[int, ...], size: int) -> str:
    if len(ranks) == size:
        return f"all {size} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {size}"


@dataclass(frozen=True)
class Nonfinite:
    """What `fzero.observe.nonfinite` found. Print it; as a condition it is true if a result is not finite.

    Attributes:
        name: of the step.
        size: the number of ranks.
        results: the results that are not finite, by their places.
        origin: where the first non-finite value was made that reaches one of them; None if all are finite.
        became: where an infinity of `origin` became nan, if it did.
    """

    name: str
    size: int
    results: tuple[str, ...]
    origin: Origin | None
    became: Origin | None

    @property
    def rank(self) -> int | None:
        """The first rank that made it; None if there is none."""
        return self.origin.ranks[0] if self.origin is not None and self.origin.ranks else None

    @property
    def finite(self) -> bool:
        """Whether all results are finite."""
        return not self.results

    def __bool__(self) -> bool:
        return not self.finite

    def __str__(self) -> str:
        if self.finite:
            return f"{self.name}: all results are finite"
        more = f", and {len(self.results) - 3} more" if len(self.results) > 3 else ""
        lines = [f"{self.name}: not finite: {'; '.join(self.results[:3])}{more}"]
        if self.origin is not None:
            lines += self.origin.lines(self.size)
        if self.became is not None:
            lines += ["and then " + self.became.lines(self.size)[0], *self.became.lines(self.size)[1:]]
        return "\n".join(lines)

    __repr__ = __str__


def nonfinite(step: Callable[..., Any]) -> Callable[..., Nonfinite]:
    """Make a function that runs a step once, and says where the first nan or infinity was made that reaches a result.

    The step runs eagerly, and each operation is looked at. That is slow, and meant for one step: the one whose loss
    was no number. Simulated ranks run in lockstep. In a distributed run all ranks call it, and get the same report. A
    mask of -inf is not named unless it reaches a result. Random operations draw anew, unless they draw by key.

    Args:
        step: a sharded step, a jitted one (the step beneath it runs), what `mesh.spmd` made, or any function.

    Returns:
        A function of the step's arguments, which it leaves as they are. It returns a `Nonfinite`: the rank, the
        argument or the operation, and your source line.

    Raises:
        TypeError: if `step` is no function.
        RuntimeError: when called, if the code is traced, or the mesh is a plan's.

    Example:
        >>> import fzero, torch
        >>> mesh = fzero.mesh(dp=2)
        >>> f = mesh.spmd(lambda x: fzero.collectives.pmean(x.log().sum()))
        >>> fzero.observe.nonfinite(f)(mesh.split(torch.tensor([1.0, 2.0, 3.0, -4.0])))
        <lambda>: not finite: result
        nan made by log on rank 1 of 2
          given float32 [2] of -4 to 3
    """
    if not callable(step):
        raise TypeError(f"step is {step!r}: expected a function")
    given = step_of(step.step if isinstance(step, Jitted) else step)

    def find(*args: Any, **kwargs: Any) -> Nonfinite:
        mesh = given.mesh
        if is_tracing() or (mesh is not None and not (mesh.simulated or mesh.distributed)):
            raise RuntimeError("fzero.observe.nonfinite runs a step with real values: call it outside jit and plan")
        trail = _watched(given, args, kwargs)
        trails = _of_all(trail, mesh)
        results = tuple(dict.fromkeys([r.place for t in trails for r in t.results]))
        found = explain(trails)
        size = 1 if mesh is None else mesh.size
        return Nonfinite(given.name, size, results, Origin.of(found.origin), Origin.of(found.became))

    return find


def _watched(step: TrainStep, args: Any, kwargs: Any) -> Trail:
    """Run a step under the watch."""
    mesh = step.mesh
    if mesh is not None and mesh.simulated and mesh.simulation != "lockstep":
        step = step._on(replace(mesh, simulation="lockstep"))
    with record() as log:
        watch = Watch(
            rank=mesh.rank if mesh is not None and mesh.distributed else None,
            size=1 if mesh is None else mesh.size,
            meetings=lambda: len(log.order),
        )
        given = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        for part in nonfinite_parts(given, mesh):
            watch.argument(part.value, tree.place("argument", part.path), part.ranks)
        with lines_of_nodes(), watching(watch.before, watch.after):
            out = step(*args, **kwargs)
        for part in nonfinite_parts(out, mesh):
            watch.result(part.value, tree.place("result", part.path))
    return watch.trail


def _of_all(trail: Trail, mesh: Mesh | None) -> list[Trail]:
    """Exchange the ranks' trails."""
    if mesh is None or not mesh.distributed:
        return [trail]
    texts = gather_texts(json.dumps(packed(trail)), mesh, "fzero.observe.nonfinite")
    return [unpacked(json.loads(text)) for text in texts]
