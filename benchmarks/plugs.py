"""Measure Trainers beside themselves: sharded by fzero, by FSDP2 and by DeepSpeed, on two processes.

python benchmarks/plugs.py [--write] [--rounds 3] [--only "two ranks" "eight ranks: FSDP2"]

Each system trains one Llama in a torchrun of its own, one after the other, in rounds. The Trainers are
transformers' and Lightning's. A step's time is the median of
the steps after the third. The peaks are the CPU allocator's: of those steps, and of the whole life. `--write` keeps
plugs.md.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.systems import BUCKET  # noqa: E402
from benchmarks.report import publish, quartiles, table  # noqa: E402

LENGTH, VOCAB = 128, 4096
BUCKETS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_reuse_distance",
    "stage3_max_live_parameters",
)
DEEPSPEED = {
    "zero_optimization": {"stage": 3, **dict.fromkeys(BUCKETS, BUCKET)},  # its own are of 500 million elements
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
FSDP2 = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
FSDP2["fsdp_config"] |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
# a system of transformers: options of TrainingArguments, and the stage and backend of fzero
SYSTEMS: dict[str, tuple[dict[str, Any], Any]] = {
    "DDP": ({}, None),
    "FSDP2": (FSDP2, None),
    "DeepSpeed 3": ({"deepspeed": DEEPSPEED}, None),
    "fzero 3, inductor": ({}, (3, "inductor")),
    "fzero 3, fx": ({}, (3, "fx")),
    "fzero 3, eager": ({}, (3, None)),
    "fzero 1, inductor": ({}, (1, "inductor")),
}
PEERS = ("FSDP2", "DeepSpeed 3")
STAGE_3 = (*PEERS, "fzero 3, inductor", "fzero 3, fx", "fzero 3, eager")
HALF = {"bf16": True, "gradient_checkpointing": True}
LIGHTNING = ("DDP", "FSDP2", "fzero 3", "fzero 1")


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of plugs.md: systems that train with the same options on as many ranks."""

    title: str
    systems: Sequence[str]
    notes: Sequence[str]
    peers: Sequence[str] = PEERS
    ranks: int = 2
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    has_times: bool = True  # not where ranks share the cores

    @property
    def steps(self) -> int:
        """The number of steps; peaks are those after the third, and times need more."""
        return 13 if self.has_times else 6


SECTIONS = (
    Section(
        "two ranks",
        tuple(SYSTEMS),
        (
            "A Llama of 8 blocks, 512 wide, has 28 million float32 parameters. transformers' Trainer trains it with "
            "AdamW, clipping and 2 micro-batches of 2 x 128 tokens a rank, on two processes of one thread on gloo. "
            "A step's time is the median of the steps after the third. The peaks are the CPU allocator's. accelerate "
            "leaves FSDP2 off where there is no accelerator, so the benchmark turns it on.",
            "Goals: at stage 3 a peak of at most 0.8, and a time of at most 0.85, of FSDP2's and of DeepSpeed's.",
            "The peak's goal beside FSDP2 lies below what must be alive here without remat, which is 308 MB or 0.88. "
            "That is state 167 MB, gradients of the first micro-batch 56, activations 73 and one gathered block 12. "
            "An eager step, the default for a class that overrides `compute_loss`, runs each block twice; pass a "
            "backend if its code is pure.",
        ),
    ),
    Section(
        "two ranks, half precision",
        (*STAGE_3, "fzero 1, inductor"),
        (
            "The same with `bf16=True` and `gradient_checkpointing=True`. fzero holds float32 master weights as its "
            "shards. Its gathered parameters, activations and gradients are bfloat16. FSDP2 and DeepSpeed do as "
            "accelerate has them do.",
        ),
        options=HALF,
    ),
    Section(
        "eight ranks",
        STAGE_3,
        (
            "On two ranks most of the peak is shards of parameters, moments and gradients, which all systems hold "
            "alike. On eight ranks they are a quarter as large. The eight processes share the cores, so no times are "
            "told.",
        ),
        ranks=8,
        has_times=False,
    ),
    Section(
        "eight ranks, half precision",
        STAGE_3,
        ("The same with `bf16=True` and `gradient_checkpointing=True`.",),
        ranks=8,
        options=HALF,
        has_times=False,
    ),
    Section(
        "Lightning",
        LIGHTNING,
        (
            "The same model, optimizer, clipping and batches in Lightning's Trainer. Its FSDPStrategy and "
            "DeepSpeedStrategy ask for a GPU, so FSDP2 is its ModelParallelStrategy, whose `configure_model` calls "
            "`fully_shard` for each block. Steps of `fzero.plugs.lightning` are eager, as FSDP2's are.",
        ),
        peers=("FSDP2",),
    ),
)


def work(name: str) -> None:
    """Train as one process by "section: system", and print the numbers on rank 0."""
    from benchmarks.allocator import held_bytes, most_bytes, restart

    def note_step() -> None:
        ends.append(time.perf_counter())
        if len(ends) == 4:
            peaks.append(most_bytes())
            restart()

    def start() -> None:
        ends.append(time.perf_counter())

    torch.set_num_threads(1)
    ends: list[float] = []
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        tokens = torch.randint(0, VOCAB, (64 * 4, LENGTH), generator=torch.Generator().manual_seed(0))
        data = [{"input_ids": x, "labels": x} for x in tokens]
        before = held_bytes()
        restart()
        title, _, system = name.partition(": ")
        section = next(section for section in SECTIONS if section.title == title)
        if section.title == "Lightning":
            train_by_lightning(system, section.steps, folder, data, start, note_step)
        else:
            options = {"max_steps": section.steps, **section.options}
            train_by_transformers(system, options, folder, data, start, note_step)
    peak = most_bytes() - before
    steps = [b - a for a, b in itertools.pairwise(ends)]
    numbers = {"first": steps[0], "step": statistics.median(steps[3:]), "peak": peak}
    numbers["whole"] = max(peak, (peaks or [0])[0] - before)
    if int(os.environ["RANK"]) == 0:
        print("RESULT", json.dumps(numbers))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, vocab_size=VOCAB, use_cache=False)
    )


