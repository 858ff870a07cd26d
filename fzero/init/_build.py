"""Building parameters as stage 3 holds them: each leaf is made, cut and forgotten, so no rank holds the whole tree."""

import random
from collections.abc import Callable
from typing import Any

import torch

from fzero import tree
from fzero._notice import notice
from fzero.init._deferred import Deferred, defer
from fzero.layout.boxes import Shard, Slot, is_box
from fzero.layout.spec import Spec, spec_of
from fzero.ranks.agreement import check_equal, checksum
from fzero.ranks.mesh import Mesh

__all__ = ["build", "deferred_or_whole"]


def deferred_or_whole(init: Callable[[], Any]) -> Deferred | Any:
    """Trace an init function, to be run leaf by leaf; or run it (a second time), if it cannot be traced."""
    before = random.getstate(), torch.get_rng_state()
    try:
        return defer(init)
    except Exception as error:  # if it is init's own, it comes again
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        whole = init()
        name, reason = getattr(init, "__name__", "the init function"), " ".join(str(error).split())[:120]
        notice(
            f"fzero: {name} cannot be traced ({type(error).__name__}: {reason}), so every rank holds the whole tree "
            "while it is cut"
        )
        return whole


def build(deferred: Deferred, cut: Callable[[Any], Any], mesh: Mesh) -> Any:
    """Compute a deferred tree straight into the boxes that `cut` puts it into.

    What is alive at any time: this rank's shards, one leaf, and what it is computed from.

    Args:
        deferred: the tree.
        cut: the layout, as a function of the whole tree (in meta tensors) on the mesh.
        mesh: whose ranks they are; in a simulation all ranks' shards are made.

    Raises:
        ValueError: on all ranks, if a leaf is not the same on all. Names it.
    """
    sums: list[Any] = list(deferred.leaves)
    entries, structure = tree.flatten(cut(tree.unflatten(deferred.structure, deferred.leaves)), is_box)
    shards: dict[int, torch.Tensor] = {}
    for i, x in enumerate(entries):
        if isinstance(x, Shard):
            shards[x.uid] = torch.zeros(x.data.shape, dtype=x.data.dtype, device=deferred.devices[i])
            entries[i] = Shard(shards[x.uid], x.uid)

    def take(positions: list[int], leaf: torch.Tensor) -> None:
        x = entries[positions[0]]
        for i in positions:
            sums[i] = checksum(leaf) if mesh.distributed else None
        if isinstance(x, Shard | Slot):
            _store(leaf, x.index if isinstance(x, Slot) else 0, spec_of(x.uid), shards[x.uid], mesh)
            return
        whole = leaf.detach().clone()  # it may be a view of more
        for i in positions:
            entries[i] = whole

    deferred.run(take)
    check_equal("params", tree.unflatten(deferred.structure, sums), mesh)
    return tree.unflatten(structure, entries)


def _store(leaf: torch.Tensor, index: int, spec: Spec, data: torch.Tensor, mesh: Mesh) -> None:
    """Copy what is its own of a whole leaf into each shard of its unit: data `[k]`, in a simulation `[N, k]`."""
    names = tuple([name for name in mesh.axis_names if name in spec.varies])
    ranks = range(mesh.size) if mesh.simulated else [mesh.rank]
    rows = {mesh.index(names, r) if mesh.simulated and names else 0: r for r in ranks}
    for row, shard in enumerate(data.view(-1, spec.shard_numel) if spec.shard_numel else ()):
        part, rank = leaf, rows[row]
        for s in spec.split:
            k = part.shape[s.dims[index]] // s.size
            part = part.narrow(s.dims[index], mesh.index(s.axis, rank) * k, k)
        start = mesh.index(spec.axes, rank) * spec.shard_numel if spec.axes else 0
        offset, size = spec.offsets[index], spec.sizes[index]
        first, last = max(start, offset), min(start + spec.shard_numel, offset + size)
        if first < last:
            shard[first - start : last - start] = part.detach().reshape(-1)[first - offset : last - offset]
