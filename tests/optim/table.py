"""The optimizers with their laws' sources of numbers, and a small model that they train."""

from typing import Any, NamedTuple

import torch

from fzero import optim, tree
from tests.optim.helpers import matrices, normal


class Row(NamedTuple):
    """An optimizer, and who else computes its numbers: a torch optimizer made from a list of leaves, or optax."""

    optimizer: optim.Optimizer
    torch: Any = None
    optax: str = ""  # a key of fixtures/optax.json


def biases(params: Any) -> Any:
    return tree.map(lambda p: p.ndim < 2, params)


def with_clipping(learning_rate: Any, max_norm: Any, weight_decay: Any) -> optim.Optimizer:
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.adamw(learning_rate, weight_decay=weight_decay))


def whitened_momentum() -> optim.Optimizer:
    """An optimizer that needs whole leaves, with a state of another shape than the leaf, an integer, and decay."""

    def init(p: torch.Tensor) -> Any:
        count = torch.zeros((), dtype=torch.int64)
        return {"m": torch.zeros_like(p), "seen": p.new_zeros(1, 2), "norm": p.new_zeros(()), "count": count}

    def update(g: torch.Tensor, s: Any, params: torch.Tensor) -> Any:
        m = 0.9 * s["m"] + g
        size = m.norm() + 1.0
        new = {"m": m, "seen": s["seen"] + size, "norm": size, "count": s["count"] + 1}
        return -0.1 * m / size - 0.01 * params * (params.square().mean() if params.numel() else 1), new

    return optim.Optimizer(init, update)


