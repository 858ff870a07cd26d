"""Six kinds of models in the default backend, each with one block; one of them in `make test`.

`make sweep` has all others, and more ways.
"""

from dataclasses import replace
from typing import Any

import pytest

import fzero
from tests.graph.helpers import needs_compiler
from tests.sweep.cases import Case
from tests.sweep.families import MODELS, of_transformers
from tests.sweep.run import ERRORS, Task, difference

ONE = {"t5": {"num_layers": 1, "num_decoder_layers": 1}}
CASES = {
    "llama": Case("no mask", 3, {"dp": 1}),
    "bert": Case("a mask, two ranks", 2, {"dp": 2}, mask=True),
    "gpt2": Case("eager attention", 0, {"dp": 1}, "eager"),
    "t5": Case("an encoder and a decoder", 3, {"dp": 1}),
    "vit": Case("images", 3, {"dp": 1}),
    "mixtral": Case("experts", 3, {"dp": 1}),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_compiled(name, monkeypatch):
    model = MODELS[name]
    build = of_transformers(name, model.kind, **ONE.get(name, {"num_hidden_layers": 1}))
    task = Task(replace(model, build=build), CASES[name])
    jit: Any = fzero.jit
    monkeypatch.setattr(fzero, "jit", lambda step, backend: jit(step, backend=backend, strict=True))
    *compiled, left = task.sharded("inductor")
    *fx, _ = task.sharded("fx")
    assert not left and difference(compiled, fx) < ERRORS["float32"]
