"""Two memories on a machine that has one: which storage lies where, what is alive in each, and nothing mixes them."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import tree
from fzero.sharding._boxes import Shard, is_box
from fzero.sharding._pieces import spaces

DOWN, UP = torch.ops.fzero.to_host.default, torch.ops.fzero.to_device.default


class MixedError(RuntimeError):
    """An operation met tensors of both memories."""


class Arena(TorchDispatchMode):
    """Counts bytes alive by memory while operations run; it knows nothing of graphs and plans.

    A result lies where its operands do, but for the two moves. What is made of nothing lies where it is first used.
    """

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.space: dict[int, str] = {}
        self.peak = {"device": 0, "host": 0}
        for x in tree.flatten(values, is_box)[0]:
            pieces = zip(spaces(x), x.pieces, strict=True) if isinstance(x, Shard) else [("device", x)]
            for space, piece in pieces:
                for t in tree.flatten(piece)[0]:
                    if isinstance(t, torch.Tensor):
                        self._hold(t, space if t.dim() or space == "host" else None)
        self._count()

    def _hold(self, x: torch.Tensor, space: str | None) -> None:
        ref = StorageWeakRef(x.untyped_storage())
        if ref.cdata not in self.storages or self.storages[ref.cdata][0].expired():
            self.storages[ref.cdata] = ref, x.untyped_storage().nbytes()
            self.space.pop(ref.cdata, None)
        if space is not None:
            self.space.setdefault(ref.cdata, space)

    def _count(self) -> None:
        self.storages = {key: x for key, x in self.storages.items() if not x[0].expired()}
        for space in self.peak:
            live = sum(n for key, (_, n) in self.storages.items() if self.space.get(key, "device") == space)
            self.peak[space] = max(self.peak[space], live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [x for x in tree.flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        spaces = {s for x in operands if x.dim() and (s := self.space.get(StorageWeakRef(x.untyped_storage()).cdata))}
        if len(spaces) > 1:
            raise MixedError(f"{func} met both memories")
        space = {DOWN: "host", UP: "device"}.get(func, next(iter(spaces), None))
        for x in operands:
            if func not in (DOWN, UP) and space is not None and x.dim():
                self._hold(x, space)
        out = func(*args, **(kwargs or {}))
        for x in tree.flatten(out)[0]:
            if isinstance(x, torch.Tensor):
                self._hold(x, space)
        self._count()
        return out
