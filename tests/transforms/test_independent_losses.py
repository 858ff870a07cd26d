"""A loss that depends on nothing that is differentiated is told of, in every way to run a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero._notice import warn_once
from tests.helpers import train_step_for

OPT = optim.sgd(0.1)
PARAMS = {"w": torch.ones(4, 2), "b": torch.ones(2)}
X = torch.ones(8, 4)
SAID = "the loss of loss_fn does not depend on argument 0, so its gradients are zero"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "does not depend on" in r.message]


def of_weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params: Any, x: Any) -> Any:
        return loss(params, x), torch.ones(())

    return loss_fn


def reads(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "reads": (reads, True),
    "reads one leaf": (lambda params, x: (x @ params["w"]).mean(), True),
    "times zero": (lambda params, x: 0 * params["b"].sum(), True),
    "other parameters": (lambda params, x: reads(PARAMS, x), False),
    "detached": (lambda params, x: reads({k: p.detach() for k, p in params.items()}, x), False),
    "a constant": (lambda params, x: torch.zeros(()), False),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"micro_batches": 4}, {"reduce": "weighted"}], ids=str)
@pytest.mark.parametrize("way", ["outside", "vmap", "lockstep", "jit"])
def test_a_loss_without_parameters_is_told(way, options, loss, caplog):
    warn_once.cache_clear()
    f, depends = LOSSES[loss]
    if options.get("reduce"):
        loss_fn = of_weighted(f)
    else:

        def loss_fn(params: Any, x: Any) -> Any:
            return f(params, x)

    if way == "outside":
        _, grads = fzero.value_and_grad(loss_fn, **options)(PARAMS, X)
    else:
        mesh = fzero.mesh(dp=2, simulate="lockstep" if way == "lockstep" else "vmap")
        step = fzero.shard(train_step_for(loss_fn, OPT, **options), stage=3, mesh=mesh)
        step = fzero.jit(step, backend="fx") if way == "jit" else step
        params, _, _ = step(*step.init(PARAMS, OPT), mesh.split(X))
        grads = fzero.tree.map(torch.sub, step.gather(params), PARAMS)
    assert told(caplog) == ([] if depends else told(caplog)[:1]) and bool(told(caplog)) != depends
    if not depends:
        assert SAID in told(caplog)[0] and not any(g.any() for g in fzero.tree.tensors(grads))


def test_it_is_not_told_of_what_reads_parameters_in_other_ways(caplog):
    """Frozen parts, two trees, rematerialised blocks, nothing to differentiate, and a derivative of the gradient."""
    warn_once.cache_clear()
    fzero.value_and_grad(lambda head, body, x: reads({**body, **head}, x))({"b": PARAMS["b"]}, {"w": PARAMS["w"]}, X)
    fzero.value_and_grad(lambda a, b: a.sum(), argnums=(0, 1))(torch.ones(2), torch.ones(2))
    fzero.value_and_grad(fzero.remat(reads))(PARAMS, X)
    fzero.value_and_grad(lambda params, x: x.mean())({}, X)
    torch.func.grad(lambda p: fzero.value_and_grad(reads)(p, X)[0])(PARAMS)
    with torch.no_grad():
        fzero.value_and_grad(reads)(PARAMS, X)
    assert not told(caplog)
