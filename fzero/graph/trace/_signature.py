"""A call of a jitted function: its tensors, what it is cached by, and how it is described."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fzero import tree
from fzero.layout.boxes import PerRank, Shard, Slot, is_box

__all__ = ["Call", "call_of", "changed"]


@dataclass(frozen=True)
class Call:
    """The arguments of a call, taken apart.

    Attributes:
        key: equal for calls that one trace serves: the structure, the tensors' shapes, strides, dtypes and devices,
            which leaves are one tensor (tied), the other leaves' values, and torch's
            settings of dtype, grad mode and autocast.
        leaves: the leaves of `(args, kwargs)`.
        structure: of `(args, kwargs)`.
        where: the position of each distinct tensor among the leaves.
        index: for each leaf its number among the distinct tensors, or -1.
    """

    key: Any
    leaves: list[Any]
    structure: Any
    where: list[int]
    index: list[int]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """The distinct tensors."""
        return [self.leaves[i] for i in self.where]

    @cached_property
    def paths(self) -> list[tuple[str, str]]:
        """The path of each leaf ("0.3.w" for argument 3 by position, "1.lr.w" by keyword), and its unit or ""."""
        return _paths(tree.unflatten(self.structure, list(range(len(self.leaves)))))

    @cached_property
    def places(self) -> list[str]:
        """The argument of each distinct tensor, and the path or unit in it: "0, leaf 'w'"."""
        paths = self.paths
        return [_place(*paths[i]) for i in self.where]

    @cached_property
    def owners(self) -> list[int | None]:
        """The position of the argument that each distinct tensor is in; None for a keyword argument."""
        paths = self.paths
        return [int(paths[i][0].split(".")[1]) if paths[i][0].startswith("0.") else None for i in self.where]

    @cached_property
    def blocks(self) -> list[str]:
        """The number of the repeated block that each distinct tensor belongs to, "" for others."""
        paths = self.paths
        return [_block(*paths[i]) for i in self.where]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of the distinct ones."""
        leaves = [x if i < 0 else tensors[i] for x, i in zip(self.leaves, self.index, strict=True)]
        return tree.unflatten(self.structure, leaves)

    def check_traceable(self) -> None:
        """Check what a graph's arguments must be.

        Raises:
            ValueError: if a tensor requires grad.
        """
        for place, x in zip(self.places, self.tensors, strict=True):
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"fzero.jit: argument {place} requires grad, and a jitted step's results have no autograd graph: "
                    "take gradients inside the step (fzero.value_and_grad) and pass tensors detached"
                )

    def check_real(self) -> None:
        """Check that every tensor has memory.

        Raises:
            ValueError: if one is on the meta device. Names it.
        """
        for place, x in zip(range(len(self.where)), self.tensors, strict=True):
            if x.is_meta:
                raise ValueError(
                    f"argument {self.places[place]} is on the meta device, without memory: such a step can be planned "
                    "(fzero.plan), not run"
                )

    def check_separate(self, donated: Sequence[int]) -> None:
        """Check that nothing shares memory with a donated tensor.

        Raises:
            ValueError: if two arguments do. Names them.
        """
        chosen = set(donated)
        spans = []
        for i, x in enumerate(self.tensors):
            if i in chosen and x.is_inference() and not torch.is_inference_mode_enabled():
                raise ValueError(
                    f"argument {self.places[i]} was made under torch.inference_mode and cannot be written into, and it "
                    "is donated: make it outside, or jit with donate=()"
                )
            if x.numel():
                start = x.data_ptr()
                spans.append((start, start + _extent(x), i))
        spans.sort()
        reach, owner = 0, -1
        for start, stop, i in spans:
            if start < reach and (i in chosen or owner in chosen) and reach:
                a, b = sorted((owner, i))
                raise ValueError(
                    f"argument {self.places[a]} and argument {self.places[b]} share memory, and one is donated to "
                    "fzero.jit: what is written into one would change the other. Clone one, or jit with donate=()"
                )
            if stop > reach:
                reach, owner = stop, i

    def pairs(self, positions: Sequence[int], out: Any, leaves: Sequence[Any]) -> dict[int, int]:
        """Match results with the donated tensors that they may be written into.

        A result goes where the argument at its own position has the same path, shape and dtype; what is left over goes
        to any donated tensor of its shape and dtype.

        Returns:
            A mapping from the number of a result's leaf to that of a distinct tensor.
        """
        tensors, owners, paths = self.tensors, self.owners, self.paths
        free = {i for i, p in enumerate(owners) if p in positions and _dense(tensors[i])}
        by_path = {paths[leaf][0].split(".", 1)[1]: i for leaf, i in enumerate(self.index) if i in free and i >= 0}
        results = [path for path, _ in _paths(out)]
        single = not isinstance(out, tuple)
        into: dict[int, int] = {}
        taken: dict[int, int] = {}  # tensor -> id of the value that it takes

        def fits(x: Any, i: int) -> bool:
            y = tensors[i]
            alike = isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)
            return alike and (y.device.type == "meta" or x.device == y.device)

        for k, (path, x) in enumerate(zip(results, leaves, strict=True)):
            i = by_path.get(("0." + path).rstrip(".") if single else path, -1)
            if i >= 0 and fits(x, i) and taken.setdefault(i, id(x)) == id(x):
                into[k] = i
        values = {id(leaves[k]) for k in into}
        for k, x in enumerate(leaves):
            if k not in into and id(x) not in values:
                i = next((i for i in sorted(free - taken.keys()) if fits(x, i)), -1)
                if i >= 0:
                    into[k], taken[i] = i, id(x)
        return into


