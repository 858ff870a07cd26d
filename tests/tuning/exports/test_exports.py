"""Exports say what their row says, and are read by their systems.

accelerate's launcher and torch read theirs here. DeepSpeed, torchtitan and Megatron-LM read theirs where they are
installed; else names are held to `fields.json`, which was made from their own parsers.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import sys
import types

import pytest

from fzero.tuning import H100, Configuration
from fzero.tuning._row import TableRow
from fzero.tuning.exports import EXPORTS, Export, PlannedRun
from fzero.tuning.models import PRESETS
from tests.distributed.launch import world

FIELDS = json.loads(pathlib.Path(__file__).with_name("fields.json").read_text())
USUAL = Configuration(3, micro_batch=2, accumulation=4, ranks=16, remat=True)
CONFIGS = {
    "stage 0": dataclasses.replace(USUAL, stage=0, remat=False),
    "stage 1": dataclasses.replace(USUAL, stage=1, accumulation=1),
    "stage 2": dataclasses.replace(USUAL, stage=2, remat="matmuls", precision="float16"),
    "stage 3": USUAL,
    "float32": dataclasses.replace(USUAL, precision="float32", chunked_loss=True),
    "offload": dataclasses.replace(USUAL, offload=0.4),
    "offload at stage 1": dataclasses.replace(USUAL, stage=1, offload=0.4),
    "tensors": dataclasses.replace(USUAL, stage=1, ranks=8, tp=2),
    "pipeline": dataclasses.replace(USUAL, stage=1, ranks=4, tp=2, pp=2, schedule="interleaved"),
    "sequences": dataclasses.replace(USUAL, ranks=4, cp=4),
    "hosts": dataclasses.replace(USUAL, host=2),
    "experts": dataclasses.replace(USUAL, ep=8, remat="matmuls"),
    "every second block": dataclasses.replace(USUAL, remat="every-2"),
}


def export_text(system: str, config: Configuration, model: str | None = None) -> Export:
    model = model or ("mixtral-8x7b" if config.ep > 1 else "llama-3-8b")
    row = TableRow(config, {}, {}, 1.0, 0.0, 0.0, True, {})
    shape = PRESETS[model]
    return EXPORTS[system](PlannedRun(row, H100, shape, shape.positions or 8192))


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def test_deepspeed_reads_the_exported_file(config, monkeypatch):
    read = json.loads(export_text("deepspeed", config).text)
    lists = FIELDS["deepspeed"]
    assert {*read} <= {*lists["config"]} and read["zero_optimization"]["stage"] == config.stage
    for name in ("zero_optimization", "tensor_parallel", "expert_parallel"):
        assert {*read.get(name, ())} <= {*lists[name]}
    offload = read["zero_optimization"].get("offload_optimizer", {})
    assert {*offload} <= {*lists["offload_optimizer"]} and bool(offload) == bool(config.offload)
    assert ("ratio" in offload) == (0 < config.offload < 1 and config.stage == 3)
    samples = read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"] * config.ranks
    assert read["train_batch_size"] == samples == config.global_batch
    assert read["train_micro_batch_size_per_gpu"] == config.micro_batch
    assert read["zero_optimization"].get("zero_hpz_partition_size") == (config.axes["dp"] if config.host > 1 else None)
    assert read.get("tensor_parallel", {"autotp_size": 1})["autotp_size"] == config.tp
    assert read.get("expert_parallel", {"autoep_size": 1})["autoep_size"] == config.ep
    if is_installed("deepspeed"):
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        module = importlib.import_module("deepspeed.runtime.config")
        monkeypatch.setattr(module.dist, "get_rank", lambda *_: 0)
        mpu = types.SimpleNamespace(get_data_parallel_world_size=lambda: config.ranks)
        parsed = module.DeepSpeedConfig(read, mpu=mpu)
        assert parsed.zero_optimization_stage == config.stage and parsed.train_batch_size == config.global_batch


def test_accelerates_launcher_reads_the_exported_file(config, tmp_path, monkeypatch):
    if config.pp > 1:
        with pytest.raises(ValueError, match="pp=2: accelerate trains no pipeline: export a row without one"):
            export_text("accelerate", config)
        return
    from accelerate.commands import launch
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    path.write_text(export_text("accelerate", config).text)
    args = launch.launch_command_parser().parse_args(["--config_file", str(path), "--main_process_ip=a", "train.py"])
    args, *_ = launch._validate_launch_command(args)
    assert args.num_processes == config.world and args.num_machines == 2
    assert args.mixed_precision == {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[config.precision]
    is_fsdp = config.stage > 0 or max(config.cp, config.tp) > 1
    assert args.use_fsdp == is_fsdp and args.multi_gpu == (not is_fsdp)
    if not is_fsdp:
        return
    for name in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_CONFIG_"))]:
        monkeypatch.delenv(name)
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward == (config.stage == 3)
    assert plugin.activation_checkpointing == bool(config.remat)
    assert type(plugin.cpu_offload).__name__ == ("CPUOffloadPolicy" if config.offload else "OffloadPolicy")
    if max(config.cp, config.tp) > 1:
        sizes = ParallelismConfig()
        assert (sizes.cp_size, sizes.tp_size, sizes.dp_shard_size) == (config.cp, config.tp, config.ranks)


FSDP2 = """
import importlib, pathlib, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
batch = torch.randn(8, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def make():
    torch.manual_seed(1)
    return nn.Sequential(Block(), Block())


def loss_fn(model, x):
    return model(x).square().mean()


plain = make()
opt = torch.optim.AdamW(plain.parameters(), lr=3e-4)
for _ in range(3):
    loss = loss_fn(plain, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
expected = plain.state_dict()
for path in sorted(pathlib.Path.cwd().glob("plan_*.py")):
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    model = make()
    opt = names["shard_model"](model, [*model])
    own = batch if "tp" in path.name else batch.chunk(2)[dist.get_rank()]
    for _ in range(3):
        mean = names["train_step"](model, opt, loss_fn, own)
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 2, loss.detach(), rtol=1e-4, atol=0, msg=path.name)
    for name, value in model.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(full.cpu(), expected[name], rtol=1e-5, atol=2e-6, msg=f"{path.name} {name}")
    if dist.get_rank() == 0:
        print("trained", path.name)
dist.destroy_process_group()
"""


def test_an_fsdp2_script_with_a_plan_trains_as_without(tmp_path):
    """It does so on two ranks of gloo, in float32: each stage, checkpoint, offload and tensor parallelism."""
    base = Configuration(3, micro_batch=1, accumulation=4, ranks=2, precision="float32")
    ways = {f"stage_{n}": {"stage": n, "remat": (False, "matmuls", "every-2", True)[n]} for n in range(4)}
    ways |= {"whole": {"stage": 1, "micro_batch": 4, "accumulation": 1}, "offload": {"offload": 1.0}}
    ways |= {"tp": {"ranks": 1, "tp": 2, "accumulation": 8, "stage": 2}}
    for name, changes in ways.items():
        text = export_text("fsdp2", dataclasses.replace(base, **changes)).text
        (tmp_path / f"plan_{name}.py").write_text(text)
    (tmp_path / "train.py").write_text(FSDP2)
    done = world(2, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("trained plan_") == len(ways)


def test_an_export_to_fsdp2_sets_the_stage_and_the_dtypes(config):
    text = export_text("fsdp2", config).text
    compile(text, "fsdp2_plan.py", "exec")
    reshards = config.axes["dp"] if config.host > 1 else config.stage == 3
    assert f'"reshard_after_forward": {reshards},' in text and f"param_dtype=torch.{config.precision}" in text
    assert ("set_requires_gradient_sync" in text) == (config.stage < 2 and config.accumulation > 1)
    assert ("CPUOffloadPolicy(" in text) == bool(config.offload) and ("checkpoint" in text) == bool(config.remat)
    sizes = [int(n) for n in re.findall(r"\d+", re.search(r"init_device_mesh\(device.type, \((.*?)\)", text)[1])]
    assert math.prod(sizes) == config.world and (sizes[-1] == 1) == (config.stage == 0)


class _Section:
    """A section of torchtitan's configuration, which has its fields and no others."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "names", FIELDS["torchtitan"][name])

    def __setattr__(self, name: str, value: object) -> None:
        assert name in self.names, name
        object.__setattr__(self, name, value)


class _Chosen:
    """A component of torchtitan, of which only the class is looked at."""

    class Config:
        loss_fn = "the loss"

        def __init__(self, loss_fn: object = None) -> None:
            self.loss_fn = loss_fn


@pytest.fixture
def torchtitan(monkeypatch):
    """torchtitan's modules, with classes that have its fields, where it is not installed."""
    config = types.SimpleNamespace(
        training=_Section("training"), parallelism=_Section("parallelism"), loss="cross-entropy"
    )
    parts = {
        "torchtitan.components.loss": {"ChunkedLossWrapper": type("ChunkedLossWrapper", (_Chosen,), {})},
        "torchtitan.distributed.activation_checkpoint": {
            name: type(name, (), {"Config": type(name, (), {})}) for name in ("FullAC", "SelectiveAC")
        },
        "torchtitan.models.llama3.config_registry": {"llama3_8b": lambda: config},
        "torchtitan.trainer": {"Trainer": type("Trainer", (), {"Config": object})},
    }
    for path, names in parts.items():
        for i in range(path.count(".") + 1):
            name = ".".join(path.split(".")[: i + 1])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
    return config


def test_torchtitan_knows_every_exported_field(config, torchtitan):
    names: dict = {"config": torchtitan}
    exec(export_text("torchtitan", config).text, names)
    done = names["apply_plan"](torchtitan) if config.ep > 1 else names["planned"]()
    training, ranks = done.training, done.parallelism
    assert training.num_tokens_per_train_step == config.global_batch * 8192
    assert training.num_tokens_per_microbatch_per_dp_rank == config.micro_batch * 8192
    degrees = (ranks.data_parallel_replicate_degree, ranks.data_parallel_shard_degree)
    assert degrees == ((config.ranks, 1) if config.stage == 0 else (1, config.ranks))
    assert ranks.fsdp_reshard_after_forward == ("always" if config.stage == 3 else "never")
    assert (ranks.tensor_parallel_degree, ranks.pipeline_parallel_degree) == (config.tp, config.pp)
    assert ranks.context_parallel_degree == config.cp
    assert ranks.expert_parallel_degree == config.ep
    checkpoints = {False: "NoneType", True: "FullAC", "every-2": "FullAC", "matmuls": "SelectiveAC"}
    assert type(done.activation_checkpoint).__name__ == checkpoints[config.remat]
    assert (done.loss == "cross-entropy") == (not config.chunked_loss)
    if config.pp > 1:
        from torch.distributed.pipelining.schedules import get_schedule_class

        assert get_schedule_class(ranks.pipeline_parallel_schedule)
        assert ranks.num_pp_microbatches == config.accumulation


@pytest.mark.skipif(not is_installed("torchtitan"), reason="torchtitan is not installed")
def test_torchtitan_reads_the_exported_file(config, tmp_path, monkeypatch):
    from torchtitan.config import ConfigManager

    text = export_text("torchtitan", config).text
    if config.ep > 1:
        text += "from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b\n"
        text += "def planned(): return apply_plan(qwen3_30b_a3b())\n"
    name = f"plan_{abs(hash(config))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    parsed = ConfigManager().parse_args(["--module", name, "--config", "planned"])
    assert parsed.training.num_tokens_per_train_step == config.global_batch * 8192


def words_of(export: Export) -> list[str]:
    """Return the words that a shell makes of Megatron-LM's flags."""
    array = re.search(r"MEGATRON_ARGS=\((.*)\n\)", export.text, re.DOTALL)
    assert array is not None
    return shlex.split(array[1], comments=True)


@pytest.mark.parametrize("model", [None, "gpt2"])
def test_megatron_knows_every_exported_flag(config, model):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag, spec in FIELDS["megatron"]["flags"].items():
        kind = {"int": int, "float": float}.get(spec.get("type", ""), str)
        more = {"action": "store_true"} if spec.get("nargs") == 0 else {"type": kind, "nargs": spec.get("nargs")}
        parser.add_argument(flag, **more, **({"choices": spec["choices"]} if "choices" in spec else {}))
    args = parser.parse_args(words_of(export_text("megatron", config, model)))
    assert (args.micro_batch_size, args.global_batch_size) == (config.micro_batch, config.global_batch)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (config.tp, config.pp)
    assert (args.expert_model_parallel_size or 1, args.context_parallel_size or 1) == (config.ep, config.cp)
    assert args.sequence_parallel == (config.tp > 1)
    assert bool(args.use_distributed_optimizer) == (config.stage > 0)
    strategy = {2: "optim_grads", 3: "optim_grads_params"}.get(config.stage)
    assert args.data_parallel_sharding_strategy == strategy and args.use_megatron_fsdp == (config.stage > 1)
    assert args.optimizer_offload_fraction == (config.offload or None)
    assert (
        args.recompute_granularity
        == {False: None, True: "full", "matmuls": "selective", "every-2": "full"}[config.remat]
    )
    shape = PRESETS[model or ("mixtral-8x7b" if config.ep > 1 else "llama-3-8b")]
    assert args.recompute_num_layers == {True: 1, "every-2": shape.depth // 2}.get(config.remat)
    assert (args.num_layers, args.hidden_size, args.num_experts or 0) == (shape.depth, shape.width, shape.experts[0])
    assert args.untie_embeddings_and_output_weights == (not shape.tied)


@pytest.mark.skipif(not is_installed("megatron"), reason="Megatron-LM is not on the path")
def test_megatron_parses_the_exported_flags(config, monkeypatch):
    arguments = importlib.import_module("megatron.training.arguments")
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    export = export_text("megatron", config)
    monkeypatch.setenv("WORLD_SIZE", str(config.world))
    if "CUDA_DEVICE_MAX_CONNECTIONS=1" in export.text:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "1", "--transformer-impl", "local"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words_of(export), *data, "--no-rope-fusion"])
    args = arguments.parse_args()
    arguments.validate_args(args)
    assert (args.data_parallel_size, args.global_batch_size) == (config.ranks, config.global_batch)


