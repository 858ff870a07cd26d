"""Run a rank program on a mesh: on this process's rank, or on simulated ranks (a batch dimension, or threads)."""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from fzero import tree
from fzero._notice import trouble_link
from fzero._torch import in_transform, is_old_function_error, quiet_vmap_fallback, storage_id
from fzero._torch.levels import unwrap, vmaps
from fzero._tracebacks import api_boundary
from fzero.axes import (
    DEFAULT_RULES,
    Axes,
    Axis,
    DiffersByRankError,
    LayoutRules,
    PerRankMemory,
    Scope,
    call_in_scope,
    check_replicated,
    differs_message,
    lockstep,
)
from fzero.ranks._mesh_shape import index_along
from fzero.sharding import PerRank, is_box, leaf_axes, unwrap_per_rank

if TYPE_CHECKING:
    from fzero.ranks._mesh import Mesh

__all__ = ["Spmd", "check_rank_dimension"]

_Names = tuple[str, ...]
_RankResult = tuple[list[Any], Any, list[_Names]]  # leaves, structure, and by leaf the axes along which it differs


@dataclass(frozen=True, eq=False)  # Dynamo of torch 2.11 hashes what it calls before it has its attributes
class Spmd:
    """A rank program on a mesh. Call it with the program's arguments.

    Attributes:
        mesh: the ranks.
        program: the function that each rank runs.
        default_axes: the axes that `axis=None` stands for in the program; None for the only axis.
        rules: the rules by which the program shards trees.
    """

    mesh: "Mesh"
    program: Callable[..., Any]
    default_axes: _Names | None = None
    rules: LayoutRules = DEFAULT_RULES

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on every rank."""
        if not self.mesh.simulated:
            return self._run_on_this_rank((args, kwargs))
        if self.mesh.simulation == "lockstep":
            return self._run_in_lockstep((args, kwargs))
        if torch.compiler.is_dynamo_compiling():
            return self._run_by_vmap((args, kwargs))
        try:
            with quiet_vmap_fallback():
                return self._run_by_vmap((args, kwargs))
        except RuntimeError as error:
            if _is_vmap_error(error, self.mesh):
                error.add_note(
                    "fzero: simulated ranks run under torch.vmap, which cannot run this operation or read its data "
                    'in Python; ranks in lockstep, fzero.mesh(..., simulate="lockstep"), and real processes can'
                )
            elif self.mesh.size > 1 and re.search(r"\b(shapes?|sizes?|dimensions?)\b", str(error)):
                error.add_note(
                    f"fzero: shapes in this message may include the {self.mesh.size} simulated ranks; with "
                    'fzero.mesh(..., simulate="lockstep") they are the shapes of one rank'
                )
            raise

    def _call(self, axes: tuple[Axis, ...], joint: tuple[Axis, ...], call: Any) -> Any:
        """Run the program for one rank in a scope of its axes."""
        args, kwargs = unwrap_per_rank(call)
        memory = (
            () if self.mesh.simulated or torch.compiler.is_dynamo_compiling() else _per_rank_memory(call, self.mesh)
        )
        leaves = tree.flatten(call, is_box)[0]
        boxes = [x for x in leaves if isinstance(x, PerRank)]
        plain_tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        scope = Scope(
            Axes(axes, joint, self.default_axes),
            self.rules,
            per_rank_memory=memory,
            splits=tuple([x.split for x in boxes]),
            sequence_lengths=_sequence_lengths(boxes or plain_tensors),
            device=self.mesh.device,
        )
        return call_in_scope(scope, lambda: self.program(*args, **kwargs))

    def _run_on_this_rank(self, call: Any) -> Any:
        axes, joint = self.mesh.bound_axes()
        out = self._call(axes, joint, call)
        return tree.map(lambda x: x, out)  # rebuilds boxes without their origin, which is valid within one step

    # One vmap per axis.

    def _run_by_vmap(self, call: Any) -> Any:
        """Run all ranks as batch dimensions: vmap each axis's token, and each argument that differs along the axis."""
        shape, names = self.mesh.shape, self.mesh.axis_names
        leaves, axes, structure = _flatten_arguments(call, self.mesh)
        leaves = [_unflatten_ranks(x, a, shape) for x, a in zip(leaves, axes, strict=True)]
        kinds = [kind for k in range(len(names) + 1) for kind in combinations(names, k)]  # ways to differ by rank
        results: list[_RankResult] = []
        run = self._vmap_program(structure, kinds, results)
        # with out_dims=None torch's vmap returns only values that no vmap has batched, including vmaps around the mesh;
        # under Dynamo there is no vmap around the mesh
        is_outermost = torch.compiler.is_dynamo_compiling() or not vmaps()
        is_unbatched = [not kind and is_outermost for kind in kinds]
        for name, size in reversed(shape):
            run = _map_over_axis(run, name, size, axes, kinds, is_unbatched)
        groups = dict(zip(kinds, run((), *leaves), strict=True))
        return _join_groups(groups, *results.pop())

    def _vmap_program(self, structure: Any, kinds: Sequence[_Names], results: list[_RankResult]) -> Callable[..., Any]:
        """Make the program of one rank of the vmaps, which returns its tensors by the axes along which they differ.

        A vmap returns tensors only: the program appends its full result to `results`.
        """
        names = self.mesh.axis_names

        def run_rank(tokens: tuple[torch.Tensor, ...], *leaves: Any) -> tuple[list[Any], ...]:
            sizes = zip(self.mesh.shape, tokens, strict=True)
            bound = tuple([Axis(name, size=n, group="", rank=0, token=t) for (name, n), t in sizes])
            out = self._call(bound, (), tree.unflatten(structure, list(leaves)))
            paths, out_leaves, out_structure = tree.flatten_with_paths(out)
            out_axes = leaf_axes(out, names)
            out_leaves = check_replicated(bound, paths, out_leaves, out_axes)
            results.append((out_leaves, out_structure, out_axes))
            return tuple([_tensors_along(kind, out_leaves, out_axes) for kind in kinds])

        return run_rank

    # Threads.

    def _run_in_lockstep(self, call: Any) -> Any:
        """Run the program for each rank as a thread, and stack the ranks' results."""
        if in_transform():
            raise RuntimeError(
                "ranks in lockstep are threads, and a torch.func transform around mesh.spmd does not reach into them: "
                'apply the transform inside the rank program, or leave out simulate="lockstep"'
            )
        leaves, axes, structure = _flatten_arguments(call, self.mesh)

        def run_rank(bound: tuple[Axis, ...], joint: tuple[Axis, ...]) -> Any:
            copies: dict[Any, Any] = {}  # tied arguments stay tied
            values = [_rank_value(x, a, bound, copies) for x, a in zip(leaves, axes, strict=True)]
            out = self._call(bound, joint, tree.unflatten(structure, values))
            return (*tree.flatten_with_paths(out), leaf_axes(out, self.mesh.axis_names))

        return _combine_ranks(self.mesh, lockstep.run(self.mesh.shape, run_rank))


