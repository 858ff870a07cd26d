"""evaluate and predict: forward programs on a step's ranks, in its layout."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._arguments import check_callable, check_int, is_int
from fzero._dtypes import sum_dtype
from fzero._tracebacks import api_boundary, api_boundary_with
from fzero.axes import AxisName, axis_index, axis_size
from fzero.collectives import all_gather_invariant, psum
from fzero.optim import Precision
from fzero.parallel.pipeline import Pipeline
from fzero.transforms import gather as gather_boxes
from fzero.zero._call_checks import as_value
from fzero.zero._sharded_step import ShardedStep

__all__ = ["evaluate", "predict"]


@api_boundary_with("evaluate(step, f) returns a program: program(params, batch, rows)")
def evaluate(
    step: ShardedStep,
    f: Callable[..., Any],
    *,
    weighted: bool = False,
    gather: bool = True,
    axis: AxisName = None,
    precision: Precision | None = None,
) -> Callable[..., Any]:
    """Make a program that evaluates a model on a batch over all ranks of a step.

    Call it as `program(params, ..., batch, rows)`, with the batches and rows of `fzero.data.epoch`. `fzero.data.mean`
    combines the results of all batches into the mean over all examples, even if the last batch is not full. The program
    can be jitted.

    Args:
        step: the sharded step. The program takes trees in the layout of its parameters.
        f: the measurement: `f(params, ..., batch)` on a rank's b examples returns a tree of tensors `[b]`, one value
            per example. With `weighted`, it returns a pair of this tree and a tensor `[b]` of weights.
        weighted: whether examples have weights. For means over tokens, a value is the sum over an example's tokens,
            and its weight is the number of tokens.
        gather: whether boxes in the arguments are gathered first. With False `f` gathers them itself, as blocks with
            remat do.
        axis: the axes over which examples are split; by default all axes of the step's batch. Name them if ranks share
            examples, as along an axis of tokens (`fzero.parallel.context`): sums are over all ranks.
        precision: the policy of `fzero.value_and_grad`, if it has `shard=`. The model then gets parameters in the
            dtype in which it was trained, and not the master weights.

    Returns:
        A program that returns `(sums, weight)`: the tree with 0-d sums over the first `rows` examples of the global
        batch, and the sum of their weights. Both are in float32 at least, and equal on all ranks.

    Raises:
        TypeError: if `step` is not a sharded step; when called, if the last argument is not a number of rows, or `f`
            returns no pair although `weighted` is set.
        ValueError: when called, if a value is not one number per example. The message names the value. Also if the
            global batch has not so many rows, or `axis` names an axis that is not among those of the step's batch.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
        >>> params, _ = step.init({"w": torch.tensor([2.0])}, optim.sgd(0.1))
        >>> program = fzero.evaluate(step, lambda params, x: {"error": (x - params["w"]).abs()})
        >>> data = fzero.data.epoch(torch.arange(5.0), step.mesh, global_batch=4)
        >>> fzero.data.mean(program(params, batch, rows) for batch, rows in data)
        {'error': 1.2}
    """
    axes = _example_axes(step, axis)
    check_callable("f", f, "a function (params, ..., batch) -> a tree of values, one for each example")

    def totals(*args: Any) -> Any:
        """Return the sums of the values over the first rows of the global batch, and of their weights."""
        if len(args) < 2 or (not is_int(args[-1]) and getattr(args[-1], "ndim", 1)):
            raise TypeError(
                "evaluate's program takes (params, ..., batch, rows), and the last argument is not a number of rows: "
                "take both from fzero.data.epoch, or pass the number of examples of the global batch"
            )
        *trees, batch, rows = args
        out = f(*_full_arguments(trees, gather, precision), batch)
        values, weights = _values_and_weights(f, out) if weighted else (out, None)
        b = _count_examples("evaluate", f, values if weights is None else (values, weights))
        if is_int(rows):
            check_int("rows", rows, 0, "a number of examples of the global batch", maximum=b * axis_size(axes))
        device = tree.tensors(values)[0].device  # the rows are counted on the host
        index = torch.arange(b, device=device) + axis_index(axes, device=device) * b
        is_real = index < rows
        weight = is_real if weights is None else torch.where(is_real, weights, 0)
        sums = tree.map(lambda x: _sum_examples(torch.where(is_real, x, 0)), values)
        return psum((sums, _sum_examples(weight)), step.data_axes)

    return _named_program(step, f, totals)


@api_boundary
def predict(
    step: ShardedStep,
    f: Callable[..., Any],
    *,
    gather: bool = True,
    axis: AxisName = None,
    precision: Precision | None = None,
) -> Callable[..., Any]:
    """Make a program that runs a model on every rank's batch and gathers the outputs.

    Call it as `program(params, ..., batch)`. It can be jitted. If the batch was padded, use the first `rows` of the
    result.

    Args:
        step: the sharded step. The program takes trees in the layout of its parameters.
        f: the model: `f(params, ..., batch)` on a rank's b examples returns a tree of tensors `[b, ...]`.
        gather: whether boxes in the arguments are gathered first; see `fzero.evaluate`.
        axis: the N ranks along these axes have different examples; by default all axes of the step's batch. Name them
            if tokens are split over an axis "cp": `f` gathers its outputs by `fzero.parallel.context.all_gather`.
        precision: the policy, if it has `shard=`; see `fzero.evaluate`.

    Returns:
        A program that returns the tree with tensors `[N b, ...]`, in the order of the global batch, on all ranks.

    Raises:
        TypeError: if `step` is not a sharded step.
        ValueError: when called, if a result does not have b rows. The message names the result. Also if `axis` names
            an axis that is not among those of the step's batch.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=2))
        >>> params, _ = step.init({"w": torch.tensor([2.0])}, optim.sgd(0.1))
        >>> program = fzero.predict(step, lambda params, x: x * params["w"])
        >>> data = fzero.data.epoch(torch.arange(5.0), step.mesh, global_batch=4)
        >>> torch.cat([program(params, batch)[:rows] for batch, rows in data])
        tensor([0., 2., 4., 6., 8.])
    """
    axes = _example_axes(step, axis)
    check_callable("f", f, "a function (params, ..., batch) -> a tree of outputs, one row for each example")

    def gathered_outputs(*args: Any) -> Any:
        *trees, batch = args
        out = f(*_full_arguments(trees, gather, precision), batch)
        _count_examples("predict", f, out)
        return tree.map(lambda x: all_gather_invariant(x, axes), out)

    return _named_program(step, f, gathered_outputs)


def _example_axes(step: ShardedStep, axis: AxisName) -> tuple[str, ...]:
    """Return the axes over which examples are split, in the mesh's order, in which batches are split."""
    if not hasattr(step, "data_axes"):
        raise TypeError(f"step is {_function_name(step)}: expected the step that fzero.shard(train_step, ...) returns")
    axes = step.data_axes if axis is None else step.mesh.names(axis)
    if other := [name for name in axes if name not in step.data_axes]:
        raise ValueError(f"axis={axis!r}: {other[0]!r} is not among the axes of the step's batch, {step.data_axes}")
    return tuple([name for name in step.data_axes if name in axes])


