"""Checks of a call of a sharded step: its arguments and results."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._arguments import did_you_mean
from fzero._notice import warn_once
from fzero._torch import is_tracing
from fzero._torch.levels import is_wrapped
from fzero._tracebacks import is_message
from fzero.axes import DEFAULT_RULES, DiffersByRankError, LayoutRules, StackedList
from fzero.graph import other_memory, refuse_writes_into
from fzero.optim import has_role, is_opt_state, role_of
from fzero.ranks import Mesh
from fzero.sharding import PerRank, Shard, abstract, check_sharded_for, is_box, sharded_units, spaces, traced_spec
from fzero.tree import Tree
from fzero.zero._stages import stage_layouts

__all__ = [
    "as_value",
    "check_arguments",
    "check_params",
    "check_results",
    "check_tree",
    "check_unwritten",
    "dtype_notes",
    "explain_error",
    "is_like",
]


def _is_sharded(values: Any) -> bool:
    """Return whether a tree holds units that are sharded over some axis."""
    return any(isinstance(x, Shard) and traced_spec(x.spec_id).axes for x in tree.flatten(values, is_box)[0])


def check_tree(values: Any, mesh: Mesh) -> None:
    """Check that the boxes of a tree were sharded for this mesh, and that it holds whole units."""
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    sharded_units(paths, entries)
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            check_sharded_for(x.spec_id, f"leaf {path!r}", mesh.shape)


def check_arguments(
    call: tuple[Sequence[Any], dict[str, Any]],
    mesh: Mesh,
    mean_axes: Sequence[str],
    rules: LayoutRules = DEFAULT_RULES,
    has_batch: bool = True,
) -> None:
    """Check that boxes were sharded for this step, and print a notice if no argument differs by rank.

    Args:
        call: the positional and keyword arguments.
        mesh: the step's mesh.
        mean_axes: the axes over which the step averages.
        rules: the step's rules for layouts.
        has_batch: whether some argument should differ by rank.
    """
    paths, entries, _ = tree.flatten_with_paths(call, is_box)
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard):
            where = tree.leaf_name("argument", path.split(".", 1)[1])
            check_sharded_for(x.spec_id, where, mesh.shape)
            _check_stacked(where, x, mesh, rules)
        if not torch.compiler.is_dynamo_compiling() and mesh.device.type != "meta":
            _check_device(path.split(".", 1)[1], x, mesh)
    _check_means(entries, mean_axes, rules.pipeline_axes)
    ranks = math.prod([size for name, size in mesh.shape if name not in rules.pipeline_axes])
    is_split = not has_batch or any(isinstance(x, PerRank) for x in entries)
    if ranks > 1 and not torch.compiler.is_dynamo_compiling() and not is_split:
        warn_once(
            "fzero.shard: no argument of the step differs by rank, so every rank computes the same: split the global "
            "batch with mesh.split(batch), or wrap each rank's batch with mesh.local(batch)"
        )


def _check_stacked(where: str, x: Shard, mesh: Mesh, rules: LayoutRules) -> None:
    """Check that each rank holds the items of a stacked list that this step's rules assign to it."""
    for s in traced_spec(x.spec_id).split:
        if s.stacked is None or not rules.stacks:
            continue
        item_paths = [f"{s.stacked.key}.{i}." for i in range(len(s.stacked.items))]
        expected = rules.stacked(item_paths, dict(mesh.shape)).get(s.axis)
        if expected != s.stacked:
            raise ValueError(
                f"{where} is of the list {s.stacked.key!r}, which was stacked with the items "
                f"{_items_text(s.stacked)} on the ranks along {s.axis!r}, and this step expects the items "
                f"{_items_text(expected)} there: unstack it with the loss that stacked it, or save it and load it into "
                "a state of this step"
            )


def _check_device(path: str, x: Any, mesh: Mesh) -> None:
    """Check that an argument's leaf or box lies on the mesh's device; numbers and a shard's host pieces need not.

    Raises:
        ValueError: if a tensor lies elsewhere. The message names the leaf, its device, and how to bring it.
    """
    if isinstance(x, Shard):
        tensors = [(path, piece) for space, piece in zip(spaces(x), x.pieces, strict=True) if space == "device"]
        advice = "make it with step.init or step.partition"
    elif isinstance(x, PerRank):
        paths, values, _ = tree.flatten_with_paths(x.value)
        tensors = [(f"{path}.{inner}" if inner else path, value) for inner, value in zip(paths, values, strict=True)]
        advice = "make it with mesh.split(batch) or mesh.local(batch) of this mesh"
    else:
        tensors = [(path, x)]
        advice = "pass parameters and state of step.init, and anything else mesh.device_put(value)"
    for where, value in tensors:
        if isinstance(value, torch.Tensor) and value.ndim and not value.is_meta and value.device != mesh.device:
            raise ValueError(
                f"{tree.leaf_name('argument', where)} is on {value.device}, and {mesh!r} computes on {mesh.device}: "
                f'{advice}; or stay on the CPU, fzero.mesh(..., device="cpu")'
            )


