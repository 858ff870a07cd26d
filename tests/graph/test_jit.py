"""fzero.jit: the numbers of the eager step, and one trace a signature."""

import itertools
import logging
import math
import shutil
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim, tree
from fzero.graph.run._program import make_program
from fzero.graph.run._segment import Segment
from fzero.testing import assert_trees_close, optimizers, stages, trees, world_sizes
from tests.graph.helpers import bitwise, copy_graph, train_both
from tests.helpers import ALL_STAGES, LEAST, cases, examples, mlp_batch, mlp_loss, mlp_params, train_step_for
from tests.tiny_gpt import gpt_loss, gpt_params
from tests.zero.helpers import loss_of_tree

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no compiler")
ADAM = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, eps=1e-3))


@examples(3, 15)
@given(params=trees(), opt=optimizers(), stage=stages(), n=world_sizes(), k=st.integers(1, 3))
def test_a_jitted_step_equals_the_eager_one_bitwise(params, opt, stage, n, k):
    step = fzero.shard(train_step_for(loss_of_tree, opt, micro_batches=k), stage=stage, mesh=fzero.mesh(dp=n))
    batches = [{"x": torch.linspace(-1, 1 + i, n * k * 2, dtype=torch.float64)} for i in range(3)]
    eager, fast = train_both(step, fzero.jit(step, backend="fx"), params, opt, batches)
    bitwise(eager, fast)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage,k",
    cases([(3, 4)], itertools.product(range(4), (1, 4))),
)
def test_a_jitted_gpt_equals_the_eager_one_bitwise_after_5_steps(stage, k):
    step = fzero.shard(train_step_for(gpt_loss, ADAM, micro_batches=k), stage=stage, mesh=fzero.mesh(dp=2))
    batches = [torch.randint(37, (8, 17), generator=torch.Generator().manual_seed(i)) for i in range(5)]
    jitted = fzero.jit(step, backend="fx", **LEAST)
    eager, fast = train_both(step, jitted, gpt_params(), ADAM, batches)
    bitwise(eager, fast)
    assert jitted.traces == 1


@needs_compiler
@pytest.mark.parametrize(
    "backend,stage",
    [("inductor", 3), *[pytest.param(*x, marks=pytest.mark.slow) for x in [("inductor", 1), ("inductor-whole", 2)]]],
)
def test_a_compiled_step_equals_the_eager_one(backend, stage):
    step = fzero.shard(train_step_for(mlp_loss, ADAM, micro_batches=3), stage=stage, mesh=fzero.mesh(dp=2))
    batches = [mlp_batch(12, seed=i) for i in range(5)]
    eager, fast = train_both(step, fzero.jit(step, backend=backend), mlp_params(), ADAM, batches)
    assert_trees_close(fast, eager, rtol=1e-12)


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_an_unsharded_step_jits(backend):
    step = train_step_for(mlp_loss, ADAM)
    jitted = fzero.jit(step, backend=backend)
    state = other = (mlp_params(), ADAM.init(mlp_params()))
    for i in range(3):
        *state, loss = step(*state, mlp_batch(6, seed=i))
        *other, got = jitted(*other, mlp_batch(6, seed=i))
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
    assert_trees_close(list(other), list(state))