def _full_arguments(args: list[Any], gather: bool, precision: Precision | None) -> list[Any]:
    args = tree.map(as_value, args)
    args = args if precision is None else precision.to_param(args)
    return gather_boxes(args) if gather else args


def _sum_examples(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dtype=sum_dtype(x.dtype))


def _count_examples(name: str, f: Any, values: Any) -> int:
    """Return the number of a rank's examples, and check that each leaf has one value, or one row, per example."""
    paths, leaves, _ = tree.flatten_with_paths(values)
    if not leaves:
        raise ValueError(
            f"fzero.{name}: {_function_name(f)} returns no tensor: return a tree with a tensor for each metric"
        )
    for path, x in zip(paths, leaves, strict=True):
        max_ndim = 1 if name == "evaluate" else math.inf
        if not isinstance(x, torch.Tensor) or not 1 <= x.ndim <= max_ndim or x.shape[0] != leaves[0].shape[0]:
            expected = (
                "a tensor [examples], one value per example" if name == "evaluate" else "a tensor [examples, ...]"
            )
            expected += "; for a pipelined loss pass loss.outputs(last)" if isinstance(f, Pipeline) else ""
            raise ValueError(
                f"fzero.{name}: {_function_name(f)} returns {tree.leaf_name('value', path)} as {tree.show(x)}: "
                f"expected {expected}"
            )
    return leaves[0].shape[0]


def _values_and_weights(f: Any, out: Any) -> tuple[Any, Any]:
    """Return the values and the weights of a weighted evaluation.

    Raises:
        TypeError: if the function returns no pair.
    """
    if not isinstance(out, tuple | list) or len(out) != 2 or not isinstance(out[1], torch.Tensor):
        raise TypeError(
            f"fzero.evaluate(weighted=True): {_function_name(f)} returns {tree.show(out)}: expected a pair "
            "(values, weights), a tree of tensors [examples] and a tensor [examples]"
        )
    return out[0], out[1]


def _function_name(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _named_program(step: ShardedStep, f: Any, program: Any) -> Callable[..., Any]:
    program.__name__ = _function_name(f)
    return step.program(program)