def _items_text(stacked: StackedList | None) -> str:
    """Show the items of each rank."""
    return "none" if stacked is None else str([list(row) for row in zip(*stacked.items, strict=True)])


def _check_means(entries: Sequence[Any], mean_axes: Sequence[str], pipeline_axes: Sequence[str] = ()) -> None:
    """Check that no leaf is split along an axis over which the step averages, unless data differ along this axis.

    The leaf's gradient would be divided by the number of the axis's ranks without a sum over them. Axes in
    `pipeline_axes` are exempt: their ranks share one batch, and the step does average over them.
    """
    batches = [x for x in entries if isinstance(x, PerRank)]
    data_axes = [
        name for name in mean_axes if name in pipeline_axes or any(x.axes is None or name in x.axes for x in batches)
    ]
    for x in entries if batches else ():
        for split in traced_spec(x.spec_id).split if isinstance(x, Shard) else ():
            if split.axis in mean_axes and split.axis not in data_axes:
                option = f"axis={tuple(data_axes)!r}" if data_axes else "such as axis='dp' of fzero.mesh(dp=1, ...)"
                axes = tuple(
                    [name for name in mean_axes if name not in pipeline_axes and name in (*data_axes, split.axis)]
                )
                raise ValueError(
                    f"the step averages over {split.axis!r}, along which {x!r} is split and no argument differs: if "
                    f"its ranks share one batch, as along tp, leave it out of the mean, fzero.shard(..., {option}); if "
                    f"each has its own batch, as along ep, also split the batch over it, mesh.split(batch, {axes!r})"
                )


def check_params(
    args: Sequence[Any],
    param_argnums: Sequence[int],
    stage: int,
    sharded: bool,
    rules: LayoutRules,
    keywords: Sequence[str] = (),
) -> None:
    """Check that parameters have the stage's layout between steps.

    Raises:
        LayoutError: if they are plain and should be sharded, or the reverse.
        TypeError: if the argument is an optimizer's state, a `PerRank` or a module.
        ValueError: if the step was called with too few arguments.
    """
    for i in param_argnums:
        if i >= len(args):
            hint = "" if args else ": a step, fzero.plan and step.plan take the arguments of train_step"
            if keywords:
                names = ", ".join(keywords)
                hint = f", and with {names} by keyword: pass the parameters by position, step({names})"
            raise ValueError(
                f"param_argnums={tuple(param_argnums)}: the step was called with {len(args)} positional arguments{hint}"
            )
        _check_one_params(i, args[i], stage, sharded, rules)


_IN_ORDER = (
    "pass the arguments in train_step's order; if parameters are not the first, use fzero.shard(..., param_argnums=1)"
)


def _check_one_params(i: int, params: Any, stage: int, sharded: bool, rules: LayoutRules) -> None:
    """Check that one argument is a tree of parameters in the stage's layout; see `check_params`."""
    if is_opt_state(params):
        raise TypeError(f"argument {i} (parameters) is the state of an optimizer, {_type_name(params)}: {_IN_ORDER}")
    if isinstance(params, PerRank):
        raise TypeError(f"argument {i} (parameters) is {params!r}, as mesh.split makes of a batch: {_IN_ORDER}")
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"argument {i} (parameters) is a module, and a step takes a tree of tensors: params, opt_state = "
            "step.init(module, opt), and apply = fzero.nn.functional(module).apply for the loss"
        )
    if sharded and not _is_sharded(params) and _has_a_unit(params, rules):
        raise tree.LayoutError(
            f"argument {i} (parameters) is plain, and stage {stage} takes it sharded: "
            "params, opt_state = step.init(params, opt); for parameters that a step of another stage trained, "
            "step.partition(params)"
        )
    if not sharded and _is_sharded(params):
        raise tree.LayoutError(
            f"argument {i} (parameters) is sharded, and stage {stage} takes it plain: gather it with the step "
            "that sharded it, then step.partition(params)"
        )


def _type_name(values: Any) -> str:
    return f"({', '.join(map(_type_name, values))})" if type(values) is tuple else type(values).__name__


