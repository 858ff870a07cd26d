"""The private torch API that fzero uses, one test each: what fails here says what broke when torch changed."""

import shutil
import threading
import warnings
from typing import Any, ClassVar

import optree
import pytest
import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from fzero import _torch
from fzero._torch import levels, memory, modules
from fzero.graph.ir import graph_results


def test_torch_is_a_supported_version():
    assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 11)


def test_functional_collectives_exist():
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        assert hasattr(_torch.c10d, name)


class _Ordered(torch.autograd.Function):
    order: ClassVar[list[str]] = []

    @staticmethod
    def forward(x: torch.Tensor, name: str) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        _Ordered.order.append(ctx.name)
        return grad, None


@pytest.mark.parametrize("raised", [True, False])
def test_raised_priority_runs_a_node_as_soon_as_its_gradient_exists(raised):
    """Inside torch.func.grad too. Without it the first node of the forward pass runs last."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        first = _Ordered.apply(x, "gather")
        if raised:
            _torch.raise_priority(first)
        y = _Ordered.apply(x * 2, "early layer")
        return (_Ordered.apply(y, "late layer") * first).sum()

    _Ordered.order.clear()
    torch.func.grad(loss)(torch.ones(2))
    assert _Ordered.order.index("gather") == (0 if raised else 2)


def test_vmaps_are_known_with_their_randomness():
    results = []

    def f(x):
        results.append(levels.vmaps())
        return x * 2

    f(torch.ones(2))
    torch.vmap(torch.func.grad(lambda x: torch.vmap(f, randomness="same")(x).sum()), randomness="different")(
        torch.ones(2, 2)
    )
    torch.vmap(f)(torch.ones(2))
    assert results == [[], ["Different", "Same"], ["Error"]]


def test_a_trace_in_another_thread_is_not_ours():
    records, begun, end = [], threading.Event(), threading.Event()

    def wait_while_traced(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        end.wait(10)
        records.append(_torch.is_tracing())
        return x + 1

    thread = threading.Thread(target=lambda: make_fx(wait_while_traced)(torch.zeros(1)))
    thread.start()
    begun.wait(10)
    assert not _torch.is_tracing()
    end.set()
    thread.join()
    assert records == [True]


def test_is_tracing_knows_the_functional_tensors_of_aot_autograd():
    """AOTAutograd runs a step on them before it records: what took real messages then failed in Inductor."""
    with FunctionalTensorMode():
        assert _torch.is_tracing()
    assert not _torch.is_tracing()


def test_is_tracing_knows_make_fx_and_dynamo():

    records: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        records.append(_torch.is_tracing())
        return x + 1

    f(torch.ones(1))
    make_fx(f)(torch.ones(1))
    assert records == [False, True]
    assert torch.compile(lambda x: x + (1 if _torch.is_tracing() else 0), backend="eager")(torch.zeros(1)).item() == 1


def test_boxes_are_nodes_for_torch_and_optree():
    class Pair:
        def __init__(self, child: torch.Tensor, static: int) -> None:
            self.child, self.static = child, static

    _torch.register_box(Pair, lambda p: ((p.child,), p.static), lambda s, c: Pair(c[0], s))
    pair = Pair(torch.ones(2), 7)
    for mapped in (pytree.tree_map(lambda x: x + 1, pair), optree.tree_map(lambda x: x + 1, pair)):
        assert mapped.static == 7 and mapped.child.tolist() == [2, 2]
    assert pytree.tree_flatten_with_path(pair)[0][0][1] is pair.child


def test_vmap_fallback_warning_is_silent_only_inside():
    q = torch.randn(2, 1, 1, 3, 4)

    def attend() -> None:
        torch.vmap(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))(q)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _torch.quiet_vmap_fallback():
            with _torch.quiet_vmap_fallback():
                attend()
            attend()
        with pytest.raises(UserWarning, match="batching rule"):
            attend()


def test_assume_constant_result_runs_for_real_under_dynamo():
    ran: list[tuple[str, tuple[int, ...]]] = []

    @_torch.assume_constant_result
    def note(name: str, shape: tuple[int, ...]) -> int:
        ran.append((name, shape))
        return 5

    f = torch.compile(lambda x: x + note("a", tuple(int(d) for d in x.shape)), backend="eager", fullgraph=True)
    assert f(torch.zeros(3)).tolist() == [5, 5, 5]
    assert ran == [("a", (3,))]


class _Doubled(torch.autograd.Function):
    """The identity, whose gradient is custom: 2 where 1 would be right."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_function_that_dynamo_inlines_still_loses_its_backward():
    """pytorch#193279 itself. torch 2.15 has mended it: with that as the oldest torch, `allow_in_graph` may go."""
    grad = torch.func.grad(lambda x: _Doubled.apply(x).sum())
    assert grad(torch.ones(2)).tolist() == [2, 2]
    torch.compiler.reset()
    expected = [1, 1] if TorchVersion(torch.__version__) < "2.15" else [2, 2]
    assert torch.compile(grad, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == expected


def test_allow_in_graph_keeps_a_custom_backward_under_compile():
    """pytorch#193279: an autograd.Function that Dynamo inlines under torch.func loses its backward, silently.

    fzero therefore calls its Functions through `allow_in_graph`, which this test watches.
    """

    @_torch.allow_in_graph
    def double(x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x)

    grad = torch.func.grad(lambda x: double(x).sum())
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        assert torch.compile(grad, backend=backend, fullgraph=True)(torch.ones(2)).tolist() == [2, 2]


def test_traces_keep_a_custom_backward_and_the_source_line():
    grad = torch.func.grad(lambda x: _Doubled.apply(x * 3).sum())
    gm = _torch.trace(lambda x: [grad(x)], _torch.stand_ins_like([torch.ones(2)]))
    assert gm(torch.ones(2))[0].tolist() == [6, 6]
    lines = {_torch.node_line(n) for n in gm.graph.nodes if n.op == "call_function"}
    assert lines and all(line.split(":")[0] == __file__ for line in lines)


def test_is_compiling_is_true_in_a_trace_alone():
    records = []
    _torch.trace(lambda x: records.append(torch.compiler.is_compiling()) or [x], _torch.stand_ins_like([torch.ones(2)]))
    assert records == [True] and not torch.compiler.is_compiling()


def test_stand_ins_may_lie_on_a_device_that_is_not_at_hand():
    (x,) = _torch.stand_ins_like([torch.ones(2, dtype=torch.bfloat16)])
    _torch.set_stand_in_device([x, 3, torch.ones(1)], "cuda")
    assert x.device.type == "cuda" and (x + x).device == x.device and x.dtype == torch.bfloat16


def test_traces_compute_nothing():
    state = torch.get_rng_state()
    _torch.trace(lambda x: [x + torch.rand(2)], _torch.stand_ins_like([torch.ones(2)]))
    assert torch.equal(torch.get_rng_state(), state)


def test_functionalisation_removes_writes_and_keeps_lines():
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        y[0].mul_(3)
        return [y]

    stand_ins = _torch.stand_ins_like([torch.ones(2)])
    gm = _torch.functionalize(_torch.trace(f, stand_ins), stand_ins)
    assert not any(str(n.target).split(".")[1].endswith("_") for n in gm.graph.nodes if n.op == "call_function")
    assert gm(torch.ones(2))[0].tolist() == [6, 2]
    assert all(_torch.node_line(n) for n in gm.graph.nodes if n.op == "call_function")


def test_storage_ids_tell_views_from_copies():
    (x,) = _torch.stand_ins_like([torch.ones(4)])
    assert _torch.storage_id(x.view(2, 2)) == _torch.storage_id(x) != _torch.storage_id(x + 1)


has_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")), reason="no compiler"
)


