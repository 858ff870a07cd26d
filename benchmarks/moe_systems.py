"""The mixture that benchmarks/moe.py trains, and what trains it: fzero with `ep`, DeepSpeed's MoE layer, and FSDP2."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fzero
from benchmarks.peers.systems import System, Train
from fzero import optim
from fzero.parallel import experts as moe

__all__ = [
    "CONFIGS",
    "SYSTEMS",
    "MoeConfig",
    "deepspeed_engine",
    "fully_sharded",
    "fzero_mesh",
    "has_deepspeed",
    "loss_of",
]

VOCAB, HEADS, BUCKET = 256, 4, 1_000_000


class MoeConfig(NamedTuple):
    """A GPT whose feed-forward parts are mixtures; `batch` sequences of `context` tokens a rank."""

    width: int
    hidden: int
    layers: int
    experts: int
    batch: int
    context: int
    capacity: float = 1.25
    balance: float = 0.01  # weight of the balance loss
    clip: float = 1.0  # global norm; 0 for none

    def params(self) -> dict[str, Any]:
        """Make the parameters, the same at each call."""
        g, d = torch.Generator().manual_seed(0), self.width

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g) * shape[-2] ** -0.5

        def block() -> dict[str, Any]:
            experts = {"up": normal(self.experts, d, self.hidden), "down": normal(self.experts, self.hidden, d)}
            dense = {"ln1": torch.ones(d), "qkv": normal(d, 3 * d), "proj": normal(d, d), "ln2": torch.ones(d)}
            return {**dense, "router": normal(d, self.experts), "experts": experts}

        ends = {"wte": normal(VOCAB, d), "wpe": 0.1 * normal(self.context, d), "ln_f": torch.ones(d)}
        return {**ends, "head": normal(d, VOCAB), "blocks": [block() for _ in range(self.layers)]}

    def batches(self, micro_batches: int, rank: int, count: int) -> list[torch.Tensor]:
        """Make a rank's batches of tokens, int64 [batch, context + 1]."""
        g = torch.Generator().manual_seed(rank)
        shape = (micro_batches * self.batch, self.context + 1)
        return [torch.randint(VOCAB, shape, generator=g) for _ in range(count)]

    def global_batch(self) -> torch.Tensor:
        """Make a batch that is the same whatever the number of ranks, [4 batch, context + 1]."""
        return torch.cat([self.batches(1, r, 1)[0] for r in range(4)])


CONFIGS = {
    "toy": MoeConfig(32, 64, 2, 8, batch=1, context=32),
    "numbers": MoeConfig(64, 128, 2, 8, batch=1, context=64, clip=0),
    "state": MoeConfig(256, 512, 4, 16, batch=2, context=256),  # most of its memory is parameters and moments
    "tokens": MoeConfig(256, 512, 2, 16, batch=4, context=512),  # and here activations
}


