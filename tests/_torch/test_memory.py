"""Which tensors lie side by side: what a jitted step finds, and makes stand-ins of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero._torch import Buffer, buffer_view, find_buffers, in_buffers, stand_ins_like, storage_id
from tests.helpers import examples

SHAPES = st.lists(st.sampled_from([(), (0,), (3,), (2, 3), (1, 4, 2)]), min_size=2, max_size=5)


def make_adjacent(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Make tensors of these shapes that lie side by side in their order."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    buffer = torch.arange(sum(sizes)).to(dtype)
    return [buffer_view(buffer, sum(sizes[:i]), shape) for i, shape in enumerate(shapes)]


@given(SHAPES, st.randoms(use_true_random=False), st.sampled_from([torch.float32, torch.bfloat16]))
def test_tensors_that_fill_a_buffer_are_found_in_any_order(shapes, random, dtype):
    xs, alone = make_adjacent(shapes, dtype), torch.ones(2)
    order = list(range(len(xs)))
    random.shuffle(order)
    (actual,) = find_buffers([alone, *[xs[i] for i in order]])
    total = sum(x.numel() for x in xs)
    assert actual.numel == total and sorted(actual.members) == list(range(1, len(xs) + 1))
    for member, offset in zip(actual.members, actual.offsets, strict=True):
        x = xs[order[member - 1]]
        assert x.numel() == 0 or x.flatten()[0] == torch.tensor(offset).to(dtype)


def test_a_buffer_lists_the_offsets_of_its_tensors():
    a, b, c = make_adjacent([(2, 3), (), (4,)])
    assert find_buffers([c, a, b]) == (Buffer((1, 2, 0), (0, 6, 7), 11),)
    assert not any(x._is_view() for x in (a, b, c))


def no_buffer() -> dict[str, list[torch.Tensor]]:
    a, b, c = make_adjacent([(2, 3), (4,), (2,)])
    whole = torch.zeros(8)
    return {
        "apart": [torch.zeros(2), torch.zeros(2)],
        "a gap": [a, c],
        "an end that nobody has": [a, b],
        "a start that nobody has": [b, c],
        "an overlap": [whole[:6], whole[2:]],
        "an overlap as long as a gap": [whole[:6], whole[2:4]],
        "another order": [torch.zeros(6).view(2, 3).t(), torch.zeros(1)],
        "turned": [whole[:6].view(2, 3).t(), whole[6:]],
        "two dtypes": [whole[:4], whole[4:].view(torch.int32)],
        "negated": [(z := torch.zeros(2, dtype=torch.complex64)).conj().imag, z.real],
    }


@pytest.mark.parametrize("what", no_buffer())
def test_tensors_with_gaps_or_overlaps_are_no_buffer(what):
    assert find_buffers(no_buffer()[what]) == ()


@examples(25, 100)
@given(SHAPES)
def test_fake_tensors_share_storages_as_their_originals_do(shapes):
    xs = [*make_adjacent(shapes), torch.ones(3, 2).t(), *make_adjacent(shapes)]
    stand_ins = stand_ins_like(xs)
    assert find_buffers(stand_ins) == find_buffers(xs)
    assert [(x.shape, x.stride(), x.dtype) for x in stand_ins] == [(x.shape, x.stride(), x.dtype) for x in xs]
    ids = [storage_id(x) for x in stand_ins]
    assert [ids.index(i) for i in ids] == [[storage_id(x) for x in xs].index(storage_id(x)) for x in xs]


def test_the_whole_buffer_can_be_viewed_from_a_stand_in_of_one_of_its_tensors():
    a, b = stand_ins_like(make_adjacent([(2, 2), (3,)]))
    assert torch.as_strided(b, [7], [1], 0).untyped_storage().nbytes() == 28
    assert storage_id(torch.as_strided(a, [7], [1], 0)) == storage_id(b)


def test_meta_tensors_lie_side_by_side_too():
    xs = in_buffers(
        make_adjacent([(2, 2), (3,)]), lambda x, shape, stride: torch.empty_strided(shape, stride, device="meta")
    )
    assert len(find_buffers(xs)) == 1 and all(x.is_meta for x in xs)