def _has_a_unit(params: Any, rules: LayoutRules) -> bool:
    """Return whether rules certainly shard some leaf of a plain tree, as far as this is known outside the mesh."""
    rule = rules.units
    if rules.over is not None:  # it may return no axis
        return False
    paths, leaves, _ = tree.flatten_with_paths(params)
    return any(
        isinstance(x, torch.Tensor) and x.is_floating_point() and (rule is None or rule(path, x) is not None)
        for path, x in zip(paths, leaves, strict=True)
    )


def check_unwritten(args: Sequence[Any], param_argnums: Sequence[int]) -> None:
    """Check that a traced step has not written into the shards of its parameters.

    A trace itself detects writes into arguments. These shards are not arguments, so they are checked here.
    """
    if torch.compiler.is_dynamo_compiling() or not is_tracing():
        return
    for i in param_argnums:
        shards = [x for x in tree.flatten(args[i], is_box)[0] if isinstance(x, Shard)]
        refuse_writes_into([(f"argument {i}, unit {x.spec.unit!r}", x.data) for x in shards])
        for x in shards:
            # not written, and yet changed; a unit over no axis was not sharded: its data is the argument itself
            if x.origin is None and traced_spec(x.spec_id).axes:
                raise RuntimeError(other_memory(f"argument {i}, unit {x.spec.unit!r}"))


def check_results(args: Sequence[Any], out: Any, param_argnums: Sequence[int]) -> None:
    """Check that a step returns new parameters like the old, and the optimizer's state, for the next step."""
    if out is None:
        raise ValueError("train_step returned None: return the new params, opt_state and loss")
    if isinstance(out, list) and not isinstance(args[param_argnums[0]], list):
        raise ValueError(f"train_step returned a list of {len(out)}: expected a tuple (params, opt_state, loss)")
    results = out if isinstance(out, tuple) else (out,)
    for i in param_argnums:
        if i >= len(results):
            raise ValueError(
                f"param_argnums={tuple(param_argnums)}: the step returned {len(results)} results; expected the new "
                "parameters at the positions of the old ones"
            )
        _check_is_params(i, results[i], args[i])
        # a step may have gathered its parameters itself: then compare them with the full parameters
        old = abstract(args[i], parts=True) if _is_sharded(args[i]) and not _is_sharded(results[i]) else args[i]
        _check_like(f"result {i} is not like argument {i} (parameters)", old, results[i])
    _check_state_is_returned(args, out, param_argnums)


def _check_is_params(i: int, result: Any, old: Any) -> None:
    """Check that a result may be new parameters, and is not an optimizer state, metric, gradient or update."""
    if is_opt_state(result) or (isinstance(result, torch.Tensor) and not isinstance(old, torch.Tensor)):
        text = _type_name(result) if is_opt_state(result) else tree.show(result)
        raise ValueError(
            f"result {i} is {text}, where the new parameters belong: return params, opt_state, loss, in the order "
            "of the arguments"
        )
    if (role := role_of(result)) in ("gradients", "updates"):
        raise ValueError(
            f"result {i} holds {role}, where the new parameters belong: return optim.apply_updates(params, updates)"
        )


def _check_like(label: str, old: Any, new: Any) -> None:
    """Check that a tree has the structure, shapes and dtypes of another."""
    try:
        tree.leaves_up_to(old, new, names=("the old tree", "the new tree"))
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    paths, before, _ = tree.flatten_with_paths(old, is_box)
    after = tree.leaves_up_to(old, new, is_box)
    for path, x, y in zip(paths, before, after, strict=True):
        x, y = (v.data if isinstance(v, Shard) else v for v in (x, y))
        if isinstance(x, torch.Tensor) and not (
            isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype == y.dtype
        ):
            raise ValueError(
                f"{label}: leaf {path!r} was {tree.show(x)} and became {tree.show(y)}; "
                "fzero.optim.apply_updates keeps dtypes and shapes"
            )


def _check_state_is_returned(args: Sequence[Any], out: Any, param_argnums: Sequence[int]) -> None:
    """Check that a step that changes its parameters returns an optimizer's state if it takes one.

    Otherwise each later step would begin with the old state, as Adam's first step does. A step that leaves its
    parameters as they are only reads the state.
    """
    states = [i for i, x in enumerate(args) if i not in param_argnums and is_opt_state(x) and tree.tensors(x)]
    results = out if isinstance(out, tuple) else (out,)
    pairs = [pair for i in param_argnums for pair in zip(tree.tensors(args[i]), tree.tensors(results[i]), strict=False)]
    is_unchanged = all(x is y for x, y in pairs)
    extra_results = [x for i, x in enumerate(results) if i not in param_argnums]
    returned_states = [
        state for x in extra_results for state in tree.flatten(x, is_opt_state)[0] if is_opt_state(state)
    ]
    if states and returned_states and pairs:
        _check_both_are_new(returned_states, is_unchanged)
    if not states or returned_states or is_unchanged:
        return
    i = states[0]
    message = (
        f"train_step takes an optimizer's state (argument {i}, {_type_name(args[i])}), changes the parameters and "
        "returns no state: return params, opt_state, loss; a function that only reads its state is step.program(f)"
    )
    if any(x.ndim for x in tree.tensors(args[i])):
        raise ValueError(message)
    warn_once(f"fzero.shard: {message}")  # it holds a count only, which a constant learning rate does not read


