"""Compare trees between the ranks of a distributed mesh: structure and shapes first, then checksums of the values."""

import datetime
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fzero import tree
from fzero._notice import trouble_link
from fzero._torch import default_store
from fzero.axes import DiffersByRankError
from fzero.ranks._mesh import Mesh
from fzero.ranks._rendezvous import MissingRankError
from fzero.ranks._split_sources import split_source
from fzero.sharding import PerRank, is_box, leaf_axes, slice_elements

__all__ = ["all_gather_numbers", "all_gather_texts", "check_equal", "check_same_structure", "checksum", "gather_texts"]


_TEXT_SECONDS = 300.0  # how long a rank waits for another rank's text

_ROUNDS: Counter[str] = Counter()  # the number of texts sent on each topic


def gather_texts(text: str, mesh: Mesh, topic: str, seconds: float | None = None) -> list[str]:
    """Send a text to all ranks, and return the texts of all ranks, in rank order.

    It uses the store, not a collective. So a rank may send a text while other ranks run collectives.

    Args:
        text: this rank's text.
        mesh: a distributed mesh.
        topic: the topic of the texts. A rank's n-th text on a topic is matched with the other ranks' n-th texts.
        seconds: how long to wait for another rank's text; by default `_TEXT_SECONDS`.

    Raises:
        MissingRankError: if a rank sends no text in that time.
    """
    limit = _TEXT_SECONDS if seconds is None else seconds
    store = default_store()
    topic += "".join([f"/{name}={index}" for name, index in mesh.within])  # each part of the world has its own keys
    _ROUNDS[topic] += 1
    keys = [f"fzero/{topic}/{_ROUNDS[topic]}/{rank}" for rank in range(mesh.size)]
    store.set(keys[mesh.rank], text)
    texts = []
    for rank, key in enumerate(keys):
        try:
            store.wait([key], datetime.timedelta(seconds=limit))
        except RuntimeError as error:
            message = f"rank {rank} sent no text on {topic!r} within {limit:g} s: see in its log what it waits for"
            raise MissingRankError(message, rank, limit) from error
        texts.append(store.get(key).decode())
    return texts


# A tensor is read in rows of this many int32 words, 256 KiB, which fit into a core's cache. The number is 4 times a
# prime. So a regular pattern, such as a column, does not hit one word of each row, and 16-byte elements fill a row.
_BLOCK_WORDS = 4 * 16381
_CHECKSUM_FACTOR = 747796405  # odd, so that a product modulo 2**32 loses no bits of a word
_CHECKSUM_SALT = -0x61C8864680B583EB  # 2**64 over the golden ratio, as an int64


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on a tensor's bits and their order: an int64 tensor of shape [].

    It reads the tensor once, and needs memory for a few rows, for any size, strides and dtype. It depends on bits, so
    a nan equals itself, and 0.0 differs from -0.0.
    """
    words = _checksum_rows(x.detach())
    hashes = torch.arange(len(words), device=x.device).mul_(2).add_(1).mul_(_CHECKSUM_SALT)
    weights = hashes.bitwise_xor_(hashes >> 32).bitwise_or_(1)  # an odd weight for each word
    return weights.mul_(words).sum()


def _checksum_rows(x: torch.Tensor) -> torch.Tensor:
    """Return the int32 sum of rows of words, each multiplied by `_CHECKSUM_FACTOR` to a power by its index."""
    total = torch.empty(0, dtype=torch.int32, device=x.device)
    for i, row in enumerate(_word_rows(x)):
        if i == 0:
            total = row
            continue
        if i == 1:
            total = total.clone()  # the first row may be a view of x
        part = total[: len(row)]
        torch.add(row, part, alpha=_CHECKSUM_FACTOR, out=part)
    return total


def _word_rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's bytes as int32 words, one row at a time."""
    is_aligned = x.nbytes % 4 == x.storage_offset() * x.element_size() % 4 == 0
    if is_aligned and x.is_contiguous() and x.numel() > 1 and not (x.is_conj() or x.is_neg()):
        yield from x.view(-1).view(torch.int32).split(_BLOCK_WORDS)
        return
    size = 4 * _BLOCK_WORDS // x.element_size()
    for start in range(0, x.numel(), size):
        yield _as_words(slice_elements(x, start, min(start + size, x.numel())))


