"""Optimizers, wrappers and dtypes from which random compositions are drawn."""

from typing import Any

import torch
from hypothesis import strategies as st

import fzero
from fzero import optim, tree

F64 = torch.float64
WIDE = fzero.Precision(param=torch.float32, reduce=F64, master=F64)


def no_decay(params: Any) -> Any:
    return tree.map(lambda p: p.dim() >= 2, params)


OFFLOADED = ("offload", "offload on device")
UPDATED_ON_HOST = ("offload", "offload with delay")
READ_FULL_LEAVES = ("lamb", "adafactor", "muon")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optim.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optim.adamw(1e-2, eps=1e-3, mask=no_decay),
    "chained": lambda: optim.chain(optim.scale_by_adam(eps=1e-3), optim.scale(-0.01)),
    "adagrad": lambda: optim.adagrad(1e-2, eps=1e-3),
    "lamb": lambda: optim.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optim.adafactor(1e-2, eps=1e-3),
    "muon": lambda: optim.muon(1e-2, fallback=optim.adamw(1e-2, eps=1e-3), ns_dtype=F64),
    "groups": lambda: optim.by_group(
        (optim.adamw(2e-2, eps=1e-3, weight_decay=0.1), no_decay),
        (optim.adamw(1e-2, eps=1e-3, weight_decay=0), lambda p: tree.map(lambda x: not x, no_decay(p))),
    ),
    "schedule": lambda: optim.adamw(optim.warmup_cosine(1e-2, 1, 5), eps=1e-3),
    "injected": lambda: optim.inject_hyperparams(optim.adamw)(learning_rate=1e-2, eps=1e-3),
    "masked": lambda: optim.chain(optim.masked(optim.add_decayed_weights(0.1), no_decay), optim.sgd(0.05)),
    "average": lambda: optim.chain(optim.adam(1e-2, eps=1e-3), optim.params_ema(0.9)),
}
WRAPPERS: dict[str, Any] = {
    "clip": lambda opt: optim.chain(optim.clip_by_global_norm(0.1), opt),
    "clip by value": lambda opt: optim.chain(optim.clip(0.01), opt),
    "rms": lambda opt: optim.chain(optim.clip_by_block_rms(0.01), opt),
    "trust": lambda opt: optim.chain(opt, optim.scale_by_trust_ratio(), optim.scale(0.1)),
    "offload": lambda opt: optim.offload(opt, 0.5),
    "offload on device": lambda opt: optim.offload(opt, 0.7, update_on="device"),
    "offload with delay": lambda opt: optim.offload(opt, 1.0, delay=1),
}
JIT: Any = st.none() | st.fixed_dictionaries(  # options of fzero.jit, or an eager step
    {"backend": st.just("fx")},
    optional={
        "prefetch": st.integers(0, 3),
        "in_flight": st.integers(0, 2),
        "bucket_bytes": st.sampled_from([0, 300, 10**6]),
        "recompute": st.booleans(),
        "max_reuse_bytes": st.sampled_from([0, 10**6]),
        "loop": st.booleans(),
        "donate": st.sampled_from([(0, 1), ()]),
    },
)
