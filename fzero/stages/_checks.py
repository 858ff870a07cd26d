"""What a sharded step checks of its arguments and results: bad input is an error that names it."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import notice
from fzero._torch import is_tracing
from fzero.axes.rules import DEFAULT_RULES, LayoutRules, Stacked
from fzero.graph.trace._writes import other_memory, refuse_writes_into
from fzero.layout.boxes import PerRank, Shard, is_box
from fzero.layout.segments import abstract
from fzero.layout.spec import check_cut_for, facts
from fzero.layout.units import cut_units
from fzero.ranks.mesh import Mesh

__all__ = ["boxed", "check_arguments", "check_params", "check_results", "check_tree", "check_unwritten"]


def boxed(values: Any) -> bool:
    """Return whether a tree holds units that are sharded."""
    return any(isinstance(x, Shard) and facts(x.uid).axes for x in tree.flatten(values, is_box)[0])


def check_tree(values: Any, mesh: Mesh) -> None:
    """Check that the boxes of a tree were cut for this mesh, and that it holds whole units."""
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    cut_units(paths, entries)
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            check_cut_for(x.uid, f"leaf {path!r}", mesh.shape)


def check_arguments(
    call: tuple[Sequence[Any], dict[str, Any]], mesh: Mesh, averaged: Sequence[str], rules: LayoutRules = DEFAULT_RULES
) -> None:
    """Check that boxes were cut for this step, and note it when no argument differs by rank.

    Args:
        call: the arguments.
        mesh: the ranks.
        averaged: the axes that the step averages over.
        rules: how it cuts trees.
    """
    paths, entries, _ = tree.flatten_with_paths(call, is_box)
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            where = tree.place("argument", path.split(".", 1)[1])
            check_cut_for(x.uid, where, mesh.shape)
            _check_stacked(where, x, mesh, rules)
    check_means(entries, averaged, rules.apart)
    ranks = math.prod([size for name, size in mesh.shape if name not in rules.apart])
    if ranks > 1 and not torch.compiler.is_dynamo_compiling() and not any(isinstance(x, PerRank) for x in entries):
        notice(
            "fzero.shard: no argument of the step differs by rank, so every rank computes the same: cut the global "
            "batch with mesh.split(batch), or wrap what each rank loaded with mesh.local(batch)"
        )


def _check_stacked(where: str, x: Shard, mesh: Mesh, rules: LayoutRules) -> None:
    """Check that each rank has the items of a stacked list that this step's rules give it."""
    for s in facts(x.uid).split:
        if s.stacked is None or not rules.stacks:
            continue
        places = [f"{s.stacked.key}.{i}." for i in range(len(s.stacked.items))]
        wanted = rules.stacked(places, dict(mesh.shape)).get(s.axis)
        if wanted != s.stacked:
            raise ValueError(
                f"{where} is of the list {s.stacked.key!r}, which was stacked with the items {_rows(s.stacked)} on the "
                f"ranks along {s.axis!r}, and this step has there {_rows(wanted)}: unstack it with the loss that "
                "stacked it, or save it and load it into a state of this step"
            )


def _rows(stacked: Stacked | None) -> str:
    """Show which items each rank has."""
    return "none" if stacked is None else str([list(row) for row in zip(*stacked.items, strict=True)])


def check_means(entries: Sequence[Any], averaged: Sequence[str], apart: Sequence[str] = ()) -> None:
    """Check that no leaf is split along an axis that the step averages over, and along which no data differ.

    Its gradient would be divided by the axis's ranks, and summed over none. Ranks along the axes `apart` have no data
    of their own, and are to be averaged over.
    """
    batches = [x for x in entries if isinstance(x, PerRank)]
    differ = [name for name in averaged if name in apart or any(x.axes is None or name in x.axes for x in batches)]
    for x in entries if batches else ():
        for split in facts(x.uid).split if isinstance(x, Shard) else ():
            if split.axis in averaged and split.axis not in differ:
                wanted = f"axis={tuple(differ)!r}" if differ else "such as axis='dp' of fzero.mesh(dp=1, ...)"
                own = tuple([name for name in averaged if name not in apart and name in (*differ, split.axis)])
                raise ValueError(
                    f"the step averages over {split.axis!r}, along which {x!r} is split and no argument differs: where "
                    f"its ranks share one batch, as along tp, leave it out of the mean, fzero.shard(..., {wanted}); "
                    f"where each has its own, as along ep, split the batch over it, too, mesh.split(batch, {own!r})"
                )