def compile_by_inductor(f: Any, args: list[torch.Tensor]) -> Any:
    stand_ins = _torch.stand_ins_like(args)
    traced = _torch.trace(f, stand_ins)
    return _torch.inductor(traced, stand_ins, [n.meta["val"] for n in graph_results(traced.graph)])


@has_compiler
def test_inductor_keeps_the_order_and_the_strides_and_empties_its_arguments():
    """Without the order options Inductor would run what frees memory first."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        a = [x @ x for _ in range(4)]  # all four, then all sums
        return [y.t().contiguous().t() + 1 for y in a] + [sum(y.sum() for y in a)]

    args = [torch.randn(8, 8)]
    compiled = compile_by_inductor(f, args)
    expected, got = f(*args), compiled(args)
    assert args == []
    for x, y in zip(expected, got, strict=True):
        torch.testing.assert_close(x, y)
        assert x.stride() == y.stride()


@pytest.mark.slow
@has_compiler
def test_inductor_makes_right_code_where_gcc_merges_scalars_that_do_not_belong_together():
    """Two transposed tiles of 32 by 32 halves in one file: with AVX-512, GCC 11 and 12 write garbage at -O3."""

    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        heads = [z[..., 32:64].unflatten(-1, (2, 16)).transpose(2, 3).transpose(3, 4) for z in (x, y)]
        return [z.contiguous() for z in heads]

    args = [torch.randn(2, 2, 32, 96).bfloat16() for _ in range(2)]
    for x, y in zip(f(*args), compile_by_inductor(f, args)(args), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
@has_compiler
def test_inductor_compiles_anew_a_loop_whose_cpp_does_not_build():
    """Equal sums of halves in one loop: of torch 2.13 it declares `at_BFloat16_tmp_acc0_vec` twice."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(1), x.sum(1, keepdim=True)]

    args = [torch.randn(2, 64, 32).bfloat16()]
    for x, y in zip(f(*args), compile_by_inductor(f, args)(args), strict=True):
        torch.testing.assert_close(x, y)