def train_by_transformers(
    name: str,
    more: dict[str, Any],
    folder: str,
    data: list[Any],
    start: Callable[[], None],
    note_step: Callable[[], None],
) -> None:
    """Train with transformers' Trainer and `more` of its arguments; `note_step` is called after each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fzero.plugs import transformers as plug

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            note_step()

    options, sharding = SYSTEMS[name]
    if "fsdp" in options:
        turn_on_fsdp()
    arguments: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments |= {"save_strategy": "no", "logging_strategy": "no", "per_device_train_batch_size": 2}
    args = TrainingArguments(folder, gradient_accumulation_steps=2, **arguments, **options, **more)
    trainer = Trainer(make_llama(), args, train_dataset=data, callbacks=[Clock()])
    if sharding is not None:
        stage, backend = sharding
        trainer = plug.shard_trainer(trainer, stage=stage, backend=backend)
    start()
    trainer.train()


def train_by_lightning(
    name: str, steps: int, folder: str, data: list[Any], start: Callable[[], None], note_step: Callable[[], None]
) -> None:
    """Train with Lightning's Trainer; `note_step` is called after each step."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from fzero.plugs.lightning import Strategy

    class Module(lightning.LightningModule):
        """The Llama, with FSDP2's calls where the strategy has a mesh."""

        def __init__(self) -> None:
            super().__init__()
            self.model: Any = make_llama()

        def configure_model(self) -> None:
            if name == "FSDP2" and not self.model_is_sharded:
                mesh: Any = self.device_mesh
                for block in self.model.model.layers:
                    fully_shard(block, mesh=mesh["data_parallel"])
                fully_shard(self.model, mesh=mesh["data_parallel"])
                self.model_is_sharded = True

        model_is_sharded = False

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2:
                note_step()

        def on_train_start(self) -> None:
            start()

    strategies = {
        "DDP": lambda: DDPStrategy(process_group_backend="gloo"),
        "FSDP2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        "fzero 3": lambda: Strategy(stage=3),
        "fzero 1": lambda: Strategy(stage=1),
    }
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options |= {"accelerator": "cpu", "devices": 2, "enable_model_summary": False, "default_root_dir": folder}
    trainer = lightning.Trainer(
        strategy=strategies[name](),
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        **options,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))


def turn_on_fsdp() -> None:
    """Have accelerate run its FSDP2 on CPUs: it leaves it off without a word where there is no accelerator."""
    from accelerate import state
    from accelerate.utils import DistributedType

    of_devices = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        of_devices(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    state.AcceleratorState.__init__ = init


def run(section: Section, system: str) -> dict[str, float] | str:
    """Run a system in a torchrun of its own; return its numbers, or why it did not run."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(section.ranks), __file__]
    command += ["--work", f"{section.title}: {system}"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not results:
        errors = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
        return errors[0].strip()[:200] if errors else done.stderr[-200:]
    return json.loads(results[0].removeprefix("RESULT"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep benchmarks/plugs.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help='titles of sections, or one system: "eight ranks: FSDP2"')
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work)
    parts: list[str] = []
    for section in SECTIONS:
        names = [x for x in section.systems if not args.only or {section.title, f"{section.title}: {x}"} & {*args.only}]
        results: dict[str, list[Any]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                if not any(isinstance(x, str) for x in results[name]):
                    results[name].append(run(section, name))
                    print(section.title, name, results[name][-1], file=sys.stderr, flush=True)
        if names:
            parts += [f"## {section.title.capitalize()}", *section.notes, table_of(section, results)]
    publish(__file__, "python benchmarks/plugs.py --write", parts, args.write)


def table_of(section: Section, results: dict[str, list[Any]]) -> str:
    """Make a section's table of medians, with ratios to its peers."""
    head = ["system", "peak of steps, MB", "peak of the whole life, MB"]
    head += ["s a step", "first step, s"] if section.has_times else []
    what = ("peak", "step") if section.has_times else ("peak",)
    head += [f"{key} / {peer}" for peer in section.peers for key in what]
    rows = [row_of(section, name, results) for name in results]
    return table(head, [[*row, *[""] * (len(head) - len(row))] for row in rows])


def row_of(section: Section, name: str, results: dict[str, list[Any]]) -> list[str]:
    """Make a row of medians; a system that failed says why."""
    failed = [x for x in results[name] if isinstance(x, str)]
    if failed:
        return [name, failed[0]]

    def median(system: str, key: str) -> float:
        return statistics.median([x[key] for x in results[system]])

    row = [name, *[f"{median(name, key) / 1e6:.0f}" for key in ("peak", "whole")]]
    if section.has_times:
        row += [quartiles([x[key] for x in results[name]]) for key in ("step", "first")]
    for peer in section.peers:
        is_known = bool(results.get(peer)) and not any(isinstance(x, str) for x in results[peer])
        keys = ("peak", "step") if section.has_times else ("peak",)
        row += [f"{median(name, key) / median(peer, key):.2f}" if is_known else "" for key in keys]
    return row


if __name__ == "__main__":
    main()
