"""Casts to a wider dtype and back: the value itself stands for them, and no result comes to share its memory."""

import pytest
import torch

import fzero
from fzero import optim
from fzero.graph.ir import CASTS

HALF, FLOAT = torch.bfloat16, torch.float32
CHAINS = {  # a function, and how many casts are left of it
    "there and back": (lambda x: x.float().bfloat16().square(), HALF, 0),
    "through a view": (lambda x: x.double().float().t() @ x, FLOAT, 0),
    "a float16 through a float32": (lambda x: x.float().half() * 2, torch.float16, 0),
    "a result": (lambda x: x.float().bfloat16(), HALF, 2),
    "a view that is a result": (lambda x: x.float().bfloat16().t(), HALF, 2),
    "rounded": (lambda x: x.bfloat16().float() * 2, FLOAT, 2),
    "another half precision": (lambda x: x.half().bfloat16() * 2, HALF, 2),
    "float8, which torch promotes to nothing": (
        lambda x: x.to(torch.float8_e4m3fn).float().to(torch.float8_e4m3fn).float() * 2,
        FLOAT,
        4,
    ),
    "to another one": (lambda x: x.float().half() * 2, HALF, 2),
    "integers": (lambda x: x.float().to(torch.int32) * 2, torch.int32, 2),
    "changed in between": (lambda x: (x.float() * 1.001).bfloat16() * 2, HALF, 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_cast_to_a_wider_dtype_and_back_is_removed(name):
    f, dtype, casts = CHAINS[name]
    torch.manual_seed(0)
    x = (torch.randn(4, 4) * 100).to(dtype)
    step = fzero.jit(f, backend="fx")
    assert sum(o.target in map(str, CASTS) for o in step.plan(x).operations) == casts
    out = step(x)
    assert torch.equal(out, f(x)) and out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("micro_batches,units", [(1, 2), (4, 5)])
def test_a_gather_in_half_precision_has_no_copy_of_the_shard(micro_batches, units):
    """Its gradient is summed in float32: a rank holds its shards once, though each unit is gathered twice."""
    policy = fzero.Precision(param=HALF)
    opt = optim.master_weights(optim.adam(1e-3), policy)

    def loss_fn(params, x):
        for p in params["h"]:
            x = torch.tanh(x @ p["w"])
        return x.float().square().mean()

    def train_step(params, opt_state, x):
        loss, grads = fzero.value_and_grad(loss_fn, precision=policy, micro_batches=micro_batches)(params, x)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2))
    with torch.device("meta"):
        params, x = {"h": [{"w": torch.zeros(256, 256)} for _ in range(8)]}, torch.zeros(16, 256, dtype=HALF)
    args = *step.init(params, opt), step.mesh.split(x)
    plan = fzero.plan(fzero.jit(step, max_reuse_bytes=0, bucket_bytes=0), *args, hardware="cuda")
    gathers = [c for c in plan.collectives if c.kind == "all_gather"]
    assert sum(c.times for c in gathers) > 8 * micro_batches
    assert max(plan.live_of("activations")) < units * 2 * 256 * 256  # of eight
