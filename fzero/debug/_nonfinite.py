"""nonfinite: run a step once, and name where the first nan or infinity was made that reaches a result."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.watched import lines_of_nodes, watching
from fzero.collectives._record import record
from fzero.debug._leaves import nonfinite_parts
from fzero.debug._report import Nonfinite, Origin
from fzero.debug._trail import Trail, explain, packed, unpacked
from fzero.debug._watch import Watch
from fzero.graph._jit import Jitted
from fzero.graph._step import TrainStep, step_of
from fzero.ranks.mesh import Mesh
from fzero.ranks.texts import gather_texts

__all__ = ["nonfinite"]


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
        >>> f = mesh.spmd(lambda x: fzero.pmean(x.log().sum()))
        >>> fzero.debug.nonfinite(f)(mesh.split(torch.tensor([1.0, 2.0, 3.0, -4.0])))
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
            raise RuntimeError("fzero.debug.nonfinite runs a step with real values: call it outside jit and plan")
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
    texts = gather_texts(json.dumps(packed(trail)), mesh, "fzero.debug.nonfinite")
    return [unpacked(json.loads(text)) for text in texts]
