"""Flat ranges as rectangles, and what two ranges of differently cut chunks share."""

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.checkpoint.layout import ChunkRange, full_chunk, rectangles, runs
from tests.helpers import examples

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_rectangles_are_a_range_in_its_order(shape, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    results = list(rectangles(shape, start, stop))
    x, elements = torch.arange(math.prod(shape)).view(shape), []
    for r in results:
        part = x
        for dim, (offset, size) in enumerate(zip(r.offsets, r.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.reshape(-1)[0] == r.flat and part.reshape(-1).diff().eq(1).all(), "not contiguous"
        elements += part.reshape(-1).tolist()
    assert elements == [*range(start, stop)] and len(results) <= max(2 * len(shape) - 1, 1)


@st.composite
def ranges(draw: Any, shape: tuple[int, ...]) -> ChunkRange:
    """A flat range of a part of a tensor, which is cut evenly along some dimensions."""
    chunk = []
    for size in shape:
        parts = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        chunk.append((draw(st.integers(0, parts - 1)) * (size // parts), size // parts))
    numel = math.prod([size for _, size in chunk])
    some = st.tuples(*[st.integers(0, numel)] * 2).map(sorted)
    return ChunkRange(tuple(chunk), *draw(st.just((0, numel)) | some))


def elements(x: torch.Tensor, r: ChunkRange) -> list[int]:
    for dim, (offset, size) in enumerate(r.chunk):
        x = x.narrow(dim, offset, size)
    return x.reshape(-1)[r.start : r.stop].tolist()


@examples(67, 200)
@given(shape=st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4).map(tuple), data=st.data())
def test_the_runs_of_two_ranges_cover_the_elements_in_both(shape, data):
    x = torch.arange(math.prod(shape)).view(shape)
    source, target = data.draw(ranges(shape)), data.draw(ranges(shape))
    mine, theirs, copied = elements(x, source), elements(x, target), []
    for run in runs(source, target):
        assert (
            run.numel > 0
            and mine[run.source_offset : run.source_offset + run.numel]
            == theirs[run.target_offset : run.target_offset + run.numel]
        )
        copied += mine[run.source_offset : run.source_offset + run.numel]
    assert sorted(copied) == sorted(set(mine) & set(theirs)), "something is missing, or comes twice"


def test_ranges_of_one_block_share_one_run():
    chunk = full_chunk((300, 7))
    assert len(list(runs(ChunkRange(chunk, 3, 900), ChunkRange(chunk, 10, 2000)))) == 1
    columns = ChunkRange(((0, 300), (0, 7)), 0, 2100), ChunkRange(((0, 150), (0, 7)), 0, 1050)
    assert len(list(runs(*columns))) == 1, "whole rows are one run"
