"""Stand-ins that are made from a known form are like those that torch makes, and no other results are made so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from fzero._torch import storage_id
from fzero._torch.stand_ins import StandInCache, make_alias
from fzero.sharding.maps._flat import flatten_leaves, view_ranges

aten: Any = torch.ops.aten
CALLS: list[Callable[[Any, Any, Any], Any]] = [
    lambda call, x, y: call(aten.mm.default, (x, y.t()), {}),
    lambda call, x, y: call(aten.mul.Tensor, (x, y[:1]), {}),
    lambda call, x, y: call(aten.mul.Tensor, (x.t(), 2), {}),
    lambda call, x, y: call(aten.view.default, (x[1:], [-1]), {}),
    lambda call, x, y: call(aten.view.default, (x, [4, 3]), {}),
    lambda call, x, y: call(aten.slice.Tensor, (x.t(), 0, 1, 3), {}),
    lambda call, x, y: call(aten.expand.default, (x[:1], [3, 4]), {}),
    lambda call, x, y: call(aten.split.Tensor, (x, 2), {}),
    lambda call, x, y: call(aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    lambda call, x, y: call(aten.native_layer_norm.default, (x, [4], y[0], None, 1e-5), {}),
    lambda call, x, y: call(aten.sum.dim_IntList, (x, [0], True), {}),
    lambda call, x, y: call(aten.cat.default, ([x, y], 1), {}),
    lambda call, x, y: call(aten.add_.Tensor, (x, y), {}),
    lambda call, x, y: call(aten.imag.default, (torch.complex(x, y),), {}),
    lambda call, x, y: call(aten.zeros.default, ([3],), {}),
    lambda call, x, y: call(flatten_leaves.on_stand_ins, ([x, y[0]], 0, 3), {}),
    lambda call, x, y: call(view_ranges.on_stand_ins, (x.view(-1), [4, 8], [[2, 2], [8]]), {}),
    lambda call, x, y: call(view_ranges.on_stand_ins, (x, [1, 3], [[1], [3]]), {}),
]


def describe_results(out: Any, operands: list[torch.Tensor]) -> list[Any]:
    """Describe results: their form, the bytes of their memory, and the operand that they are or view."""
    outs = list(out) if isinstance(out, tuple | list) else [out]
    bases = [storage_id(x) for x in operands]
    return [
        x
        if x is None
        else (
            *(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.untyped_storage().nbytes()),
            [b == storage_id(x) for b in bases],
            [x is y for y in operands],
        )
        for x in outs
    ]


@pytest.mark.parametrize("run", CALLS)
def test_a_cached_stand_in_is_like_the_computed_one(run: Callable[[Any, Any, Any], Any]):
    with FakeTensorMode():
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        cache = StandInCache()
        expected = describe_results(run(lambda f, args, kwargs: f(*args, **kwargs), x, y), [x, y])
        results = [run(cache.call, x, y) for _ in range(3)]
        for out in results:
            assert describe_results(out, [x, y]) == expected
        if not any(expected[0][-2]):  # new memory each time
            assert len({storage_id(o[0] if isinstance(o, tuple) else o) for o in results}) == 3


def test_forms_differ_by_shape_stride_offset_dtype_and_the_type_of_a_number():
    with FakeTensorMode():
        x, cache = torch.ones(4, 4, dtype=torch.int64), StandInCache()
        for a in (x, x.t(), x[:, :2], x[1:, :2], x.int(), x.bool()):
            for number in (2, 2.0, True):
                for f in (aten.mul.Tensor, aten.slice.Tensor):
                    args = (a, number) if f is aten.mul.Tensor else (a, 0, 1, 2)
                    assert describe_results(cache.call(f, args, {}), [a]) == describe_results(f(*args), [a])


def test_a_view_is_of_its_own_operand_although_operands_shared_memory_before():
    library = torch.library.Library("fzero_test_views", "DEF")
    library.define("row(Tensor x, Tensor(a) y) -> Tensor(a)")
    library.impl("row", lambda x, y: y[0], "Meta")
    row: Any = torch.ops.fzero_test_views.row.default
    with FakeTensorMode():
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        cache = StandInCache()
        for operands in ((x, x), (x, y), (y, x)):
            assert storage_id(cache.call(row, operands, {})) == storage_id(operands[1])


def test_caches_share_forms_of_one_default_dtype():
    """A trace finds what an earlier one has found; a quotient of integers has the default dtype."""
    before, results = torch.get_default_dtype(), []
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            with FakeTensorMode():
                x = torch.ones(3, dtype=torch.int64)
                results.append(StandInCache().call(aten.div.Tensor, (x, x), {}).dtype)
    finally:
        torch.set_default_dtype(before)
    assert results == [torch.float32, torch.float64, torch.float32]


def test_an_operation_that_raises_is_not_cached():
    with FakeTensorMode():
        cache = StandInCache()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                cache.call(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_stand_in_made_without_checks_has_the_state_that_torch_gives(device: str):
    mode = FakeTensorMode()
    mode.allow_meta = True
    x = FakeTensor(mode, torch.empty_strided((3, 4), (1, 3), dtype=torch.bfloat16, device="meta"), torch.device(device))
    alias = make_alias(x)
    with in_kernel_invocation_manager(mode):
        like = FakeTensor(mode, aten.detach.default(x), x.fake_device)
    assert type(alias) is FakeTensor and alias is not x and alias.__dict__ == like.__dict__
    assert describe_results(alias, [x]) == describe_results(like, [x])
    for query in (
        torch._C._dispatch_keys,
        torch.Tensor.is_inference,
        lambda t: t.requires_grad,
        lambda t: t._is_view(),
    ):
        assert query(alias) == query(like)
    assert alias.fake_mode is mode


def test_an_alias_keeps_its_shape_when_the_tensors_changes():
    with FakeTensorMode():
        x: Any = torch.ones(3, 4)
        alias = make_alias(x)
        x.t_()
        assert alias.shape == (3, 4) and storage_id(alias) == storage_id(x)


def test_no_data_is_read_from_a_stand_in_made_from_its_form():
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False
    with mode:
        x, cache = torch.ones(3, 4), StandInCache()
        for made in [cache.call(aten.mul.Tensor, (x, 2), {}) for _ in range(2)]:
            with pytest.raises(RuntimeError, match="data pointer"):
                made.data_ptr()


def test_a_function_runs_once_for_operands_of_one_form():
    calls = 0

    def twice(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x + x

    with FakeTensorMode():
        cache = StandInCache()
        results = [cache.call(twice, (torch.ones(n),), {}) for n in (3, 3, 4, 3)]
    assert [len(x) for x in results] == [3, 3, 4, 3] and calls == 2
