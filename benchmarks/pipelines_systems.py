"""The GPT that benchmarks/pipelines.py trains, and what trains it: fzero, torch.distributed.pipelining and DeepSpeed.

A mesh is dp x pp. Each system has its own order of ranks, so a system says which part of the batch its rank is given.
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
from benchmarks.peers.gpt import Block
from fzero import optim, tree
from tests.tiny_gpt import gpt_block, gpt_params

__all__ = ["CONFIGS", "SYSTEMS", "Built", "PipelineConfig", "System", "by_path", "choose", "fzero_loss", "fzero_system"]

BUCKET = 1_000_000  # elements, of DeepSpeed's buckets
FZERO_STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 2, "zbv": 2}  # pipeline stages a rank
TORCH = {  # by our names; the multi-stage ones are given a list of stages
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


class PipelineConfig(NamedTuple):
    """A GPT; `micro_batches` of `batch` sequences of `context` tokens go through each pipeline."""

    width: int
    layers: int
    batch: int
    context: int
    micro_batches: int
    vocab: int = 256
    dtype: torch.dtype = torch.float32

    def params(self) -> dict[str, Any]:
        """Make the parameters, the same at each call."""
        return gpt_params(self.width, self.layers, self.vocab, self.context, self.dtype)

    def batches(self, part: int, count: int) -> list[torch.Tensor]:
        """Make batches of one of the parts along dp: tokens, int64 [micro_batches * batch, context + 1]."""
        g = torch.Generator().manual_seed(part)
        shape = (self.micro_batches * self.batch, self.context + 1)
        return [torch.randint(self.vocab, shape, generator=g) for _ in range(count)]


CONFIGS = {
    "toy": PipelineConfig(32, 8, 1, 16, 4),
    "numbers": PipelineConfig(32, 8, 2, 16, 8, dtype=torch.float64),
    "activations": PipelineConfig(256, 8, 2, 128, 8),  # most of a rank's memory is activations
    "state": PipelineConfig(512, 8, 1, 64, 8),  # and here parameters and moments
}


class Built(NamedTuple):
    """A system on one rank.

    Attributes:
        train: takes its tokens, trains, and returns its share of the mean loss: the ranks' shares add up.
        weights: returns parameters by the dense model's paths; those of all ranks together are all.
        part: of the batch that is this rank's, along dp.
    """

    train: Callable[[torch.Tensor], torch.Tensor]
    weights: Callable[[], dict[str, torch.Tensor]]
    part: int


class System(NamedTuple):
    """One way to train.

    Attributes:
        name: of the library.
        schedule: of the pipeline, by fzero's names.
        stage: of ZeRO, that its layouts are most like.
        variant: how else it runs.
        build: makes it, of a model, the sizes dp and pp, and whether it takes steps of plain SGD.
    """

    name: str
    schedule: str
    stage: int
    variant: str
    build: Callable[[PipelineConfig, int, int, bool], Built]

    @property
    def key(self) -> str:
        """The row's name, without spaces."""
        return "-".join([self.name, self.schedule, str(self.stage), *([self.variant] if self.variant else [])])


def by_path(params: Any) -> dict[str, torch.Tensor]:
    """Return copies of the leaves of a tree by their paths."""
    paths, leaves = tree.flatten_with_paths(params)[:2]
    return {path: x.detach().clone() for path, x in zip(paths, leaves, strict=True)}


