"""Export a row to torchtitan: a Python file with a function that returns its `Trainer.Config`."""

from dataclasses import replace
from typing import NamedTuple

from fzero._arguments import check_choice
from fzero.tuning._search_space import EVERY_SECOND
from fzero.tuning.exports._export import (
    Export,
    PlannedRun,
    applicable_lines,
    expected_bytes,
    make_export,
    unsupported_settings,
)
from fzero.tuning.exports._peaks import fsdp2_states

__all__ = ["torchtitan"]

_SYSTEM = "torchtitan 0.2.2 (main of August 2026, commit b5bcd76c)"


class _KnownModel(NamedTuple):
    """A model of torchtitan: its module, and the function of a configuration, of another flavor if one is given."""

    module: str
    function: str
    flavor: str = ""
    assets: str = ""


# Of Qwen3 8B torchtitan has no configuration to pretrain, and that of Llama 3 405B is in float8.
_KNOWN = {
    "llama-3-8b": _KnownModel("llama3", "llama3_8b"),
    "llama-3-70b": _KnownModel("llama3", "llama3_70b"),
    "llama-3-405b": _KnownModel("llama3", "llama3_70b", "405B", "Llama-3.1-405B"),
    "qwen3-8b": _KnownModel("qwen3", "qwen3_14b", "8B", "Qwen3-8B"),
}
# the class of torch.distributed.pipelining; its zero bubble has two stages a rank
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


def torchtitan(run: PlannedRun) -> Export:
    """Write the functions `apply_plan`, and `planned` where torchtitan has the model."""
    parts = [_import_lines(run), _apply_plan(run)]
    if _known_model(run):
        parts.append(_config_function(run))
    # whole gradients are never held, since each micro-batch is summed over ranks
    peak = expected_bytes(run, fsdp2_states, replace(run.config, stage=2) if run.config.stage == 1 else None)
    return make_export(
        run,
        system=_SYSTEM,
        filename="torchtitan_plan.py",
        body="\n\n".join(parts),
        differences=_list_differences(run),
        peak=peak,
    )


def _known_model(run: PlannedRun) -> _KnownModel | None:
    return _KNOWN.get(run.shape.name) if run.shape else None


def _checkpoint_class(run: PlannedRun) -> str:
    """Return the class of activation checkpoints; "" for none."""
    return {False: "", "matmuls": "SelectiveAC"}.get(run.config.remat, "FullAC")


def _import_lines(run: PlannedRun) -> str:
    policy, model = _checkpoint_class(run), _known_model(run)
    lines = ["from torchtitan.components.loss import ChunkedLossWrapper"]
    if policy:
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    if model:
        if model.flavor:
            lines.append(f"from torchtitan.models.{model.module} import model_registry")
        lines += [f"from torchtitan.models.{model.module}.config_registry import {model.function}"]
    return "\n".join([*lines, "from torchtitan.trainer import Trainer", ""])


