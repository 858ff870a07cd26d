"""The systems that are compared, each used as its own documentation says: what makes a train step of the GPT.

A step takes a rank's batch of all micro-batches, updates the model, and returns the loss: the mean over ranks, or the
rank's own, of which the mean is taken elsewhere. AdamW has the same numbers everywhere, its learning rate 1e-3.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import fzero
from benchmarks.peers.gpt import Config, Gpt, gpt_loss
from fzero import optim
from tests.helpers import train_step_for

__all__ = ["SYSTEMS", "Setup", "System", "Train", "fzero_system"]

Train = Callable[[torch.Tensor], torch.Tensor]
BUCKET = 1_000_000  # elements, of DeepSpeed's buckets


class Setup(NamedTuple):
    """What is trained, and on what."""

    config: Config
    micro_batches: int
    mesh: fzero.ranks.Mesh


class System(NamedTuple):
    """One way to train: its name, its ZeRO stage, its variant, and what makes a step."""

    name: str
    stage: int
    variant: str
    build: Callable[[Setup], Train]

    @property
    def key(self) -> str:
        """The row's name in tables and on the command line, without spaces."""
        return f"{self.name}-{self.stage}" + (f"-{self.variant}" if self.variant else "")


def fzero_system(stage: int, backend: str) -> System:
    """Make fzero's system of a stage and a backend."""

    def build(setup: Setup) -> Train:
        opt = optim.adamw(1e-3)
        train_step = train_step_for(gpt_loss, opt, micro_batches=setup.micro_batches)
        step = fzero.shard(train_step, stage=stage, mesh=setup.mesh)
        step = step if backend == "eager" else fzero.jit(step, backend=backend)
        state = [*step.init(setup.config.params, opt)]

        def train(tokens: torch.Tensor) -> torch.Tensor:
            *state[:], loss = step(*state, setup.mesh.local(tokens))
            return loss

        return train

    return System("fzero", stage, backend, build)


def _train_module(
    model: nn.Module, opt: torch.optim.Optimizer, micro_batches: int, unsynchronised: Callable[[], Any]
) -> Train:
    """Make the usual loop over micro-batches; all but the last run in `unsynchronised()`."""

    def train(tokens: torch.Tensor) -> torch.Tensor:
        parts, losses = tokens.chunk(micro_batches), []
        for i, part in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else unsynchronised():
                loss = model(part) / micro_batches
                loss.backward()
                losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
        return torch.stack(losses).sum()

    return train


def _ddp(stage: int) -> System:
    def build(setup: Setup) -> Train:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(Gpt(setup.config.params()), gradient_as_bucket_view=True)
        if stage:
            opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return _train_module(model, opt, setup.micro_batches, model.no_sync)

    return System("ZeroRedundancyOptimizer" if stage else "DDP", stage, "", build)


def _fsdp2(reshard: bool, compiled: bool) -> System:
    def build(setup: Setup) -> Train:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, mesh = Gpt(setup.config.params()), init_device_mesh("cpu", (setup.mesh.size,))
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return _train_module(model, opt, setup.micro_batches, contextlib.nullcontext)  # reduces each micro-batch

    variant = ("reshard" if reshard else "keep") + ("-compile" if compiled else "")
    return System("FSDP2", 3 if reshard else 2, variant, build)


def _deepspeed(stage: int) -> System:
    def build(setup: Setup) -> Train:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        config = {
            "train_micro_batch_size_per_gpu": setup.config.batch,
            "gradient_accumulation_steps": setup.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
            "gradient_clipping": 0.0,  # it clips to 1.0 unless told
            "zero_optimization": {**zero, "stage3_prefetch_bucket_size": BUCKET},
        }
        model = Gpt(setup.config.params())
        parameters: Any = model.parameters()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            losses = []
            for part in tokens.chunk(setup.micro_batches):
                loss = engine(part)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        return train

    return System("DeepSpeed", stage, "", build)


SYSTEMS = {
    s.key: s
    for s in [
        *[fzero_system(stage, backend) for stage in range(4) for backend in ("eager", "fx", "inductor")],
        _ddp(0),
        _ddp(1),
        *[_fsdp2(reshard, compiled) for compiled in (False, True) for reshard in (False, True)],
        *[_deepspeed(stage) for stage in (1, 2, 3)],
    ]
}
