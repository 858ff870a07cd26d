"""Export a row to FSDP2, which has no file: two functions around `torch.distributed.fsdp.fully_shard`."""

from dataclasses import replace

from fzero.tuning._search_space import EVERY_SECOND, Configuration
from fzero.tuning.exports._export import (
    Export,
    PlannedRun,
    applicable_lines,
    expected_bytes,
    make_export,
    unsupported_settings,
)
from fzero.tuning.exports._peaks import fsdp2_states

__all__ = ["fsdp2"]

_SYSTEM = "FSDP2, torch 2.11 and newer"
# what remat="matmuls" saves, as torch names it
_PRODUCTS = """\
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""


def fsdp2(run: PlannedRun) -> Export:
    """Write a function that shards a model and one that trains it by a batch."""
    c, parts = run.config, [_import_lines(run)]
    if c.remat == "matmuls":
        parts.append(_PRODUCTS)
    body = "\n\n".join([*parts, _shard_model(run), _train_step(run)])
    peak = expected_bytes(run, fsdp2_states, replace(c, ep=1))
    return make_export(
        run, system=_SYSTEM, filename="fsdp2_plan.py", body=body, differences=_list_differences(run), peak=peak
    )


def _import_lines(run: PlannedRun) -> str:
    """Return the import lines of the program."""
    c = run.config
    tensor = "ColwiseParallel, RowwiseParallel, parallelize_module"
    names = ["MixedPrecisionPolicy", "fully_shard"]
    names = ["CPUOffloadPolicy", *names] if c.offload else names
    checkpoints = ["checkpoint", "create_selective_checkpoint_contexts"][: 1 + (c.remat == "matmuls")]
    lines = [
        "from functools import partial\n" if c.remat else "",
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(names)}",
        f"from torch.distributed.tensor.parallel import {tensor}" if c.tp > 1 else "",
        f"from torch.utils.checkpoint import {', '.join(checkpoints)}" if c.remat else "",
    ]
    return "".join([f"{line}\n" for line in lines if line])


def _shard_model(run: PlannedRun) -> str:
    """Write the function that shards a model. At stage 0 groups of one rank hold all shards."""
    c = run.config
    data_ranks = c.ranks * c.cp  # parameters are sharded over the ranks of a sequence too
    sizes = {"pp": c.pp, "replicate": data_ranks, "shard": 1} if c.stage == 0 else {"pp": c.pp, "dp": data_ranks}
    sizes["tp"] = c.tp
    sizes = {name: n for name, n in sizes.items() if n > 1 or name in ("dp", "replicate", "shard")}
    names = [name for name in sizes if name not in ("pp", "tp")]
    data = "mesh" if len(names) == len(sizes) else f"mesh[{', '.join(map(repr, names))}]".replace("'", '"')
    shape = ", ".join(map(str, sizes.values())) + ("," if len(sizes) == 1 else "")
    labels = ", ".join([f'"{name}"' for name in sizes]) + ("," if len(sizes) == 1 else "")
    policy = f"MixedPrecisionPolicy(param_dtype=torch.{c.precision}, reduce_dtype=torch.float32)"
    every_second, products = c.remat == EVERY_SECOND, c.remat == "matmuls"
    indent, context_option = " " * (12 if every_second else 8), ", context_fn=contexts" if products else ""
    rows = [
        "def shard_model(model, blocks):",
        '    """Shard a float32 model by its blocks, a list of modules, and return its optimizer."""',
        '    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")',
        f"    mesh = init_device_mesh(device.type, ({shape}), mesh_dim_names=({labels}))",
        "    options = {",
        f'        "mesh": {data},',
        f'        "reshard_after_forward": {_reshard_setting(c)},',
        f'        "mp_policy": {policy},',
        (c.offload, '        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),'),
        "    }",
        (c.tp > 1, "    # the linear layers of a block that are split, by their names in your model"),
        (c.tp > 1, '    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}'),
        (every_second, "    for i, block in enumerate(blocks):"),
        (not every_second, "    for block in blocks:"),
        (c.tp > 1, '        parallelize_module(block, mesh["tp"], plan)'),
        (products, "        contexts = partial(create_selective_checkpoint_contexts, PRODUCTS)"),
        (every_second, "        if i % 2:"),
        (c.remat, f"{indent}block.forward = partial(checkpoint, block.forward, use_reentrant=False{context_option})"),
        "        fully_shard(block, **options)",
        "    fully_shard(model, **options)",
        "    return torch.optim.AdamW(model.parameters(), lr=3e-4)",
        "",
    ]
    return "\n".join(applicable_lines(rows))


def _reshard_setting(config: Configuration) -> bool | int:
    """Return whether parameters are sharded again after the forward pass, or over how many ranks of a host."""
    if config.stage < 3:
        return False
    return config.axes["dp"] if config.host > 1 else True


def _train_step(run: PlannedRun) -> str:
    """Write the function that trains. Stages 0 and 1 sum over ranks once a step, 2 and 3 for each micro-batch."""
    c = run.config
    lines = [
        "def train_step(model, opt, loss_fn, batch):",
        f'    """Train by a rank\'s {c.micro_batch * c.accumulation} samples, {c.micro_batch} at a time, and return '
        'the mean of its losses."""',
        f"    micro_batches, total = batch.split({c.micro_batch}), 0.0",
        "    for i, micro_batch in enumerate(micro_batches):",
    ]
    if c.accumulation > 1 and c.stage < 3:
        lines.append("        is_last = i == len(micro_batches) - 1")
        if c.stage < 2:
            lines.append("        model.set_requires_gradient_sync(is_last)")
        lines.append("        model.set_reshard_after_backward(is_last)")
    elif c.accumulation == 1 or c.stage == 3:
        lines[-1] = "    for micro_batch in micro_batches:"
    return "\n".join(
        [
            *lines,
            "        loss = loss_fn(model, micro_batch) / len(micro_batches)",
            "        loss.backward()",
            "        total += loss.detach().float()",
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "    opt.step()",
            "    opt.zero_grad()",
            "    return total",
            "",
        ]
    )


