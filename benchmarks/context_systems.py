"""The GPT that benchmarks/context.py trains, and what trains it: fzero's split sequences, torch's context_parallel with
FSDP2, and DeepSpeed's Ulysses with FSDP2 and with ZeRO-3. All shard parameters, gradients and moments over all ranks.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fzero
from benchmarks import context_torch
from benchmarks.peers.systems import System, Train
from fzero import optim
from fzero.parallel import context

__all__ = ["CONFIGS", "SYSTEMS", "ContextConfig", "has_deepspeed"]

VOCAB, HEADS, BUCKET = 256, 4, 1_000_000
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ContextConfig(NamedTuple):
    """A causal GPT; `batch` sequences of `tokens` tokens, split over all ranks."""

    width: int
    layers: int
    tokens: int
    batch: int = 1

    def params(self) -> dict[str, Any]:
        """Make the parameters, the same at each call."""
        g, d = torch.Generator().manual_seed(0), self.width

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g) * shape[-2] ** -0.5

        def block() -> dict[str, torch.Tensor]:
            weights = {"qkv": normal(d, 3 * d), "proj": normal(d, d), "fc": normal(d, 4 * d), "out": normal(4 * d, d)}
            return {"ln1": torch.ones(d), "ln2": torch.ones(d), **weights}

        ends = {"wte": normal(VOCAB, d), "wpe": normal(self.tokens, d), "ln_f": torch.ones(d), "head": normal(d, VOCAB)}
        return {**ends, "blocks": [block() for _ in range(self.layers)]}

    def batches(self, micro_batches: int, rank: int, count: int) -> list[torch.Tensor]:
        """Make global batches, the same on all ranks: tokens, int64 [batch, tokens + 1]."""
        g = torch.Generator().manual_seed(0)
        shape = (micro_batches * self.batch, self.tokens + 1)
        return [torch.randint(VOCAB, shape, generator=g) for _ in range(count)]


CONFIGS = {
    "toy": ContextConfig(32, 2, 64),
    "2k": ContextConfig(512, 4, 2_048),
    "8k": ContextConfig(128, 3, 8_192),
    "32k": ContextConfig(64, 1, 32_768),
}


def block(p: Any, x: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Attention and an MLP, each added to x [b, t, width]. `attend` takes [b, heads, t, d]."""
    h = F.layer_norm(x, x.shape[-1:], p["ln1"])
    q, k, v = (h @ p["qkv"]).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(2, 3).unbind(0)
    x = x + attend(q, k, v).transpose(1, 2).flatten(2) @ p["proj"]
    return x + F.gelu(F.layer_norm(x, x.shape[-1:], p["ln2"]) @ p["fc"]) @ p["out"]