@has_compiler
def test_inductor_code_for_a_symbolic_length_has_guards():
    """The symbol, its range and the guards are the shape environment's."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([x.view(2, 6).t()]) * 2]

    stand_ins = _torch.stand_ins_like([torch.ones(12)])
    traced = _torch.trace(f, stand_ins)
    (view,) = [n for n in traced.graph.nodes if "view" in str(n.target)]

    def arguments(n: Any) -> Any:
        return {view.name: ((view.args[0], [2, n]), {})}

    def forms(n: Any) -> Any:
        cpu = torch.device("cpu")
        return [((2 * n,), (1,), torch.float32, cpu)], [((1, n, 2), (2 * n, 2, 1), torch.float32, cpu)]

    runs, holds = _torch.inductor_for_lengths(traced, arguments, forms, 6)
    for n in (6, 9, 4):
        x = torch.randn(2 * n)
        (y,) = runs([n, x])
        assert holds(n) and torch.equal(y, torch.stack([x.view(2, n).t()]) * 2) and y.is_contiguous()
    assert not holds(1)


def test_functorch_levels_tell_which_transforms_track_a_tensor():
    from fzero._torch.levels import is_differentiated, is_foreign, is_mapped, is_wrapped

    def within(x):
        assert is_wrapped(x) and is_mapped(x) and is_mapped(x + 1) and not is_mapped(torch.ones(2))
        return x

    torch.vmap(lambda x: torch.func.grad(lambda y: (y * x).sum() if is_differentiated(y) else None)(x))(
        torch.ones(3, 2)
    )
    torch.vmap(within)(torch.ones(3, 2))
    assert not is_wrapped(torch.ones(2)) and not is_differentiated(torch.ones(2))
    assert is_differentiated(torch.ones(2, requires_grad=True))

    class Below(torch.autograd.Function):
        """Its forward runs below all transforms."""

        @staticmethod
        def forward(x, outer):
            assert is_foreign(outer()) and not is_foreign(x)
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g, None

    torch.func.grad(lambda x: Below.apply(x, lambda: x).sum())(torch.ones(2))


def test_the_error_of_an_autograd_function_of_the_old_form_is_known_by_its_text():
    class Old(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * x

    with pytest.raises(RuntimeError) as caught:
        torch.func.grad(lambda x: Old.apply(x).sum())(torch.ones(2))
    assert type(caught.value) is RuntimeError, "torch has a type now: catch it in is_old_function_error"
    assert _torch.is_old_function_error(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.func.grad(lambda x: x)(torch.ones(2))
    assert not _torch.is_old_function_error(caught.value)


def test_a_tensor_that_a_vmap_does_not_map_over_is_known():
    from fzero._torch.levels import may_differ

    records, same = [], torch.ones(2)

    def within(token, x):
        torch.func.grad(lambda y: records.append([may_differ(v, token) for v in (y, y + x, x, same)]) or y.sum())(same)
        return x

    torch.vmap(torch.vmap(within, in_dims=(None, 0)), in_dims=(0, None))(torch.arange(3), torch.ones(4))  # x by another
    torch.vmap(within)(torch.arange(3), torch.ones(3))
    assert records == [[False] * 4, [False, True, True, False]]
    assert may_differ(same, torch.arange(3))  # no vmap tells


def test_hooks_on_gradients_are_listed():
    p = torch.nn.Parameter(torch.ones(2))
    assert modules.gradient_hooks(p) == []
    p.register_hook(lambda g: g)
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert modules.gradient_hooks(p) == ["register_hook", "register_post_accumulate_grad_hook"]


def test_backward_hooks_of_modules_are_detected():
    module = torch.nn.Linear(2, 2)
    assert not modules.has_backward_hook(module)
    module.register_forward_hook(lambda *_: None)
    assert not modules.has_backward_hook(module)
    handle = module.register_full_backward_hook(lambda *_: None)
    assert modules.has_backward_hook(module)
    handle.remove()
    module.register_full_backward_pre_hook(lambda *_: None)
    assert modules.has_backward_hook(module)


def test_a_modules_own_attributes_and_statistics_are_listed():
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert set(modules.attributes(module)) == {
        "num_features",
        "eps",
        "momentum",
        "affine",
        "track_running_stats",
    }
    assert set(modules.persistent_buffers(module)) == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_write_changes_the_version_of_a_tensor():
    x = torch.ones(2)
    before = memory.tensor_version(x)
    x.add_(1)
    assert memory.tensor_version(x) != before
    with torch.inference_mode():
        assert memory.tensor_version(torch.ones(2)) is None


def test_the_version_key_tells_new_memory_at_an_old_address():
    """A storage that is referred to weakly frees its memory, and no other takes its address."""
    for _ in range(100):
        x = torch.ones(3)
        before = levels.version_key(x)
        for _ in range(8):
            x.data = x - 1
            assert levels.version_key(x) != before
        assert before.storage.expired()


def test_a_function_mode_can_be_left_out():
    records = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            records.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        torch.ones(2) + 1
        before = len(records)
        with _torch.without_function_modes():
            torch.ones(2) + 1
    assert before and len(records) == before


def test_recurrent_modules_see_parameters_that_were_none():
    rnn, x = torch.nn.LSTM(2, 2), torch.ones(1, 1, 2)
    weight, expected = rnn.weight_ih_l0, rnn(x)[0]
    rnn.weight_ih_l0 = None
    rnn.to("cpu")  # which forgets what it holds
    rnn.weight_ih_l0 = weight
    modules.refresh_flat_weights(rnn)
    torch.testing.assert_close(torch.func.functional_call(rnn, {"weight_ih_l0": weight.clone()}, (x,))[0], expected)
    other = torch.func.functional_call(rnn, {"weight_ih_l0": weight + 1}, (x,))[0]
    assert not torch.equal(other, expected)