def _list_differences(run: PlannedRun) -> tuple[str, ...]:
    """List what FSDP2 does otherwise than the row says, or leaves to the program."""
    c = run.config
    rules = {
        "ep": "fully_shard splits no experts, so each rank holds its shard of all",
        "cp": "loss_fn splits the tokens over ranks, such as by torch's context_parallel, on a mesh of your own",
        "pp": "shard the layers of a rank's stage, and run them by torch.distributed.pipelining in place of train_step",
        "tp": "the plan below names two layers; write it for your model. The row splits activations along tokens "
        "too, which is SequenceParallel in torch",
        "chunked_loss": "loss_fn computes it, such as by torch's chunks under checkpoint",
    }
    if c.host > 1 and c.stage == 3:
        rules["host"] = "a host's shards come from all ranks in each forward pass; the row fetches them once a step"
    if c.offload:
        rules["offload"] = (
            "fully_shard offloads all or nothing, and here all of parameters, gradients and state. Make the process "
            "group with 'cpu:gloo,cuda:nccl', since the norm of gradients is summed on hosts"
        )
    differences = list(unsupported_settings(c, rules))
    if c.stage in (1, 2):
        differences.append(
            f"Stage {c.stage}: fully_shard shards parameters between steps, and gathers them in the first forward "
            "pass; they stay so until the last backward pass."
        )
    if c.precision != "float32" and not c.policy.has_master_shards:
        differences.append(
            f"Parameters are float32 between steps and {c.precision} in gathers, and have no second copy."
        )
    if c.precision == "float16":
        differences.append("float16 needs a loss scale: torch.amp.GradScaler.")
    return tuple(differences)
