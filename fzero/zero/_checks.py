"""What a sharded step checks: its arguments and results, the optimizer, and the state."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import notice
from fzero._torch import is_tracing, storage_id
from fzero._torch.levels import is_wrapped
from fzero.axes import DEFAULT_RULES, LayoutRules, Stacked
from fzero.graph import other_memory, refuse_writes_into
from fzero.optim import check_pair, of_torch
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, abstract, check_cut_for, cut_units, facts, is_box
from fzero.tree import Tree

__all__ = [
    "as_value",
    "boxed",
    "check_arguments",
    "check_device",
    "check_no_torch_optimizer",
    "check_optimizer",
    "check_params",
    "check_results",
    "check_tree",
    "check_unwritten",
    "copied_from",
    "is_like",
    "noted",
]

# What a sharded step checks of its arguments and results: bad input is an error that names it.


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


# What a sharded step checks of the optimizer that it makes a state for, and of that state.


def check_optimizer(opt: Any, stage: int, on_shards: bool) -> None:
    """Check that an optimizer is a pair, and one that a stage can run: on shards only an elementwise one."""
    check_pair(opt, "init")
    elementwise = getattr(opt, "elementwise", None)  # a third-party pair does not say
    if not on_shards:
        return
    if elementwise is None:
        notice(
            f"fzero: {type(opt).__name__} does not say whether it is elementwise and is taken to be: "
            "fzero.testing.check_elementwise(opt) finds out"
        )
    if elementwise is False:
        raise ValueError(
            f"stage={stage} runs the optimizer on flat shards, and this one declares elementwise=False: "
            "it needs whole leaves; give them to it with optim.whole(opt), or use stage=0"
        )


def noted(make: Callable[[], Any]) -> Any:
    """Call `make()`, and add advice to the error of a pair that takes trees apart by itself."""
    try:
        return make()
    except ValueError as error:
        if "differs by rank" in str(error):
            error.add_note("A pair that takes trees apart by itself keeps unboxed state: wrap it, optim.leafwise(pair)")
        raise


def check_device(params: Any, opt_state: Any) -> None:
    """Check that no state was made without memory for parameters that have it."""
    if not any(x.is_meta for x in tree.tensors(params)):
        check_memory("opt_state", opt_state)


def check_memory(what: str, values: Any) -> None:
    """Check that no leaf of a tree is on the meta device, beside parameters that have values.

    Raises:
        ValueError: if one is. The message names it.
    """
    if not any(x.is_meta for x in tree.tensors(values)):
        return
    paths, leaves, _ = tree.flatten_with_paths(values)
    path = next(p for p, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor) and x.is_meta)
    raise ValueError(
        f"{what} leaf {path!r} is on the meta device, and the parameters have values: give step.init the module "
        "itself, or a function that makes zeros, and then read the parameters into what it returned"
    )


def check_no_torch_optimizer(train_step: Callable[..., Any]) -> None:
    """Check that a train step runs no optimizer of torch.optim, which would change nothing and say nothing.

    Raises:
        TypeError: if one is among what it refers to, and it calls a `step` or an `update`.
    """
    if not inspect.isfunction(train_step) or not {"step", "update"} & set(train_step.__code__.co_names):
        return
    seen = inspect.getclosurevars(train_step)
    for name, x in {**seen.globals, **seen.nonlocals}.items():
        if isinstance(x, torch.optim.Optimizer):
            raise TypeError(f"train_step calls {name!r}: {of_torch(x)}")


# Tensors as a step takes and gives them: without a graph of their own, in memory of their own, and like the old.


def as_value(x: Any) -> Any:
    """Return a tensor without its own `requires_grad`; a tensor that a graph or a transform made stays as it is."""
    own = isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf and not is_wrapped(x)
    return x.detach() if own else x


def copied_from(values: Tree) -> Callable[[Any], Any]:
    """Return a function that copies tensors that share memory with `values`, which a jitted step may overwrite."""
    lent = {storage_id(x) for x in tree.tensors(values)}
    return lambda x: x.clone() if isinstance(x, torch.Tensor) and storage_id(x) in lent else x


def is_like(x: Tree, y: Tree) -> bool:
    """Return whether two trees of tensors have one structure, and tensors of one shape and dtype at each place."""
    (xs, structure), (ys, other) = tree.flatten(x), tree.flatten(y)
    is_tree = not isinstance(x, torch.Tensor) and any(isinstance(a, torch.Tensor) for a in xs)
    return is_tree and structure == other and [tree.show(a) for a in xs] == [tree.show(b) for b in ys]
