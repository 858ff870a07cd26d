"""local_steps: each replica takes H steps by itself, and then the replicas average their parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fzero import tree
from fzero._liveness import publish_step
from fzero._torch import is_tracing
from fzero._torch.types import StrPath
from fzero._tracebacks import UserFrames, api_boundary
from fzero.codecs import Codec
from fzero.collectives import wait_tensor
from fzero.graph import Jitted
from fzero.local_sgd._checkpoint import load_replicas, save_replicas
from fzero.local_sgd._outer_step import OuterStep
from fzero.local_sgd._parts import divide_into_parts, select
from fzero.local_sgd._replicas import LocalState, ReplicaGroups, Replicas, own_memory
from fzero.local_sgd._sync_schedule import SyncSchedule
from fzero.optim import OptimizerLike, as_optimizer, sgd
from fzero.ranks import Mesh, check_equal
from fzero.sharding import Shard, is_box, spaces
from fzero.tree import Tree
from fzero.zero import ShardedStep

__all__ = ["LocalSteps", "local_steps"]


@dataclass(frozen=True, eq=False)
class LocalSteps:
    """A step of replicas that train apart, made by `local_steps`. Call it like the sharded step.

    Attributes:
        step: the step of one replica, on the replica's own mesh.
        groups: the replicas.
        schedule: when the parts of the parameters are averaged.
        outer_step: the programs that average them.
    """

    step: Callable[..., Any]
    groups: ReplicaGroups
    schedule: SyncSchedule
    outer_step: OuterStep
    jit_error: ClassVar[str] = (
        "local_steps decides in Python whether a step averages: jit the step inside, local_steps(fzero.jit(step), ...)"
    )

    @property
    def mesh(self) -> Mesh:
        """All ranks."""
        return self.groups.mesh

    def __repr__(self) -> str:
        return f"LocalSteps({self.step!r}, over={self.groups.over!r}, {self.schedule!r})"

    @api_boundary
    def init(self, params: Any, opt: OptimizerLike) -> tuple[Replicas, LocalState]:
        """Put parameters into the stage's layout on each replica, and make the optimizers' states.

        Args:
            params: as in the `init` of a sharded step.
            opt: the inner optimizer, an (init, update) pair.

        Returns:
            `(params, state)` for the step.

        Raises:
            ValueError: if the parameters differ between replicas, or the optimizer keeps a part of them on the host.
        """
        inner: Any = self.step
        first_params, first_state = inner.init(params, opt)
        _check_on_device("params", first_params)
        _check_on_device("opt_state", first_state)
        anchor = self.outer_step.anchor(first_params, first_state)
        check_equal("params", anchor, self.mesh)
        parts = divide_into_parts(anchor, self.schedule.parts)
        outer = tuple([self.outer_step.init(select(anchor, part)) for part in parts])
        copies = [own_memory((first_params, first_state)) for _ in self.groups.replica_indices[1:]]
        trees = [(first_params, first_state), *copies]
        inner_state = Replicas(tuple([s for _, s in trees]))
        return Replicas(tuple([p for p, _ in trees])), LocalState(
            count=0, inner=inner_state, anchor=anchor, outer_states=outer, pending_sums=(None,) * len(parts)
        )

    def __call__(self, params: Replicas, state: LocalState, *args: Any, **kwargs: Any) -> Any:
        """Run one step on each replica, and average the parts that are due.

        Args:
            params: the parameters, from `init` or the previous call.
            state: the state, likewise.
            *args: the step's other arguments, such as the batch from `mesh.split`, which is split over all ranks.
            **kwargs: keyword arguments of the step, likewise.

        Returns:
            The results of the step: the new parameters, the new state, and all others as values that differ by replica,
            in `PerRank` boxes.

        Raises:
            TypeError: if `params` or `state` is not from `init`, or the step returns no new parameters and state.
        """
        if is_tracing():
            raise TypeError(self.jit_error)
        with UserFrames():
            return self._run_local_step(params, state, args, kwargs)

    def _run_local_step(
        self, params: Replicas, state: LocalState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._check_replicas(params, state)
        new_params, new_states, *extra_results = self._run_replicas(params, state, args, kwargs)
        if not isinstance(self.step, Jitted):  # an eager step may return an argument itself, as a frozen leaf
            new_params, new_states = tree.copy_shared((new_params, new_states), (params.trees, state.inner.trees))
        extra_results = [self.groups.wrap_results(tree.copy_shared(x, (new_params, new_states))) for x in extra_results]
        count = state.count + 1
        state = replace(state, count=count, inner=Replicas(new_states))
        state = self._start_average(
            new_params, state, self.schedule.parts_to_send(count), self.schedule.parts_to_apply(count)
        )
        return Replicas(new_params), state, *extra_results

    def _run_replicas(
        self, params: Replicas, state: LocalState, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        """Run the step on each replica; return each of its results as a tuple of the replicas'."""
        outs: list[Any] = []
        for replica, p, s in zip(self.groups.replica_indices, params.trees, state.inner.trees, strict=True):
            own_args, own_kwargs = self.groups.argument((args, kwargs), replica)
            try:
                outs.append(self.step(p, s, *own_args, **own_kwargs))
            except tree.LayoutError as error:  # its message names step.partition, which replicas do not have
                error.add_note(
                    "fzero: replicas go on at another stage or on another mesh by old.save(path, params, state) "
                    "and new.load(path, *new.init(...))"
                )
                raise
        if not isinstance(outs[0], tuple) or len(outs[0]) < 2:
            raise TypeError(f"the step returned {type(outs[0]).__name__}: expected (params, opt_state, ...)")
        return [*zip(*outs, strict=True)]

    @api_boundary
    def average_now(self, params: Replicas, state: LocalState) -> tuple[Replicas, LocalState]:
        """Average all parts now, as at the end of a run: `state.anchor` then includes the last steps.

        A sum that is still under way is waited for and dropped: this average covers the same steps. The arguments stay
        as they are.

        Args:
            params: the parameters.
            state: the state.

        Returns:
            The new `(params, state)`, with the same count.
        """
        self._check_replicas(params, state)
        trees = tuple([own_memory(x) for x in params.trees])
        tree.map(wait_tensor, state.pending_sums)
        inner = Replicas(tuple([own_memory(x) for x in state.inner.trees]))
        everything = range(self.schedule.parts)
        return Replicas(trees), self._start_average(trees, replace(state, inner=inner), everything, everything)

    def _check_replicas(self, params: Any, state: Any) -> None:
        if not isinstance(params, Replicas) or not isinstance(state, LocalState):
            raise TypeError(
                f"params is {type(params).__name__} and state is {type(state).__name__}: expected those of "
                "params, state = step.init(params, opt), or of the previous call"
            )
        if len(state.outer_states) != self.schedule.parts:
            raise ValueError(
                f"state is of {len(state.outer_states)} parts, and this step has parts={self.schedule.parts}: "
                "go on with the step that made it, or begin anew from step.gather(state.anchor)"
            )

    def _start_average(
        self, params: tuple[Any, ...], state: LocalState, to_send: Sequence[int], to_apply: Sequence[int]
    ) -> LocalState:
        """Start to average the parts `to_send`, and write the means of the parts `to_apply` into the replicas."""
        if not to_send and not to_apply:
            return state
        parts = divide_into_parts(state.anchor, self.schedule.parts)
        states, anchor = state.inner.trees, state.anchor
        outer_states, sums = [*state.outer_states], [*state.pending_sums]
        with publish_step("the outer step of local_steps", is_own=False):
            for i in to_send:
                sums[i] = self.outer_step.start_average(parts[i], anchor, params, states)
            for i in to_apply:
                anchor, outer_states[i] = self.outer_step.apply_average(
                    part=parts[i],
                    anchor=anchor,
                    state=outer_states[i],
                    pending_sum=sums[i],
                    params=params,
                    states=states,
                )
                sums[i] = None
        return replace(state, anchor=anchor, outer_states=tuple(outer_states), pending_sums=tuple(sums))

    @api_boundary
    def gather(self, values: Tree) -> Tree:
        """Gather a tree that all replicas share, such as `state.anchor`, into full tensors, outside the step.

        All ranks must call it.

        Raises:
            TypeError: if `values` is `Replicas`, which the ranks of different replicas hold apart.
        """
        if isinstance(values, Replicas | LocalState):
            raise TypeError(
                f"values is a {type(values).__name__}, which each replica has for itself; gather state.anchor, the "
                "model that they share"
            )
        return self.outer_step.step.gather(values)

    @api_boundary
    def save(self, path: StrPath, params: Replicas, state: LocalState) -> None:
        """Save the replicas, and the state that they share, to folders within `path`. All ranks call it.

        Save each time to another path. A save is complete when its last folder, `shared`, is.

        Args:
            path: a folder, or a URL, as for `fzero.save`.
            params: the parameters.
            state: the state.

        Raises:
            CheckpointError: as `fzero.save` does.
        """
        self._check_replicas(params, state)
        save_replicas(path, self.outer_step, self.schedule, params, state)

    @api_boundary
    def load(self, path: StrPath, params: Replicas, state: LocalState) -> tuple[Replicas, LocalState]:
        """Load what `save` saved. All ranks call it.

        The mesh within a replica and the stage may differ from those of the save. The number of replicas, and `every`,
        may differ if the save was made right after an average. Each replica then goes on from the anchor. A new one
        gets a copy of another replica's optimizer state.

        Args:
            path: the path of the save.
            params: parameters from `init`, whose tensors are overwritten.
            state: a state from `init`, likewise.

        Returns:
            `(params, state)` for the step.

        Raises:
            CheckpointError: if the save is incomplete or damaged, or was made between two averages by another number
                of replicas, or with another schedule.
        """
        self._check_replicas(params, state)
        return load_replicas(path, self.groups, self.schedule, params, state)


