"""Find silent corruption: compare the memory between calls, and each n-th step with a second run of itself."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch

from fzero import tree
from fzero._arguments import check_choice, check_int
from fzero._notice import trouble_link
from fzero.collectives import ppermute
from fzero.ranks import Mesh, all_gather_numbers, check_equal, checksum
from fzero.sharding import PerRank, is_box

__all__ = ["CallHistory", "CorruptionError", "Rerun", "check_rerun", "run_and_compare"]


class CorruptionError(RuntimeError):
    """Bits changed that nobody wrote, or a step gave two results: memory, a link or a device has failed."""


CorruptionError.__module__ = "fzero.errors"  # where a pickle finds it


@dataclass(frozen=True)
class Rerun:
    """The choice of `fzero.shard(check=)` that looks for silent corruption.

    Before each call, checksums of the arguments are compared with those that they had as results of the last call. So a
    flipped bit in memory is found at the next call. The first call and then each `every`-th runs twice, the first time
    on copies of its arguments. The two results must have the same bits on each rank.

    Attributes:
        every: the calls from one that runs twice to the next.
        swap: the name of an axis of 2 ranks, such as two replicas. On the copies, the ranks along it swap their
            batches, so that each computes the other's gradients. That finds a device that always makes the same
            mistake. A step that depends on its rank, as `fzero.random.seeded` makes it, cannot swap. With more than
            two ranks, units must be sharded over the other axes (`over=`), and 0-d results such as the loss are not
            compared: sums over more than two ranks may have other bits in another order. Simulated ranks swap with
            `fzero.mesh(..., simulate="lockstep")`.

    Raises:
        ValueError: if `every` is below 1.
        TypeError: if `every` is not an int.

    Example:
        >>> import fzero, torch
        >>> opt = fzero.optim.sgd(0.1)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: (p["w"] * x).mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return fzero.optim.apply_updates(params, updates), opt_state, loss
        >>> mesh = fzero.mesh(dp=2, simulate="lockstep")
        >>> step = fzero.shard(train_step, stage=3, mesh=mesh, check=fzero.zero.Rerun(every=100, swap="dp"))
        >>> params, opt_state = step.init({"w": torch.ones(3)}, opt)
        >>> batch = mesh.split(torch.ones(4, 3))
        >>> params, opt_state, loss = step(params, opt_state, batch)
        >>> float(loss)
        1.0
        >>> params["w"].pieces[0].numpy().view("uint8")[0, 0] ^= 1  # a cosmic ray, of which torch knows nothing
        >>> try:
        ...     step(params, opt_state, batch)
        ... except fzero.errors.CorruptionError as error:
        ...     print(str(error)[:65])
        argument 0, leaf 'w.0' has other bits than the last call returned
    """

    every: int = 100
    swap: str | None = None

    def __post_init__(self) -> None:
        check_int("every", self.every)


class _ResultRecord(NamedTuple):
    """A tensor that a call returned: the number of torch's writes into it by then, and its checksum."""

    tensor: "ref[torch.Tensor]"
    version: int
    checksum: torch.Tensor


@dataclass
class CallHistory:
    """The history of a step's checked calls: how many there were, and what the last one returned.

    Attributes:
        calls: the count of calls.
        results: the tensors that the last call returned, by their ids.
    """

    calls: int = 0
    results: Mapping[int, _ResultRecord] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether the next call is the first."""
        return self.calls == 0

    def record(self, out: Any = None) -> None:
        """Count a call, and keep checksums of its results, so that the next call can compare its arguments."""
        tensors = [x for x in tree.tensors(out) if not x.is_inference()]
        self.results = {id(x): _ResultRecord(ref(x), x._version, checksum(x)) for x in tensors}
        self.calls += 1


def check_rerun(check: Any, mesh: Mesh, axes: Sequence[str], over: Any, stage: int) -> None:
    """Check the argument `check` of a sharded step.

    Args:
        check: the argument.
        mesh: the mesh of the step.
        axes: its data-parallel axes.
        over: the axes over which its units are sharded, or a rule; None for all.
        stage: its ZeRO stage.

    Raises:
        ValueError: if it is neither "first", True, False nor a `Rerun`, or ranks of this step cannot swap their
            batches without other bits of the gradients.
    """
    if not isinstance(check, Rerun):
        check_choice("check", check, ("first", True, False))
        return
    if check.swap is None:
        return
    argument_text, sizes = f"check=Rerun(swap={check.swap!r})", dict(mesh.shape)
    if sizes.get(check.swap) != 2:
        raise ValueError(
            f"{argument_text}: expected an axis of 2 ranks, and the mesh has {sizes}: sums over two ranks have the "
            "same bits in either order; make two replicas, fzero.mesh(replica=2, shard=-1)"
        )
    if mesh.simulated and mesh.simulation == "vmap":
        # A product over the rows of all ranks may sum those of another rank in another order.
        raise ValueError(
            f"{argument_text}: the mesh simulates its ranks as a batch, in which a rank's place may change its bits; "
            "simulate "
            'them one after the other, fzero.mesh(..., simulate="lockstep")'
        )
    ranks = math.prod(sizes[axis] for axis in axes)
    is_apart = stage > 0 and over is not None and (callable(over) or check.swap not in mesh.names(over))
    if check.swap in axes and ranks > 2 and not is_apart:
        raise ValueError(
            f"{argument_text}: gradients of {ranks} ranks are summed at once, and another order may give other bits; "
            "keep the replicas apart, fzero.shard(..., stage=1, axis=('replica', 'shard'), over='shard')"
        )


def run_and_compare(
    rerun: Rerun,
    history: CallHistory,
    mesh: Mesh,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call `run`, and look for corruption before and after.

    Args:
        rerun: the comparisons, and how often they are made.
        history: the step's earlier calls.
        mesh: the step's ranks.
        run: the step. It may overwrite the tensors of its arguments.
        args: its arguments.
        kwargs: its arguments by name.

    Returns:
        The results.

    Raises:
        CorruptionError: if bits changed. On all ranks, if two runs differ; else on the rank whose memory changed.
        DiffersByRankError: on all ranks, if a plain tensor differs between them, in a call that runs twice.
    """
    call = {**dict(enumerate(args)), **kwargs}
    _check_unwritten(history, call)
    is_due = history.calls % rerun.every == 0
    sums: list[torch.Tensor] = []
    if is_due:
        check_equal("argument", call, mesh)
        copies = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, dict(kwargs)))
        copies = _swap_batches(copies, mesh, rerun.swap)
        second_result = _swap_batches(run(*copies[0], **copies[1]), mesh, rerun.swap)
        del copies
        sums = [checksum(x) for x in _stable_results(second_result, mesh, rerun).values()]
        del second_result
    out = run(*args, **kwargs)
    if is_due:
        _check_same(sums, out, mesh, rerun, history.calls + 1)
        check_equal("result", out, mesh)
    return out