def _is_vmap_error(error: RuntimeError, mesh: "Mesh") -> bool:
    """Return whether only vmap refuses the program, so that ranks in lockstep can run it."""
    if is_old_function_error(error):
        return False
    text = str(error)  # torch has no types for these
    # an in-place write of a value that differs by rank into one that does not: [*shape] and [ranks, *shape]
    match = re.match(r"output with shape \[(.*)\] doesn't match the broadcast shape \[(\d+)(?:, )?(.*)\]", text)
    in_place = match is not None and match[1] == match[3] and int(match[2]) in [size for _, size in mesh.shape]
    if "Cannot access data pointer of Tensor that doesn't have storage" in text:  # numpy(), or tolist()
        return True
    return in_place or "vmap" in text or "Batching rule not implemented" in text


def _unflatten_ranks(x: Any, axes: _Names, shape: Iterable[tuple[str, int]]) -> Any:
    """Give a value that differs along several axes one dimension for each in place of dimension 0."""
    return x.unflatten(0, [size for name, size in shape if name in axes]) if len(axes) > 1 else x


def _tensors_along(kind: _Names, leaves: Sequence[Any], axes: Sequence[_Names]) -> list[torch.Tensor]:
    """List the tensors of a result that differ along the axes of a kind, and no other."""
    return [x for x, a in zip(leaves, axes, strict=True) if a == kind and isinstance(x, torch.Tensor)]