def _check_on_device(label: str, values: Any) -> None:
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    for path, x in zip(paths, entries, strict=True):
        if isinstance(x, Shard) and "host" in spaces(x):
            raise ValueError(
                f"{tree.leaf_name(label, path)} lies on the host, in part: local_steps does not average such leaves; "
                "leave out optim.offload"
            )


@api_boundary
def local_steps(
    step: Callable[..., Any],
    over: str = "replica",
    *,
    every: int,
    outer: OptimizerLike | None = None,
    parts: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    codec: Codec | None = None,
) -> LocalSteps:
    """Let groups of ranks train apart, and average them once in every H steps (DiLoCo, arXiv:2311.08105).

    The ranks that share an index along `over` are a replica. A replica runs the sharded step on its own mesh, and sends
    nothing to the others. After H steps the replicas average anchor - parameters, the pseudo-gradient. The outer
    optimizer updates the anchor by it, and each replica goes on from the anchor.

    Args:
        step: a sharded step, or one that `fzero.jit` compiled, on the mesh of all ranks. Its `axis` names the axes
            within a replica; if it names `over` too, that is left out. Its arguments begin with parameters and
            optimizer state, and so do its results.
        over: the axis along which ranks belong to different replicas.
        every: H, the number of steps between two averages of one leaf.
        outer: the outer optimizer. By default replicas go on from their plain mean, `optim.sgd(1.0)`. The paper takes
            `optim.sgd(0.7, momentum=0.9, nesterov=True)`, for long runs that start from trained parameters.
        parts: the number of parts of the parameters. Each is averaged at another step, so a step sends less
            (Streaming DiLoCo, arXiv:2501.18512).
        delay: the number of steps from the send of a part to the use of its mean. On processes, the steps between hide
            the transfer.
        mix: the share of a replica's own parameters in its parameters after an average, 0 to below 1. With a delay a
            share keeps some of the replica's steps since the send; the paper takes 0.5.
        codec: sends pseudo-gradients in fewer bits, such as `fzero.codecs.int4()`. Each replica encodes its
            own once, and the sum is decoded on each rank. By default it is sent in float32.

    Returns:
        A `LocalSteps`. Call it like the step.

    Raises:
        TypeError: if `step` is not a sharded step, or its parameters are not its first argument.
        ValueError: if `over` is not an axis of the mesh or is its only axis, or a number is out of range. Also if the
            outer optimizer is not exact on shards, and the stage shards the anchor.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> opt = optim.sgd(0.1)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: ((p["w"] - x) ** 2).mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return optim.apply_updates(params, updates), opt_state, loss
        >>> mesh = fzero.mesh(replica=2, dp=2)
        >>> step = local_steps(fzero.shard(train_step, stage=2, mesh=mesh, axis="dp"), every=2, outer=optim.sgd(1.0))
        >>> params, state = step.init({"w": torch.zeros(())}, opt)
        >>> x = torch.tensor([0.0, 0.0, 1.0, 1.0])  # two replicas learn from different data
        >>> for _ in range(2):
        ...     params, state, loss = step(params, state, mesh.split(x))
        >>> loss.value
        tensor([0.0000, 0.6400])
        >>> step.gather(state.anchor)
        {'w': tensor(0.1800)}
    """
    sharded_step = _sharded_step(step)
    groups = _replica_groups(sharded_step, over)
    _check_options(outer, mix, codec)
    optimizer = as_optimizer(sgd(1.0) if outer is None else outer)
    if optimizer.exact_on_shards is False and sharded_step.layout.shards_state:
        raise ValueError(
            f"outer={optimizer!r} is not exact on shards, and stage {sharded_step.stage} shards the anchor: use "
            "another outer optimizer, or stage 0"
        )
    axis = tuple([name for name in sharded_step.axis if name != over])
    step_on_all_ranks = replace(sharded_step.on_mesh(sharded_step.mesh), axis=axis)  # with a history of its own
    replica_step = step_on_all_ranks.on_mesh(groups.inner_mesh)
    inner = step.with_options(replica_step) if isinstance(step, Jitted) else replica_step
    schedule = SyncSchedule(every, parts, delay)
    return LocalSteps(
        inner,
        groups,
        schedule,
        OuterStep(step=step_on_all_ranks, groups=groups, optimizer=optimizer, mix=float(mix), codec=codec),
    )