def loss_of(params: Any, batch: Any, apply: Callable[[Any, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of a rank's tokens, labels [b, t] and positions [t]."""
    x = params["wte"][batch["tokens"]] + params["wpe"][batch["positions"]]
    for p in params["blocks"]:
        x = apply(p, x)
    logits = F.layer_norm(x, x.shape[-1:], params["ln_f"]) @ params["head"]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def tokens_and_labels(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs and their next tokens, of whole sequences."""
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def fzero_system(method: Any, backend: str) -> System:
    """Make fzero's system of a method of attention and a backend."""

    def build(setup: Any) -> Train:
        opt = optim.adamw(1e-3)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return context.attention(q, k, v, causal=True, method=method)

        def loss_fn(params: Any, batch: Any) -> torch.Tensor:
            batch = {**batch, "positions": context.positions(batch["tokens"].shape[1])}
            return loss_of(params, batch, lambda p, x: block(p, x, attend))

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        mesh = fzero.mesh(simulate=False, dp=1, cp=setup.mesh.size)
        step = fzero.shard(train_step, stage=3, mesh=mesh)
        state = [*step.init(setup.config.params(), opt, donate=True)]
        run = fzero.jit(step, backend=backend)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            *state[:], loss = run(*state, context.split(mesh, tokens_and_labels(tokens)))
            return loss

        return train

    return System("fzero", 3, method + (f"-{backend}" if backend != "inductor" else ""), build)


# The model as a module.


class Block(nn.Module):
    """One layer, with an attention that may have a module of its own."""

    def __init__(self, params: dict[str, torch.Tensor], attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        for name, x in params.items():
            self.register_parameter(name, nn.Parameter(x))

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return block(self, x, self.attend)


class Gpt(nn.Module):
    """The model; called with a rank's part of a batch it returns the loss."""

    def __init__(self, config: ContextConfig, attend: Attend) -> None:
        super().__init__()
        params = config.params()
        self.blocks = nn.ModuleList([Block(p, attend) for p in params.pop("blocks")])
        self.names = list(params)
        for name in self.names:
            self.register_parameter(name, nn.Parameter(params[name]))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        params = {**{name: getattr(self, name) for name in self.names}, "blocks": self.blocks}
        batch = {"tokens": tokens, "labels": labels, "positions": positions}
        return loss_of(params, batch, lambda p, x: p(x))


def local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # which context_parallel replaces


def fully_sharded(config: ContextConfig, attend: Attend, ranks: int, compiled: bool = False) -> tuple[Gpt, Any]:
    """Return the model by FSDP2, gathered again for the backward pass, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = Gpt(config, attend), init_device_mesh("cpu", (ranks,))
    for one in model.blocks:
        if compiled:
            one.compile()
        fully_shard(one, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)


# Torch's context_parallel, with FSDP2.


def torch_system(rotate: str) -> System:
    """Make torch's, whose keys and values come by one all-gather, or go round by all-to-all.

    With compiled blocks it took 1.2 times as long, and 1.1 times the memory.
    """

    def build(setup: Any) -> Train:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        context_torch.serve_cpu()
        model, opt = fully_sharded(setup.config, local_attention, setup.mesh.size)
        mesh = init_device_mesh("cpu", (setup.mesh.size,), mesh_dim_names=("cp",))
        positions = torch.arange(setup.config.tokens)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            set_rotate_method(rotate)  # a global of torch's
            batch = {**tokens_and_labels(tokens), "positions": positions}
            buffers = [x.clone() for x in batch.values()]  # they are cut in place
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers={*buffers}):
                loss = model(*buffers)
                loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return train

    return System("context_parallel", 3, rotate, build)


def ulysses(group: Any) -> Attend:
    """Make DeepSpeed's attention of heads over ranks."""
    from deepspeed.sequence.layer import DistributedAttention

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return local_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    layer: Any = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)  # [b, t, heads, d]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return layer(*(x.transpose(1, 2) for x in (q, k, v)), 0).transpose(1, 2)

    return attend


def own_part(tokens: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
    """Return this rank's tokens in a row: after the all-to-all all ranks have the same work."""
    batch = {**tokens_and_labels(tokens), "positions": torch.arange(tokens.shape[1] - 1)}
    return {name: x.chunk(ranks, -1)[dist.get_rank()] for name, x in batch.items()}


def ulysses_fsdp2(compiled: bool = False) -> System:
    """Make Ulysses with FSDP2."""

    def build(setup: Any) -> Train:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        ranks = setup.mesh.size
        model, opt = fully_sharded(setup.config, ulysses(dist.group.WORLD), ranks, compiled)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            loss = model(**own_part(tokens, ranks))
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return train

    return System("Ulysses+FSDP2", 3, "compile" * compiled, build)


def ulysses_deepspeed() -> System:
    """Make Ulysses with DeepSpeed's own ZeRO-3."""

    def build(setup: Any) -> Train:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        names = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        ranks = setup.mesh.size
        settings = {
            "train_micro_batch_size_per_gpu": setup.config.batch,
            "data_parallel_size": 1,
            "sequence_parallel_size": ranks,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3, **dict.fromkeys(names, BUCKET)},
        }
        deepspeed.init_distributed("gloo", verbose=False)
        model = Gpt(setup.config, ulysses(dist.group.WORLD))
        parameters: Any = model.parameters()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            loss = engine(**own_part(tokens, ranks))
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return train

    return System("DeepSpeed", 3, "Ulysses", build)


def has_deepspeed() -> bool:
    """Return whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


SYSTEMS = {
    s.key: s
    for s in [
        fzero_system("all_to_all", "inductor"),
        fzero_system("ring", "inductor"),
        torch_system("allgather"),
        torch_system("alltoall"),
        *([ulysses_fsdp2(), ulysses_fsdp2(compiled=True), ulysses_deepspeed()] if has_deepspeed() else []),
    ]
}
