"""Elastic runs: torchrun restarts the remaining ranks, which resume from the hosts' shared memory.

torchrun's agents end all workers when one has died or a host has joined, and start them again with the hosts that are
there. So no process goes on by itself; what goes on is the state, in shared memory that outlives the processes.
"""

import inspect
import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from torch.distributed import DistError, destroy_process_group

from fzero._arguments import check_callable, check_int, check_path
from fzero._liveness import LostRankError, current_heartbeat
from fzero._notice import warn_once
from fzero._torch.types import StrPath
from fzero._tracebacks import api_boundary, api_boundary_with
from fzero.axes import AxisName
from fzero.checkpoint import Checkpoints, checkpoints
from fzero.data import BatchPlan, batch_plan
from fzero.elastic._shape import ShapeRequest, choose_shape
from fzero.ranks import TIMEOUT, Mesh, World, check_axes, connect_store, find_world
from fzero.ranks import mesh as make_mesh
from fzero.tree import Tree

__all__ = ["ElasticRun", "run"]

_T = TypeVar("_T")
_POLL_SECONDS = 0.2  # between two looks of a spare
_CALLS = itertools.count()  # the same on all ranks, since they run one script
_log = logging.getLogger("fzero")


class ElasticRun:
    """One start of an elastic run, which `fzero.elastic.run` gives to the user's function.

    Attributes:
        mesh: the ranks of this start.
        steps: the number of steps of the whole run.
        step: the number of steps done, once `restore` was called.
        batch_plan: how the global batch is shared by these ranks: `batch_plan.accumulation` is the number of a rank's
            micro-batches.
    """

    def __init__(
        self,
        root: StrPath,
        mesh: Mesh,
        steps: int,
        plan: BatchPlan,
        copy_every: int,
        save_every: int,
        memory: str,
        copies: int,
    ) -> None:
        self.mesh, self.steps, self.batch_plan, self.step = mesh, steps, plan, -1
        self._copy_every, self._save_every = copy_every, save_every
        # two, so that a copy in memory does not wait for a save to disk
        self._on_disk = checkpoints(root, mesh)
        self._in_memory = checkpoints(root, mesh, memory=memory, copies=copies)
        self._is_leaving = False

    def __repr__(self) -> str:
        return f"ElasticRun(step {max(self.step, 0)} of {self.steps}, {self.mesh!r})"

    @api_boundary
    def restore(self, state: _T) -> _T:
        """Return the newest state that is whole, from the hosts' memory or the disk; `state` itself in a new run.

        The state may be one of another number of ranks. It is saved in memory again at once: copies may be lost.

        Args:
            state: a tree in the layout of this mesh, as `step.init` returns it. It is overwritten.

        Raises:
            CheckpointError: if the run's state is another tree, or all of its checkpoints are damaged.
            ValueError: if the run has another `global_batch`.
        """
        values = self._in_memory.restore({"state": state, "step": 0, "global_batch": self.batch_plan.global_batch})
        if values["global_batch"] != self.batch_plan.global_batch:
            raise ValueError(
                f"global_batch={self.batch_plan.global_batch}, and the run in this folder has "
                f"{values['global_batch']}: batch i would be another one now; give the same number, or another folder"
            )
        self.step = values["step"]
        if self.step:
            if self.mesh.rank == 0:
                _log.info("goes on after step %d of %d on %r", self.step, self.steps, self.mesh)
            self._in_memory.save_in_memory(self.step, values)
        return values["state"]

    @api_boundary
    def save(self, step: int, state: Tree) -> None:
        """Save the state after each step: each `copy_every`-th in memory, each `save_every`-th and the last on disk.

        The state may be donated to the next step at once.

        Args:
            step: the number of steps done.
            state: the tree, as `restore` returned it.

        Raises:
            ValueError: if `restore` was not called, or `step` is not the next one.
            CheckpointError: if the last copy or save failed.
        """
        if self.step < 0:
            raise ValueError("save: call run.restore(state) first, which returns the state to go on from")
        if step != self.step + 1:
            raise ValueError(
                f"save({step}, ...) after step {self.step}: a batch was skipped or taken twice; call save after each "
                "step, with the number of the batch plus 1, and begin with the batch of number run.step"
            )
        self.step, values = step, {"state": state, "step": step, "global_batch": self.batch_plan.global_batch}
        if step % self._copy_every == 0:
            self._in_memory.save_in_memory(step, values)
            if self._is_leaving:
                self.wait()
                _log.info("leaves after step %d, which is saved", step)
                raise SystemExit(128 + signal.SIGTERM)
        if step % self._save_every == 0 or step == self.steps:
            self._on_disk.save(step, values)

    def wait(self) -> None:
        """Wait until what was saved is committed.

        Raises:
            CheckpointError: if it failed.
        """
        self._in_memory.wait()
        self._on_disk.wait()

    def _release_if_complete(self) -> None:
        """Release the hosts' memory, if the run is on disk to its end."""
        self.wait()
        if self.step == self.steps:
            self._in_memory.clear_memory()


