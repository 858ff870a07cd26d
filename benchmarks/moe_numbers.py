"""One step's gradients and their global norm, by each system of benchmarks/moe.py, for a batch that is always the same.

torchrun --nproc-per-node N benchmarks/moe_numbers.py OUT.pt
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import fzero
from benchmarks import moe_systems as systems
from benchmarks.moe_systems import MoeConfig
from fzero import optim, tree
from fzero.parallel import experts as moe

__all__ = ["CASES", "Numbers", "apart", "dense"]

NUMBERS = systems.CONFIGS["numbers"]
CASES = {
    "all seated": NUMBERS._replace(capacity=8.0, balance=0.0),
    "drops": NUMBERS._replace(capacity=1.0, balance=0.0),
    "drops, balance loss": NUMBERS._replace(capacity=1.0, balance=0.1),
}


class Numbers(NamedTuple):
    """What one step computes: each leaf's whole gradient, and the norm that each rank clips by."""

    grads: dict[str, torch.Tensor]
    norms: list[float]


def apart(actual: Numbers, wanted: Numbers) -> tuple[float, float]:
    """Return how far gradients and norms lie apart: the worst leaf, by its largest element, and the worst rank."""
    leaves = [(actual.grads[path] - g).abs().max() / g.abs().max() for path, g in wanted.grads.items()]
    norms = [abs(n / wanted.norms[0] - 1) for n in actual.norms]
    return max(x.item() for x in leaves), max(norms)


def by_path(params: Any) -> dict[str, torch.Tensor]:
    paths, leaves = tree.flatten_with_paths(params)[:2]
    return {path: x.detach().clone() for path, x in zip(paths, leaves, strict=True)}


def everyones(value: float) -> list[float]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train_step(config: MoeConfig) -> Callable[..., Any]:
    """A step that changes nothing, and returns what it computed."""

    def step(params: Any, tokens: torch.Tensor) -> Any:
        _, grads = fzero.value_and_grad(lambda p, t: systems.loss_of(p, t, config))(params, tokens)
        return params, (grads, optim.global_norm(grads))

    return step


def dense(config: MoeConfig) -> Numbers:
    """Compute the numbers of the model without ranks."""
    _, (grads, norm) = train_step(config)(config.params(), config.global_batch())
    return Numbers(by_path(grads), [norm.item()])


def by_fzero(stage: int) -> Callable[..., Numbers]:
    def compute(config: MoeConfig, tokens: torch.Tensor) -> Numbers:
        mesh = systems.fzero_mesh(dist.get_world_size())
        step = fzero.shard(train_step(config), stage=stage, mesh=mesh, split=moe.split_rule("experts"))
        params = step.partition(config.params())
        _, (grads, norm) = fzero.jit(step, backend="fx")(params, mesh.local(tokens))
        return Numbers(by_path(step.gather(grads)), everyones(norm.item()))

    return compute


def by_fsdp2(config: MoeConfig, tokens: torch.Tensor) -> Numbers:
    model = systems.fully_sharded(config, dist.get_world_size(), reshard=True, compiled=False)
    model(tokens).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return Numbers(grads, everyones(norm.full_tensor().item()))


def by_deepspeed(stage: int) -> Callable[..., Numbers]:
    def compute(config: MoeConfig, tokens: torch.Tensor) -> Numbers:
        ranks = dist.get_world_size()
        engine = systems.deepspeed_engine(
            config._replace(clip=1e9, batch=len(tokens)), stage, ranks, lambda groups: torch.optim.SGD(groups, lr=1.0)
        )
        before = weights(engine.module, ranks)
        engine.backward(engine(tokens))
        norm = 0.0
        if not stage:  # what the engine calls, and keeps to itself
            from deepspeed.runtime.utils import clip_grad_norm_

            norm = float(clip_grad_norm_(engine.module.parameters(), 1e9))
        engine.step()
        norm = norm or float(engine.get_global_grad_norm())
        after = weights(engine.module, ranks)  # SGD of rate 1 takes off the gradient
        return Numbers({path: before[path] - after[path] for path in before}, everyones(norm))

    return compute


def weights(model: Any, ranks: int) -> dict[str, torch.Tensor]:
    """Return the whole parameters by the dense model's paths; experts are those of the ranks along `ep`."""
    values: dict[str, torch.Tensor] = {}
    for name in model.names:
        values[name] = getattr(model, name).detach().clone()
    for i, block in enumerate(model.blocks):
        for name in ("ln1", "qkv", "proj", "ln2"):
            values[f"blocks.{i}.{name}"] = block[name].detach().clone()
        inner = block.moe.deepspeed_moe
        values[f"blocks.{i}.router"] = inner.gate.wg.weight.detach().T.clone()
        for name in ("up", "down"):
            own = torch.stack([getattr(e, name).weight.detach().T for e in inner.experts.deepspeed_experts])
            parts = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(parts, own.contiguous())
            values[f"blocks.{i}.experts.{name}"] = torch.cat(parts[: min(ranks, 2)])
    return values


def computed_by() -> dict[str, Callable[..., Numbers]]:
    """Return who computes, by name; DeepSpeed where it is installed."""
    ours = {f"fzero, stage {stage}": by_fzero(stage) for stage in range(len(fzero.zero.STAGES))}
    theirs = {f"DeepSpeed, stage {stage}": by_deepspeed(stage) for stage in (0, 1)}
    return {**ours, "FSDP2": by_fsdp2, **(theirs if systems.has_deepspeed() else {})}


def main() -> None:
    """Compute all, and write rank 0's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks, values = dist.get_rank(), dist.get_world_size(), {}
    for name, compute in computed_by().items():
        for case, config in CASES.items():
            values[name, case] = compute(config, config.global_batch().chunk(ranks)[rank])
    if rank == 0:
        torch.save({key: (x.grads, x.norms) for key, x in values.items()}, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