def _sharded_step(step: Any) -> ShardedStep:
    """Return the sharded step of a step, which may be jitted."""
    sharded_step = step.step if isinstance(step, Jitted) else step
    if not isinstance(sharded_step, ShardedStep):
        raise TypeError(
            f"step is {step!r}: expected fzero.shard(train_step, stage=..., mesh=mesh), or fzero.jit of it, on a mesh "
            "such as fzero.mesh(replica=2, dp=4)"
        )
    if sharded_step.param_argnums != (0,):
        raise TypeError(
            f"step has param_argnums={sharded_step.param_argnums}: expected the parameters as argument 0 only"
        )
    return sharded_step


def _replica_groups(sharded_step: ShardedStep, over: Any) -> ReplicaGroups:
    """Return the groups of replicas along an axis; an error if the step needs this axis for its own batch."""
    mesh = sharded_step.mesh
    if not isinstance(over, str) or over not in mesh.axis_names:
        raise ValueError(
            f"over={over!r}: expected an axis of {mesh!r}, along which ranks train apart; add one, "
            f"fzero.mesh(replica=2, dp=4), or pass over={mesh.axis_names[0]!r}"
        )
    groups = ReplicaGroups(mesh, over)
    if set(sharded_step.axis) <= {over}:
        inner_axes = groups.inner_axes
        advice = (
            f"did you mean over={inner_axes[0]!r}?"
            if inner_axes
            else "give a replica an axis of its own, even of one rank: "
            f"fzero.mesh({over}={groups.count}, {'shard' if over == 'dp' else 'dp'}=1)"
        )
        raise ValueError(f"over={over!r} is the only axis of the step's batch on {mesh!r}: {advice}")
    return groups


def _check_options(outer: Any, mix: Any, codec: Any) -> None:
    if outer is not None and not (hasattr(outer, "init") and hasattr(outer, "update")):
        raise TypeError(f"outer={outer!r}: expected an optimizer, such as fzero.optim.sgd(1.0)")
    if not isinstance(mix, int | float) or not 0 <= mix < 1:
        raise ValueError(f"mix={mix!r}: expected a share from 0 to below 1")
    if codec is not None and not isinstance(codec, Codec):
        raise TypeError(f"codec={codec!r}: expected None or a codec, such as fzero.codecs.int4()")
