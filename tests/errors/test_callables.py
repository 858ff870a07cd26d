"""Each public function that takes a function refuses another value at once, and names the argument."""

import collections.abc
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fzero
from fzero.parallel.experts import route
from tests.errors.helpers import OPT, PARAMS, TWO, init, step_of
from tests.public_names import OF_FZERO, public_names

BAD = {"w": "text"}  # a tree in place of a function
MODULE, VALUES = torch.nn.Linear(2, 2), {"w": torch.ones(2)}
RATE = {"learning_rate": 0.1}
BATCHES = {"dataset": [1, 2], "mesh": TWO, "global_batch": 2}
PIPELINE: dict[str, Any] = {"block": torch.mul, "first": torch.mul, "last": torch.mul, "micro_batches": 2}
SCHEDULE = {"ranks": 2, "micro_batches": 2}
TUNE = {"make_step": lambda _: (torch.sin, torch.ones(2)), "world_size": 2, "global_batch": 2, "machine": "cpu"}
# the other arguments of a call
OTHERS: dict[str, dict[str, Any]] = {
    "checkpoint.dcp.save": {"path": "/dev/null/x", "values": VALUES},
    "checkpoint.hf.write": {"folder": "/dev/null/x", "params": VALUES},
    "data.batches": BATCHES,
    "data.epoch": BATCHES,
    "elastic.run": {"root": "runs", "steps": 1, "global_batch": 2, "dp": 2},
    "evaluate": {"step": step_of(3)},
    "local_sgd.local_steps": {"every": 2},
    "nn.initializer": {"module": MODULE},
    "nn.functional": {"module": torch.nn.Sequential(MODULE, torch.nn.Linear(2, 2))},
    "nn.pipeline": {"module": torch.nn.Sequential(MODULE, torch.nn.Linear(2, 2)), "loss": len, "micro_batches": 2},
    "nn.tiled": {"chunk": 2},
    "optim.adafactor": RATE,
    "optim.adamw": RATE,
    "optim.lamb": RATE,
    "optim.lion": RATE,
    "optim.muon": RATE,
    "optim.add_decayed_weights": {"weight_decay": 0.1},
    "optim.masked": {"opt": OPT},
    "optim.offload": {"opt": OPT},
    "optim.with_offload_ratio": {"opt_state": init(3)[1], "params": init(3)[0]},
    "parallel.experts.layer": {"experts": PARAMS, "x": torch.ones(2, 2), "routing": route(torch.ones(2, 2), k=1)},
    "parallel.pipeline.pipeline": PIPELINE,
    "parallel.schedules.greedy": SCHEDULE,
    "parallel.schedules.schedule": {"name": "1f1b", **SCHEDULE},
    "pipeline": PIPELINE,
    "predict": {"step": step_of(3)},
    "remat": {"block": len},
    "scaled_value_and_grad": {"scale": 1.0},
    "shard": {"train_step": len, "stage": 3, "mesh": TWO},
    "sharding.by_size": {"params": VALUES},
    "testing.assert_equivalent": {"params": PARAMS, "opt": OPT, "batches": [torch.ones(2)]},
    "tree.flatten": {"tree": VALUES},
    "tree.flatten_with_paths": {"tree": VALUES},
    "tree.map": {"f": len, "tree": VALUES},
    "tree.map_with_path": {"f": len, "tree": VALUES},
    "tune": TUNE,
    "tuning.offload_ratio": {"memory_budget": 1 << 30},
    "tuning.tune": TUNE,
    "tuning.watch": {"step": fzero.jit(torch.sin, backend="fx")},
}
# These read files, or the axes of a rank program, before they look at the function.
LATER = ("checkpoint.verify", "checkpoint.dcp.load", "checkpoint.hf.read", "partition")


def takes_function(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(takes_function, typing.get_args(annotation)))
    return typing.get_origin(annotation) is collections.abc.Callable


def arguments() -> Iterator[tuple[str, str]]:
    """Yield each public function and each of its arguments that may be a function."""
    for name, f in public_names(OF_FZERO).items():
        if inspect.isfunction(f):
            for parameter in inspect.signature(f).parameters.values():
                short = name.removeprefix("fzero.")
                if takes_function(parameter.annotation) and short not in LATER:
                    yield short, parameter.name


@pytest.mark.parametrize(("name", "argument"), [*arguments()])
def test_a_tree_in_place_of_a_function_is_refused_at_once(name, argument):
    f = public_names(OF_FZERO)[f"fzero.{name}"]
    others = {k: v for k, v in OTHERS.get(name, {}).items() if k != argument}
    is_repeated = inspect.signature(f).parameters[argument].kind is inspect.Parameter.VAR_POSITIONAL
    with pytest.raises((TypeError, ValueError)) as caught:
        f(*others.values(), BAD) if is_repeated else f(**others, **{argument: BAD})
    message = str(caught.value)
    assert argument.removesuffix("s") in message and ("expected" in message or "takes" in message)
    assert "not callable" not in message and "unexpected keyword" not in message