EVERY_LEAF = optim.Moments("int8", full=lambda path, leaf: False)
HALF_MOMENTS = optim.Moments("bfloat16", full=lambda path, leaf: False)
FALLING = optim.linear(1e-2, 1e-3, 5)
TABLE = {
    "sgd": Row(optim.sgd(0.1), lambda xs: torch.optim.SGD(xs, 0.1)),
    "momentum": Row(optim.sgd(0.1, momentum=0.9), lambda xs: torch.optim.SGD(xs, 0.1, momentum=0.9)),
    "nesterov": Row(
        optim.sgd(0.1, momentum=0.9, nesterov=True),
        lambda xs: torch.optim.SGD(xs, 0.1, momentum=0.9, nesterov=True),
        "sgd",
    ),
    "adam": Row(optim.adam(1e-2), lambda xs: torch.optim.Adam(xs, 1e-2)),
    "adam, betas and eps": Row(
        optim.adam(1e-2, b1=0.8, b2=0.95, eps=1e-3), lambda xs: torch.optim.Adam(xs, 1e-2, (0.8, 0.95), 1e-3)
    ),
    "adamw": Row(optim.adamw(1e-2), lambda xs: torch.optim.AdamW(xs, 1e-2)),
    "adamw, strong decay": Row(
        optim.adamw(1e-2, weight_decay=0.5), lambda xs: torch.optim.AdamW(xs, 1e-2, weight_decay=0.5)
    ),
    "adamw, masked decay": Row(
        optim.adamw(optim.warmup_cosine(0.1, 3, 8, 0.01), weight_decay=0.1, mask=matrices), optax="adamw"
    ),
    "adamw in 8 bits": Row(optim.adamw(1e-2, mask=matrices, moments=EVERY_LEAF)),
    "adam links in 8 bits": Row(
        optim.chain(optim.scale_by_adam(moments=EVERY_LEAF), optim.scale_by_learning_rate(FALLING))
    ),
    "lion in 8 bits": Row(optim.lion(1e-2, 0.8, 0.95, moments=EVERY_LEAF)),
    "muon in 8 bits": Row(
        optim.muon(1e-2, fallback=optim.lamb(1e-2, moments=EVERY_LEAF), ns_dtype=None, moments=EVERY_LEAF)
    ),
    "adamw in 16 bits": Row(optim.adamw(1e-2, mask=matrices, moments=HALF_MOMENTS)),
    "lion in 16 bits": Row(optim.lion(1e-2, 0.8, 0.95, moments=HALF_MOMENTS)),
    "muon in 16 bits": Row(
        optim.muon(1e-2, fallback=optim.lamb(1e-2, moments=HALF_MOMENTS), ns_dtype=None, moments=HALF_MOMENTS)
    ),
    "adam in links": Row(
        optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(1e-2)), lambda xs: torch.optim.Adam(xs, 1e-2)
    ),
    "adafactor": Row(optim.adafactor(0.1), lambda xs: torch.optim.Adafactor(xs, 0.1)),
    "adafactor, everything else": Row(
        optim.adafactor(0.1, 0.6, 0.05, 0.3, 1.5, 0.1),
        lambda xs: torch.optim.Adafactor(xs, 0.1, -0.6, (0.05, 0.3), 1.5, 0.1),
    ),
    "adagrad": Row(optim.adagrad(0.1), lambda xs: torch.optim.Adagrad(xs, 0.1)),
    "adagrad from 0.1": Row(
        optim.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-3),
        lambda xs: torch.optim.Adagrad(xs, 0.1, initial_accumulator_value=0.1, eps=1e-3),
    ),
    "lion": Row(optim.lion(1e-2), optax="lion"),
    "lion, masked decay": Row(
        optim.lion(FALLING, 0.8, 0.95, weight_decay=0.1, mask=matrices), optax="lion, masked decay"
    ),
    "lion in links": Row(
        optim.chain(
            optim.scale_by_lion(0.8, 0.95),
            optim.add_decayed_weights(0.1, matrices),
            optim.scale_by_learning_rate(FALLING),
        ),
        optax="lion, masked decay",
    ),
    "lamb": Row(optim.lamb(1e-2), optax="lamb"),
    "lamb, masked decay": Row(
        optim.lamb(FALLING, 0.8, 0.95, 1e-3, weight_decay=0.1, mask=matrices), optax="lamb, masked decay"
    ),
    "lars": Row(
        optim.chain(optim.scale_by_trust_ratio(), optim.scale_by_learning_rate(1e-2)),
        optax="lars",
    ),
    "clip_by_block_rms": Row(
        optim.chain(optim.clip_by_block_rms(0.9), optim.sgd(0.1)),
        optax="clip_by_block_rms",
    ),
    "clip_by_global_norm": Row(
        optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1)), optax="clip_by_global_norm"
    ),
    "masked adam": Row(optim.masked(optim.adam(1e-2), matrices), optax="masked adam"),
    "groups of adam": Row(optim.by_group((optim.adam(1e-2), matrices), (optim.adam(1e-3), biases))),
    "masked lamb": Row(optim.masked(optim.lamb(1e-2, weight_decay=0.1, mask=matrices), biases)),
    "masked clipping": Row(
        optim.chain(optim.masked(optim.clip_by_global_norm(0.5), matrices), optim.sgd(0.1)), optax="masked clipping"
    ),
    "frozen leaves": Row(
        optim.chain(optim.adam(1e-2), optim.masked(optim.set_to_zero(), matrices)), optax="frozen leaves"
    ),
    "injected adamw": Row(
        optim.inject_hyperparams(optim.adamw, static_args="mask")(
            FALLING,
            b1=optim.linear(0.5, 0.9, 5),
            eps=1e-3,
            weight_decay=optim.exponential_decay(0.1, 2, 0.5),
            mask=matrices,
        ),
        optax="injected adamw",
    ),
    "injected numbers": Row(
        optim.inject_hyperparams(with_clipping)(1e-2, 0.5, 0.1),
        optax="clip_by_global_norm",
    ),
    "averaged gradients": Row(optim.chain(optim.ema(0.9), optim.sgd(0.1)), optax="averaged gradients"),
    "averaged gradients, biased": Row(
        optim.chain(optim.ema(0.9, debias=False), optim.sgd(0.1)), optax="averaged gradients, biased"
    ),
    "averaged parameters": Row(
        optim.chain(optim.adam(1e-2), optim.params_ema(0.9)), lambda xs: torch.optim.Adam(xs, 1e-2)
    ),
    "averaged parameters, debiased": Row(
        optim.chain(optim.sgd(0.1), optim.params_ema(0.9, debias=True)), lambda xs: torch.optim.SGD(xs, 0.1)
    ),
    "muon": Row(optim.muon(1e-2, fallback=optim.adamw(1e-2), ns_dtype=None)),
    "muon, scaled": Row(
        optim.muon(FALLING, 0.0, 0.8, False, adjust_lr_fn="match_rms_adamw", fallback=optim.sgd(0.1), ns_dtype=None)
    ),
    "whole": Row(optim.on_full_leaves(whitened_momentum())),
    "links": Row(
        optim.chain(
            optim.clip(0.9),
            optim.scale_by_adam(eps=1e-3),
            optim.add_decayed_weights(0.1, matrices),
            optim.scale_by_schedule(optim.linear(-1e-2, -1e-3, 5)),
            optim.scale(2.0),
        ),
        optax="links",
    ),
}

# Each optimizer of fzero.optim by its name, for the laws of other packages.
EACH = {name: TABLE[name].optimizer for name in optim.__all__ if name in TABLE}


def small_params() -> dict[str, Any]:
    """A unit of two leaves and one of a 0-d leaf; no size divides by 3 or 4 ranks."""
    return {"layer": {"w": normal((5, 2), 0), "b": normal((3,), 1)}, "scale": normal((), 2)}


def small_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["layer"]["w"]).sum(1, keepdim=True) * p["scale"] - p["layer"]["b"]).square().mean()
