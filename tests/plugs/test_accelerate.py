"""A loop of Accelerate with a sharded step: the numbers of accelerate unsharded; and what is refused."""

import itertools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, DDPCommunicationHookType, DistributedDataParallelKwargs

from fzero.plugs import accelerate as plug
from tests.distributed.launch import world
from tests.helpers import ALL_STAGES, cases, either
from tests.plugs.accelerate_helpers import assert_alike, loss_of, make, with_accelerate, with_fzero

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Unknown(torch.optim.SGD):
    """An optimizer that fzero has no equivalent of."""


QUICK = [(3, "fx"), (1, None)]
OTHERS = [(stage, backend) for stage in ALL_STAGES for backend in ("fx", None) if (stage, backend) not in QUICK]


@pytest.mark.parametrize("stage,backend", [*QUICK, *[pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS]])
def test_every_stage_has_the_losses_and_dropout_of_the_accelerate_loop(stage, backend):
    epochs = either(2, 5)  # of 10 batches: 3 steps of 3, and one of 1
    plain, sharded = with_accelerate(epochs, 0.1), with_fzero(epochs, 0.1, stage, backend)
    assert len(plain.losses) == len(plain.norms) == 4 * epochs and len(plain.predictions) == 14
    assert_alike(sharded, plain)


def test_a_state_of_accelerate_resumes_at_another_stage(tmp_path):
    whole = with_accelerate(3, 0.0, shuffle=False)
    first = with_fzero(2, 0.0, 3, save=str(tmp_path), shuffle=False)
    rest = with_fzero(1, 0.0, 1, "fx", load=str(tmp_path), shuffle=False)
    assert first.losses == pytest.approx(whole.losses[:8], abs=1e-5)
    assert rest.rates == whole.rates[8:]
    assert rest.losses == pytest.approx(whole.losses[8:], abs=1e-5)


@pytest.mark.parametrize(
    "stage,backend,tolerance", cases([(3, "fx", 0.0)], [(3, None, 0.0), (1, "fx", 2e-3), (2, None, 2e-3)])
)
def test_a_state_in_half_precision_resumes_at_any_stage(tmp_path, stage, backend, tolerance):
    """Of stage 3, whose shards are the master weights, though those of other stages are in the optimizer's state."""
    options: dict[str, Any] = {"shuffle": False, "mixed_precision": "bf16"}
    whole = with_fzero(3, 0.0, 3, backend, **options)
    first = with_fzero(2, 0.0, 3, backend, save=str(tmp_path), **options)
    rest = with_fzero(1, 0.0, stage, backend, load=str(tmp_path), **options)
    assert [*first.losses, *rest.losses] == pytest.approx(whole.losses, abs=tolerance)
    torch.testing.assert_close(rest.weights, whole.weights, rtol=tolerance, atol=tolerance)
    assert rest.predictions.dtype == torch.bfloat16


@pytest.mark.slow
def test_accelerate_on_processes_trains_as_ddp_and_one_process_resumes(tmp_path):
    done = world(2, "-m", "tests.plugs.train_accelerate", str(tmp_path), "1", "3")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    options: dict[str, Any] = {"rows": 80, "batch": 8, "shuffle": False}
    resumed = with_fzero(1, 0.0, 2, load=str(tmp_path / "state"), **options)
    whole = with_accelerate(2, 0.0, **options)
    assert resumed.rates == whole.rates[4:]
    assert resumed.losses == pytest.approx(whole.losses[4:], abs=1e-5)


@pytest.mark.slow
def test_accelerate_on_processes_has_ddps_losses_over_twenty_steps(tmp_path):
    done = world(2, "-m", "tests.plugs.train_accelerate", str(tmp_path), "5", "0123")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_bf16_keeps_master_weights():
    plain, sharded = with_accelerate(1, 0.0), with_fzero(1, 0.0, 3, "fx", mixed_precision="bf16")
    assert {x.dtype for x in sharded.weights.values()} == {torch.float32}
    torch.testing.assert_close(sharded.losses, plain.losses, rtol=2e-2, atol=2e-2)


def test_fp16_skips_a_step_whose_gradients_overflow_and_the_schedule_waits():
    def overflows_once(model: Any, batch: Any) -> torch.Tensor:
        calls.append(None)
        return loss_of(model, batch).float() * (1e30 if len(calls) == 3 else 1.0)

    calls: list[None] = []
    accelerator, model, optimizer, loader, schedule = make(0.0, mixed_precision="fp16")
    step = plug.shard_loop(accelerator, model, optimizer, overflows_once, stage=3, max_norm=0.5)
    loader, schedule = accelerator.prepare(loader, schedule)
    rates, weights = [], [step.state_dict()]
    for batch in loader:
        with accelerator.accumulate():
            loss = step(batch)
            schedule.step()
        if loss is not None:
            rates.append(optimizer.param_groups[0]["lr"])
            weights.append(step.state_dict())
    assert rates[0] == 0.01 > rates[1] > rates[2]  # the rate of the skipped step is used by the next
    assert {x.dtype for x in weights[0].values()} == {torch.float32}
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(weights)]
    assert same == [True, False, False, False]  # a skipped step changes nothing


def test_unsupported_settings_of_accelerate_are_refused(tmp_path):
    accelerator, model, optimizer, _, _ = make(0.0, 8, 4)

    def shard_loop(*args: Any, **options: Any) -> Any:
        return plug.shard_loop(*args, loss_of, **{"stage": 3, **options})

    with pytest.raises(TypeError, match=r"expected an accelerate\.Accelerator"):
        shard_loop(None, model, optimizer)
    with pytest.raises(ValueError, match="backend='eager': expected"):
        shard_loop(accelerator, model, optimizer, backend="eager")
    prepared = accelerator.prepare(optimizer)
    with pytest.raises(TypeError, match="optimizer is prepared by accelerate already"):
        shard_loop(accelerator, model, prepared)
    with pytest.raises(TypeError, match="model is prepared by accelerate already"):
        shard_loop(accelerator, accelerator.prepare(model), optimizer)
    with pytest.raises(ValueError, match=r"optimizer: .*Unknown owns its parameters"):
        _, other, _, _, _ = make(0.0, 8, 4)
        shard_loop(accelerator, other, Unknown(other.parameters()))
    hooks = [
        (
            DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16),
            r"comm_hook=\.\.\.\) is refused",
        ),
        (AutocastKwargs(enabled=False), r"AutocastKwargs\(enabled=False\) is refused"),
    ]
    for handler, message in hooks:
        accelerator, model, optimizer, _, _ = make(0.0, 8, 4, kwargs_handlers=[handler])
        with pytest.raises(ValueError, match=message):
            shard_loop(accelerator, model, optimizer)
    accelerator, model, optimizer, _, _ = make(0.0, 8, 4, dynamo_backend="eager")
    with pytest.raises(ValueError, match=r"dynamo_backend=\.\.\.\) is refused"):
        shard_loop(accelerator, model, optimizer)
    assert not any(p.is_meta for p in model.parameters())  # nothing that was refused has used it up
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*make(0.0, 8, 4)[1:3])
    accelerator.save_state(str(tmp_path))
    accelerator, model, optimizer, _, _ = make(0.0, 8, 4)
    shard_loop(accelerator, model, optimizer)
    with pytest.raises(ValueError, match="has a sharded step already"):
        shard_loop(accelerator, *make(0.0, 8, 4)[1:3])
    with pytest.raises(ValueError, match=r"load_state: .* has no folder 'fzero'"):
        accelerator.load_state(str(tmp_path))