def _check_both_are_new(states: Sequence[Any], is_unchanged: bool) -> None:
    """Check that a step that updated returns both the new parameters and the new state.

    Parameters that an eager step wrote in place are new, though they are the old tensors.

    Raises:
        ValueError: if one of them is the old one.
    """
    roles = {role_of(state) for state in states}
    if is_unchanged and "state" in roles and (is_tracing() or has_role("parameters")):
        raise ValueError(
            "train_step returns its old parameters and the new state of its optimizer, so it would train nothing: "
            "params = optim.apply_updates(params, updates) returns the new ones, and writes into none"
        )
    if not is_unchanged and "old state" in roles:
        raise ValueError(
            "train_step returns new parameters and the old state of its optimizer, so every step would be the first: "
            "updates, opt_state = opt.update(grads, opt_state, params), and return this opt_state"
        )


def explain_error(
    error: Exception, args: Sequence[Any], param_argnums: Sequence[int], stage: int, simulated: bool = False
) -> list[str]:
    """List notes on an error that a step raised and that does not name the step's wrong argument."""
    notes = []
    if not is_message(error, error.__traceback__):  # of torch or of the user's code
        notes += [_batch_text(i, x, simulated) for i, x in enumerate(args) if isinstance(x, PerRank)]
        notes += dtype_notes(str(error), args)
        notes += [note for text, note in _NOTES.items() if text in str(error)]
        notes += _key_notes(error, args, param_argnums)
    path = error.result_path if isinstance(error, DiffersByRankError) else None
    if path is not None and path.split(".")[0] in [str(i) for i in param_argnums]:
        notes.append(
            "The new parameters differ by rank if their gradients were not averaged: take them by "
            "fzero.value_and_grad, or average them by fzero.collectives.pmean(grads)"
        )
    if isinstance(error, tree.LayoutError):
        shards_state = stage_layouts(stage).shards_state
        for i, x in enumerate(args):
            if i not in param_argnums and is_opt_state(x) and _is_sharded(x) != shards_state:
                actual, expected = ("plain", "sharded") if shards_state else ("sharded", "plain")
                notes.append(
                    f"Argument {i} (optimizer state) is {actual}, and stage {stage} takes it {expected}: params, "
                    "opt_state = step.init(params, opt)"
                )
    return notes


_PAIR = "Of a pair take both parts: apply of fzero.nn.functional returns (output, buffers)"
_NOTES = {  # part of a message of torch -> how a step does the same
    "backward() called inside a functorch transform": "A step has no tape of autograd: loss, grads = "
    "fzero.value_and_grad(loss_fn)(params, batch) takes the gradients",
    "must be Tensor, not tuple": _PAIR,
    "'tuple' object has no attribute": _PAIR,
    "Default process group has not been initialized": "Simulated ranks have no process group: fzero.collectives has "
    "the collectives, and fzero.axes.axis_index(axis) is the number of a rank",
}
_MOST_KEYS = 6  # of an argument, in a note


def _key_notes(error: Exception, args: Sequence[Any], param_argnums: Sequence[int]) -> list[str]:
    """List notes on an error if a key, or an attribute of a dict, was not found: what the arguments have.

    A key that is near one of an argument gets a note on this argument alone. An argument that has the key is not the
    dict that lacked it, so it gets none.

    Args:
        error: the error.
        args: the positional arguments of the step.
        param_argnums: the positions of the parameters.
    """
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    owner: dict[Any, Any] = {}
    if isinstance(error, AttributeError) and type(error.obj) is dict:
        key, owner = error.name, error.obj
    if not isinstance(key, str):
        return []
    notes: list[str] = []
    for i, x in enumerate(args):
        values = x.value if isinstance(x, PerRank) else x
        if not isinstance(values, Mapping) or not (i in param_argnums or isinstance(x, PerRank)):
            continue
        if key in values and key not in owner:
            continue
        label = f"Argument {i} (parameters)" if i in param_argnums else f"Argument {i} (batch)"
        if hint := _key_hint(key, values):
            return [f"{label} {hint}"]
        keys_text = ", ".join([repr(name) for name in [*values][:_MOST_KEYS]])
        rest_text = f" and {len(values) - _MOST_KEYS} more" if len(values) > _MOST_KEYS else ""
        notes.append(f"{label} has the keys {keys_text}{rest_text}")
    return notes