@api_boundary_with('for example, fzero.elastic.run(train, "runs/gpt", steps=1000, global_batch=64, dp=-1)')
def run(
    train: Callable[[ElasticRun], _T],
    root: StrPath,
    *,
    steps: int,
    global_batch: int,
    micro_batch: int | None = None,
    axis: AxisName = None,
    copy_every: int = 10,
    save_every: int = 1000,
    min_ranks: int = 1,
    memory: str = "/dev/shm",
    copies: int = 1,
    timeout: float | None = TIMEOUT,
    simulate: bool | Literal["vmap", "lockstep"] | None = None,
    simulated_ranks: int | None = None,
    **axes: int,
) -> _T | None:
    """Train on the ranks that are alive, and go on with those that are left when some are lost, or others join.

    Start it by `torchrun --nnodes MIN:MAX --max-restarts N`. When a rank is lost, the others raise `LostRankError`, and
    torchrun starts the script again on the hosts that are left. Then the mesh has fewer ranks, each with more of the
    same global batch, and the state comes from the hosts' shared memory. The batch of number i stays the same.

    Args:
        train: the user's function, which gets an `ElasticRun`. It makes the step and its state for `run.mesh`, calls
            `run.restore(state)`, then `run.save(i + 1, state)` after each step i from `run.step` to `run.steps`.
        root: the folder of the run's checkpoints, the same in each start; see `fzero.checkpoint.checkpoints`.
        steps: the number of steps of the whole run.
        global_batch: the examples of a step over all ranks. It stays the same on any number of ranks.
        micro_batch: the examples of a rank's micro-batch; by default a rank has one micro-batch.
        axis: the axes along which ranks get different examples; by default all.
        copy_every: the steps between two copies of the state in memory. At most so many are done again, and so many
            more if a rank is lost while a copy is under way.
        save_every: the steps between two checkpoints on disk.
        min_ranks: the fewest ranks to train on.
        memory: a folder of shared memory.
        copies: on how many other hosts each rank's part is copied.
        timeout: how long ranks wait for one another, as `fzero.mesh` takes it.
        simulate: how to simulate ranks, as `fzero.mesh` takes it.
        simulated_ranks: the number of ranks to simulate if there is no world.
        **axes: the size of each axis of the mesh. The axis of size -1 grows and shrinks with the ranks: `dp=-1, tp=2`.

    Returns:
        What `train` returns; None on a spare: a rank beyond the largest mesh that shares the batch equally. It waits
        for the end of the run, or for a start that needs it.

    Raises:
        RuntimeError: if the ranks that are alive are too few for the mesh, `min_ranks` or the batch.
        TypeError: if `train` is not a function.
        ValueError: if an argument is out of range, or there is no axis.
        LostRankError: if a rank is lost. torchrun starts the others again.

    Example:
        >>> import fzero, tempfile, torch
        >>> opt = fzero.optim.sgd(0.1)
        >>> def train(run):
        ...     def train_step(w, opt_state, x):
        ...         loss, grads = fzero.value_and_grad(lambda w, x: (w - x).square().mean())(w, x)
        ...         updates, opt_state = opt.update(grads, opt_state, w)
        ...         return fzero.optim.apply_updates(w, updates), opt_state, loss
        ...
        ...     step = fzero.shard(train_step, stage=3, mesh=run.mesh)
        ...     state = run.restore(step.init(torch.zeros(3), opt))
        ...     data = fzero.data.batches(torch.ones(20, 3), run.mesh, global_batch=4)
        ...     for i, batch in data.steps(run.step, run.steps):
        ...         *state, loss = step(*state, batch)
        ...         run.save(i + 1, tuple(state))
        ...     return run.mesh.size, run.step
        >>> root, where = tempfile.mkdtemp(), {"memory": tempfile.mkdtemp(), "global_batch": 4}
        >>> run(train, root, steps=10, dp=-1, simulated_ranks=4, **where)
        (4, 10)
        >>> run(train, root, steps=15, dp=-1, simulated_ranks=3, **where)  # 3 ranks do not share 4 examples equally
        (2, 15)
    """
    numbers = {"steps": steps, "global_batch": global_batch, "copy_every": copy_every, "save_every": save_every}
    numbers |= {"min_ranks": min_ranks, "micro_batch": micro_batch, "simulated_ranks": simulated_ranks}
    _check_arguments(train, numbers, axes, axis)
    check_path("root", root, "the path of a folder, or a URL", "fzero.elastic.run(train, root, steps=100)")
    data_axes = tuple(axes) if axis is None else _axis_tuple(axis)
    world = None if simulate else find_world()
    request = ShapeRequest(
        axes=axes, data_axes=data_axes, global_batch=global_batch, micro_batch=micro_batch or 1, min_ranks=min_ranks
    )
    shape = choose_shape(_count_alive(world, simulated_ranks, axes), request)
    used_ranks, call_number = math.prod(shape.values()), next(_CALLS)
    if world is not None and used_ranks < world.size:
        _leave_spares(world, used_ranks, lambda mesh: checkpoints(root, mesh, memory=memory), timeout)
        if world.rank >= used_ranks:
            _wait_as_spare(world, used_ranks, call_number)
            return None
    sizes: dict[str, Any] = {**shape}
    mesh = make_mesh(simulate=simulate, timeout=timeout, **sizes)
    _warn_of_no_restarts(world)
    elastic_run = ElasticRun(
        root=root,
        mesh=mesh,
        steps=steps,
        plan=_batch_plan(mesh, data_axes, global_batch, micro_batch),
        copy_every=copy_every,
        save_every=save_every,
        memory=memory,
        copies=copies,
    )
    result = _run_training(elastic_run, train)
    if world is not None and used_ranks < world.size and mesh.rank == 0:
        _end_spares(world, call_number)
    return result