def _join_groups(
    groups: Mapping[_Names, Sequence[torch.Tensor]], leaves: Sequence[Any], structure: Any, axes: Sequence[_Names]
) -> Any:
    """Put the tensors that the vmaps returned, by the axes along which they differ, in place of a rank's leaves."""
    tensors = {kind: iter(group) for kind, group in groups.items()}
    out = []
    for x, a in zip(leaves, axes, strict=True):
        y = next(tensors[a]) if isinstance(x, torch.Tensor) else x
        out.append(y.flatten(0, len(a) - 1) if len(a) > 1 else y)
    return tree.unflatten(structure, out)


def _map_over_axis(
    run: Callable[..., Any],
    name: str,
    size: int,
    axes: Sequence[_Names],
    kinds: Sequence[_Names],
    is_unbatched: Sequence[bool],
) -> Any:
    """Map a program over one more axis: the axis's token, and arguments and groups of results that differ along it.

    Groups that are `is_unbatched` are returned once, not once per rank.
    """

    def over_axis(tokens: tuple[torch.Tensor, ...], *leaves: Any) -> Any:
        """Run the program for all ranks along one more axis, as a vmap over their tokens."""
        groups = torch.vmap(
            lambda token, *xs: run((*tokens, token), *xs),
            in_dims=(0, *[0 if name in a else None for a in axes]),
            out_dims=tuple([None if unbatched else 0 for unbatched in is_unbatched]),  # pyright: ignore[reportArgumentType]
            randomness="different",
        )(torch.arange(size, device=_simulation_device(leaves)), *leaves)
        return tuple(
            [
                [x[0] for x in group] if not unbatched and name not in kind else group
                for group, kind, unbatched in zip(groups, kinds, is_unbatched, strict=True)
            ]
        )

    return over_axis


def _simulation_device(leaves: Iterable[Any]) -> torch.device:
    """Return the accelerator on which simulated ranks lie, or the CPU."""
    devices = [x.device for x in leaves if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta")]
    return devices[0] if devices else torch.device("cpu")


def _rank_value(x: Any, axes: _Names, bound: tuple[Axis, ...], copies: dict[Any, Any]) -> Any:
    """Copy a rank's row of a stacked leaf, or a plain leaf, since a rank may write into its arguments."""
    if not axes and isinstance(x, torch.nn.Module | torch.Tensor):
        if id(x) not in copies:
            copies[id(x)] = x.clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x)
        return copies[id(x)]
    sizes, coordinates = {a.name: a.size for a in bound}, {a.name: a.rank for a in bound}
    row = index_along(sizes, coordinates, [name for name in sizes if name in axes])
    return x[row].clone() if isinstance(x, torch.Tensor) else x