def _apply_plan(run: PlannedRun) -> str:
    """Write the function that sets a configuration to the row. A sequence's length is set where it is known."""
    c = run.config
    if c.pp > 1:
        check_choice("schedule for torchtitan", c.schedule, tuple(_SCHEDULES))
    tokens = f"{run.length}" if run.length else "config.training.max_context_length"
    replicate, shard = (1, c.ranks) if c.stage else (c.ranks, 1)
    reshards = '"always"' if c.stage == 3 else '"never"'
    table = [  # setting, value, whether it is set
        ("training.max_context_length", run.length, run.length),
        ("training.num_tokens_per_microbatch_per_dp_rank", f"{c.micro_batch} * {tokens}", True),
        ("training.num_tokens_per_train_step", f"{c.global_batch} * {tokens}", True),
        ("training.max_norm", 1.0, True),
        ("training.dtype", '"float32"', True),
        ("training.mixed_precision_param", f'"{_dtype_name(run)}"', True),
        ("training.enable_cpu_offload", c.offload > 0, True),
        ("training.disable_cuda_graphs", True, c.pp > 1 or c.ep > 1),
        ("parallelism.data_parallel_replicate_degree", replicate, True),
        ("parallelism.data_parallel_shard_degree", shard, True),
        ("parallelism.fsdp_reshard_after_forward", reshards, True),
        ("parallelism.tensor_parallel_degree", c.tp, True),
        ("parallelism.context_parallel_degree", c.cp, True),
        ("parallelism.pipeline_parallel_degree", c.pp, True),
        ("parallelism.expert_parallel_degree", c.ep, True),
        ("parallelism.pipeline_parallel_schedule", f'"{_SCHEDULES.get(c.schedule)}"', c.pp > 1),
        ("parallelism.num_pp_microbatches", c.accumulation, c.pp > 1),
        ("config.activation_checkpoint", _checkpoint_class(run) + ".Config()" if c.remat else None, True),
    ]
    lines = [
        "def apply_plan(config: Trainer.Config) -> Trainer.Config:",
        '    """Set a configuration of torchtitan to the row of the plan."""',
        "    training, parallelism = config.training, config.parallelism",
        *applicable_lines([(is_set, f"    {setting} = {value}") for setting, value, is_set in table]),
        *(_CHUNKED_LOSS if c.chunked_loss else _WHOLE_LOSS),
    ]
    return "\n".join([*lines, "    return config", ""])


_CHUNKED_LOSS = (
    "    if not isinstance(config.loss, ChunkedLossWrapper.Config):",
    "        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)",
)
_WHOLE_LOSS = (
    "    if isinstance(config.loss, ChunkedLossWrapper.Config):",
    "        config.loss = config.loss.loss_fn",
)


def _config_function(run: PlannedRun) -> str:
    """Write the function that `--config` names."""
    model = _known_model(run)
    assert model is not None and run.shape is not None
    lines = [
        "def planned() -> Trainer.Config:",
        f'    """Return the configuration of {run.shape.name}: NGPU={min(run.config.world, run.machine.ranks)} '
        'MODULE=torchtitan_plan CONFIG=planned ./run_train.sh"""',
        f"    config = {model.function}()",
    ]
    if model.flavor:
        lines += [
            f'    config.model_spec = model_registry("{model.flavor}")',
            f'    config.hf_assets_path = "./assets/hf/{model.assets}"',
        ]
    return "\n".join([*lines, "    return apply_plan(config)", ""])


def _dtype_name(run: PlannedRun) -> str:
    return "float32" if run.config.precision == "float32" else "bfloat16"


def _list_differences(run: PlannedRun) -> tuple[str, ...]:
    """List what torchtitan does otherwise than the row says, or leaves to the user."""
    c = run.config
    rules = {}
    if c.offload:
        rules["offload"] = "torchtitan offloads all or nothing, and here all of parameters, gradients and state"
    if c.remat == "matmuls":
        rules["remat"] = "SelectiveAC saves every second matrix product only; what it is expected to hold counts all"
    if c.remat == EVERY_SECOND:
        rules["remat"] = "FullAC recomputes all of each block; what it is expected to hold counts every second one"
    if c.pp > 1 and c.schedule == "zb":
        rules["pp"] = "torch's InterleavedZeroBubble has two stages a rank, so a model needs as many more blocks"
    differences = []
    if not _known_model(run):
        differences.append("torchtitan has no such model: call apply_plan on the configuration of yours.")
    if run.length:
        differences.append("A micro-batch is counted in tokens, and documents are packed into it.")
    differences += unsupported_settings(c, rules)
    if c.stage in (1, 2):
        differences.append(
            f"Stage {c.stage}: torchtitan shards parameters between steps, and keeps them gathered from the forward to "
            "the backward pass of each micro-batch."
        )
    if run.shape is not None and run.shape.experts[0]:
        differences.append("No token is dropped: torchtitan's experts have no capacity, where the row counts 1.25.")
    if c.precision == "float16":
        differences.append("float16: bfloat16 stands in its place, since torchtitan has no loss scale.")
    if c.precision != "float32":
        differences.append(
            f"Parameters are float32 between steps and {_dtype_name(run)} in gathers, and have no second copy."
        )
    return tuple(differences)