def _paths(values: Any) -> list[tuple[str, str]]:
    """List for each leaf its path, and the unit that it is a shard of, or ""."""
    found = []
    for path, x in zip(*tree.flatten_with_paths(values, is_box)[:2], strict=True):
        if isinstance(x, PerRank):
            found += [(f"{path}.{inner}".strip("."), "") for inner in tree.flatten_with_paths(x.value)[0]]
        elif isinstance(x, Shard):
            found += [(path, x.spec.unit)] * len(tree.flatten(x)[0])
        elif not isinstance(x, Slot):
            found.append((path, ""))
    return found


def _block(path: str, unit: str) -> str:
    keys = unit.split(".") if unit else path.split(".")[2:-1]
    return next((key for key in reversed(keys) if key.isdigit()), "")


def _extent(x: torch.Tensor) -> int:
    if x.is_contiguous():
        return x.nbytes
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _dense(x: torch.Tensor) -> bool:
    """Tell whether no two elements of a tensor share memory, as they do in an expanded one: it can be written into."""
    reach = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * size
    return True


def _place(path: str, unit: str = "") -> str:
    name, _, rest = path.partition(".")[2].partition(".")
    name = name if path.startswith("0.") else f"{name!r}"
    if unit:
        return f"{name}, unit {unit!r}"
    return f"{name}, leaf {rest!r}" if rest else name


def call_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Take a call apart.

    Raises:
        DonatedError: if an argument was donated.
        TypeError: if an argument that is no tensor has no hash.
    """
    leaves, structure = tree.flatten((args, kwargs))
    described, where, index = [], [], []
    numbers: dict[int, int] = {}
    for position, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            described.append((type(x), x.hex() if isinstance(x, float) else x))  # -0.0 == 0.0, and nan != nan
            index.append(-1)
            continue
        number = numbers.setdefault(id(x), len(where))
        index.append(number)
        if number == len(where):
            where.append(position)
            described.append((x.shape, x.dtype, x.stride(), x.device, x.requires_grad))
        else:
            described.append(number)
    key = (structure, tuple(described), _settings())
    try:
        hash(key)
    except TypeError as error:
        call = Call(None, leaves, structure, where, index)
        for (path, _), x in zip(call.paths, leaves, strict=True):
            if not isinstance(x, torch.Tensor) and type(x).__hash__ is None:
                raise TypeError(
                    f"fzero.jit: argument {_place(path)} is a {type(x).__name__}, neither a tensor nor hashable: make "
                    "it a tensor, or register its class as a pytree node"
                ) from error
        raise
    return Call(key, leaves, structure, where, index)


def _settings() -> Any:
    """Return torch's settings that what a step traces depends on."""
    casts = tuple([torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda")])
    return torch.get_default_dtype(), torch.is_grad_enabled(), casts


def changed(old: Any, call: Call) -> str:
    """Say in one line what distinguishes a call from an earlier one's key."""
    structure, described, _ = old
    if structure != call.structure or len(described) != len(call.leaves):
        return "the arguments have another structure"
    for (path, unit), x, before, now in zip(call.paths, call.leaves, described, call.key[1], strict=True):
        if before != now and isinstance(before, int) != isinstance(now, int):
            return f"argument {_place(path, unit)} is {'no longer ' if isinstance(before, int) else ''}tied to another"
        if before != now:
            was = f"{before[1]} {list(before[0])}" if isinstance(x, torch.Tensor) and len(before) == 5 else before[-1]
            is_now = f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
            what = "" if was != is_now else f" (strides {before[2]} and {x.stride()})"
            return f"argument {_place(path, unit)} was {was} and is {is_now}{what}"
    return "torch's default dtype, grad mode or autocast was switched"
