"""Export a row to accelerate: the YAML of `accelerate launch --config_file`, with FSDP2."""

from dataclasses import replace
from typing import Any

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

__all__ = ["accelerate"]

_SYSTEM = "accelerate 1.15"
_PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def accelerate(run: PlannedRun) -> Export:
    """Write the file of `accelerate launch`: DDP at stage 0, and FSDP2 above it and with more axes.

    Raises:
        ValueError: if the row has a pipeline.
    """
    c, is_fsdp = run.config, _is_fsdp(run)
    if c.pp > 1:
        raise ValueError(f"pp={c.pp}: accelerate trains no pipeline: export a row without one, as --pp 1 plans")
    fields: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_fsdp else "MULTI_GPU",
        "mixed_precision": _PRECISIONS[c.precision],
        "num_machines": run.hosts,
        "machine_rank": 0,
        "num_processes": c.world,
        "main_training_function": "main",
    }
    if is_fsdp:
        fields["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": c.stage == 3,
            "fsdp_offload_params": c.offload > 0,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": bool(c.remat),
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
    if max(c.cp, c.tp) > 1:
        fields["parallelism_config"] = {
            "parallelism_config_dp_shard_size": c.ranks,
            "parallelism_config_cp_size": c.cp,
            "parallelism_config_tp_size": c.tp,
        }
    as_run = replace(c, stage=max(c.stage, int(is_fsdp)), remat=bool(c.remat), offload=c.offload * is_fsdp, ep=1)
    peak = expected_bytes(run, fsdp2_states, as_run)
    return make_export(
        run,
        system=_SYSTEM,
        filename="accelerate.yaml",
        body=_to_yaml(fields),
        differences=_list_differences(run),
        peak=peak,
    )


def _is_fsdp(run: PlannedRun) -> bool:
    return run.config.stage > 0 or max(run.config.cp, run.config.tp) > 1


def _to_yaml(fields: dict[str, Any], indent: str = "") -> str:
    """Write nested dictionaries of plain values, which need no library for YAML."""
    lines = []
    for key, value in fields.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_to_yaml(value, indent + '  ')}")
        else:
            word = '"no"' if value == "no" else value  # the word alone is false in YAML
            if isinstance(value, bool):
                word = str(value).lower()
            lines.append(f"{indent}{key}: {word}\n")
    return "".join(lines)


def _list_differences(run: PlannedRun) -> tuple[str, ...]:
    """List what accelerate does otherwise than the row says, or leaves to the program."""
    c, is_fsdp = run.config, _is_fsdp(run)
    sync_option = ", sync_each_batch=True" if c.stage > 1 else ""
    precision = c.precision if is_fsdp else "float32"
    lines_above = [
        (
            True,
            f"DataLoader(batch_size={c.micro_batch}) and accelerator.clip_grad_norm_(..., 1.0) stand in your program.",
        ),
        (
            c.accumulation > 1,
            f"So does Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={c.accumulation}"
            f"{sync_option})).",
        ),
        (
            run.hosts > 1,
            "Each of the machines starts with its own --machine_rank, and all with --main_process_ip.",
        ),
        (
            is_fsdp,
            "A model that is none of transformers' needs fsdp_transformer_layer_cls_to_wrap: the class of a block.",
        ),
        (
            is_fsdp and c.stage < 3,
            f"Stage {c.stage}: FSDP2 shards parameters between steps, and keeps them gathered from the forward to the "
            "backward pass.",
        ),
    ]
    lines_below = [(c.precision != "float32", f"Gradients are summed over ranks in {precision}.")]
    return (*applicable_lines(lines_above), *unsupported_settings(c, _remedies(run)), *applicable_lines(lines_below))


_REMEDIES = {
    "ep": "accelerate does not split experts",
    "cp": "the loop splits each batch by accelerator.maybe_context_parallel",
    "tp": "the model needs a plan of its own, such as from_pretrained(tp_plan='auto') of transformers",
    "chunked_loss": "the model computes its loss, such as by Liger's fused linear cross-entropy",
}


def _remedies(run: PlannedRun) -> dict[str, str]:
    """Return what to do instead, by the setting that accelerate does not take from its file."""
    c, is_fsdp = run.config, _is_fsdp(run)
    rows = [  # setting, words, whether they hold; the last that holds counts
        ("offload", "FSDP2 offloads all or nothing, and here all of parameters, gradients and state", is_fsdp),
        ("offload", "left out, since DDP offloads nothing", not is_fsdp),
        ("remat", "recomputes all of a block, since accelerate has no selective checkpoints", c.remat == "matmuls"),
        (
            "remat",
            "recomputes all of each block, since accelerate checkpoints no chosen ones",
            c.remat == EVERY_SECOND,
        ),
        ("remat", "the model recomputes: model.gradient_checkpointing_enable() of transformers", not is_fsdp),
    ]
    settings = {"offload": c.offload, "remat": c.remat}
    return {**_REMEDIES, **{setting: words for setting, words, applies in rows if applies and settings[setting]}}
