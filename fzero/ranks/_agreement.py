"""Compare values between the ranks of a distributed mesh: what they are, then by checksum what they hold."""

import datetime
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import see
from fzero._torch import default_store
from fzero.ranks._mesh import Mesh
from fzero.sharding import PerRank, axes_of, elements, is_box

__all__ = ["MissingRank", "check_alike", "check_equal", "checksum", "gather_texts", "numbers_of_all", "texts_of_all"]

# Texts from rank to rank, through the store of the process group.


TEXT_SECONDS = 300.0  # how long a rank waits for another's text

_ROUNDS: Counter[str] = Counter()  # how often ranks have given a text on a topic


class MissingRank(RuntimeError):
    """A rank gave no text in time; `rank` is which, and `seconds` how long it was waited for."""

    def __init__(self, rank: int, topic: str, seconds: float) -> None:
        super().__init__(f"rank {rank} gave no text on {topic!r} within {seconds:g} s")
        self.rank, self.seconds = rank, seconds


def gather_texts(mine: str, mesh: Mesh, topic: str, seconds: float | None = None) -> list[str]:
    """Give a text to all ranks, and get all ranks', in rank order.

    It is no collective, so a rank that gives a text while the others run does not take their messages for its own.

    Args:
        mine: this rank's text.
        mesh: a distributed mesh. A mesh is the world.
        topic: what the texts are about. Its n-th text on a topic is for the other ranks' n-th.
        seconds: how long to wait for another's text; by default `TEXT_SECONDS`.

    Raises:
        MissingRank: if a rank gives no text in that time.
    """
    patience = TEXT_SECONDS if seconds is None else seconds
    store = default_store()
    _ROUNDS[topic] += 1
    keys = [f"fzero/{topic}/{_ROUNDS[topic]}/{rank}" for rank in range(mesh.size)]
    store.set(keys[mesh.rank], mine)
    found = []
    for rank, key in enumerate(keys):
        try:
            store.wait([key], datetime.timedelta(seconds=patience))
        except RuntimeError as error:
            raise MissingRank(rank, topic, patience) from error
        found.append(store.get(key).decode())
    return found


# A tensor is read in blocks of this many int32 words, 256 KiB, which a core's cache holds. It is 4 times a prime, so
# a regular pattern, such as a column, does not fall on one word of each block, and elements of 16 bytes fill a block.
_WORDS = 4 * 16381
_FACTOR = 747796405  # odd, so that a product modulo 2**32 keeps all of a word
_SCRAMBLE = -0x61C8864680B583EB  # 2**64 over the golden ratio, as an int64


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on a tensor's bits and their order: an int64 tensor of shape [].

    One read of the tensor, and memory for a few blocks of it, whatever its size, strides and dtype are. Bits are
    compared, so a nan is equal to itself, and 0.0 is not -0.0.
    """
    words = _folded(x.detach())
    places = torch.arange(len(words), device=x.device).mul_(2).add_(1).mul_(_SCRAMBLE)
    weights = places.bitwise_xor_(places >> 32).bitwise_or_(1)  # an odd one for each word
    return weights.mul_(words).sum()


def _folded(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's blocks, each times a power of a factor that tells its place: int32."""
    total = torch.empty(0, dtype=torch.int32, device=x.device)
    for i, block in enumerate(_blocks(x)):
        if i == 0:
            total = block
            continue
        if i == 1:
            total = total.clone()  # it may be a view
        part = total[: len(block)]
        torch.add(block, part, alpha=_FACTOR, out=part)
    return total


