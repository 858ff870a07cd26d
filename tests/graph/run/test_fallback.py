"""A segment that cannot run compiled runs operation by operation, and says so once."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import fzero
from fzero import optim
from fzero._notice import warn_once
from fzero.graph.run._fallback import Refusal, check_outputs, compile_checked, merge_refusals, serialize
from fzero.graph.run._segment_compiler import Code, CompileError, first_line
from tests.graph.helpers import bitwise, code_of
from tests.graph.run.helpers import Inductor, in_inductors_place, interpret
from tests.helpers import mlp_batch, mlp_loss, mlp_params, train_step_for


@pytest.fixture(autouse=True)
def nothing_noticed_yet():
    warn_once.cache_clear()


def has(gm: GraphModule, name: str) -> bool:
    return any(name in str(n.target) for n in gm.graph.nodes)


def refusing(name: str, error: Exception) -> Inductor:
    """Make what compiles all but segments with an operation of this name."""

    def inductor(gm: GraphModule, stand_ins: Any, outputs: Any) -> Any:
        if has(gm, name):
            raise error
        return interpret(gm, stand_ins, outputs)

    return inductor


def changing(change: Callable[[torch.Tensor], torch.Tensor]) -> Inductor:
    """Make what changes the first result of segments that compute a tanh."""

    def inductor(gm: GraphModule, stand_ins: Any, outputs: Any) -> Any:
        runs = interpret(gm, stand_ins, outputs)

        def change_first(args: list[Any]) -> list[Any]:
            first, *rest = runs(args)
            return [change(first), *rest]

        return change_first if has(gm, "aten.tanh.default") else runs

    return inductor


def train(backend: str = "inductor", **options: Any) -> tuple[Any, Any]:
    """Train both ways; returns the executable, and asserts that numbers are those of the eager step."""
    opt = optim.adamw(1e-2)
    step = fzero.shard(train_step_for(mlp_loss, opt), 3, fzero.mesh(dp=2))
    jitted = fzero.jit(step, backend=backend, **options)  # pyright: ignore[reportArgumentType]
    eager, fast = step.init(mlp_params(), opt), step.init(mlp_params(), opt)
    for i in range(2):
        batch = step.mesh.split(mlp_batch(12, seed=i))
        *eager, loss = step(*eager, batch)
        *fast, other = jitted(*fast, batch)
        bitwise((eager, loss), (fast, other))
    (entry,) = jitted._entries.values()
    return entry.executable, jitted


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fzero"]


OPCHECK = "expected size 2==2, stride 16==512 at dim=2\nUse torch.library.opcheck to test your custom op."


def test_a_segment_that_does_not_compile_runs_uncompiled_and_a_notice_says_so(monkeypatch, caplog):
    in_inductors_place(monkeypatch, refusing("aten.tanh.default", AssertionError(OPCHECK)))
    executable, _ = train()
    assert 0 < executable.uncompiled < executable.distinct
    (said,) = notices(caplog)
    for part in ("segment ", "tanh", "helpers.py:", "stride 16==512", "slower", "strict=True"):
        assert part in said
    assert "opcheck" not in said


def test_segments_that_fail_with_one_error_give_one_notice(monkeypatch, caplog):
    in_inductors_place(monkeypatch, refusing("", FileNotFoundError("no C++ compiler\nSet TORCHDYNAMO_VERBOSE=1")))
    executable, _ = train()
    assert executable.uncompiled == executable.distinct > 1
    (said,) = notices(caplog)
    assert f" and {executable.distinct - 1} more" in said and "no C++ compiler" in said and "VERBOSE" not in said


def test_strict_raises_the_compilers_error_and_keeps_the_state(monkeypatch, caplog):
    in_inductors_place(monkeypatch, refusing("aten.tanh.default", AssertionError(OPCHECK)))
    opt = optim.sgd(0.1)
    step = fzero.shard(train_step_for(mlp_loss, opt), 3, fzero.mesh(dp=2))
    state, batch = step.init(mlp_params(), opt), step.mesh.split(mlp_batch(4))
    with pytest.raises(
        RuntimeError, match=r'(?s)segment \d.*tanh.*helpers.py:\d+.*stride 16==512.*backend="fx"'
    ) as error:
        fzero.jit(step, strict=True)(*state, batch)
    assert "opcheck" not in str(error.value) and not notices(caplog)
    step(*state, batch)  # they are still there


@pytest.mark.parametrize(
    "change",
    [lambda x: x.repeat_interleave(2, -1)[..., ::2], lambda x: x.float(), lambda x: x[..., :-1]],
    ids=["strides", "dtype", "shape"],
)
def test_results_that_are_not_as_traced_are_found_before_the_first_step(monkeypatch, caplog, change):
    in_inductors_place(monkeypatch, changing(change))
    executable, _ = train()
    assert executable.uncompiled >= 1
    (said,) = notices(caplog)
    assert re.search(
        r"result 0 of its compiled code is float\d\d\[.*strides .*, but was traced as float64\[.*strides", said
    )


def test_the_whole_step_backend_falls_back_to_uncompiled_code(monkeypatch, caplog):
    def fail(*args: Any) -> Any:
        raise RuntimeError("no")

    in_inductors_place(monkeypatch, fail)
    train("inductor-whole")
    (said,) = notices(caplog)
    assert "the whole step" in said
    with pytest.raises(CompileError, match="the whole step"):
        train("inductor-whole", strict=True)


def test_auto_takes_over_without_a_segment_that_fails(monkeypatch, caplog):
    from fzero.graph.run import _auto_backend, _backends

    in_inductors_place(monkeypatch, refusing("aten.tanh.default", AssertionError(OPCHECK)))
    monkeypatch.setattr(_backends, "is_compiled", lambda code: True)
    monkeypatch.setattr(_auto_backend, "is_compiled", lambda code: True)
    monkeypatch.setattr(_auto_backend, "can_load", lambda code: True)
    executable, _ = train("auto")
    assert executable.function.compiled is not None
    assert 0 < executable.function.compiled.uncompiled < executable.distinct
    assert len(notices(caplog)) == 1


def test_an_error_that_random_values_cause_is_not_blamed_on_the_compiler():
    code = code_of(lambda x: [torch.linalg.cholesky(x)], torch.eye(3))
    runs = interpret(GraphModule({}, code.graph), code.stand_ins, code.outputs)
    with pytest.raises(torch.linalg.LinAlgError):
        runs([torch.zeros(3, 3)])
    check_outputs(code, runs)


def test_checking_compiled_code_draws_no_random_numbers_and_changes_no_tensor():
    x = torch.ones(4, 3).t()[:, ::2]
    code = code_of(lambda x: [torch.rand_like(x) + x], x)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    check_outputs(code, interpret(GraphModule({}, code.graph), code.stand_ins, code.outputs))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "x", [torch.ones(2, 3), torch.ones(3).expand(2, 3), torch.ones(0, 3), torch.tensor(1), torch.ones(4, 6)[::2, 1::2]]
)
def test_made_up_arguments_have_the_strides_of_their_stand_ins(x):
    records = []

    def runs(args: list[torch.Tensor]) -> list[torch.Tensor]:
        records.extend(args)
        return [args[0] + 1]

    check_outputs(code_of(lambda x: [x + 1], x), runs)
    assert [(a.shape, a.stride(), a.dtype) for a in records] == [(x.shape, x.stride(), x.dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_code_whose_results_are_not_finite_is_refused_unless_the_operations_do_the_same(dtype):
    code = code_of(lambda x: [x.float().log().to(dtype), x + 0.5], torch.ones(2, 3))
    infinite, half = torch.full((2, 3), -math.inf).to(dtype), torch.full((2, 3), 0.5)
    check_outputs(code, lambda args: [infinite, half])  # the logarithm of zero
    check_outputs(code, lambda args: [infinite.nan_to_num() if dtype.itemsize > 1 else infinite, half])
    broken = half.clone()
    broken[1, 2] = math.nan
    with pytest.raises(CompileError, match="result 1 of its compiled code is not finite, but that of the uncompiled"):
        check_outputs(code, lambda args: [infinite, broken])


def test_a_failed_check_of_compiled_code_refuses_the_backend():
    code = code_of(lambda x: [x.sin().cos()], torch.ones(1000))
    for n in code.graph.nodes:
        n.meta["fused"] = "sin" in n.name

    def fail(args: Any) -> Any:
        raise AssertionError(OPCHECK)

    refusal = compile_checked(code, lambda code: fail)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "it fails compiled: expected size 2==2, stride 16==512 at dim=2"
    assert refusal.cost == "4.0 kB more than planned"


def test_refusals_of_all_ranks_are_merged_with_the_first_rank_of_each():
    a, b = Refusal("a", "why", ""), Refusal("b", "else", "1 B")
    result = merge_refusals([serialize({}, 0), serialize({"x": a}, 1), serialize({"x": b, "y": b}, 2)])
    assert result == {"x": a._replace(rank=1), "y": b._replace(rank=2)}


def test_a_compile_error_without_a_message_shows_its_class():
    assert first_line(KeyError()) == "KeyError"
    assert first_line(RuntimeError("\n  first\nsecond")) == "first"


def test_strict_is_a_flag_and_not_for_auto():
    with pytest.raises(ValueError, match="strict='yes': expected True or False"):
        fzero.jit(lambda x: x, strict="yes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match='strict=True: backend="auto"'):
        fzero.jit(lambda x: x, backend="auto", strict=True)


def test_compiled_code_without_stand_ins_is_not_checked():
    code = Code(code_of(lambda x: [x + 1], torch.ones(2)).graph, [None], [], "generator")  # pyright: ignore

    def fail(args: Any) -> Any:
        raise AssertionError("not reached")

    check_outputs(code, fail)