# What a system does not take from its file: the setting as the export names it, by system.
SAID = {
    "deepspeed": ("remat:", "cp 4:", "tp 2:", "offload 0.4:", "pp 2", "chunked loss:", "no capacity", "float32"),
    "fsdp2": ("cp 4:", "offload 0.4:", "pp 2", "chunked loss:", "ep 8:", "Stage 1:", "Stage 2:", "loss scale", "tp 2:"),
    "accelerate": (
        "offload 0.4:",
        "cp 4:",
        "ep 8:",
        "remat but matmuls:",
        "Stage 1:",
        "sync_each_batch",
        "num_steps=4",
    ),
    "torchtitan": ("offload 0.4:", "remat but matmuls:", "no capacity", "Stage 2:", "float16:"),
    "megatron": ("chunked loss:", "remat but matmuls:", "CUDA_DEVICE_MAX_CONNECTIONS"),
}


@pytest.mark.parametrize("system", EXPORTS)
def test_an_export_lists_options_that_the_system_lacks(system):
    results = [export_text(system, config) for config in CONFIGS.values() if (system, config.pp) != ("accelerate", 2)]
    said = "\n".join([line for export in results for line in export.differences])
    assert [word for word in SAID[system] if word not in said] == []
    for export in results:
        assert system == "deepspeed" or all(f"# {line}\n" in export.text for line in export.differences)
        assert export.system.split()[0].lower().startswith(system[:4])
    sums = [export_text("accelerate", CONFIGS[name]).text for name in ("stage 3", "stage 0")]
    assert ["sync_each_batch=True" in text for text in sums] == [True, False]