def _combine_ranks(mesh: "Mesh", results: list[Any]) -> Any:
    """Combine the ranks' results: values that differ by rank are stacked, and all other values must be equal."""
    paths, leaves, structure, axes = results[0]
    for r, (_, _, rank_structure, other_axes) in enumerate(results):
        if rank_structure != structure or other_axes != axes:
            raise lockstep.DivergedError(
                f"ranks diverged: rank {r} returned {rank_structure}, but rank 0 returned {structure}; all ranks must "
                "return results of one structure"
            )
    out = []
    for i, (path, x, a) in enumerate(zip(paths, leaves, axes, strict=True)):
        rows: dict[tuple[int, ...], tuple[int, Any]] = {}  # coordinates along the leaf's axes -> a rank, its value
        for r, result in enumerate(results):
            row = tuple([c for c, name in zip(mesh.coordinates(r), mesh.axis_names, strict=True) if name in a])
            first, y = rows.setdefault(row, (r, result[1][i]))
            if not lockstep.are_equal(y, result[1][i]):
                how = f": ranks {first} and {r} have {_show_difference(y, result[1][i])}"
                raise DiffersByRankError(differs_message(path, a, how), result_path=path)
        values = [y for _, (_, y) in sorted(rows.items())]
        if a and any(tree.show(y) != tree.show(values[0]) for y in values):
            values_text = ", ".join([tree.show(y) for y in values])
            raise ValueError(
                f"{tree.leaf_name('result', path)} has another shape on each rank: {values_text}; pad it to one shape"
                f"{trouble_link('shapes-that-change')}"
            )
        out.append(torch.stack(values) if a and isinstance(x, torch.Tensor) else x)
    return tree.unflatten(structure, out)


def _show_difference(x: Any, y: Any) -> str:
    """Show how two values differ, by the first elements that differ."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or tree.show(x) != tree.show(y):
        return f"{tree.show(x)} and {tree.show(y)}"
    i = int((x != y).flatten().nonzero()[0])
    text = f"{x.flatten()[i].item()} and {y.flatten()[i].item()}"
    return text if x.numel() == 1 else f"{text} at element {i}"


def _flatten_arguments(call: Any, mesh: "Mesh") -> tuple[list[Any], list[_Names], Any]:
    """Flatten the arguments of a simulation, and check that values that differ by rank are stacked over the ranks."""
    paths, leaves, structure = tree.flatten_with_paths(call)
    axes = leaf_axes(call, mesh.axis_names)
    for path, x, a in zip(paths, leaves, axes, strict=True):
        if a:
            label = tree.leaf_name("argument", path.split(".", 1)[1])
            if not isinstance(x, torch.Tensor):
                raise TypeError(
                    f"{label} is {tree.show(x)}: a value that differs by rank must be a tensor; pass "
                    "torch.as_tensor(x) of it, or, if it is equal on all ranks, pass it without the box"
                )
            check_rank_dimension(x, label, mesh, a)
    return leaves, axes, structure


def check_rank_dimension(x: torch.Tensor, label: str, mesh: "Mesh", axes: _Names) -> None:
    """Check that dimension 0 of a value that differs along `axes` is the rank."""
    size = math.prod([n for name, n in mesh.shape if name in axes])
    if x.ndim == 0 or x.shape[0] != size:
        along = "" if axes == mesh.axis_names else f" along {', '.join(axes)}"
        raise ValueError(
            f"{label} is {list(x.shape)}: in a simulation dimension 0 of a value that differs by rank is the rank, "
            f"and {mesh!r} has {size}{along}; split a batch with mesh.split(batch); gather parameters "
            "and state with the step that sharded them, then pass them to step.partition(full, like=...) of this mesh"
        )


def _sequence_lengths(trees: Iterable[Any]) -> tuple[int, ...]:
    """Return the sizes of integers in trees besides that of samples, such as of tokens `[samples, tokens]`."""
    integers = [x for t in trees for x in tree.tensors(t) if not x.is_floating_point() and not x.is_complex()]
    return tuple([size for x in integers for size in x.shape[1:]])  # no set: hashes decide on a symbolic length


def _per_rank_memory(call: Any, mesh: "Mesh") -> tuple[PerRankMemory, ...]:
    """List the memory of the arguments in `PerRank` boxes, whose values belong to this rank."""
    boxes = [x for x in tree.flatten(call, is_box)[0] if isinstance(x, PerRank)]
    return tuple(
        [
            PerRankMemory(storage_id(unwrap(x)), leaf_axes(box, mesh.axis_names)[0])
            for box in boxes
            for x in tree.tensors(box)
        ]
    )