def _count_alive(world: World | None, simulated_ranks: int | None, axes: Mapping[str, int]) -> int:
    """Return the number of ranks that are alive; without a world those that are simulated, or that the axes name."""
    if world is not None:
        return world.size
    return simulated_ranks or math.prod([n for n in axes.values() if n > 0])


def _check_arguments(train: Any, numbers: Mapping[str, Any], axes: Mapping[str, int], axis: AxisName) -> None:
    """Check the arguments of `run`, as far as this is possible without the world and the mesh."""
    for name, n in numbers.items():
        if n is not None or name not in ("micro_batch", "simulated_ranks"):
            check_int(name, n, 1)
    check_callable("train", train, "a function of an ElasticRun, as in fzero.elastic.run(train, root, steps=100)")
    if not axes:
        raise ValueError(
            "elastic.run needs the axes of its mesh: dp=-1 is an axis that grows and shrinks with the ranks"
        )
    check_axes(axes, None, [*inspect.signature(run).parameters])
    for name in _axis_tuple(axis):
        if name not in axes:
            raise ValueError(f"axis={axis!r}: {name!r} is not an axis of the mesh, which has {', '.join(axes)}")
    global_batch, micro_batch = numbers["global_batch"], numbers["micro_batch"]
    if micro_batch is not None and global_batch % micro_batch:
        raise ValueError(
            f"micro_batch={micro_batch} does not divide global_batch={global_batch}: no number of ranks can share it"
        )


