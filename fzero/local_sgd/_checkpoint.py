"""Checkpoints of replicas that train apart: a folder for each replica, and one for their shared state."""

import torch

from fzero import tree
from fzero._arguments import check_path
from fzero._torch.types import StrPath
from fzero.checkpoint import CheckpointError, load, read, save
from fzero.local_sgd._outer_step import OuterStep
from fzero.local_sgd._parts import divide_into_parts, select
from fzero.local_sgd._replicas import LocalState, ReplicaGroups, Replicas
from fzero.local_sgd._sync_schedule import SyncSchedule

__all__ = ["load_replicas", "save_replicas"]


def save_replicas(
    path: StrPath, outer_step: OuterStep, schedule: SyncSchedule, params: Replicas, state: LocalState
) -> None:
    """Save each replica in a folder of its own, and then their shared state: only then is the save complete."""
    groups, parts = outer_step.groups, divide_into_parts(state.anchor, schedule.parts)
    for replica, p, s in zip(groups.replica_indices, params.trees, state.inner.trees, strict=True):
        values = {"count": state.count, "params": p, "opt_state": s}
        save(_replica_folder(path, f"replica-{replica}"), values, groups.inner_mesh)
    numbers = {
        "count": state.count,
        "replicas": groups.count,
        "schedule": schedule.to_list(),
        "mix": outer_step.mix,
    }
    sums = [outer_step.wait(part, state.anchor, x) for part, x in zip(parts, state.pending_sums, strict=True)]
    save(
        _replica_folder(path, "shared"),
        {**numbers, "anchor": state.anchor, "outer": state.outer_states, "sent": sums},
        groups.mesh,
    )


def load_replicas(
    path: StrPath, groups: ReplicaGroups, schedule: SyncSchedule, params: Replicas, state: LocalState
) -> tuple[Replicas, LocalState]:
    """Load a save of `save_replicas` into the tensors of `params` and `state`."""
    folder = _replica_folder(path, "shared")
    count, replicas, mix = [read(folder, name) for name in ("count", "replicas", "mix")]
    saved_schedule = SyncSchedule.from_list(read(folder, "schedule"))
    is_same = replicas == groups.count and saved_schedule == schedule
    holds_anchor = saved_schedule.is_boundary(count) and (mix == 0 or count == 0)
    same_parts = (saved_schedule.parts, saved_schedule.delay) == (schedule.parts, schedule.delay)
    if not is_same and not (holds_anchor and same_parts):
        raise CheckpointError(
            f"{folder!r} was saved after step {count} of {replicas} replicas with every, parts, delay = "
            f"{saved_schedule.to_list()} and mix={mix}, and this run has {groups.count} replicas with "
            f"{schedule.to_list()}: another number of replicas, or another `every`, can only go on right after an "
            "average, where all replicas hold the anchor"
        )
    parts, waiting = divide_into_parts(state.anchor, schedule.parts), schedule.parts_in_flight(count)
    sums = [select(state.anchor, part) if i in waiting else None for i, part in enumerate(parts)]
    like = {"anchor": state.anchor, "outer": state.outer_states, "sent": tree.map(torch.empty_like, sums)}
    shared_state = load(folder, like, groups.mesh, partial=True)
    trees = []
    for replica, p, s in zip(groups.replica_indices, params.trees, state.inner.trees, strict=True):
        own_folder = _replica_folder(path, f"replica-{replica % replicas}")
        values = load(own_folder, {"count": 0, "params": p, "opt_state": s}, groups.inner_mesh)
        if values["count"] != count:
            raise CheckpointError(
                f"{own_folder!r} was saved after step {values['count']}, and {folder!r} after step {count}: a save was "
                "cut off; save each step to a folder of its own, and load the last complete one"
            )
        trees.append((values["params"], values["opt_state"]))
    inner = Replicas(tuple([s for _, s in trees]))
    new_state = LocalState(
        count=count,
        inner=inner,
        anchor=shared_state["anchor"],
        outer_states=tuple(shared_state["outer"]),
        pending_sums=tuple(shared_state["sent"]),
    )
    return Replicas(tuple([p for p, _ in trees])), new_state


def _replica_folder(path: StrPath, name: str) -> str:
    text = check_path("path", path, "the path of a folder, or a URL", "local.save(path, params, state)")
    return f"{text.rstrip('/')}/{name}"