def _check_unwritten(history: CallHistory, call: Any) -> None:
    """Compare arguments that are results of the last call, and into which nothing was written since.

    Raises:
        CorruptionError: if the bits of one changed. The message names the leaf.
    """
    paths, leaves, _ = tree.flatten_with_paths(call)
    comparisons: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # path, checksum now, checksum as a result
    for path, x in zip(paths, leaves, strict=True):
        record = history.results.get(id(x))
        if record is not None and record.tensor() is x and record.version == x._version:
            comparisons.append((path, checksum(x), record.checksum))
    if not comparisons:
        return
    differ = _stack_checksums([now for _, now, _ in comparisons]) != _stack_checksums(
        [before for _, _, before in comparisons]
    )
    for (path, _, _), is_other in zip(comparisons, differ.tolist(), strict=True):
        if is_other:
            raise CorruptionError(
                f"{tree.leaf_name('argument', path)} has other bits than the last call returned, and nothing was "
                f"written into it: memory has failed; go on from a checkpoint{trouble_link('silent-corruption')}"
            )


def _check_same(sums: Sequence[torch.Tensor], out: Any, mesh: Mesh, rerun: Rerun, call: int) -> None:
    """Compare the checksums of two runs on all ranks.

    Raises:
        CorruptionError: on all ranks, if they differ on one. The message names the leaf and the ranks.
    """
    results = _stable_results(out, mesh, rerun)
    if not results:
        return
    differs_here = _stack_checksums([checksum(x) for x in results.values()]) != _stack_checksums(sums)
    flags_here = differs_here.long()
    differ = all_gather_numbers(flags_here, mesh) if mesh.distributed else [flags_here.tolist()]
    ranks = [rank for rank, flags in enumerate(differ) if any(flags)]
    if not ranks:
        return
    first_path = next(path for i, path in enumerate(results) if any(flags[i] for flags in differ))
    where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if mesh.distributed else ""
    swap = f", in which ranks swapped their batches along {rerun.swap!r}" * (rerun.swap is not None)
    rank_cause = "depends on its rank, or " if rerun.swap is not None else ""
    raise CorruptionError(
        f"{tree.leaf_name('result', first_path)} has other bits{where} than in a second run of call {call}{swap}: a "
        f"device, memory or a link has failed, unless the step {rank_cause}is not deterministic; go on from a "
        f"checkpoint{trouble_link('silent-corruption')}"
    )


def _stable_results(out: Any, mesh: Mesh, rerun: Rerun) -> dict[str, torch.Tensor]:
    """Return the results, by path, that have the same bits in a second run; all of them unless ranks swap batches.

    A 0-d result may be a mean over all ranks, as the loss is: over more than two, its order changes with the swap.
    """
    paths, leaves, _ = tree.flatten_with_paths(out)
    results = {path: x for path, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor)}
    if rerun.swap is None or mesh.size == 2:
        return results
    return {path: x for path, x in results.items() if x.ndim > 0 or not x.is_floating_point()}


def _stack_checksums(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack checksums on the accelerator if one lies there: a state has tensors on both, such as a count on the CPU."""
    device = next((x.device for x in sums if x.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([x.to(device) for x in sums])


def _swap_batches(values: Any, mesh: Mesh, axis: str | None) -> Any:
    """Swap the values of two ranks along an axis, where they differ by rank."""
    if axis is None:
        return values

    def swap(boxes: list[PerRank]) -> list[PerRank]:
        return [PerRank(tree.map(lambda x: ppermute(x, axis, perm=[(0, 1), (1, 0)]), x.value), x.axes) for x in boxes]

    entries, structure = tree.flatten(values, is_box)
    indices = [i for i, x in enumerate(entries) if isinstance(x, PerRank) and (x.axes is None or axis in x.axes)]
    boxes = mesh.spmd(lambda xs: swap([PerRank(x, entries[i].axes) for i, x in zip(indices, xs, strict=True)]))(
        [entries[i] for i in indices]
    )
    for i, box in zip(indices, boxes, strict=True):
        entries[i] = box
    return tree.unflatten(structure, entries)