def _axis_tuple(axis: AxisName) -> tuple[str, ...]:
    """Return the names of axes as a tuple; none for None."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _batch_plan(mesh: Mesh, data_axes: tuple[str, ...], global_batch: int, micro_batch: int | None) -> BatchPlan:
    """Plan the batches of a start; without `micro_batch` a rank has one micro-batch."""
    accumulation = 1 if micro_batch is None else None
    return batch_plan(
        global_batch=global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        mesh=mesh,
        axis=data_axes,
        model_axes=(),
    )


def _run_training(elastic_run: ElasticRun, train: Callable[[ElasticRun], _T]) -> _T:
    """Call the user's function, and release the hosts' memory if it came to the end of the run."""
    with _leave_at_saved_step(elastic_run):
        try:
            result = train(elastic_run)
            if elastic_run.step < elastic_run.steps:
                warn_once(
                    f"fzero.elastic.run: the function returned after step {max(elastic_run.step, 0)} of "
                    f"{elastic_run.steps}, as far as run.save was told: call run.save(i + 1, state) after each step"
                )
            elastic_run._release_if_complete()
            return result
        except LostRankError:
            _log.error("rank %d ends after step %d, to be started again", elastic_run.mesh.rank, elastic_run.step)
            raise


def _end_key(call_number: int) -> str:
    """Return the key of the store that says that a process's run of some number has ended."""
    return f"fzero/elastic/ended/{call_number}"


def _leave_spares(
    world: World, ranks: int, checkpoints_on: Callable[[Mesh], Checkpoints], timeout: float | None
) -> None:
    """Let `fzero.mesh` find a world of the first ranks. They get what the others' hosts have in memory.

    Raises:
        ValueError: if a process group exists already.
    """
    if not world.address:
        raise ValueError(
            f"elastic.run: a process group of {world.size} ranks exists, and the largest mesh that shares the global "
            f"batch equally has {ranks}: let elastic.run make the group, or choose a batch that all ranks share"
        )
    checkpoints_on(make_mesh(all=world.size, device="cpu", timeout=timeout)).move_memory(ranks)
    destroy_process_group()
    host, _, port = world.address.rpartition(":")
    variables = {"RANK": world.rank, "WORLD_SIZE": ranks, "MASTER_ADDR": host, "MASTER_PORT": port}
    if world.rank < ranks:
        os.environ.update({name: str(value) for name, value in variables.items()})


def _end_spares(world: World, call_number: int) -> None:
    """Let the spares return: the run has ended."""
    connect_store(world, TIMEOUT).set(_end_key(call_number), "")


def _wait_as_spare(world: World, ranks: int, call_number: int) -> None:
    """Wait until the run has ended. torchrun ends this process if it starts all again."""
    _log.warning("rank %d is a spare: %d of %d ranks share the global batch equally", world.rank, ranks, world.size)
    try:
        store = connect_store(world, TIMEOUT)
        while not store.check([_end_key(call_number)]):
            time.sleep(_POLL_SECONDS)
    except DistError:  # rank 0 has served the store, and has ended
        _log.warning("rank %d, a spare, ends, since the store is gone", world.rank)


def _warn_of_no_restarts(world: World | None) -> None:
    """Print a notice if a loss ends the run."""
    if world is not None and world.rank == 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        warn_once("fzero: nothing starts lost ranks again: launch with torchrun --max-restarts N")


@contextmanager
def _leave_at_saved_step(elastic_run: ElasticRun) -> Iterator[None]:
    """Let SIGTERM end this process after the next step that is saved in memory, as torchrun sends it when a host joins.

    After 30 s torchrun kills. Without heartbeats a rank could wait so long for one that died, so it ends at once.
    """
    never_waits_long = current_heartbeat() is not None or elastic_run.mesh.size == 1
    is_main = threading.current_thread() is threading.main_thread()
    if not (elastic_run.mesh.distributed and never_waits_long and is_main):
        yield
        return

    def leave(*_: Any) -> None:
        elastic_run._is_leaving = True

    previous_handler = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
