"""The systems that are compared, each used as its own documentation says: what makes a train step of the GPT.

A step takes a rank's batch of all micro-batches, updates the model, and returns the loss: the mean over ranks, or the
rank's own, of which the mean is taken elsewhere. AdamW has the same numbers everywhere, its learning rate 1e-3.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import fzero
from benchmarks.peers.gpt import Config, Gpt, gpt_loss
from fzero import optim
from tests.helpers import train_step_for

__all__ = ["SYSTEMS", "Setup", "System", "Train", "ddp", "deepspeed", "fsdp2", "fzero_system", "plain"]

Train = Callable[[torch.Tensor], torch.Tensor]
HALF = fzero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
BUCKET = 1_000_000  # elements, of DeepSpeed's buckets on a CPU; on a GPU they have its own default


class Setup(NamedTuple):
    """What is trained, and on what; `is_half` for bfloat16 with float32 masters."""

    config: Config
    micro_batches: int
    mesh: fzero.ranks.Mesh
    is_half: bool = False

    def model(self) -> Gpt:
        """Make the model on the mesh's device."""
        return Gpt(self.config.params()).to(self.mesh.device)


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

    @property
    def is_compiled(self) -> bool:
        """Whether Inductor compiles it."""
        return self.variant.endswith(("inductor", "compile"))


def fzero_system(stage: int, backend: str) -> System:
    """Make fzero's system of a stage and a backend."""

    def build(setup: Setup) -> Train:
        opt = optim.adamw(1e-3)
        opt = optim.master_weights(opt, HALF) if setup.is_half else opt
        precision = HALF if setup.is_half else None
        train_step = train_step_for(gpt_loss, opt, micro_batches=setup.micro_batches, precision=precision)
        step = fzero.shard(train_step, stage=stage, mesh=setup.mesh)
        step = step if backend == "eager" else fzero.jit(step, backend=backend)
        state = [*step.init(setup.config.params, opt)]

        def train(tokens: torch.Tensor) -> torch.Tensor:
            *state[:], loss = step(*state, setup.mesh.local(tokens))
            return loss

        return train

    return System("fzero", stage, backend, build)


def _train_module(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    setup: Setup,
    unsynchronised: Callable[[], Any] = contextlib.nullcontext,
    is_cast: bool = False,
) -> Train:
    """Make the usual loop over micro-batches; all but the last run in `unsynchronised()`, casts in autocast."""
    device, micro_batches = setup.mesh.device.type, setup.micro_batches

    def train(tokens: torch.Tensor) -> torch.Tensor:
        parts, losses = tokens.chunk(micro_batches), []
        for i, part in enumerate(parts):
            with contextlib.nullcontext() if i == len(parts) - 1 else unsynchronised():
                with torch.autocast(device, torch.bfloat16, enabled=is_cast):
                    loss = model(part) / micro_batches
                loss.backward()
                losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
        return torch.stack(losses).sum()

    return train


def plain(is_compiled: bool) -> System:
    """Make the system of one device, which a world of more ranks does not have."""

    def build(setup: Setup) -> Train:
        model = setup.model()
        if is_compiled:
            model.compile()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return _train_module(model, opt, setup, is_cast=setup.is_half)

    return System("plain torch", 0, "compile" if is_compiled else "", build)


def ddp(stage: int, is_compiled: bool = False) -> System:
    """Make DDP's system, at stage 1 with ZeroRedundancyOptimizer."""

    def build(setup: Setup) -> Train:
        group = None
        if dist.get_backend() == "fake":  # which does not serve DDP: there it has this rank alone
            group = dist.new_group([0], backend="gloo" if setup.mesh.device.type == "cpu" else "nccl")
        model = nn.parallel.DistributedDataParallel(setup.model(), process_group=group, gradient_as_bucket_view=True)
        if is_compiled:
            model.compile()
        if stage:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return _train_module(model, opt, setup, model.no_sync, is_cast=setup.is_half)

    name = "ZeroRedundancyOptimizer" if stage else "DDP"
    return System(name, stage, "compile" if is_compiled else "", build)


def fsdp2(reshard: bool, is_compiled: bool) -> System:
    """Make FSDP2's system; it reduces the gradients of each micro-batch."""

    def build(setup: Setup) -> Train:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        half = torch.bfloat16 if setup.is_half else None
        options: dict[str, Any] = {
            "mesh": init_device_mesh(setup.mesh.device.type, (setup.mesh.size,)),
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half),
        }
        model = setup.model()
        for block in model.blocks:
            if is_compiled:
                block.compile()
            fully_shard(block, **options)
        fully_shard(model, **options)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return _train_module(model, opt, setup)

    variant = ("reshard" if reshard else "keep") + ("-compile" if is_compiled else "")
    return System("FSDP2", 3 if reshard else 2, variant, build)


def deepspeed(stage: int) -> System:
    """Make DeepSpeed's system."""

    def build(setup: Setup) -> Train:
        is_on_cpu = setup.mesh.device.type == "cpu"
        if is_on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        names = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        config = {
            "train_micro_batch_size_per_gpu": setup.config.batch,
            "gradient_accumulation_steps": setup.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
            "gradient_clipping": 0.0,  # it clips to 1.0 unless told
            "zero_optimization": {"stage": stage, **(dict.fromkeys(names, BUCKET) if is_on_cpu else {})},
            "bf16": {"enabled": setup.is_half},
        }
        model = setup.model()
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
        *[
            fzero_system(stage, backend)
            for stage in range(len(fzero.zero.STAGES))
            for backend in ("eager", "fx", "inductor")
        ],
        ddp(0),
        ddp(1),
        *[fsdp2(reshard, compiled) for compiled in (False, True) for reshard in (False, True)],
        *[deepspeed(stage) for stage in (1, 2, 3)],
    ]
}