@pytest.mark.parametrize("system", EXPORTS)
def test_exports_list_quantised_messages_and_states_as_differences(system):
    config = dataclasses.replace(USUAL, gather="int8", reduce="int4", moments="int8", float8="rowwise")
    lines = " ".join(export_text(system, config).differences)
    assert all(f"{name}: " in lines for name in ("gather int8", "reduce int4", "moments int8", "float8 rowwise"))
    assert "moments" not in " ".join(export_text(system, USUAL).differences)


@pytest.mark.parametrize("system", EXPORTS)
def test_an_export_notes_that_planned_seconds_are_of_compiled_code(system):
    plain, compiled = (export_text(system, dataclasses.replace(USUAL, compiled=x)).differences for x in (False, True))
    assert [x for x in compiled if x not in plain] == [
        "compiled: the seconds are those of compiled code, which the system must be told to run."
    ]


def test_a_model_of_the_users_own_has_no_sizes():
    row = TableRow(USUAL, {}, {}, 1.0, 0.0, 0.0, True, {})
    texts = {system: make(PlannedRun(row, H100)).text for system, make in EXPORTS.items()}
    assert "--num-layers" not in texts["megatron"] and "own make_step" in texts["megatron"]
    assert "config.training.max_context_length" in texts["torchtitan"] and "planned()" not in texts["torchtitan"]
