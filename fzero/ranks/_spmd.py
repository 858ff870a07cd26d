"""How a rank program runs on a mesh: on this process's rank, or on all ranks as a batch dimension, or as threads."""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from fzero import tree
from fzero._notice import see
from fzero._torch import in_transform, quiet_vmap_fallback, storage_id
from fzero._torch.levels import unwrapped, vmaps
from fzero.axes import (
    DEFAULT_RULES,
    Axes,
    Axis,
    LayoutRules,
    OwnMemory,
    Scope,
    check_replicated,
    differs,
    lockstep,
    within,
)
from fzero.sharding import PerRank, axes_of, is_box, own_values

__all__ = ["Spmd", "check_stacked"]

Names = tuple[str, ...]


@dataclass(frozen=True)
class Spmd:
    """A rank program on a mesh: call it with the program's arguments.

    Attributes:
        mesh: the ranks.
        program: what each runs.
        default: the axes that `axis=None` means in it; None for the only one.
        rules: how it cuts trees.
    """

    mesh: Any
    program: Callable[..., Any]
    default: Names | None = None
    rules: LayoutRules = DEFAULT_RULES

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on every rank."""
        if not self.mesh.simulated:
            return self._on_this_rank((args, kwargs))
        if self.mesh.simulation == "lockstep":
            return self._in_lockstep((args, kwargs))
        if torch.compiler.is_dynamo_compiling():
            return self._by_vmap((args, kwargs))
        try:
            with quiet_vmap_fallback():
                return self._by_vmap((args, kwargs))
        except RuntimeError as error:
            if _is_of_vmap(str(error), self.mesh):
                error.add_note(
                    "fzero: simulated ranks run under torch.vmap, which cannot run this operation or read its data "
                    'in Python; ranks in lockstep can: fzero.mesh(..., simulate="lockstep"), and so can real processes'
                )
            elif self.mesh.size > 1 and re.search(r"\b(shapes?|sizes?|dimensions?)\b", str(error)):
                error.add_note(
                    f"fzero: sizes in this message may count the {self.mesh.size} simulated ranks, too: "
                    'fzero.mesh(..., simulate="lockstep") has those of one rank'
                )
            raise

    def _call(self, axes: tuple[Axis, ...], joint: tuple[Axis, ...], call: Any) -> Any:
        args, kwargs = own_values(call)
        own = () if self.mesh.simulated or torch.compiler.is_dynamo_compiling() else _own_memory(call, self.mesh)
        scope = Scope(Axes(axes, joint, self.default), self.rules, own=own)
        return within(scope, lambda: self.program(*args, **kwargs))

    def _on_this_rank(self, call: Any) -> Any:
        axes, joint = self.mesh.bound_axes()
        out = self._call(axes, joint, call)
        return tree.map(lambda x: x, out)  # boxes forget their origin, which lives within one step

    # ------------------------------------------------------------ one vmap an axis

    def _by_vmap(self, call: Any) -> Any:
        """Run all ranks as batch dimensions: over each axis's token, and over whatever differs along it."""
        shape, names = self.mesh.shape, self.mesh.axis_names
        leaves, axes, structure = _checked_leaves(call, self.mesh)
        leaves = [
            x.unflatten(0, [size for name, size in shape if name in a]) if len(a) > 1 else x
            for x, a in zip(leaves, axes, strict=True)
        ]
        kinds = [kind for k in range(len(names) + 1) for kind in combinations(names, k)]  # ways to differ by rank
        result: list[Any] = []

        def rank(tokens: tuple[torch.Tensor, ...], *leaves: Any) -> tuple[list[Any], ...]:
            bound = tuple([Axis(name, n, "", 0, t) for (name, n), t in zip(shape, tokens, strict=True)])
            out = self._call(bound, (), tree.unflatten(structure, list(leaves)))
            paths, out_leaves, out_structure = tree.flatten_with_paths(out)
            out_axes = axes_of(out, names)
            out_leaves = check_replicated(bound, paths, out_leaves, out_axes)
            result.append((out_leaves, out_structure, out_axes))
            return tuple(
                [
                    [x for x, a in zip(out_leaves, out_axes, strict=True) if a == kind and isinstance(x, torch.Tensor)]
                    for kind in kinds
                ]
            )

        run: Callable[..., Any] = rank
        # torch lets a vmap return without a dimension only what no vmap has batched, one around the world included;
        # under Dynamo none is around it
        alone = torch.compiler.is_dynamo_compiling() or not vmaps()
        whole = [not kind and alone for kind in kinds]
        for name, size in reversed(shape):
            run = _vmapped(run, name, size, axes, kinds, whole)
        groups = [iter(group) for group in run((), *leaves)]
        out_leaves, out_structure, out_axes = result.pop()
        out = []
        for x, a in zip(out_leaves, out_axes, strict=True):
            y = next(groups[kinds.index(a)]) if isinstance(x, torch.Tensor) else x
            out.append(y.flatten(0, len(a) - 1) if len(a) > 1 else y)
        return tree.unflatten(out_structure, out)

    # ------------------------------------------------------------ threads

    def _in_lockstep(self, call: Any) -> Any:
        if in_transform():
            raise RuntimeError(
                "ranks in lockstep are threads, which a transform of torch.func around the whole world cannot see: "
                'transform inside the rank program, or leave out simulate="lockstep"'
            )
        leaves, axes, structure = _checked_leaves(call, self.mesh)

        def rank(bound: tuple[Axis, ...], joint: tuple[Axis, ...]) -> Any:
            copies: dict[Any, Any] = {}  # what is one object stays one
            own = [_own(x, a, bound, copies) for x, a in zip(leaves, axes, strict=True)]
            out = self._call(bound, joint, tree.unflatten(structure, own))
            return (*tree.flatten_with_paths(out), axes_of(out, self.mesh.axis_names))

        return _together(self.mesh, lockstep.run(self.mesh.shape, rank))


