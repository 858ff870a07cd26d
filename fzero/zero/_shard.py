"""shard: make a sharded step of an unsharded train step, with the layouts of a ZeRO stage."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from fzero._arguments import is_int
from fzero._notice import warn_once
from fzero._tracebacks import api_boundary
from fzero.axes import AxisName, OverRule, SplitRules, UnitRule, layout_rules
from fzero.ranks import Mesh
from fzero.ranks import mesh as make_mesh
from fzero.zero._rerun import Rerun, check_rerun
from fzero.zero._setup_checks import check_train_step
from fzero.zero._sharded_step import ShardedStep
from fzero.zero._stages import check_stage

__all__ = ["shard"]


@api_boundary
def shard(
    train_step: Callable[..., Any],
    stage: int,
    mesh: Mesh | None = None,
    axis: AxisName = None,
    param_argnums: int | Sequence[int] = 0,
    units: UnitRule | None = None,
    over: AxisName | OverRule = None,
    split: SplitRules | None = None,
    check: Literal["first"] | bool | Rerun = "first",
) -> ShardedStep:
    """Shard an unsharded train step by a ZeRO stage (arXiv:1910.02054).

    The sharded step has the same signature, and computes the numbers of unsharded training on the global batch. At
    stage 3 it runs `train_step` on boxes. At stages 1 and 2 it partitions the parameters, runs `train_step` on the
    boxes, and gathers the new parameters. At stage 0 it runs `train_step` on plain tensors.

    Args:
        train_step: a pure function, such as `(params, opt_state, batch) -> (params, opt_state, loss)`, that takes
            gradients with `fzero.value_and_grad`.
        stage: the number of a ZeRO stage, from 0 on. It determines the sharded trees: see `ShardedStep.layout`.
        mesh: the ranks; by default the whole world under torchrun, else a simulated mesh of one rank.
        axis: the data-parallel axes of the mesh; by default all of its axes. The batch is split over them, losses and
            gradients are averaged over them, and units are sharded over them. The first axis divides a unit, the next
            its parts. So `axis=("dp", "host")` on `mesh(host=2, dp=8)` gathers units over the hosts once a step, then
            within a host.
        param_argnums: the position, or positions, of the arguments that are parameters. At stages 1 and 2 the results
            at the same positions are gathered.
        units: a rule `(path, leaf) -> unit name`: leaves with one name are gathered together. The name `None` keeps a
            leaf replicated. By default each repeated block is a unit, and so is each other top-level child.
        over: the axes, among `axis`, over which units are sharded, or a rule `(path, leaf) -> axes`; by default all.
            Units are replicated along the other axes: hybrid sharding is `axis=("replica", "shard"), over="shard"`.
        split: a rule `(path, leaf) -> {axis: dimension}` for tensor and expert parallelism: each rank along the axis
            has its own part of the leaf. `init` takes full leaves, and `gather` returns full leaves. A sequence of
            rules, each for a different axis, is also accepted.
        check: whether a distributed run compares its plain arguments and results between the ranks, by checksum: at
            the "first" call, at each call (True), or never (False). It detects a forgotten `pmean` or `mesh.local`. A
            simulation always checks results, by type. `fzero.zero.Rerun(every=100)` looks for flipped bits, too.

    Returns:
        A `ShardedStep`. Call it like `train_step`.

    Raises:
        ValueError: if no stage has this number, `axis` is not an axis of the mesh, or `check` has an invalid value.
        TypeError: if `train_step` is not a function, is jitted already, is a module, or runs an optimizer of
            torch.optim; or if `mesh` is not a mesh. Also if `axis` is not a name, or if `units`, `over` or `split` is
            not a rule.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> opt = optim.adam(0.1)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: (p["w"] * x).mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return optim.apply_updates(params, updates), opt_state, loss
        >>> mesh = fzero.mesh(dp=2)
        >>> step = fzero.shard(train_step, stage=2, mesh=mesh)
        >>> params, opt_state = step.init({"w": torch.ones(3)}, opt)
        >>> params, opt_state, loss = step(params, opt_state, mesh.split(torch.ones(4, 3)))
        >>> params
        {'w': tensor([0.9000, 0.9000, 0.9000])}
        >>> opt_state.mu
        {'w': Shard('w', float32 [3], 2 of 3 elements, dp=2)}
    """
    if not callable(train_step):
        raise TypeError(
            f"train_step is {train_step!r}: expected a function, (params, opt_state, batch) -> (params, opt_state, ...)"
        )
    check_train_step(train_step)
    if mesh is None:
        mesh = make_mesh(dp=-1)
        if mesh.simulated:
            warn_once(
                "fzero.shard: no mesh and no torchrun world, so a simulated mesh of one rank is used: pass "
                "mesh=fzero.mesh(dp=4) to simulate 4 ranks, or launch the script with torchrun"
            )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: expected a mesh, such as fzero.mesh(dp=4)")
    names = mesh.names(axis)
    argnums = (param_argnums,) if isinstance(param_argnums, int | str) else tuple(param_argnums)
    are_indices = all(is_int(i) and i >= 0 for i in argnums)
    if not are_indices or not argnums or len(set(argnums)) < len(argnums):
        raise ValueError(f"param_argnums={param_argnums!r}: expected distinct positions of arguments, counted from 0")
    stage_number = check_stage(stage)
    check_rerun(check, mesh, names, over, stage_number)
    return ShardedStep(
        train_step=train_step,
        stage=stage_number,
        mesh=mesh,
        axis=names,
        param_argnums=argnums,
        rules=layout_rules(units, over, split),
        check=check,
    )
