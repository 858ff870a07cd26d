"""The simulated caching allocator keeps its blocks in order; `tests/cuda` compares it with torch's own."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fzero
from fzero.graph.planning.memory._caching_allocator import _Pool, simulate_allocator
from fzero.graph.planning.memory._live_ranges import Range, live_bytes
from tests.helpers import examples

MB = 2**20
SIZES = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MB), st.integers(0, 70 * MB))


@st.composite
def storages(draw: st.DrawFn, operations: int = 8) -> list[tuple[int, int, int]]:
    """Draw storages: the positions of their first and last operation, and their bytes."""
    ends = st.tuples(st.integers(0, operations), st.integers(0, operations))
    return [(*sorted(draw(ends)), draw(SIZES)) for _ in range(draw(st.integers(0, 20)))]


def round_up(size: int) -> int:
    return -(-size // 512) * 512


@examples(30, 200)
@given(st.lists(SIZES, max_size=3), storages(), st.booleans())
@example([], [], True)
def test_reserved_bytes_hold_all_blocks_and_blocks_hold_all_storages(kept, ranges, expandable):
    peaks = simulate_allocator(kept, ranges, expandable_segments=expandable)
    live = live_bytes([Range(start, stop, round_up(size), "", "") for start, stop, size in ranges], 9)
    least = sum(map(round_up, kept)) + max(live)
    assert peaks.reserved_bytes >= peaks.allocated_bytes >= least
    if expandable:
        assert peaks.allocated_bytes == least  # a block is never larger than its storage, rounded


@examples(30, 200)
@given(st.lists(st.tuples(SIZES, st.integers(0, 30)), max_size=30), st.booleans(), st.booleans())
def test_blocks_cover_their_segment_and_no_two_free_ones_touch(actions, small, expandable):
    pool, held = _Pool(small, expandable), []
    for size, choice in actions:
        if choice % 2 and held:
            pool.release(held.pop(choice % len(held)))
        else:
            held.append(pool.allocate(max(round_up(min(size, MB) if small else size + MB), 512)))
        check_segments(pool, held)
    while held:
        pool.release(held.pop())
    assert sum(b.size for b in pool.free) == pool.reserved
    assert all(b.before is None and b.after is None for b in pool.free)


def check_segments(pool, held) -> None:
    blocks = {id(b): b for b in [*held, *pool.free]}
    assert len(blocks) == len(held) + len(pool.free)
    assert sum(b.size for b in blocks.values()) == pool.reserved
    assert pool.free == sorted(pool.free) and all(b.free for b in pool.free) and not any(b.free for b in held)
    for b in blocks.values():
        if b.after is not None:
            assert b.after.before is b and b.after.address == b.address + b.size
            assert not (b.free and b.after.free)


@pytest.mark.parametrize(
    ("size", "reserved", "expanded"),
    [
        (1, 2 * MB, 2 * MB),
        (MB, 2 * MB, 2 * MB),
        (MB + 1, 20 * MB, 20 * MB),
        (10 * MB - 512, 20 * MB, 20 * MB),
        (10 * MB, 10 * MB, 20 * MB),
        (21 * MB, 22 * MB, 40 * MB),
    ],
)
def test_one_storage_takes_a_segment_of_its_kind(size, reserved, expanded):
    assert simulate_allocator([size], [], expandable_segments=False).reserved_bytes == reserved
    assert simulate_allocator([size], [], expandable_segments=True).reserved_bytes == expanded


def test_a_large_block_is_given_out_whole_if_little_is_left_of_it():
    """Torch splits no large block for the sake of 1 MB, unless segments expand."""
    ranges = [(0, 0, 30 * MB), (1, 1, 29 * MB), (1, 1, 10 * MB)]
    assert simulate_allocator([], ranges, expandable_segments=False) == (40 * MB, 40 * MB)
    assert simulate_allocator([], ranges, expandable_segments=True) == (39 * MB, 40 * MB)


def test_free_memory_in_pieces_is_reserved_beside_a_block_that_fits_into_none():
    """Blocks of 20 MB with one alive between two free ones: 40 MB are free, and 40 MB more are taken."""
    ranges = [(0, 1, 20 * MB), (0, 3, 20 * MB), (0, 1, 20 * MB), (2, 2, 40 * MB)]
    assert simulate_allocator([], ranges, expandable_segments=False).reserved_bytes == 100 * MB
    grown = simulate_allocator([], ranges, expandable_segments=True)
    assert grown.reserved_bytes == 80 * MB, "the last block grows by 20 MB"
    assert grown.allocated_bytes == 60 * MB


def test_a_block_within_a_segment_is_given_out_before_the_last_one_which_can_grow():
    """Torch reserves as much (`tests/cuda/allocations.py`): 18 MB come from 30 free ones, not from the last 20."""
    ranges = [(0, 1, 30 * MB), (0, 9, 30 * MB), (0, 1, 15 * MB), (2, 2, 18 * MB), (2, 2, 30 * MB)]
    assert simulate_allocator([], ranges, expandable_segments=True).reserved_bytes == 100 * MB


def test_a_plan_of_a_gpu_tells_what_the_allocator_takes():
    x = torch.zeros(3000, 1024, device="meta")
    plan = fzero.plan(lambda x: x @ x.T, x, hardware="cuda")
    assert plan.device_type == "cuda"
    product = round_up(3000 * 3000 * 4)
    expected = 3000 * 1024 * 4 + product + plan.workspace_bytes
    assert plan.allocator_peaks(expandable_segments=True).allocated_bytes == expected
    assert "caching allocator reserves 8" in str(plan)


def test_a_plan_of_a_cpu_names_no_caching_allocator():
    x = torch.zeros(30, 10, device="meta")
    plan = fzero.plan(lambda x: x @ x.T, x)
    assert plan.device_type in ("cpu", "meta")
    assert "caching allocator" not in str(plan)