def _as_words(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a row `[n]` as int32 words; the last word is padded with zeros."""
    x = x.resolve_conj().resolve_neg()
    # torch calls a tensor of at most one element contiguous whatever its stride is
    data = (x if x.stride(0) == 1 else x.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
    padding = -len(data) % 4
    if padding:
        data = torch.nn.functional.pad(data, (0, padding))
    elif data.storage_offset() % 4:  # a part of a larger tensor of small elements
        data = data.clone()
    return data.view(torch.int32)


def all_gather_numbers(numbers: torch.Tensor, mesh: Mesh) -> list[list[int]]:
    """Exchange int64 numbers `[m]`, with one m on all ranks; return each rank's numbers, in rank order."""
    numbers = numbers.to(mesh.device)
    all_numbers = [torch.empty_like(numbers) for _ in range(mesh.size)]
    torch.distributed.all_gather(all_numbers, numbers, group=mesh.process_group)
    return [x.tolist() for x in all_numbers]


def _describe_properties(x: Any) -> str:
    """Describe the properties of a leaf or box that must be the same on all ranks."""
    return "PerRank" if isinstance(x, PerRank) else tree.show(x)


def check_equal(label: str, values: Any, mesh: Mesh, sums: Sequence[torch.Tensor] | None = None) -> None:
    """Compare a tree between the ranks: its paths in order, the layouts of boxes, numbers, and plain tensors.

    Args:
        label: the name of the tree in messages.
        values: the tree. Tensors on the meta device are compared by shape and dtype only.
        mesh: the ranks. If they are not processes, there is nothing to compare.
        sums: the checksums of the tree's leaves; None to compute them now.

    Raises:
        DiffersByRankError: on all ranks, if a plain tensor differs. The message names the leaf.
        ValueError: on all ranks, if the trees differ otherwise. The message names the leaf.
    """
    if not mesh.distributed:
        return
    check_same_structure(label, values, mesh)
    _check_sources(label, values, mesh)
    paths, leaves, _ = tree.flatten_with_paths(values)
    varies = leaf_axes(values, mesh.axis_names)
    compared_indices = [
        i
        for i, (x, axes) in enumerate(zip(leaves, varies, strict=True))
        if isinstance(x, torch.Tensor) and axes != mesh.axis_names and (sums is not None or not x.is_meta)
    ]
    if not compared_indices:
        return
    own_sums = [(checksum(leaves[i]) if sums is None else sums[i]).to(mesh.device) for i in compared_indices]
    all_sums = all_gather_numbers(torch.stack(own_sums), mesh)
    for n, i in enumerate(compared_indices):
        first_ranks: dict[
            tuple[int, ...], int
        ] = {}  # coordinates along the axes of `varies[i]` -> the first rank there
        for rank in range(mesh.size):
            coordinates = zip(mesh.coordinates(rank), mesh.axis_names, strict=True)
            other = first_ranks.setdefault(tuple([c for c, name in coordinates if name in varies[i]]), rank)
            if all_sums[other][n] != all_sums[rank][n]:
                raise DiffersByRankError(_disagreement_message(tree.leaf_name(label, paths[i]), other, rank, varies[i]))


def _check_sources(label: str, values: Any, mesh: Mesh) -> None:
    """Compare the global batches that `mesh.split` split into the boxes of a tree.

    Raises:
        DiffersByRankError: on all ranks, if they differ. The message names the leaf.
    """
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    names, sums = [], []
    for path, x in zip(paths, entries, strict=True):
        if not isinstance(x, PerRank):
            continue
        inner, leaves, _ = tree.flatten_with_paths(x.value)
        names += [tree.leaf_name(label, f"{path}.{p}" if p else path) for p in inner]
        sources = [split_source(leaf) for leaf in leaves]
        sums += [[0, 0] if source is None else [1, int(checksum(source))] for source in sources]
    if not names:
        return
    all_sums = all_gather_numbers(torch.tensor(sums, device="cpu").flatten(), mesh)
    for n, name in enumerate(names):
        pairs = [numbers[2 * n : 2 * n + 2] for numbers in all_sums]
        for rank, (is_known, total) in enumerate(pairs):
            if is_known and pairs[0][0] and total != pairs[0][1]:
                raise DiffersByRankError(
                    f"{name} was split by mesh.split from batches that differ between rank 0 and rank {rank}: split "
                    "takes the global batch, equal on all ranks, and keeps each rank's part of it. A batch that each "
                    f"rank loaded itself is mesh.local(batch){trouble_link('messages')}"
                )


def check_same_structure(label: str, values: Any, mesh: Mesh) -> None:
    """Compare a tree between the ranks as `check_equal` does, without the values of its tensors.

    Raises:
        ValueError: on all ranks, if a leaf differs. The message names the leaf.
    """
    if not mesh.distributed:
        return
    paths, entries, _ = tree.flatten_with_paths(values, is_box)
    lines = [
        f"{tree.leaf_name(label, path)} is {_describe_properties(x)}" for path, x in zip(paths, entries, strict=True)
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    digests = all_gather_numbers(torch.tensor([int.from_bytes(digest[:8], "big", signed=True)], device="cpu"), mesh)
    if any(x != digests[0] for x in digests):
        all_lines: list[Any] = [None] * mesh.size
        torch.distributed.all_gather_object(all_lines, lines, group=mesh.process_group)
        _raise_first_difference(all_lines)


def _disagreement_message(label: str, first_rank: int, second_rank: int, axes: tuple[str, ...]) -> str:
    if axes:
        return (
            f"{label} differs between rank {first_rank} and rank {second_rank}, but its box says that it differs along "
            f"{', '.join(axes)} only: make it equal along the other axes"
        )
    return (
        f"{label} differs between rank {first_rank} and rank {second_rank}, but a plain tensor must be equal on all "
        "ranks: reduce it with fzero.collectives.pmean, use one seed on all ranks when you make it, or box it "
        f"with mesh.local (in a rank program fzero.PerRank) if it is meant to differ"
        f"{trouble_link('a-loss-that-differs')}"
    )


def _raise_first_difference(all_lines: list[list[str]]) -> None:
    for rank, lines in enumerate(all_lines):
        for own_line, other_line in zip([*all_lines[0], "no more leaves"], [*lines, "no more leaves"], strict=False):
            if own_line != other_line:
                raise ValueError(
                    f"the ranks hold different trees: on rank 0 {own_line}, and on rank {rank} {other_line}; build the "
                    "same tree on all ranks, with dicts in one order"
                )


_MAX_BYTES = 1024  # a text is truncated to this length


def all_gather_texts(text: str, mesh: Mesh) -> list[str]:
    """Exchange short texts between all ranks, encoded as numbers, without pickle."""
    padded = text.encode()[:_MAX_BYTES].ljust(_MAX_BYTES, b"\0")
    numbers = torch.tensor([int.from_bytes(padded[i : i + 4], "big") for i in range(0, _MAX_BYTES, 4)], device="cpu")
    all_numbers = all_gather_numbers(numbers, mesh)
    return [b"".join([n.to_bytes(4, "big") for n in x]).rstrip(b"\0").decode(errors="ignore") for x in all_numbers]