def check_params(args: Sequence[Any], positions: Sequence[int], stage: int, sharded: bool, rules: LayoutRules) -> None:
    """Check that parameters have the stage's layout between steps."""
    for i in positions:
        if i >= len(args):
            hint = "" if args else ": a step, fzero.plan and step.plan take what train_step takes"
            raise ValueError(
                f"params={tuple(positions)}: the step was called with {len(args)} positional arguments{hint}"
            )
        if _is_state(args[i]):
            raise TypeError(
                f"argument {i} (parameters) is the state of an optimizer, {_named(args[i])}: give a step its arguments "
                "in train_step's order; fzero.shard(..., params=1) says that parameters are not the first"
            )
        if isinstance(args[i], torch.nn.Module):
            raise TypeError(
                f"argument {i} (parameters) is a module, and a step takes a tree of tensors: params, opt_state = "
                "step.init(module, opt), and apply = fzero.nn.functional(module).apply for the loss"
            )
        if sharded and not boxed(args[i]) and _has_a_unit(args[i], rules):
            raise ValueError(
                f"argument {i} (parameters) is plain, and stage {stage} takes it cut: "
                "params, opt_state = step.init(params, opt); what a step of another stage trained by "
                "step.partition(params)"
            )
        if not sharded and boxed(args[i]):
            raise ValueError(
                f"argument {i} (parameters) is cut, and stage {stage} takes it plain: gather it with the step "
                "that cut it, then step.init"
            )


def _is_state(values: Any) -> bool:
    """Return whether a value is what an optimizer of fzero, or a chain of them, keeps."""
    if type(values) is tuple:
        return any(_is_state(x) for x in values)
    return isinstance(values, tuple) and type(values).__module__.startswith("fzero.optim.")


def _named(values: Any) -> str:
    return f"({', '.join(map(_named, values))})" if type(values) is tuple else type(values).__name__


def _has_a_unit(params: Any, rules: LayoutRules) -> bool:
    """Return whether rules are known, outside the mesh, to cut some leaf of a plain tree."""
    rule = rules.units
    if rules.over is not None:  # it may name no axis
        return False
    paths, leaves, _ = tree.flatten_with_paths(params)
    return any(
        isinstance(x, torch.Tensor) and x.is_floating_point() and (rule is None or rule(path, x) is not None)
        for path, x in zip(paths, leaves, strict=True)
    )


def check_unwritten(cut: Sequence[Any], positions: Sequence[int]) -> None:
    """Check that a step that is traced has not written into the shards that its parameters were cut into.

    A trace finds writes into arguments by itself, and these shards are none.
    """
    if torch.compiler.is_dynamo_compiling() or not is_tracing():
        return
    for i in positions:
        shards = [x for x in tree.flatten(cut[i], is_box)[0] if isinstance(x, Shard)]
        refuse_writes_into([(f"argument {i}, unit {x.spec.unit!r}", x.data) for x in shards])
        for x in shards:
            # not written, and yet no longer what it was; a unit over no axis was not cut, and is the argument itself
            if x.origin is None and facts(x.uid).axes:
                raise RuntimeError(other_memory(f"argument {i}, unit {x.spec.unit!r}"))


def check_results(args: Sequence[Any], out: Any, positions: Sequence[int]) -> None:
    """Check that new parameters are like the old, so that the next step can take them."""
    results = out if isinstance(out, tuple) else (out,)
    for i in positions:
        what = f"result {i} is not like argument {i} (parameters)"
        if i >= len(results):
            raise ValueError(
                f"params={tuple(positions)}: the step returned {len(results)} results; new parameters are expected "
                "at the positions of the old"
            )
        # a step may have gathered its parameters itself: then they are like the whole ones
        old = abstract(args[i], parts=True) if boxed(args[i]) and not boxed(results[i]) else args[i]
        try:
            tree.leaves_up_to(old, results[i])
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error
        paths, before, _ = tree.flatten_with_paths(old, is_box)
        after = tree.leaves_up_to(old, results[i], is_box)
        for path, x, y in zip(paths, before, after, strict=True):
            x, y = (v.data if isinstance(v, Shard) else v for v in (x, y))
            if isinstance(x, torch.Tensor) and not (
                isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype
            ):
                raise ValueError(
                    f"{what}: leaf {path!r} was {tree.show(x)} and became {tree.show(y)}; "
                    "fzero.optim.apply_updates keeps dtypes and shapes"
                )