def _blocks(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes as int32 words, a block at a time."""
    in_words = x.nbytes % 4 == x.storage_offset() * x.element_size() % 4 == 0
    if in_words and x.is_contiguous() and x.numel() > 1 and not (x.is_conj() or x.is_neg()):
        yield from x.view(-1).view(torch.int32).split(_WORDS)
        return
    size = 4 * _WORDS // x.element_size()
    for start in range(0, x.numel(), size):
        yield _words(elements(x, start, min(start + size, x.numel())))


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a block `[n]` as int32 words, the last one filled up with zeros."""
    x = x.resolve_conj().resolve_neg()
    # of at most one element torch takes any stride for contiguous
    data = (x if x.stride(0) == 1 else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
    rest = -len(data) % 4
    if rest:
        data = torch.nn.functional.pad(data, (0, rest))
    elif data.storage_offset() % 4:  # a part of a larger tensor of small elements
        data = data.clone()
    return data.view(torch.int32)


def numbers_of_all(mine: torch.Tensor, mesh: Mesh) -> list[list[int]]:
    """Exchange int64 numbers `[m]`, the same m on all ranks: each rank's, in rank order."""
    mine = mine.to(mesh.device_mesh.device_type)
    theirs = [torch.empty_like(mine) for _ in range(mesh.size)]
    torch.distributed.all_gather(theirs, mine)  # a mesh is the world
    return [x.tolist() for x in theirs]


def _shown(x: Any) -> str:
    """Describe what must be the same on all ranks; of what may differ, nothing."""
    return "PerRank" if isinstance(x, PerRank) else tree.show(x)


def check_equal(what: str, values: Any, mesh: Mesh, sums: Sequence[torch.Tensor] | None = None) -> None:
    """Compare a tree between the ranks: its paths in their order, how boxes are cut, numbers, and plain tensors.

    Args:
        what: what the tree is called in messages.
        values: the tree. Of tensors on the meta device there is nothing to compare but shape and dtype.
        mesh: the ranks; where they are not processes, nothing is done.
        sums: the checksums of the tree's leaves, if they are known; they are taken now by default.

    Raises:
        ValueError: on all ranks, if any differs. The message names its path.
    """
    if not mesh.distributed:
        return
    check_alike(what, values, mesh)
    paths, leaves, _ = tree.flatten_with_paths(values)
    varies = axes_of(values, mesh.axis_names)
    compared = [
        i
        for i, (x, axes) in enumerate(zip(leaves, varies, strict=True))
        if isinstance(x, torch.Tensor) and axes != mesh.axis_names and (sums is not None or not x.is_meta)
    ]
    if not compared:
        return
    device = mesh.device_mesh.device_type
    mine = [(checksum(leaves[i]) if sums is None else sums[i]).to(device) for i in compared]
    everyones = numbers_of_all(torch.stack(mine), mesh)
    for n, i in enumerate(compared):
        first: dict[tuple[int, ...], int] = {}  # place along the axes that it differs along -> a rank there
        for rank in range(mesh.size):
            places = zip(mesh.coordinates(rank), mesh.axis_names, strict=True)
            other = first.setdefault(tuple([place for place, name in places if name in varies[i]]), rank)
            if everyones[other][n] != everyones[rank][n]:
                raise ValueError(_message(tree.place(what, paths[i]), other, rank, varies[i]))


def check_alike(what: str, values: Any, mesh: Mesh) -> None:
    """Compare a tree between the ranks as `check_equal` does, but for what its tensors hold.

    Raises:
        ValueError: on all ranks, if any differs. The message names its path.
    """
    if not mesh.distributed:
        return
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    lines = [f"{tree.place(what, path)} is {_shown(x)}" for path, x in zip(paths, entries, strict=True)]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    prints = numbers_of_all(torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device="cpu"), mesh)
    if any(p != prints[0] for p in prints):
        everyones: list[Any] = [None] * mesh.size
        torch.distributed.all_gather_object(everyones, lines)
        _raise_first_difference(everyones)


def _message(where: str, one: int, other: int, axes: tuple[str, ...]) -> str:
    if axes:
        return (
            f"{where} differs between rank {one} and rank {other}, and its box says that it differs along "
            f"{', '.join(axes)} only: give the ranks of the other axes one value"
        )
    return (
        f"{where} differs between rank {one} and rank {other}, and a plain tensor must be "
        "equal on all ranks: reduce it with fzero.collectives.pmean, seed every rank alike before making it, or box it "
        f"with mesh.local (in a rank program fzero.PerRank) if it is meant to differ{see('a-loss-that-differs')}"
    )


def _raise_first_difference(everyones: list[list[str]]) -> None:
    for rank, lines in enumerate(everyones):
        for mine, theirs in zip([*everyones[0], "no more leaves"], [*lines, "no more leaves"], strict=False):
            if mine != theirs:
                raise ValueError(
                    f"the ranks hold different trees: on rank 0 {mine}, and on rank {rank} {theirs}; build them alike, "
                    "dicts in one order"
                )


_LONGEST = 1024  # bytes of a text that is told


def texts_of_all(text: str, mesh: Mesh) -> list[str]:
    """Exchange short texts between all ranks, as numbers: nothing is pickled."""
    padded = text.encode()[:_LONGEST].ljust(_LONGEST, b"\0")
    mine = torch.tensor([int.from_bytes(padded[i : i + 4], "big") for i in range(0, _LONGEST, 4)])
    everyones = numbers_of_all(mine, mesh)
    return [b"".join([n.to_bytes(4, "big") for n in x]).rstrip(b"\0").decode(errors="ignore") for x in everyones]
