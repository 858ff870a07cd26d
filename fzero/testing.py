"""Checks for tests of your own train steps: a sharded step must give the numbers of the unsharded step.

It needs the extra `fzero[testing]` (hypothesis).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from fzero import optim, tree
from fzero._arguments import check_callable
from fzero.optim import OptimizerLike
from fzero.parallel.pipeline import Pipeline
from fzero.ranks import Mesh
from fzero.ranks import mesh as make_mesh
from fzero.sharding import PerRank
from fzero.transforms import gather, partition
from fzero.tree import Tree
from fzero.zero import STAGES, ShardedStep, shard

__all__ = [
    "assert_equivalent",
    "assert_trees_close",
    "is_exact_on_shards",
    "optimizers",
    "stages",
    "trees",
    "world_sizes",
]


def assert_trees_close(actual: Tree, expected: Tree, rtol: float | None = None, what: str = "") -> None:
    """Assert that two trees have one structure, and leaves of equal shapes, dtypes and values.

    Args:
        actual: a tree.
        expected: a tree.
        rtol: the largest difference allowed, relative to the largest absolute value of the expected leaf; by
            default 1e-12 for float64, 1e-5 for float32, 1e-2 for half precision. Integer leaves must be equal, and
            infinities and nans must be in the same places.
        what: a label that comes before the path in messages.

    Raises:
        AssertionError: if the trees differ. The message names the leaf's path and the difference.

    Example:
        >>> assert_trees_close({"w": torch.ones(2)}, {"w": torch.ones(2)})
    """
    paths, leaves, _ = tree.flatten_with_paths(expected)
    try:
        actual_leaves = tree.leaves_up_to(expected, actual)
    except ValueError as error:
        raise AssertionError(f"{what}: {error}") from error
    for path, y, x in zip(paths, leaves, actual_leaves, strict=True):
        label = f"{what} leaf {path!r}".strip() if path else what
        if not isinstance(y, torch.Tensor):
            assert type(x) is type(y) and x == y, f"{label}: {x!r} is not {y!r}"
            continue
        assert isinstance(x, torch.Tensor), f"{label}: {x!r} is not a tensor"
        actual_type, expected_type = (x.dtype, list(x.shape)), (y.dtype, list(y.shape))
        assert actual_type == expected_type, f"{label}: {actual_type} is not {expected_type}"
        if not y.is_floating_point():
            assert torch.equal(x, y), f"{label}: {x} is not {y}"
            continue
        default = {torch.float64: 1e-12, torch.float32: 1e-5}.get(y.dtype, 1e-2)
        limit = default if rtol is None else rtol
        finite = y[y.isfinite()]
        scale = finite.abs().max().item() if finite.numel() else 0.0
        try:
            torch.testing.assert_close(x, y, rtol=0, atol=limit * scale, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error} (allowed: {limit} of {scale})") from error


def assert_equivalent(
    train_step: Callable[..., Any],
    params: Tree,
    opt: OptimizerLike,
    batches: Sequence[Any],
    stages: Sequence[int] = tuple(range(len(STAGES))),
    world_sizes: Sequence[int] = (1, 2, 4),
    *,
    rtol: float | None = None,
    meshes: Sequence[Mesh] | None = None,
    pipeline: Pipeline | None = None,
    **options: Any,
) -> None:
    """Assert that a sharded train step gives the numbers of the unsharded step, at every stage and world size.

    It trains unsharded on the global batches, then sharded on simulated ranks. It compares all results of each step,
    and the final parameters and optimizer state.

    Args:
        train_step: `(params, opt_state, batch) -> (params, opt_state, ...)`.
        params: a tree of tensors; float64 detects the smallest errors.
        opt: the (init, update) pair that `train_step` uses.
        batches: global batches, one per step: trees of tensors whose dimension 0 is divisible by each world size.
        stages: the ZeRO stages to try.
        world_sizes: the numbers of ranks to try, simulated by vmap.
        rtol: see `assert_trees_close`.
        meshes: the meshes to try instead of `world_sizes`, such as `[fzero.mesh(dp=2, tp=2, simulate="lockstep")]`.
        pipeline: the loss of `train_step`, if it is a pipeline. Its blocks are stacked for each mesh, and unstacked for
            the comparison. Without `meshes` the ranks lie along the pipeline's axis.
        **options: arguments of `fzero.shard`: `axis`, `units`, `over`, `split`.

    Raises:
        AssertionError: if any value differs. The message names the stage, mesh, step and leaf.

    Example:
        >>> import fzero
        >>> opt = optim.adam(1e-2)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: (x @ p["w"]).square().mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return optim.apply_updates(params, updates), opt_state, loss
        >>> params = {"w": torch.randn(3, 2, dtype=torch.float64)}
        >>> assert_equivalent(train_step, params, opt, [torch.randn(8, 3, dtype=torch.float64) for _ in range(3)])
    """
    if not isinstance(batches, Sequence):
        raise TypeError(f"batches is a {type(batches).__name__}: expected a list of global batches, one for each step")
    check_callable("train_step", train_step, "a function (params, opt_state, batch) -> (params, opt_state, ...)")
    options = options if pipeline is None else {"split": pipeline.split, **options}
    axes: list[dict[str, Any]] = [{"dp" if pipeline is None else pipeline.axis: n} for n in world_sizes]
    all_meshes = [make_mesh(simulate=True, **sizes) for sizes in axes] if meshes is None else list(meshes)
    for mesh in all_meshes[:1]:  # both train on one device
        params, batches = mesh.device_put((params, list(batches)))
    precision = getattr(opt, "precision", None)
    expected = [(params if precision is None else precision.cast(params), opt.init(params))]
    for batch in batches:
        expected.append(train_step(*expected[-1][:2], batch))
    for mesh in all_meshes:
        ranks = ", ".join([f"{name}={size}" for name, size in mesh.shape])

        def gather_full(values: Any, step: ShardedStep) -> Any:
            values = step.gather(values)  # unstack takes a tree without blocks if it is in a tuple
            return values if pipeline is None else pipeline.unstack((values,), step.mesh)[0]

        for stage in stages:
            step = shard(train_step, stage=stage, mesh=mesh, **options)
            state = step.init(params if pipeline is None else pipeline.stack(params, mesh), opt)
            for i, batch in enumerate(batches):
                state = step(*state[:2], mesh.split(batch, step.data_axes) if step.data_axes else batch)
                label = f"stage={stage}, {ranks}, step {i}: result"
                for j in range(2, len(state)):
                    result = _concatenate_ranks(gather_full(state[j], step))
                    reference = _concatenate_ranks(expected[i + 1][j], 0)
                    assert_trees_close(result, reference, rtol, f"{label} {j}")
            label = f"stage={stage}, {ranks}, after {len(batches)} steps:"
            for name, result, reference in zip(("parameters", "optimizer state"), state, expected[-1], strict=False):
                assert_trees_close(gather_full(result, step), reference, rtol, f"{label} {name}")


def _concatenate_ranks(values: Any, dims: int = 1) -> Any:
    """Unwrap values that differ by rank: concatenate the ranks' parts, in the order of the unsharded batch."""

    def join(x: Any) -> Any:
        return tree.map(lambda v: v.flatten(0, dims), x.value) if isinstance(x, PerRank) else x

    return tree.map(join, values, is_leaf=lambda x: isinstance(x, PerRank))