def ffn(p: Any, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    return linear(F.gelu(linear(rows, p["up"])), p["down"])


def attend(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, x.shape[-1:], p["ln1"])
    q, k, v = (h @ p["qkv"]).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(2, 3).unbind(0)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + a.transpose(1, 2).flatten(2) @ p["proj"]


def mixture(p: Any, h: torch.Tensor, capacity: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fzero's layer: on a mesh with `ep` each rank has a part of the experts; anywhere else all."""
    routing = moe.route(h @ p["router"], k=2, normalize=True)
    return moe.layer(ffn, p["experts"], h, routing, capacity=capacity), moe.balance_loss(routing)


def block(p: Any, x: torch.Tensor, config: MoeConfig, mix: Callable[..., Any] = mixture) -> Any:
    x = attend(p, x)
    y, auxiliary = mix(p, F.layer_norm(x, x.shape[-1:], p["ln2"]), config.capacity)
    return x + y, auxiliary


def loss_of(params: Any, tokens: torch.Tensor, config: MoeConfig, apply: Callable[..., Any] = block) -> torch.Tensor:
    """Next-token cross entropy of tokens [b, t + 1], and the balance losses."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x, auxiliary = params["wte"][inputs] + params["wpe"], []
    for p in params["blocks"]:
        x, one = apply(p, x, config)
        auxiliary.append(one)
    logits = F.layer_norm(x, x.shape[-1:], params["ln_f"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + config.balance * torch.stack(auxiliary).sum()


def fzero_mesh(ranks: int) -> fzero.ranks.Mesh:
    """Return the axis of the experts: ep=2 with dp=2 on four ranks."""
    return fzero.mesh(simulate=False, dp=ranks // min(ranks, 2), ep=min(ranks, 2))


def fzero_system(stage: int, backend: str) -> System:
    """Make fzero's system of a stage and a backend."""

    def build(setup: Any) -> Train:
        config: MoeConfig = setup.config
        opt = optim.adamw(1e-3)
        opt = optim.chain(optim.clip_by_global_norm(config.clip), opt) if config.clip else opt

        def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
            loss, grads = fzero.value_and_grad(lambda p, t: loss_of(p, t, config))(params, tokens)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        step = fzero.shard(train_step, stage=stage, mesh=fzero_mesh(setup.mesh.size), split=moe.split_rule("experts"))
        state = [*step.init(config.params(), opt, donate=True)]
        run = fzero.jit(step, backend=backend)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            *state[:], loss = run(*state, step.mesh.local(tokens))
            return loss

        return train

    return System("fzero", stage, backend, build)


class Mixture(nn.Module):
    """A tree of parameters, whose dicts are modules; called, a block of the model."""

    def __init__(self, params: dict[str, Any], config: MoeConfig) -> None:
        super().__init__()
        self.names, self.config = list(params), config
        for name, x in params.items():
            child = Mixture(x, config) if isinstance(x, dict) else nn.Parameter(x)
            setattr(self, name, child)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, x: torch.Tensor) -> Any:
        return block(self, x, self.config)


class Gpt(nn.Module):
    """The model; called with tokens it returns the loss. `make` makes a block of its parameters."""

    def __init__(self, config: MoeConfig, make: Callable[..., nn.Module] = Mixture) -> None:
        super().__init__()
        params, self.config = config.params(), config
        self.blocks = nn.ModuleList([make(p, config) for p in params.pop("blocks")])
        self.names = list(params)
        for name in self.names:
            setattr(self, name, nn.Parameter(params.pop(name)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        params = {**{name: getattr(self, name) for name in self.names}, "blocks": self.blocks}
        return loss_of(params, tokens, self.config, apply=lambda p, x, config: p(x))


def fully_sharded(config: MoeConfig, ranks: int, reshard: bool, compiled: bool) -> Gpt:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Gpt(config), init_device_mesh("cpu", (ranks,))
    for one in model.blocks:
        if compiled:
            one.compile()
        fully_shard(one, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def fsdp2_system(reshard: bool, compiled: bool) -> System:
    """Make FSDP2's: each rank has all experts in turn, and no token travels."""

    def build(setup: Any) -> Train:
        config, model = setup.config, fully_sharded(setup.config, setup.mesh.size, reshard, compiled)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            loss = model(tokens)
            loss.backward()
            if config.clip:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return train

    return System("FSDP2", 3 if reshard else 2, "reshard" + "-compile" * compiled if reshard else "keep", build)


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def _deepspeed_block(ep: int, rank: int) -> Callable[..., nn.Module]:
    """Return what makes a block whose mixture is DeepSpeed's layer, with the same weights."""
    from deepspeed.moe.layer import MoE

    class Block(nn.Module):
        def __init__(self, params: dict[str, Any], config: MoeConfig) -> None:
            super().__init__()
            self.config = config
            for name in ("ln1", "qkv", "proj", "ln2"):
                setattr(self, name, nn.Parameter(params[name]))
            options = {"min_capacity": 1, "use_rts": False, "top2_2nd_expert_sampling": False}
            self.moe = MoE(
                *(config.width, Expert(config.width, config.hidden), config.experts),
                **{"ep_size": ep, "k": 2, "capacity_factor": config.capacity, **options},
            )
            inner = self.moe.deepspeed_moe
            inner.gate.wg.weight.data.copy_(params["router"].T)
            local = inner.experts.deepspeed_experts
            for i, expert in enumerate(local):
                at = rank % ep * len(local) + i
                expert.up.weight.data.copy_(params["experts"]["up"][at].T)
                expert.down.weight.data.copy_(params["experts"]["down"][at].T)

        def __getitem__(self, name: str) -> Any:
            return getattr(self, name)

        def forward(self, x: torch.Tensor) -> Any:
            return block(self, x, self.config, mix=lambda p, h, capacity: self.moe(h)[:2])

    return Block


def deepspeed_engine(
    config: MoeConfig, stage: int, ranks: int, make_optimizer: Callable[..., Any], compiled: bool = False
) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    make = _deepspeed_block(min(ranks, 2), dist.get_rank())
    model = Gpt(config, make)
    for one in model.blocks if compiled else ():
        one.compile()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    settings = {
        "train_micro_batch_size_per_gpu": config.batch,
        "gradient_clipping": config.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    opt: Any = make_optimizer(groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=settings)
    return engine


def deepspeed_system(stage: int, compiled: bool) -> System:
    """Make DeepSpeed's, with torch's fused AdamW."""

    def build(setup: Any) -> Train:
        def adamw(groups: Any) -> Any:
            return torch.optim.AdamW(groups, lr=1e-3, weight_decay=1e-2, fused=True)

        engine = deepspeed_engine(setup.config, stage, setup.mesh.size, adamw, compiled)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return train

    return System("DeepSpeed", stage, "compile" * compiled, build)


def has_deepspeed() -> bool:
    """Return whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


SYSTEMS = {
    s.key: s
    for s in [
        *[fzero_system(stage, backend) for stage in range(len(fzero.zero.STAGES)) for backend in ("fx", "inductor")],
        *[deepspeed_system(stage, compiled) for stage in (0, 1) for compiled in (False, True) if has_deepspeed()],
        *[fsdp2_system(reshard, compiled) for reshard, compiled in ((False, False), (True, False), (True, True))],
    ]
}
