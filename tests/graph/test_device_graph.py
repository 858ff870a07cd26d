"""A recorded step has the numbers of the step. `make cuda` records on a CUDA without a GPU; here a stand-in does."""

import inspect
import logging
from typing import Any

import pytest
import torch

import fzero
from fzero import _torch, optim
from fzero.graph import _entry
from fzero.graph.run import _device_graph
from tests.helpers import ALL_STAGES, cases


class StandIn:
    """A device graph by its definition: it runs the function again, on the same memory."""

    made = 0

    def __init__(self, run: Any, pool: Any = None) -> None:
        arguments = inspect.getclosurevars(run).nonlocals["arguments"]
        values = [x.clone() for x in arguments]
        self._function, self.results = run, run()
        for x, value in zip(arguments, values, strict=True):  # recording runs nothing
            x.copy_(value)
        StandIn.made += 1

    def run(self) -> None:
        for to, x in zip(self.results, self._function(), strict=True):
            if isinstance(to, torch.Tensor):
                to.copy_(x)


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(_torch, "can_record", lambda tensors: True)
    monkeypatch.setattr(_entry, "check_recordable", lambda *_: None)
    monkeypatch.setattr(_entry, "check_separate", lambda *_: None)  # the stand-in holds what is donated
    monkeypatch.setattr(_device_graph, "DeviceGraph", StandIn)
    monkeypatch.setattr(StandIn, "made", 0)


OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.linear(1e-2, 1e-3, steps=5)))


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    loss, grads = fzero.value_and_grad(lambda p, x: torch.tanh(x @ p["w"]).square().mean())(params, batch)
    updates, opt_state = OPT.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, {"loss": loss, "batch": fzero.PerRank(batch)}


def train(stage: int, lengths: list[int], **options: Any) -> list[Any]:
    mesh = fzero.mesh(dp=2)
    step = fzero.shard(train_step, stage=stage, mesh=mesh)
    torch.manual_seed(0)
    params, opt_state = step.init({"w": torch.randn(4, 3)}, OPT)
    step, out = fzero.jit(step, backend="fx", **options), []
    for length in lengths:
        batch = mesh.split(torch.randn(length, 4))
        params, opt_state, aux = step(params, opt_state, batch)
        out += [aux["loss"], aux["batch"].value]
    return [*out, step.gather(params)["w"]]


@pytest.mark.parametrize("stage", cases((3,), ALL_STAGES))
def test_a_recorded_step_has_the_numbers_of_the_step(recording, stage):
    lengths = [4, 4, 4, 4, 8, 8, 8, 4, 8]
    recorded = train(stage, lengths, device_graph=True)
    assert StandIn.made == 2  # one for each length
    for actual, expected in zip(recorded, train(stage, lengths), strict=True):
        assert torch.equal(actual, expected)


def test_a_step_is_recorded_anew_for_other_addresses_up_to_a_limit(recording, monkeypatch, caplog):
    monkeypatch.setattr(_device_graph, "_MAX_RECORDINGS", 2)
    step = fzero.jit(lambda x: x + 1, donate=0, backend="fx", device_graph=True)
    memory = [torch.zeros(2) for _ in range(6)]
    with caplog.at_level(logging.WARNING, "fzero"):
        assert [step(x).tolist() for x in memory] == [[1, 1]] * 6
    assert StandIn.made == 2
    assert "makes no more" in caplog.text


def test_without_a_gpu_a_step_runs_unrecorded_with_a_notice(caplog):
    step = fzero.jit(lambda x: 3 * x, backend="fx", device_graph=True)
    with caplog.at_level(logging.WARNING, "fzero"):
        assert [step(torch.ones(2)).tolist() for _ in range(4)] == [[3, 3]] * 4
    assert "no argument lies on a GPU: it runs unrecorded" in caplog.text


def test_wrong_options_of_device_graph_are_refused():
    with pytest.raises(ValueError, match="device_graph=1: expected True or False"):
        fzero.jit(lambda x: x, device_graph=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match='device_graph=True: backend="auto" changes its code'):
        fzero.jit(lambda x: x, backend="auto", device_graph=True)
