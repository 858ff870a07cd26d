"""A loss that depends on nothing that is differentiated is refused, in every way to run a step."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fzero
from fzero import optim
from fzero._notice import warn_once
from tests.helpers import LEAST, cases, train_step_for

OPT = optim.sgd(0.1)
PARAMS = {"w": torch.ones(4, 2), "b": torch.ones(2)}
X = torch.ones(8, 4)
SAID = r"the loss of loss_fn depends on no leaf of argument 0 \('w', 'b'\), so its gradients are zero"


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "depends on no leaf" in r.message]


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
@pytest.mark.parametrize(
    "options", cases([{}, {"micro_batches": 4}], [{"micro_batches": 2}, {"reduce": "weighted"}]), ids=str
)
@pytest.mark.parametrize("way", ["outside", "vmap", "lockstep", "jit"])
def test_a_loss_without_parameters_is_refused(way, options, loss, caplog):
    warn_once.cache_clear()
    f, depends = LOSSES[loss]
    if options.get("reduce"):
        loss_fn = of_weighted(f)
    else:

        def loss_fn(params: Any, x: Any) -> Any:
            return f(params, x)

    def train() -> Any:
        if way == "outside":
            return fzero.value_and_grad(loss_fn, **options)(PARAMS, X)[1]
        mesh = fzero.mesh(dp=2, simulate="lockstep" if way == "lockstep" else "vmap")
        step = fzero.shard(train_step_for(loss_fn, OPT, **options), stage=3, mesh=mesh)
        step = fzero.jit(step, backend="fx", **LEAST) if way == "jit" else step
        params, _, _ = step(*step.init(PARAMS, OPT), mesh.split(X))
        return fzero.tree.map(torch.sub, step.gather(params), PARAMS)

    if depends:
        train()
        assert not notices(caplog)
    elif way == "lockstep":  # another rank's loss may depend on them
        grads = train()
        assert re.search(SAID, notices(caplog)[0]) and not any(g.any() for g in fzero.tree.tensors(grads))
    else:
        with pytest.raises(ValueError, match=SAID):
            train()


def test_a_rank_and_a_micro_batch_without_examples_have_a_constant_loss():
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        rows = x[x[:, 0] > 0]
        return reads(params, rows) if len(rows) else torch.zeros(())

    x = X.clone()
    x[4:] = 0
    for start in (x, x.flip(0)):
        grads = fzero.value_and_grad(loss, micro_batches=2)(PARAMS, start)[1]
        assert grads["w"].any()
    mesh = fzero.mesh(dp=2, simulate="lockstep")
    step = fzero.shard(train_step_for(loss, OPT), stage=2, mesh=mesh)
    params, _, _ = step(*step.init(PARAMS, OPT), mesh.split(x))
    torch.testing.assert_close(params["w"], PARAMS["w"] - 0.1 * grads["w"])


def test_the_error_of_an_independent_loss_names_at_most_a_few_leaves():
    many, one = {f"layer{i}": {"w": torch.ones(1)} for i in range(9)}, torch.ones(2)
    text = r"no leaf of argument 0 \('layer0.w', 'layer1.w', 'layer2.w', and 6 more\) or argument 1, so"
    with pytest.raises(ValueError, match=text):
        fzero.value_and_grad(lambda a, b: torch.ones(()), argnums=(0, 1))(many, one)
    for autograd in (False, True):
        with pytest.raises(ValueError, match=r"as apply\(params, .*trouble.md#a-loss-that-trains-nothing"):
            fzero.value_and_grad(lambda p: p.detach().sum(), autograd=autograd)(one)


def test_a_loss_that_reads_its_parameters_in_any_way_gives_no_notice(caplog):
    """Frozen parts, two trees, blocks under remat, nothing to differentiate, and a derivative of the gradient."""
    warn_once.cache_clear()
    fzero.value_and_grad(lambda head, body, x: reads({**body, **head}, x))({"b": PARAMS["b"]}, {"w": PARAMS["w"]}, X)
    fzero.value_and_grad(lambda a, b: a.sum(), argnums=(0, 1))(torch.ones(2), torch.ones(2))
    fzero.value_and_grad(fzero.remat(reads))(PARAMS, X)
    fzero.value_and_grad(lambda params, x: x.mean())({}, X)
    torch.func.grad(lambda p: fzero.value_and_grad(reads)(p, X)[0])(PARAMS)
    with torch.no_grad():
        fzero.value_and_grad(reads)(PARAMS, X)
    assert not notices(caplog)