def first(rest: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Embed tokens [b, t + 1]."""
    return rest["wte"][tokens[:, :-1]] + rest["wpe"][: tokens.shape[1] - 1]


def head(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], scale) @ weight


def last(rest: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a micro-batch."""
    return token_loss(head(x, rest["ln_f"], rest["head"]), tokens[:, 1:])


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits [b, t, vocab]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fzero_loss(config: PipelineConfig, schedule: str, **options: Any) -> fzero.parallel.pipeline.Pipeline:
    """Make fzero's pipeline of the model."""
    return fzero.pipeline(
        block=gpt_block,
        first=first,
        last=last,
        micro_batches=config.micro_batches,
        schedule=schedule,
        stages_per_rank=FZERO_STAGES[schedule],
        **options,
    )


def train_step_of(loss: fzero.parallel.pipeline.Pipeline, opt: Any, **options: Any) -> Callable[..., Any]:
    """Make the ordinary train step."""

    def train_step(params: Any, opt_state: Any, tokens: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, reduce="weighted", **options)(params, tokens)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, value

    return train_step


def fzero_system(schedule: str, stage: int, backend: str) -> System:
    """Make fzero's system of a schedule, a stage of ZeRO and a backend."""

    def build(config: PipelineConfig, dp: int, pp: int, plain: bool) -> Built:
        mesh = fzero.mesh(simulate=False, dp=dp, pp=pp)
        loss = fzero_loss(config, schedule)
        opt = optim.sgd(1.0) if plain else optim.adamw(1e-3)
        step = fzero.shard(train_step_of(loss, opt), stage=stage, mesh=mesh, axis=("dp", "pp"), split=loss.split)
        state = [*step.init(loss.stack(config.params(), mesh), opt, donate=True)]
        run = step if backend == "eager" else fzero.jit(step, backend=backend)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            *state[:], value = run(*state, mesh.local(tokens, "dp"))
            return value / mesh.size

        def weights() -> dict[str, torch.Tensor]:
            return by_path(loss.unstack(step.gather(state[0]), mesh))

        return Built(train, weights, mesh.rank // pp)

    return System("fzero", schedule, stage, backend, build)


# What the peers train: the same functions, as modules.


class Part(nn.Module):
    """Some blocks of the model, with its beginning and end where they belong to it."""

    def __init__(self, config: PipelineConfig, stage: int, stages: int) -> None:
        super().__init__()
        params, each = config.params(), config.layers // stages
        self.numbers = range(stage * each, (stage + 1) * each)
        self.blocks = nn.ModuleList([Block(params["blocks"][i]) for i in self.numbers])
        mine = (["wte", "wpe"] if stage == 0 else []) + (["ln_f", "head"] if stage == stages - 1 else [])
        self.ends = mine
        for name in mine:
            self.register_parameter(name, nn.Parameter(params[name]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "wte" in self.ends:
            x = self.wte[x] + self.wpe[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return head(x, self.ln_f, self.head) if "head" in self.ends else x

    def whole(self, full: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of its parameters by the dense model's paths."""
        named = {name: getattr(self, name) for name in self.ends}
        for i, block in zip(self.numbers, self.blocks, strict=True):
            named |= {f"blocks.{i}.{name}": p for name, p in block.named_parameters()}
        return {path: full(p).detach().clone() for path, p in named.items()}


def torch_system(schedule: str, data: str, compiled: bool = False) -> System:
    """Make torch's, with what holds and reduces gradients along dp.

    Args:
        schedule: by fzero's name.
        data: "DDP", "replicate" (FSDP2's), "ZeRO" (DDP, and ZeroRedundancyOptimizer), "keep" (FSDP2, gathered once a
            step), "reshard" (FSDP2, gathered for each action).
        compiled: whether blocks are compiled.
    """

    def build(config: PipelineConfig, dp: int, pp: int, plain: bool) -> Built:
        from torch.distributed import pipelining
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dp, pp), mesh_dim_names=("dp", "pp"))
        count, rank = pp * FZERO_STAGES[schedule], mesh.get_local_rank("pp")
        mine = [s for s in range(count) if _home(schedule, s, pp) == rank]
        parts = [Part(config, s, count) for s in mine]
        for part in parts if compiled else ():
            for block in part.blocks:
                block.compile()
        modules = [_replicated(part, data, mesh["dp"]) for part in parts]
        device, group = torch.device("cpu"), mesh.get_group("pp")
        stages = [
            pipelining.PipelineStage(module, s, count, device, group=group)
            for module, s in zip(modules, mine, strict=True)
        ]
        make: Any = getattr(pipelining, TORCH[schedule])
        plan = make(stages if FZERO_STAGES[schedule] > 1 else stages[0], config.micro_batches, loss_fn=token_loss)
        opt = _optimizer([p for m in modules for p in m.parameters()], data, mesh.get_group("dp"), plain)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            inputs, losses = [tokens[:, :-1]] if 0 in mine else [], []
            ends = {"target": tokens[:, 1:].contiguous(), "losses": losses} if count - 1 in mine else {}
            plan.step(*inputs, **ends, return_outputs=False)
            opt.step()
            opt.zero_grad()
            return torch.stack(losses).mean().detach() / dp if losses else torch.zeros((), dtype=config.dtype)

        def weights() -> dict[str, torch.Tensor]:
            return {k: v for part in parts for k, v in part.whole(_full).items()}

        return Built(train, weights, mesh.get_local_rank("dp"))

    stage = {"DDP": 0, "replicate": 0, "ZeRO": 1, "keep": 3, "reshard": 3}[data]
    names = {"ZeRO": "ZeroRedundancyOptimizer", "keep": "FSDP2 keep", "reshard": "FSDP2 reshard"}
    return System("torch", schedule, stage, names.get(data, data) + " compile" * compiled, build)


def _home(schedule: str, stage: int, ranks: int) -> int:
    there = stage % (2 * ranks) if schedule == "zbv" else stage % ranks
    return min(there, 2 * ranks - 1 - there)


def _full(p: Any) -> torch.Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def _replicated(part: Part, data: str, mesh: Any) -> nn.Module:
    if mesh.size() == 1:
        return part
    if data in ("DDP", "ZeRO"):
        return nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    if data == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return replicate(part, mesh=mesh)
    from torch.distributed.fsdp import fully_shard

    for block in part.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=data == "reshard")
    return fully_shard(part, mesh=mesh, reshard_after_forward=data == "reshard")


def _optimizer(params: list[Any], data: str, group: Any, plain: bool) -> Any:
    kind: Any = torch.optim.SGD if plain else torch.optim.AdamW
    options: dict[str, Any] = {"lr": 1.0} if plain else {"lr": 1e-3, "weight_decay": 1e-2, "fused": True}
    if data == "ZeRO":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(params, kind, process_group=group, **options)
    return kind(params, **options)


class Embed(nn.Module):
    def __init__(self, config: PipelineConfig) -> None:
        super().__init__()
        params = config.params()
        self.wte, self.wpe = nn.Parameter(params["wte"]), nn.Parameter(params["wpe"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wte[tokens] + self.wpe[: tokens.shape[1]]


class Head(nn.Module):
    def __init__(self, config: PipelineConfig) -> None:
        super().__init__()
        params = config.params()
        self.ln_f, self.head = nn.Parameter(params["ln_f"]), nn.Parameter(params["head"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return head(x, self.ln_f, self.head)


class Layer(Block):
    def __init__(self, config: PipelineConfig, number: int, compiled: bool) -> None:
        super().__init__(config.params()["blocks"][number])
        if compiled:
            self.compile()


def deepspeed_system(stage: int, compiled: bool) -> System:
    """Make DeepSpeed's PipelineEngine, which runs 1F1B; with torch's fused AdamW."""

    def build(config: PipelineConfig, dp: int, pp: int, plain: bool) -> Built:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule

        deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
        middle = [LayerSpec(Layer, config, i, compiled) for i in range(config.layers)]
        layers = [LayerSpec(Embed, config), *middle, LayerSpec(Head, config)]
        model = PipelineModule(layers, num_stages=pp, loss_fn=token_loss, partition_method="type:Layer")
        adamw = {"lr": 1e-3, "weight_decay": 1e-2, "torch_adam": True, "fused": True}
        optimizer = {"type": "SGD", "params": {"lr": 1.0}} if plain else {"type": "AdamW", "params": adamw}
        settings = {
            "train_micro_batch_size_per_gpu": config.batch,
            "gradient_accumulation_steps": config.micro_batches,
            "steps_per_print": 1 << 30,
            "gradient_clipping": 0.0,  # it clips to 1.0 unless told
            "zero_allow_untested_optimizer": True,
            "optimizer": optimizer,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=settings)

        def train(tokens: torch.Tensor) -> torch.Tensor:
            parts = tokens.chunk(config.micro_batches)
            loss = engine.train_batch(iter([(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in parts]))
            return loss.detach() / dist.get_world_size()

        def weights() -> dict[str, torch.Tensor]:
            params: dict[str, torch.Tensor] = {}
            for i, layer in enumerate(model.forward_funcs, model._local_start):
                before = f"blocks.{i - 1}." if 0 < i <= config.layers else ""
                params |= {before + name: p.detach().clone() for name, p in layer.named_parameters()}
            return params

        return Built(train, weights, model._grid.get_data_parallel_id())

    return System("DeepSpeed", "1f1b", stage, "compile" * compiled, build)


def has_deepspeed() -> bool:
    """Return whether DeepSpeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


PP = [fzero_system(schedule, 1, backend) for schedule in FZERO_STAGES for backend in ("fx", "inductor")]
SYSTEMS = {
    s.key: s
    for s in [
        *PP,
        *[fzero_system("1f1b", stage, backend) for stage in (0, 2, 3) for backend in ("fx", "inductor")],
        fzero_system("interleaved", 3, "inductor"),
        *[torch_system(schedule, "replicate") for schedule in TORCH],
        *[torch_system(schedule, "replicate", compiled=True) for schedule in ("gpipe", "1f1b", "interleaved")],
        torch_system("1f1b", "DDP"),  # with it the second step of other schedules fails in its reducer
        torch_system("1f1b", "ZeRO"),
        *[torch_system("1f1b", data) for data in ("keep", "reshard")],
        torch_system("interleaved", "keep"),
        *[deepspeed_system(stage, compiled) for stage in (0, 1) for compiled in (False, True) if has_deepspeed()],
    ]
}


def choose(prefixes: list[str], dp: int) -> list[System]:
    """List systems whose names begin so. Without ranks along dp, peers that differ along it alone are left out."""
    systems = [s for key, s in SYSTEMS.items() if key.startswith(tuple(prefixes))]
    return [s for s in systems if dp > 1 or s.name == "fzero" or s.stage == 0]