def _key_hint(key: str, values: Mapping[str, Any]) -> str:
    """Say what a dict has in place of a key: a path in nested dicts, a flat name, or a near one; "" if none."""
    if key in values:  # the error is of an attribute
        return f"is a dict: read [{key!r}]"
    paths = tree.flatten_with_paths(values, is_box)[0]
    if key in paths:
        return f"is nested: read {_write_subscripts(values, key.split('.')) or 'it by its parts'}, and not [{key!r}]"
    flat = [name for name in values if isinstance(name, str) and name.startswith(f"{key}.")]
    if flat:
        return f"is a flat dict: read [{flat[0]!r}]"
    inner = [parts[: parts.index(key) + 1] for path in paths if key in (parts := path.split("."))]
    if inner and (subscripts := _write_subscripts(values, inner[0])):
        return f"has {key!r} further down: read {subscripts}"
    names = dict.fromkeys([*values, *[part for path in paths for part in path.split(".")]])
    hint = did_you_mean(key, [name for name in names if name != key], "{!r}")  # a part of a flat name is no key
    return f"has no key {key!r}{hint}" if hint else ""


def _write_subscripts(values: Any, parts: Sequence[str]) -> str:
    """Write the subscripts that read a part of a tree, numbers for items of lists; "" if they read none."""
    text = ""
    for part in parts:
        key: Any = int(part) if isinstance(values, list | tuple) and part.isdigit() else part
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):  # a key with a dot, or the field of a named tuple
            return ""
        text += f"[{key!r}]"
    return text


_DTYPES = {
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "long": torch.int64,
}


def dtype_notes(message: str, args: Sequence[Any]) -> list[str]:
    """Return a note if torch's message names two dtypes, and the first leaf of a batch that has one of them."""
    words = re.findall(r"(?<![a-z])(?:cpu)?(bfloat16|half|float|double|long)(?:tensor|type|\b)", message.lower())
    dtypes = list(dict.fromkeys([_DTYPES[word] for word in words]))
    if len(dtypes) < 2:
        return []
    for i, x in enumerate(args):
        paths, leaves, _ = tree.flatten_with_paths(x.value) if isinstance(x, PerRank) else ((), (), None)
        for path, leaf in zip(paths, leaves, strict=True):
            dtype = getattr(leaf, "dtype", None)
            other_dtypes = [other for other in dtypes if other != dtype and other.is_floating_point]
            if dtype in dtypes and other_dtypes:
                where, other = tree.leaf_name("argument", f"{i}.{path}"), str(other_dtypes[0]).removeprefix("torch.")
                return [
                    f"A{where[1:]}, is {str(dtype).removeprefix('torch.')}, and met {other}: fzero.Precision casts "
                    f"parameters, and no batch; cast the batch, x.to(torch.{other})"
                ]
    return []


def _batch_text(i: int, batch: PerRank, simulated: bool) -> str:
    """Show one rank's part of a batch, with its shapes."""
    paths, leaves, _ = tree.flatten_with_paths(batch.value)
    parts = [
        f"{path!r} " * bool(path) + f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)[int(simulated) :]}"
        for path, x in zip(paths, leaves, strict=True)
        if isinstance(x, torch.Tensor)
    ]
    rest = [f"and {len(parts) - 8} more"] if len(parts) > 9 else []
    text = ", ".join([*(parts[:8] if rest else parts), *rest])
    return f"Each rank got, as argument {i}, a {type(batch.value).__name__}: {text}"


def as_value(x: Any) -> Any:
    """Return a leaf tensor without `requires_grad`; a tensor that a graph or a transform produced stays as it is."""
    is_grad_leaf = isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf and not is_wrapped(x)
    return x.detach() if is_grad_leaf else x


def is_like(x: Tree, y: Tree) -> bool:
    """Return whether two trees of tensors have the same structure, shapes and dtypes. A lone tensor is not a tree."""
    (xs, structure), (ys, structure_y) = tree.flatten(x), tree.flatten(y)
    is_tree = not isinstance(x, torch.Tensor) and any(isinstance(a, torch.Tensor) for a in xs)
    return is_tree and structure == structure_y and [tree.show(a) for a in xs] == [tree.show(b) for b in ys]
