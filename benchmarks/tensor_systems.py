"""The Llama that benchmarks/tensor.py trains, and what trains it: fzero with `tp`, and torch's parallelize_module."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import fzero
from benchmarks.peers.systems import System, Train
from fzero import optim
from fzero.parallel import tensor as tp

__all__ = ["CONFIGS", "SYSTEMS", "LlamaConfig"]

VOCAB, HEADS, TP = 2048, 8, 2


class LlamaConfig(NamedTuple):
    """A Llama of transformers; `batch` sequences of `context` tokens a rank along `dp`."""

    width: int
    hidden: int
    layers: int
    batch: int
    context: int

    def model(self) -> nn.Module:
        """Make the model, the same at each call."""
        sizes = {"hidden_size": self.width, "intermediate_size": self.hidden, "num_hidden_layers": self.layers}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
        config = AutoConfig.for_model("llama", vocab_size=VOCAB, use_cache=False, **sizes, **heads)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def batches(self, micro_batches: int, rank: int, count: int) -> list[torch.Tensor]:
        """Make a rank's batches of tokens, int64 [batch, context]: ranks along `tp` have the same."""
        g = torch.Generator().manual_seed(rank // TP)
        return [torch.randint(VOCAB, (self.batch, self.context), generator=g) for _ in range(count)]


CONFIGS = {
    "toy": LlamaConfig(64, 96, 2, batch=2, context=16),
    "state": LlamaConfig(512, 1408, 4, batch=1, context=128),  # most of its memory is parameters and moments
    "tokens": LlamaConfig(256, 704, 4, batch=4, context=256),  # and here activations
}


def following(tokens: torch.Tensor) -> torch.Tensor:
    """Return each token's target, which the last has not. (torch's loss of parallel logits takes no part of them.)"""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)


def fzero_system(stage: int, backend: str, sequence: bool = False) -> System:
    """Make fzero's system of a stage and a backend."""

    def build(setup: Any) -> Train:
        model = setup.config.model()
        layers = tp.layers(model, {"lm_head": "colwise"}, sequence=sequence)
        apply, params, buffers = fzero.nn.functional(model, tp=layers)
        opt = optim.adamw(1e-3)

        def loss_fn(params: Any, tokens: torch.Tensor) -> torch.Tensor:
            return tp.cross_entropy(apply(params, buffers, tokens)[0].logits, following(tokens))

        def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
            loss, grads = fzero.value_and_grad(loss_fn)(params, tokens)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        mesh = fzero.mesh(simulate=False, dp=-1, tp=TP)
        step = fzero.shard(train_step, stage=stage, mesh=mesh, axis="dp", split=layers.split)
        state = [*step.init(params, opt)]
        del model, params
        run = step if backend == "eager" else fzero.jit(step, backend=backend)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            *state[:], loss = run(*state, mesh.local(tokens, "dp"))
            return loss

        return train

    return System("fzero", stage, backend + "-sequence" * sequence, build)


def torch_plan(sequence: bool) -> dict[str, Any]:
    """Return what torch's tutorial on tensor parallelism says of a Llama, with a loss of parts of the logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    parts: Any = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
    }
    block: dict[str, Any] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=parts),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=parts),
    }
    if sequence:
        block |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        hidden = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
        block["self_attn"] = PrepareModuleInput(input_kwarg_layouts=hidden[0], desired_input_kwarg_layouts=hidden[1])
        block["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["model.norm"] = SequenceParallel()
    return {**plan, **{f"model.layers.*.{name}": style for name, style in block.items()}}


def torch_system(stage: int, sequence: bool) -> System:
    """Make torch's, by itself along `tp`, or at stage 3 with FSDP2 along `dp`."""

    def build(setup: Any) -> Train:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

        model: Any = setup.config.model()
        mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], torch_plan(sequence))
        if stage == 3:
            for one in model.model.layers:
                fully_shard(one, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        groups: dict[Any, list[Any]] = {}  # a fused kernel takes tensors of one mesh
        for p in model.parameters():
            groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
        opt = torch.optim.AdamW([{"params": x} for x in groups.values()], lr=1e-3, weight_decay=1e-2, fused=True)
        positions = torch.arange(setup.config.context).unsqueeze(0)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            with loss_parallel():
                logits = model(tokens, position_ids=positions).logits
                loss = F.cross_entropy(logits.flatten(0, 1), following(tokens).flatten())
                loss.backward()
            opt.step()
            opt.zero_grad()
            return _local(loss.detach())

        return train

    return System("torch" if stage == 0 else "torch+FSDP2", stage, "sequence" * sequence, build)


def _local(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _all() -> list[System]:
    systems: list[System] = []
    for stage in (0, 3):
        for sequence in (False, True):
            systems += [fzero_system(stage, backend, sequence) for backend in ("eager", "fx", "inductor")[sequence:]]
            systems += [torch_system(stage, sequence)]
    return systems  # torch's blocks, compiled, fail in torch 2.13: tensors of parts wait within the graph


SYSTEMS = {s.key: s for s in _all()}