def _is_of_vmap(error: str, mesh: Any) -> bool:
    """Return whether only vmap refuses what a program does, so that ranks in lockstep can do it."""
    if "setup_context" in error:  # an autograd.Function that no transform of torch.func takes
        return False
    # what differs by rank, to be written into what does not: a rank's shape, and the ranks' shape
    found = re.match(r"output with shape \[(.*)\] doesn't match the broadcast shape \[(\d+)(?:, )?(.*)\]", error)
    in_place = found is not None and found[1] == found[3] and int(found[2]) in [size for _, size in mesh.shape]
    return in_place or "vmap" in error


def _vmapped(
    run: Callable[..., Any],
    name: str,
    size: int,
    axes: Sequence[Names],
    kinds: Sequence[Names],
    whole: Sequence[bool],
) -> Any:
    """Map a program over one more axis: its token, and the arguments and groups of results that differ along it.

    Groups that are `whole` are returned as they are, and not once for each rank.
    """

    def over_axis(tokens: tuple[torch.Tensor, ...], *leaves: Any) -> Any:
        groups = torch.vmap(
            lambda token, *xs: run((*tokens, token), *xs),
            in_dims=(0, *[0 if name in a else None for a in axes]),
            out_dims=tuple([None if one else 0 for one in whole]),  # pyright: ignore[reportArgumentType]
            randomness="different",
        )(torch.arange(size), *leaves)
        return tuple(
            [
                [x[0] for x in group] if not one and name not in kind else group
                for group, kind, one in zip(groups, kinds, whole, strict=True)
            ]
        )

    return over_axis


def _own(x: Any, axes: Names, bound: tuple[Axis, ...], copies: dict[Any, Any]) -> Any:
    """Copy a rank's own piece of a stacked leaf, or a plain one: a rank may write into what it is given."""
    if not axes and isinstance(x, torch.nn.Module | torch.Tensor):
        if id(x) not in copies:
            copies[id(x)] = x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x)
        return copies[id(x)]
    place = 0
    for a in bound:
        if a.name in axes:
            place = place * a.size + a.rank
    return x[place].clone() if isinstance(x, torch.Tensor) else x


