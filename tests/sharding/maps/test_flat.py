"""A unit's leaves as one buffer and back, in each of the ways in which that is computed."""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero._torch import stand_ins_like, storage_id
from fzero.graph.planning.memory._live_ranges import peak_bytes as plan_peak
from fzero.graph.run._executable import make_operations_executable
from fzero.graph.trace._trace import trace
from fzero.sharding.maps._flat import flatten_by_copies, flatten_leaves, view_ranges
from tests.memory import peak_bytes

SHAPES = st.lists(st.sampled_from([(), (0,), (3,), (2, 3), (3, 1, 2)]), min_size=1, max_size=4)
FRONTS = st.sampled_from([(), (2,), (2, 3)])


def leaves_of(shapes: list[tuple[int, ...]], front: tuple[int, ...], turned: bool) -> list[torch.Tensor]:
    """Make tensors `[*front, *shape]`, `turned` ones not contiguous."""
    results = []
    for shape in shapes:
        whole = (*front, *shape)
        results.append(
            torch.randn(whole[::-1]).permute([*reversed(range(len(whole)))]) if turned else torch.randn(whole)
        )
    return results


@given(SHAPES, FRONTS, st.booleans(), st.integers(0, 2))
def test_leaves_are_flattened_and_viewed_again(shapes, front, turned, padding):
    leaves = leaves_of(shapes, front, turned)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = flatten_leaves(leaves, len(front), padding)
    assert buffer.shape == (*front, sum(sizes) + padding)
    assert not buffer[..., sum(sizes) :].any()
    parts = view_ranges(buffer, sizes, [list(shape) for shape in shapes])
    assert all(torch.equal(x, y) for x, y in zip(parts, leaves, strict=True))
    assert all(storage_id(x) == storage_id(buffer) for x in parts)


@given(SHAPES, FRONTS, st.booleans(), st.integers(0, 2), st.sampled_from([torch.float32, torch.complex64]))
def test_flattening_by_copies_gives_the_same_bits(shapes, front, turned, padding, dtype):
    leaves = [x.to(dtype) for x in leaves_of(shapes, front, turned)]
    leaves[0] = leaves[0].conj()
    assert torch.equal(flatten_by_copies(leaves, len(front), padding), flatten_leaves(leaves, len(front), padding))


def test_flattening_by_copies_takes_no_memory_but_the_results():
    turned, plain = torch.randn(64, 32).t(), torch.randn(64, 32)
    for leaves, padding in (([turned, turned], 0), ([plain, turned], 5), ([plain, plain], 0), ([plain], 999)):
        assert peak_bytes(partial(flatten_by_copies, leaves, 0, padding)) == (len(leaves) * 64 * 32 + padding) * 4
    assert peak_bytes(lambda: flatten_leaves([turned], 0, 0)) > 64 * 32 * 4


@given(SHAPES, FRONTS, st.integers(0, 3))
def test_fake_tensors_are_viewed_as_flat_buffers_like_real_ones(shapes, front, before):
    """The buffer may be a part of another, and dimensions may be in front."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    arguments = sizes, [list(shape) for shape in shapes]
    real = torch.zeros(*front, before + sum(sizes))
    (stand_in,) = stand_ins_like([real])
    actual = view_ranges.on_stand_ins(stand_in[..., before:], *arguments)
    expected = view_ranges(real[..., before:], *arguments)
    assert [(x.shape, x.stride(), x.storage_offset()) for x in actual if x.numel()] == [
        (x.shape, x.stride(), x.storage_offset()) for x in expected if x.numel()
    ]


def test_an_executor_flattens_with_no_memory_but_the_results():
    """Its memory is what a plan counts: the values of the graph's nodes, and nothing beside them."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [flatten_leaves([(x + 1).t(), (x + 2).t()], 0, 0)]

    traced = trace(step, stand_ins_like([torch.zeros(64, 32)]), [{"label": "x", "kind": "inputs"}]).graph
    run, x = make_operations_executable(traced), torch.randn(64, 32)
    assert plan_peak(traced) == peak_bytes(lambda: run([x])) + x.nbytes == 5 * x.nbytes
