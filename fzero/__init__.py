"""fzero: ZeRO, sharded data-parallel training, as pure functions on torch.func."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fzero import axes, codecs, collectives, graph, optim, random, ranks, sharding, transforms, tree, zero
from fzero._names import missing_attribute
from fzero.graph import jit, plan
from fzero.optim import Precision
from fzero.ranks import mesh
from fzero.sharding import PerRank
from fzero.transforms import gather, partition, reduce_scatter, remat, scaled_value_and_grad, value_and_grad
from fzero.zero import evaluate, predict, shard

if TYPE_CHECKING:  # a program that does not use these does not wait for their import; `testing` needs hypothesis
    from fzero import checkpoint, data, elastic, errors, local_sgd, nn, observe, parallel, plugs, tuning
    from fzero import testing as testing
    from fzero.checkpoint import load, save
    from fzero.observe import profile
    from fzero.parallel.pipeline import pipeline
    from fzero.tuning import tune

__version__ = "0.2.0.dev0"

__all__ = [
    "PerRank",
    "Precision",
    "axes",
    "checkpoint",
    "codecs",
    "collectives",
    "data",
    "elastic",
    "errors",
    "evaluate",
    "gather",
    "graph",
    "jit",
    "load",
    "local_sgd",
    "mesh",
    "nn",
    "observe",
    "optim",
    "parallel",
    "partition",
    "pipeline",
    "plan",
    "plugs",
    "predict",
    "profile",
    "random",
    "ranks",
    "reduce_scatter",
    "remat",
    "save",
    "scaled_value_and_grad",
    "shard",
    "sharding",
    "transforms",
    "tree",
    "tune",
    "tuning",
    "value_and_grad",
    "zero",
]


_LAZY_MODULES = (
    "checkpoint",
    "data",
    "elastic",
    "errors",
    "local_sgd",
    "nn",
    "observe",
    "parallel",
    "plugs",
    "testing",
    "tuning",
)
_MODULE_OF = {
    "load": "checkpoint",
    "pipeline": "parallel.pipeline",
    "profile": "observe",
    "save": "checkpoint",
    "tune": "tuning",
}


_FOREIGN_NAMES = {  # names of other libraries
    "DDP": "fzero.shard(train_step, stage=0, mesh=mesh)",
    "DistributedDataParallel": "fzero.shard(train_step, stage=0, mesh=mesh)",
    "FSDP": "fzero.shard(train_step, stage=3, mesh=mesh)",
    "FullyShardedDataParallel": "fzero.shard(train_step, stage=3, mesh=mesh)",
    "ZeroRedundancyOptimizer": "fzero.shard(train_step, stage=1, mesh=mesh)",
    "fully_shard": "fzero.shard(train_step, stage=3, mesh=mesh)",
    "initialize": "fzero.shard(train_step, stage=2, mesh=mesh), and step.init(params, opt)",
    "DeviceMesh": "fzero.mesh(dp=4)",
    "init_device_mesh": "fzero.mesh(dp=4)",
    "MixedPrecisionPolicy": "fzero.Precision, in fzero.optim.master_weights and fzero.value_and_grad",
    "CPUOffloadPolicy": "fzero.optim.offload(opt, 1.0)",
    "OffloadPolicy": "fzero.optim.offload(opt, 1.0)",
    "no_sync": "fzero.value_and_grad(loss_fn, micro_batches=4)",
    "save_checkpoint": "fzero.save(path, values)",
    "load_checkpoint": "fzero.load(path, like)",
    "load_state_dict": "fzero.load(path, like)",
    "init_distributed": "not needed: fzero.mesh finds torchrun's processes",
    "filter_grad": "fzero.value_and_grad",
    "filter_jit": "fzero.jit",
    "filter_value_and_grad": "fzero.value_and_grad",
    "grad": "fzero.value_and_grad, or torch.func.grad of a function of full tensors",
    "pmap": "mesh.spmd",
    "shard_map": "mesh.spmd",
    "vmap": "torch.vmap",
    "psum": "fzero.collectives.psum",
    "tree_map": "fzero.tree.map",
    "PartitionSpec": "a rule of split=, such as fzero.parallel.tensor.split_rule",
    "DTensor": "a rule of split=, such as fzero.parallel.tensor.split_rule",
    "GatheredParameters": "step.gather(params)",
    "checkpoint_wrapper": "fzero.remat(fn)",
    "zero_grad": "not needed: fzero.value_and_grad returns gradients and keeps none",
    "Adam": "fzero.optim.adam",
    "AdamW": "fzero.optim.adamw",
    "FusedAdam": "fzero.optim.adamw, which fzero.jit fuses",
    "PRNGKey": "fzero.random.key",
    "Init": "step.init(params, opt)",
    "Accelerator": "fzero.plugs.accelerate.shard_loop(accelerator, model, optimizer, loss, stage=3)",
    "prepare": "fzero.plugs.accelerate.shard_loop(accelerator, model, optimizer, loss, stage=3)",
    "Trainer": "fzero.plugs.transformers.shard_trainer(trainer, stage=3)",
    "AdamW8bit": 'fzero.optim.adamw(rate, moments="int8")',
    "AveragedModel": "fzero.optim.params_ema",
    "Muon": "fzero.optim.muon",
    "GradScaler": "fzero.optim.dynamic_loss_scale",
    "DynamicLossScale": "fzero.optim.dynamic_loss_scale",
    "Policy": "fzero.Precision, in fzero.optim.master_weights and fzero.value_and_grad",
    "autocast": "fzero.Precision, in fzero.optim.master_weights and fzero.value_and_grad",
    "lr_scheduler": "a schedule in place of the optimizer's rate, such as fzero.optim.warmup_cosine",
    "clip_grad_norm_": "fzero.optim.clip_by_global_norm, in a chain before the optimizer",
    "clip_grad_value_": "fzero.optim.clip, in a chain before the optimizer",
    "LocalSGD": "fzero.local_sgd.local_steps(step, every=10)",
    "DiLoCo": "fzero.local_sgd.local_steps(step, every=10)",
    "MoE": "fzero.parallel.experts.layer",
    "convert_to_float8_training": 'fzero.nn.functional(module, matmul_precision="float8")',
    "TiledMLP": "fzero.nn.tiled",
    "sequence_tiled_compute": "fzero.nn.tiled",
    "parallelize_module": "fzero.parallel.tensor.layers(module)",
    "ColwiseParallel": 'fzero.parallel.tensor.layers(module, {"*.up": "colwise"})',
    "RowwiseParallel": 'fzero.parallel.tensor.layers(module, {"*.down": "rowwise"})',
    "SequenceParallel": "fzero.parallel.tensor.layers(module, sequence=True)",
    "PrepareModuleInput": "fzero.parallel.tensor.enter",
    "PrepareModuleOutput": "fzero.parallel.tensor.leave",
    "loss_parallel": "fzero.parallel.tensor.cross_entropy",
    "set_z3_leaf_modules": "units=fzero.sharding.by_size(params, max_numel=10**8)",
    "distribute_tensor": "step.partition(tree)",
    "with_sharding_constraint": "a function in your code, such as fzero.parallel.tensor.scatter",
    "init_process_group": "not needed: fzero.mesh finds torchrun's processes",
    "SyncBatchNorm": "fzero.collectives.pmean(buffers), before the step returns them",
    "register_hook": "a mask in the loss: torch.where(mask, p, p.detach())",
    "create_selective_checkpoint_contexts": 'fzero.remat(fn, save="matmuls")',
    "dots_saveable": 'save="matmuls" of fzero.remat',
    "save_and_offload_only_these_names": 'save="host" of fzero.remat',
    "CheckpointManager": "fzero.checkpoint.checkpoints(root, mesh)",
    "StandardCheckpointer": "fzero.save(path, values) and fzero.load(path, like)",
    "from_pretrained": "fzero.checkpoint.hf.read(folder, like)",
    "save_pretrained": "fzero.checkpoint.hf.write(folder, params)",
    "to_empty": "step.init(module, opt) of a module on the meta device",
    "reset_parameters": "step.init(module, opt) of a module on the meta device",
    "DataLoader": "fzero.data.batches(dataset, mesh, global_batch=32)",
    "StatefulDataLoader": "fzero.data.batches(dataset, mesh, global_batch=32), whose batches have numbers",
    "DistributedSampler": "fzero.data.batches(dataset, mesh, global_batch=32)",
    "skip_first_batches": "fzero.data.batches(dataset, mesh, global_batch=32).steps(start)",
    "DataCollatorWithPadding": "fzero.data.padding(lengths, global_batch=32)",
    "group_by_length": "fzero.data.padding(lengths, global_batch=32)",
    "gather_for_metrics": "fzero.predict(step, f)",
    "detect_anomaly": "fzero.observe.nonfinite(step)",
    "SummaryWriter": "fzero.observe.log",
    "tqdm": "fzero.observe.log(fzero.observe.progress())",
    "mark_dynamic": "not needed: fzero.jit(step, dynamic=True) is the default",
    "register_pytree_node": "torch's own, whose nodes fzero.tree visits",
}


def _names_of_others() -> dict[str, str]:
    """Return the names of other libraries that fzero answers, and those that its loaded modules answer."""
    modules = [sys.modules.get(f"fzero.{x}") for x in __all__]
    return {k: v for m in modules for k, v in getattr(m, "_FOREIGN_NAMES", {}).items()} | _FOREIGN_NAMES


def __getattr__(name: str) -> Any:
    """Import a module, or the module of a function, at its first use."""
    if name not in _LAZY_MODULES and name not in _MODULE_OF:
        own = [f"fzero.{x}.{name}" for x in __all__ if name in getattr(sys.modules.get(f"fzero.{x}"), "__all__", ())]
        elsewhere = {name: " or ".join(own)} if own else _names_of_others()
        raise missing_attribute(f"module {__name__!r}", name, __all__, elsewhere, "fzero.{}")
    module = importlib.import_module(f"fzero.{_MODULE_OF.get(name, name)}")
    value = getattr(module, name) if name in _MODULE_OF else module
    return globals().setdefault(name, value)  # the next use finds it here


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