def _together(mesh: Any, ranks: list[Any]) -> Any:
    """Put the ranks' results together: what differs by rank is stacked, and everything else must be equal."""
    paths, leaves, structure, axes = ranks[0]
    for r, (_, _, other, other_axes) in enumerate(ranks):
        if other != structure or other_axes != axes:
            raise lockstep.DivergedError(
                f"ranks diverged: rank {r} returned {other}, and rank 0 returned {structure}; all ranks return "
                "results of one structure"
            )
    out = []
    for i, (path, x, a) in enumerate(zip(paths, leaves, axes, strict=True)):
        found: dict[tuple[int, ...], tuple[int, Any]] = {}  # coordinates along the leaf's axes -> a rank, its value
        for r, rank in enumerate(ranks):
            here = tuple([c for c, name in zip(mesh.coordinates(r), mesh.axis_names, strict=True) if name in a])
            first, y = found.setdefault(here, (r, rank[1][i]))
            if not lockstep.same(y, rank[1][i]):
                raise ValueError(differs(path, a, f": ranks {first} and {r} have {_apart(y, rank[1][i])}"))
        values = [y for _, (_, y) in sorted(found.items())]
        if a and any(tree.show(y) != tree.show(values[0]) for y in values):
            shown = ", ".join([tree.show(y) for y in values])
            raise ValueError(
                f"{tree.place('result', path)} has another shape on each rank: {shown}; pad it to one"
                f"{see('shapes-that-change')}"
            )
        out.append(torch.stack(values) if a and isinstance(x, torch.Tensor) else x)
    return tree.unflatten(structure, out)


def _apart(x: Any, y: Any) -> str:
    """Show how two values differ: the first elements that do."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or tree.show(x) != tree.show(y):
        return f"{tree.show(x)} and {tree.show(y)}"
    place = int((x != y).flatten().nonzero()[0])
    shown = f"{x.flatten()[place].item()} and {y.flatten()[place].item()}"
    return shown if x.numel() == 1 else f"{shown} at element {place}"


# ---------------------------------------------------------------- arguments


def _checked_leaves(call: Any, mesh: Any) -> tuple[list[Any], list[Names], Any]:
    """Flatten the arguments of a simulation, checking that what differs by rank is stacked over the ranks."""
    paths, leaves, structure = tree.flatten_with_paths(call)
    axes = axes_of(call, mesh.axis_names)
    for path, x, a in zip(paths, leaves, axes, strict=True):
        if a:
            where = tree.place("argument", path.split(".", 1)[1])
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{where} is {x!r}: what differs by rank must be a tensor")
            check_stacked(x, where, mesh, a)
    return leaves, axes, structure


def check_stacked(x: torch.Tensor, what: str, mesh: Any, axes: Names) -> None:
    """Check that dimension 0 of what differs along `axes` is the rank."""
    size = math.prod([n for name, n in mesh.shape if name in axes])
    if x.ndim == 0 or x.shape[0] != size:
        along = "" if axes == mesh.axis_names else f" along {', '.join(axes)}"
        raise ValueError(
            f"{what} is {list(x.shape)}: in a simulation dimension 0 of what differs by rank is the rank, "
            f"and {mesh!r} has {size}{along}; make it with mesh.split or step.init on this mesh"
        )


def _own_memory(call: Any, mesh: Any) -> tuple[OwnMemory, ...]:
    """List what of the arguments is this rank's own."""
    boxes = [x for x in tree.flatten(call, is_box)[0] if isinstance(x, PerRank)]
    return tuple(
        [
            OwnMemory(storage_id(unwrapped(x)), axes_of(box, mesh.axis_names)[0])
            for box in boxes
            for x in tree.tensors(box)
        ]
    )