def is_exact_on_shards(opt: OptimizerLike, steps: int = 3) -> bool:
    """Return whether an (init, update) pair gives the same numbers on flat shards as on full leaves.

    Args:
        opt: an optimizer, such as a third-party optimizer (torchopt's optimizers in `optim.leafwise`).
        steps: the number of updates to try.

    Returns:
        Whether the optimizer may run on shards, at stages 1 to 3.

    Example:
        >>> is_exact_on_shards(optim.adam(0.1))
        True
    """
    g = torch.Generator().manual_seed(0)

    def random_tree() -> dict[str, torch.Tensor]:
        shapes = {"a": (4, 6), "b": (5,), "c": (3, 2, 2)}
        return {k: torch.randn(s, generator=g, dtype=torch.float64, device="cpu") for k, s in shapes.items()}

    def train(params: Any, grads: Sequence[Any]) -> Any:
        state = opt.init(params)
        for g in grads:
            # copies, since some third-party optimizers write into their arguments
            updates, state = opt.update(tree.map(torch.clone, g), state, params=params)
            params = optim.apply_updates(params, updates)
        return params

    def train_on_shards(params: Any, grads: Sequence[Any]) -> Any:
        shards = [partition(t, units=lambda path, leaf: "one unit") for t in (params, *grads)]
        return gather(train(shards[0], shards[1:]))

    optim.chain(opt)  # raises for another value than an optimizer
    params, grads = random_tree(), [random_tree() for _ in range(steps)]
    sharded, full = make_mesh(simulate=True, dp=2).spmd(train_on_shards)(params, grads), train(params, grads)
    return all(torch.allclose(sharded[k], full[k], rtol=1e-9, atol=1e-12) for k in full)


