"""Run cases of one model, and print a line of JSON for each: `python -m tests.sweep.run MODEL CASE ...`."""

import json
import logging
import math
import os
import sys
import time
import traceback
import warnings
from typing import Any

import torch

import fzero
from fzero import optim
from fzero.parallel import tensor as tp
from tests.sweep.cases import Case, cases_of
from tests.sweep.families import MODELS, Batch, Model, inputs_of, loss_of

STEPS, SIZE = 3, 4
ERRORS = {"float32": 1e-3, "bfloat16": 6e-2}  # of losses, and of parameters as a share of the largest of a leaf
KNOWN = (  # parts of errors by which fzero or vmap refuses a model, by name and with the reason
    "has no repeated blocks",
    "Unsupported dtype BFloat16",  # torch's FFT on a CPU
    "lists of blocks",
    "differ in",
    "changes the value between blocks",
    "which depends on parameters",
    "carries no tp_plan",
    "data-dependent control flow",
    "uses its blocks in another way",
    "without setup_context",
    "which fzero.parallel.tensor does not know",
    "differs by rank along 'tp'",  # a plan that forgets a layer whose parameters are used on parts
)


def optimizer() -> optim.Optimizer:
    return optim.adamw(1e-2, eps=1e-2)


class Task:
    """A model, a case, and how to make a train step of them."""

    def __init__(self, model: Model, case: Case) -> None:
        self.model, self.case = model, case
        self.dtype = getattr(torch, case.dtype)
        self.opt = optimizer()

    def batch(self, seed: int) -> Batch:
        return self.model.batch(seed, SIZE, self.dtype, self.case.mask)

    def module(self) -> Any:
        """Build the model, with no parameter at zero: a norm of zeros makes large numbers of rounding errors."""
        module = self.model.build(self.case.attention if self.model.attention else None)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p), alpha=0.02)
        return module.to(self.dtype)

    def train_step(self, loss_fn: Any, **options: Any) -> Any:
        def train_step(params: Any, opt_state: Any, *rest: Any) -> Any:
            loss, grads = fzero.value_and_grad(loss_fn, **options)(params, *rest)
            updates, opt_state = self.opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        return train_step

    def unsharded(self) -> Any:
        """Train by the plain step, on the whole batch."""
        apply, params, buffers = fzero.nn.functional(self.module())
        step = self.train_step(lambda p, u, b: loss_of(apply(p, u, **inputs_of(b))[0], b))
        state, losses = (params, self.opt.init(params)), []
        for i in range(STEPS):
            *state, loss = step(*state, buffers, self.batch(i))
            losses.append(float(loss))
        return losses, state[0]

    def sharded(self, backend: str) -> Any:
        """Train on the mesh; returns losses, whole parameters, and how many segments run uncompiled."""
        if "pp" in self.case.mesh:
            return self._piped(backend)
        mesh = fzero.mesh(**self.case.mesh)
        module = self.module()
        layers = tp.layers(module) if "tp" in mesh.axis_names else None
        apply, params, buffers = fzero.nn.functional(module, remat=self.case.remat, tp=layers)
        k = self.case.micro_batches
        rest = {"micro_batches": k} if k > 1 else {}
        if k > 1:  # buffers are not part of a micro-batch
            step = self.train_step(lambda p, b: loss_of(apply(p, buffers, **inputs_of(b))[0], b), **rest)
        else:
            step = self.train_step(lambda p, u, b: loss_of(apply(p, u, **inputs_of(b))[0], b))
        split = {} if layers is None else {"axis": "dp", "split": layers.split}
        step = fzero.shard(step, self.case.stage, mesh, **split)
        run, state, losses = fzero.jit(step, backend=backend), step.init(params, self.opt), []
        for i in range(STEPS):
            batch = mesh.split(self.batch(i), "dp")
            *state, loss = run(*state, *([] if k > 1 else [buffers]), batch)
            losses.append(float(loss))
        whole = step.gather(state[0])
        return losses, whole if layers is None else layers.pack(whole), uncompiled(run)

    def _piped(self, backend: str) -> Any:
        mesh, module = fzero.mesh(**self.case.mesh), self.module()
        loss, params, join = fzero.nn.pipeline(
            module, loss_of, inputs=inputs_of, micro_batches=self.case.micro_batches, depth=None
        )
        step = fzero.shard(
            self.train_step(loss, reduce="weighted"), self.case.stage, mesh, axis=("dp", "pp"), split=loss.split
        )
        run, state, losses = fzero.jit(step, backend=backend), step.init(loss.stack(params, mesh), self.opt), []
        for i in range(STEPS):
            *state, value = run(*state, mesh.split(self.batch(i), "dp"))
            losses.append(float(value))
        return losses, join(loss.unstack(step.gather(state[0]), mesh)), uncompiled(run)


def uncompiled(run: Any) -> int:
    return sum(entry.executable.uncompiled for entry in run._entries.values())


def difference(actual: Any, expected: Any) -> float:
    """Return the largest error: of losses, and of leaves relative to their largest element."""
    (losses, params), (other_losses, other_params) = actual, expected
    errors = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(losses, other_losses, strict=True)]
    assert params.keys() == other_params.keys()
    for name, x in params.items():
        y = other_params[name].double()
        errors.append(float((x.double() - y).abs().max() / y.abs().max().clamp(min=0.1)) if x.numel() else 0.0)
    return float("nan") if any(e != e for e in errors) else max(errors)


def result(model: Model, case: Case) -> dict[str, Any]:
    """Run a case; returns what came of it."""
    begin = time.monotonic()
    task = Task(model, case)
    try:
        expected = task.unsharded()
        *fx, _ = task.sharded("fx")
        *compiled, left = task.sharded("inductor")
    except Exception as error:
        text = next((x.strip() for x in str(error).splitlines() if x.strip()), type(error).__name__)
        outcome = "refused" if any(k in str(error) for k in KNOWN) else "failed"
        outcome = "absent" if isinstance(error, ImportError) else outcome
        where = "" if outcome != "failed" else traceback.format_exc()[-1500:]
        return {"outcome": outcome, "why": text[:400], "trace": where, "seconds": time.monotonic() - begin}
    to_fx, to_whole = difference(compiled, fx), difference(compiled, expected)
    bound = ERRORS[case.dtype] * model.loose
    parts = math.prod(case.mesh.values()) * case.micro_batches
    exact = to_fx <= bound and (
        to_whole <= bound
        or (model.batch_statistics and parts > 1)
        or (case.dtype == "bfloat16" and abs(compiled[0][0] - expected[0][0]) <= bound)
    )
    outcome = ("uncompiled" if left else "ok") if exact else "wrong"
    return {
        "outcome": outcome,
        "why": f"{left} segments" if left else "",
        "from fx": to_fx,
        "from unsharded": to_whole,
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    name, *wanted = sys.argv[1:]
    model = MODELS[name]
    number = list(MODELS).index(name)
    for case in cases_of(model, number):
        if case.name in wanted:
            actual = result(model, case)
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps({"model": name, "case": case.name, **actual}), flush=True)


if __name__ == "__main__":
    main()