def sam_step(opt: Any) -> Any:
    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        _, grads = fzero.value_and_grad(mlp_loss)(params, batch)
        scale = 0.05 / optim.global_norm(grads)
        above = tree.map(lambda p, g: p + scale.to(g.dtype) * g, params, grads)
        loss, grads = fzero.value_and_grad(mlp_loss)(above, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_sharpness_aware_minimization_jits(stage):
    opt = optim.sgd(0.1, momentum=0.9)
    step = fzero.shard(sam_step(opt), stage=stage, mesh=fzero.mesh(dp=3))
    eager, fast = train_both(
        step, fzero.jit(step, backend="fx", **LEAST), mlp_params(), opt, [mlp_batch(6, seed=i) for i in range(3)]
    )
    bitwise(eager, fast)


@pytest.mark.slow
def test_batch_norm_buffers_jit():
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(inplace=True))
    apply, params, buffers = fzero.nn.functional(module.double())
    opt = optim.sgd(0.1)

    def train_step(params: Any, opt_state: Any, buffers: Any, batch: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            out, new = apply(params, buffers, batch["x"])
            return out.square().mean(), new

        (value, new), grads = fzero.value_and_grad(loss, has_aux=True)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, fzero.collectives.pmean(new), value

    step = fzero.shard(train_step, stage=2, mesh=fzero.mesh(dp=2))
    jitted = fzero.jit(step, backend="fx", **LEAST)
    (params, state), batch = step.init(params, opt), step.mesh.split(mlp_batch(8))
    expected = step(params, state, buffers, batch)
    bitwise(jitted(copy_graph(params), state, copy_graph(buffers), batch), expected)


def transformers_model(name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(["gpt2"], ["llama"]))
def test_models_of_transformers_jit(name):
    """They branch on values, unless torch.compiler.is_compiling() says that they are traced."""
    apply, params, buffers = fzero.nn.functional(transformers_model(name))

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = apply(params, buffers, input_ids=tokens[:, :-1])[0].logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    opt = optim.sgd(0.1)
    step = fzero.shard(train_step_for(loss, opt), stage=3, mesh=fzero.mesh(dp=2))
    batches = [torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    eager, fast = train_both(step, fzero.jit(step, backend="fx", **LEAST), params, opt, batches)
    assert_trees_close(fast, eager, rtol=1e-6)


@pytest.mark.slow
def test_an_lstm_jits_on_a_simulated_mesh():
    """vmap runs it rank by rank, and its kernel keeps what the backward pass needs only where grad mode is on."""
    apply, params, buffers = fzero.nn.functional(torch.nn.LSTM(3, 2, num_layers=2, batch_first=True))

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return apply(params, buffers, x)[0][0].square().mean()

    opt, batches = optim.sgd(0.1), [torch.linspace(-1, 1 + i, 24).reshape(4, 2, 3) for i in range(2)]
    for stage in (0, 3):
        step = fzero.shard(train_step_for(loss, opt), stage=stage, mesh=fzero.mesh(dp=2))
        bitwise(*train_both(step, fzero.jit(step, backend="fx", **LEAST), params, opt, batches))


def test_autograd_within_a_step_jits():
    def f(w: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        (g,) = torch.autograd.grad((w**3).sum(), w)
        return g if torch.is_grad_enabled() else w

    jitted = fzero.jit(f, backend="fx")
    got = jitted(torch.tensor([1.0, 2.0]))
    assert got.tolist() == [3, 12] and not got.requires_grad
    with torch.no_grad():
        held = torch.ones(2, requires_grad=True)
        assert not fzero.jit(lambda w: w * 2, backend="fx")(held).requires_grad


def test_a_jitted_function_draws_the_eager_random_numbers():
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand(x.shape)

    jitted, x = fzero.jit(noisy, backend="fx"), torch.ones(50)
    torch.manual_seed(0)
    got = [jitted(x) for _ in range(3)]
    torch.manual_seed(0)
    expected = [noisy(x) for _ in range(3)]
    bitwise(got, expected)
    assert not torch.equal(got[0], got[1])


def test_draws_that_share_an_operand_keep_their_order():
    def f(p: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = torch.randn_like(p), torch.randn_like(p)
        return a * 2, b @ w

    args = (torch.zeros(2, 2), torch.eye(2))
    torch.manual_seed(0)
    expected = f(*args)
    torch.manual_seed(0)
    bitwise(fzero.jit(f, backend="fx")(*args), expected)


def test_a_generator_keeps_its_state():
    g, h = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    jitted = fzero.jit(lambda x: x + torch.rand(4, generator=g) - 2 * torch.rand(4, generator=g), backend="fx")
    expected = [torch.rand(4, generator=h) - 2 * torch.rand(4, generator=h) for _ in range(2)]
    bitwise([jitted(torch.zeros(4)) for _ in range(2)], expected)


@needs_compiler
def test_dropout_stays_random_under_inductor():
    jitted = fzero.jit(lambda x: F.dropout(x, 0.5))
    a, b = jitted(torch.ones(200)), jitted(torch.ones(200))
    assert not torch.equal(a, b) and 0.5 < a.mean() < 1.5


def test_under_a_transform_a_jitted_function_is_the_function():
    f = fzero.jit(lambda x: (x * x).sum(), backend="fx")
    assert torch.func.grad(f)(torch.tensor([1.0, 2.0])).tolist() == [2, 4]
    assert torch.vmap(f)(torch.ones(3, 2)).tolist() == [2, 2, 2]
    assert fzero.jit(lambda x: f(x) + 1, backend="fx")(torch.ones(2)).item() == 3


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("stage", cases((0, 3), [2]))
def test_a_vmap_around_the_world_maps_every_rank(stage, jitted):
    step = fzero.shard(train_step_for(mlp_loss, ADAM), stage=stage, mesh=fzero.mesh(dp=2))
    params, state = step.init(mlp_params(), ADAM)
    batches = [step.mesh.split(mlp_batch(4, seed=i)) for i in range(3)]
    f = fzero.jit(step, backend="fx") if jitted else step
    stacked = fzero.PerRank(tree.map(lambda *xs: torch.stack(xs), *[b.value for b in batches]))
    batched = torch.vmap(lambda batch: f(params, state, batch))(stacked)
    for i, batch in enumerate(batches):
        assert_trees_close(tree.map(lambda x, i=i: x[i], batched), step(params, state, batch), rtol=1e-12)


@pytest.mark.parametrize("check_nan", [False, True])
def test_a_step_is_traced_under_anomaly_mode_as_without(check_nan):
    step = train_step_for(mlp_loss, ADAM)
    args = (mlp_params(), ADAM.init(mlp_params()), mlp_batch(4))
    expected = step(*args)
    with torch.autograd.set_detect_anomaly(True, check_nan):
        bitwise(fzero.jit(step, backend="fx")(*args), expected)
        assert torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled() == check_nan


def test_a_step_may_write_into_tensors_that_it_made():
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[0] = 5
        y.mul_(2)
        literal = torch.tensor([1.0, 2.0])
        literal += 1
        return y + literal

    jitted = fzero.jit(f, backend="fx")
    for _ in range(2):
        bitwise(jitted(torch.ones(2)), f(torch.ones(2)))


def test_each_signature_is_traced_once(caplog):
    f = fzero.jit(lambda x, k, flag=None: x * k, backend="fx")
    with caplog.at_level(logging.INFO, "fzero.jit"):
        for _ in range(3):
            f(torch.ones(2), 2)
        assert f.traces == 1
        f(torch.ones(3), 2)
        f(torch.ones(3), 3)
        f(torch.ones(3), 3.0)
        f(torch.ones(3).double(), 3.0)
        f(torch.ones(3).double(), 3.0, flag=True)
        f(torch.ones(2), 2)
    assert f.traces == 6
    text = caplog.text
    assert "argument 0 was float32 [2] and is float32 [3]" in text
    assert "argument 1 was 2 and is 3" in text and "argument 1 was 3 and is 3.0" in text
    assert "argument 0 was float32 [3] and is float64 [3]" in text
    assert "another structure" in text


def test_strides_and_ties_and_autocast_trace_anew():
    f = fzero.jit(lambda p: p["a"] @ p["b"], backend="fx")
    x = torch.randn(3, 3)
    f({"a": x, "b": x.clone()})
    bitwise(f({"a": x, "b": x}), x @ x)
    bitwise(f({"a": x.t(), "b": x.clone()}), x.t() @ x)
    with torch.autocast("cpu"):
        assert f({"a": x, "b": x.clone()}).dtype == torch.bfloat16
    assert f.traces == 4


def test_unchanged_results_stay_tied():
    a, b = fzero.jit(lambda p: (p, p), backend="fx")(torch.ones(2))
    assert a is b


def test_threads_may_trace_at_once():
    f = fzero.jit(lambda x, w: torch.tanh(x @ w).sum(), backend="fx")
    threads = [threading.Thread(target=lambda n=n: f(torch.ones(n, 4), torch.ones(4, 4))) for n in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f.traces == 3 and not torch.compiler.is_compiling()


def test_signed_zeros_and_nans_are_numbers_of_their_own():
    f = fzero.jit(lambda x, s: torch.copysign(x, torch.tensor(s)), backend="fx")
    assert [f(torch.ones(()), s).item() for s in (0.0, -0.0)] == [1, -1]
    f(torch.ones(()), float("nan"))
    f(torch.ones(()), float("nan"))
    assert f.traces == 3


def test_a_third_party_pair_jits_leaf_by_leaf():
    import torchopt

    opt = optim.leafwise(torchopt.adam(1e-2))
    step = fzero.shard(train_step_for(mlp_loss, opt), stage=3, mesh=fzero.mesh(dp=2))
    eager, fast = train_both(step, fzero.jit(step, backend="fx", **LEAST), mlp_params(), opt, [mlp_batch(4)])
    bitwise(eager, fast)


def mutates(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "reads a value": (lambda x: x * x.sum().item(), RuntimeError, r"reads the value .* at .*test_jit\.py:\d+"),
    "branches on a value": (lambda x: x if x.sum() > 0 else -x, RuntimeError, r"reads the value .* at .*test_jit\.py"),
    "data-dependent shape": (lambda x: x[x > 0], RuntimeError, r"reads the value .* at .*test_jit\.py"),
    "mutates its input": (mutates, RuntimeError, r"writes into argument 0 in place \(aten.add_.Tensor\) at .*test_jit"),
    "returns a number": (lambda x: {"a": x, "b": 3.0}, TypeError, r"result leaf 'b' is 3\.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_steps_that_cannot_be_traced_are_refused(name):
    f, error, message = BAD[name]
    with pytest.raises(error, match=message):
        fzero.jit(f, backend="fx")(torch.ones(3))


def test_captured_tensors_that_need_a_gradient_or_are_written_are_refused():
    w, big = torch.ones(3, requires_grad=True), torch.ones(600, 600)
    with pytest.raises(ValueError, match=r"captures a tensor \[3\].* used at .*test_jit\.py:\d+, that requires grad"):
        fzero.jit(lambda x: x * w, backend="fx")(torch.ones(3))
    linear = torch.nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(ValueError, match=r"fzero\.nn\.functional"):
        fzero.jit(lambda x: linear(x), backend="fx")(torch.ones(3))
    with pytest.warns(UserWarning, match=r"captures a tensor \[600, 600\].*1,440,000 bytes"):
        fzero.jit(lambda x: x + big.sum(), backend="fx")(torch.ones(3))
    counter = torch.zeros(3)

    def counts(x: torch.Tensor) -> torch.Tensor:
        counter.add_(x)
        return x

    with pytest.raises(RuntimeError, match="writes into a captured tensor"):
        fzero.jit(counts, backend="fx")(torch.ones(3))


def test_the_error_of_a_jitted_step_names_its_wrong_argument():
    f = fzero.jit(lambda x, y=None: x, backend="fx")
    with pytest.raises(ValueError, match="argument 0 requires grad"):
        f(torch.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match=r"argument 'y' is a set"):
        f(torch.ones(3), y={1, 2})
    with pytest.raises(ValueError, match="called with 1 positional"):
        fzero.jit(lambda x: x, donate=1, backend="fx")(torch.ones(3))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"backend": "xla"}, 'backend=\'xla\': expected "inductor", "auto", "fx" or "inductor-whole"'),
        ({"prefetch": -1}, 'prefetch=-1: expected an int from 0 on, "fitting" or "auto"$'),
        ({"prefetch": True}, 'prefetch=True: expected an int from 0 on, "fitting" or "auto"$'),
        ({"prefetch": math.inf}, 'prefetch=inf: expected an int from 0 on, "fitting" or "auto"$'),
        ({"in_flight": 0.5}, 'in_flight=0.5: expected an int from 0 on or "auto"$'),
        ({"in_flight": None}, 'in_flight=None: expected an int from 0 on or "auto"$'),
        ({"recompute": "yes"}, "recompute='yes': expected True, False or \"auto\"$"),
        ({"recast": 0}, 'recast=0: expected True, False or "auto"$'),
        ({"recompute": 1}, 'recompute=1: expected True, False or "auto"$'),
        ({"bucket_bytes": "big"}, "bucket_bytes='big': expected an int from 0 on or \"auto\"$"),
        ({"bucket_bytes": "fitting"}, "bucket_bytes='fitting': expected an int from 0 on or \"auto\"$"),
        ({"memory_budget": -5}, "memory_budget=-5: expected a number of bytes .* or None$"),
        (
            {"memory_budget": math.nan},
            "memory_budget=nan: expected a number of bytes .* or None$",
        ),
        (
            {"memory_budget": "auto"},
            "memory_budget='auto': expected a number of bytes .* or None$",
        ),
        ({"memory_budget": False}, "memory_budget=False: expected a number of bytes .* or None$"),
        (
            {"max_reuse_bytes": math.nan},
            'max_reuse_bytes=nan: expected a number of bytes .*, inf or "auto"$',
        ),
        ({"max_reuse_bytes": torch.ones(2)}, "max_reuse_bytes=tensor"),
        ({"donate": -1}, "donate=-1: expected positions of arguments"),
        ({"donate": True}, "donate=True: expected positions of arguments"),
        ({"donate": "01"}, "donate='01': expected positions of arguments"),
    ],
)
def test_the_error_of_jit_names_its_wrong_option(options, message):
    with pytest.raises(ValueError, match=message):
        fzero.jit(lambda x: x, **options)


def test_options_take_numbers_of_numpy_and_keep_those_of_python():
    jitted = fzero.jit(lambda x: x, prefetch=np.int64(2), memory_budget=np.float32(8), max_reuse_bytes=np.int8(3))
    assert repr(jitted.options.schedule_options[:5]) == "(2, 'auto', 'auto', 3, 8.0)"
    assert fzero.jit(lambda x: x, max_reuse_bytes=math.inf, donate=np.int64(0)).options.donate == (0,)


def test_jit_refuses_values_that_are_no_functions():
    with pytest.raises(TypeError, match="expected a function"):
        fzero.jit(3)  # pyright: ignore
    with pytest.raises(TypeError, match="jitted already"):
        fzero.jit(fzero.jit(lambda x: x))


@needs_compiler
def test_a_compile_error_names_the_segment_and_its_lines():
    g = torch.Generator().manual_seed(0)
    f = fzero.jit(lambda x: x + torch.rand(4, generator=g), strict=True)
    with pytest.raises(
        RuntimeError, match=r'(?s)segment 1 of 1 .*rand.*test_jit\.py:\d+.*could not compile .*backend="fx"'
    ):
        f(torch.ones(4))


@pytest.mark.slow
@pytest.mark.parametrize("stage", cases((3,), (1, 2)))
def test_the_number_of_distinct_segments_does_not_grow_with_the_micro_batches(stage):
    """The parts of a batch are arguments of the pieces, so all micro-batches after the first have equal ones."""

    def distinct(k: int) -> int:
        step = fzero.shard(train_step_for(mlp_loss, ADAM, micro_batches=k), stage, fzero.mesh(dp=2))
        args = (*step.init(mlp_params(), ADAM), step.mesh.split(mlp_batch(4 * k)))
        jitted = fzero.jit(step)
        jitted.plan(*args)
        (entry,) = jitted._entries.values()
        return len({s.key for s in make_program(entry.best.graph).instructions if isinstance(s, Segment)})

    assert distinct(4) == distinct(7)


def test_batch_norm_that_runs_twice_updates_its_statistics_twice():
    """Its operation writes into them, which its schema does not say."""
    apply, params, buffers = fzero.nn.functional(torch.nn.BatchNorm1d(2))

    def step(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        real, buffers = apply(params, buffers, x)
        fake, buffers = apply(params, buffers, 3 * x + 1)
        return (real - fake).square().mean(), buffers

    x = torch.arange(8.0).view(4, 2)
    bitwise(fzero.jit(step, backend="fx", donate=())(params, buffers, x), step(params, buffers, x))