class _Pair(NamedTuple):
    first: Any
    second: Any


def stages() -> st.SearchStrategy[int]:
    """Draw a ZeRO stage: the number of a row of the table of stages."""
    return st.integers(0, len(STAGES) - 1)


def world_sizes(maximum: int = 8) -> st.SearchStrategy[int]:
    """Draw a number of ranks: 1 to `maximum`."""
    return st.integers(1, maximum)


def _awkward_shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Draw an awkward shape: 0-d, empty, or with sizes that the number of ranks does not divide."""
    return st.one_of(
        st.just(()),
        st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
        st.sampled_from([(0,), (3, 0), (1,), (13,), (1, 1), (17,)]),
    )


def trees(dtypes: Sequence[torch.dtype] = (torch.float64,), max_leaves: int = 8) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a tree of tensors: nested dicts, lists, tuples, NamedTuples and None, with awkward shapes.

    Args:
        dtypes: the dtypes to draw from; integer and bool leaves hold small numbers.
        max_leaves: the approximate largest number of leaves.

    Returns:
        A strategy of dicts with at least one leaf. Floating-point values are standard normal, from a drawn seed.
    """

    def leaf(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=g, dtype=torch.float64, device="cpu").to(dtype)
        return torch.randint(0, 2 if dtype == torch.bool else 9, shape, generator=g, device="cpu").to(dtype)

    leaves = st.builds(leaf, _awkward_shapes(), st.sampled_from(list(dtypes)), st.integers(0, 2**31))
    nested_trees = st.recursive(
        leaves | st.none(),
        lambda children: st.one_of(
            st.lists(children, min_size=1, max_size=3),
            st.lists(children, min_size=1, max_size=3).map(tuple),
            st.builds(_Pair, children, children),
            st.dictionaries(st.sampled_from("abcxyz"), children, min_size=1, max_size=3),
        ),
        max_leaves=max_leaves,
    )
    return st.builds(lambda first, rest: {"first": first, "rest": rest}, leaves, nested_trees)


def optimizers() -> st.SearchStrategy[optim.Optimizer]:
    """Draw one of fzero's optimizers, with clipping, schedules and decay masks."""

    def matrices(params: Any) -> Any:
        return tree.map(lambda p: p.ndim >= 2, params)

    usual = {"eps": 1e-3, "weight_decay": 0.1, "mask": matrices, "initial_accumulator_value": 0.1, "ns_dtype": None}
    usual |= {"fallback": optim.adam(1e-2, eps=1e-3)}

    def make(name: str) -> optim.Optimizer:
        parameters = inspect.signature(getattr(optim, name)).parameters
        return getattr(optim, name)(1e-2, **{k: v for k, v in usual.items() if k in parameters})

    functions = [f for name in optim.__all__ if inspect.isfunction(f := getattr(optim, name))]
    complete_optimizers = [
        f.__name__ for f in functions if next(iter(inspect.signature(f).parameters), "") == "learning_rate"
    ]
    return st.sampled_from(
        [
            *[make(name) for name in complete_optimizers],
            optim.sgd(0.1, momentum=0.9),
            optim.sgd(optim.warmup_cosine(0.1, 1, 4), momentum=0.9, nesterov=True),
            optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)),
            optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.constant(1e-2), eps=1e-3)),
            optim.masked(optim.adam(1e-2, eps=1e-3), matrices),
            optim.on_full_leaves(optim.adamw(1e-2, eps=1e-3)),
            optim.chain(optim.clip_by_block_rms(0.5), optim.sgd(0.1), optim.params_ema(0.9)),
            optim.inject_hyperparams(optim.adamw)(optim.linear(1e-2, 1e-3, 4), eps=1e-3, weight_decay=0.1),
        ]
    )
