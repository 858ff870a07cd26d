"""Export a row to DeepSpeed: the JSON of `deepspeed.initialize(config=)`."""

import json
from typing import Any

from fzero.tuning._search_space import Configuration
from fzero.tuning.exports._export import Export, PlannedRun, expected_bytes, make_export, unsupported_settings
from fzero.tuning.exports._peaks import deepspeed_states

__all__ = ["deepspeed"]

_SYSTEM = "DeepSpeed 0.19"
_SELECTIVE = "create_selective_checkpoint_contexts"


def deepspeed(run: PlannedRun) -> Export:
    """Write DeepSpeed's configuration. JSON has no comments, so the differences stand beside it."""
    c = run.config
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(c.precision)
    adamw = {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    fields: dict[str, Any] = {
        "train_batch_size": c.global_batch,
        "train_micro_batch_size_per_gpu": c.micro_batch,
        "gradient_accumulation_steps": c.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        **({half: {"enabled": True}} if half else {}),
        "zero_optimization": {
            "stage": c.stage,
            **({"zero_hpz_partition_size": c.axes["dp"]} if _has_second_shards(c) else {}),
            **({"offload_optimizer": _offload_section(run)} if _offloads(run) else {}),
        },
        **({"tensor_parallel": {"autotp_size": c.tp}} if c.tp > 1 else {}),
    }
    if c.ep > 1:
        fields["expert_parallel"] = {"enabled": True, "autoep_size": c.ep, "preset_model": "mixtral"}
    text, peak = json.dumps(fields, indent=2) + "\n", expected_bytes(run, deepspeed_states)
    return make_export(
        run,
        system=_SYSTEM,
        filename="ds_config.json",
        body=text,
        differences=_list_differences(run),
        peak=peak,
        comments=False,
    )


def _has_second_shards(config: Configuration) -> bool:
    """Return whether each host holds all parameters in shards of its own: hpZ of ZeRO++, which is for stage 3."""
    return config.host > 1 and config.stage == 3


def _offloads(run: PlannedRun) -> bool:
    """Return whether DeepSpeed offloads the state: at stages 1 to 3, and not with both experts and matrices split."""
    c = run.config
    return c.offload > 0 and c.stage > 0 and (c.ep == 1 or c.tp == 1)


def _offload_section(run: PlannedRun) -> dict[str, Any]:
    """Return the section of the offload. Only stage 3 takes a ratio."""
    ratio = {"ratio": run.config.offload} if run.config.stage == 3 and run.config.offload < 1 else {}
    return {"device": "cpu", "pin_memory": True, **ratio}


def _list_differences(run: PlannedRun) -> tuple[str, ...]:
    """List what DeepSpeed does otherwise than the row says, or leaves to the program."""
    c = run.config
    rules = {
        "remat": "the model recomputes, not DeepSpeed: model.gradient_checkpointing_enable() of transformers "
        "recomputes all of a block",
        "tp": "AutoTP keeps the activations between layers whole, which the row splits along tokens",
        "cp": "ranks split sequences by DeepSpeed's Ulysses, which your program sets up",
        "pp": f"write the model as deepspeed.pipe.PipelineModule(num_stages={c.pp}), whose schedule is 1F1B; it takes "
        "no stage above 1",
        "chunked_loss": "the model computes its loss, such as by Liger's fused linear cross-entropy",
    }
    if _has_second_shards(c):
        rules["host"] = "a host's shards come from all ranks in each forward pass; the row fetches them once a step"
    if c.offload and not _offloads(run):
        rules["offload"] = "left out, since DeepSpeed offloads at stages 1 to 3 only, and not with both ep and tp"
    elif c.offload < 1 and c.stage < 3:
        rules["offload"] = "DeepSpeed offloads all of the state at stages 1 and 2"
    differences = list(unsupported_settings(c, rules))
    if c.remat == "matmuls":
        differences.append(
            f"To save the products, pass context_fn=functools.partial({_SELECTIVE}, ops) to its checkpoints."
        )
    if c.ep > 1:
        differences.append('The experts are found by the preset "mixtral"; replace it by the one of your model.')
    if run.shape is not None and run.shape.experts[0]:
        differences.append("No token is dropped: DeepSpeed's AutoEP has no capacity, where the row counts 1.25.")
    if c.precision != "float32":
        differences.append(f"Gradients are summed in {c.precision}; the row sums them in float32.")
    return tuple(differences)
