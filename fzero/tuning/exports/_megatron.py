"""Export a row to Megatron-LM: the flags of `pretrain_gpt.py`, as a shell array."""

from fzero.tuning._search_space import EVERY_SECOND
from fzero.tuning.exports._export import Export, PlannedRun, applicable_lines, make_export, unsupported_settings
from fzero.tuning.models import ModelShape

__all__ = ["megatron"]

_SYSTEM = "Megatron-LM 0.20 (main of August 2026, commit d98e8a64)"
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def megatron(run: PlannedRun) -> Export:
    """Write flags: the distributed optimizer at stage 1, and Megatron-FSDP at stages 2 and 3."""
    groups = {
        "the model": _model_flags(run),
        "the batch": _batch_flags(run),
        "ranks": _parallel_flags(run),
        "memory": _memory_flags(run),
        "numbers": _number_flags(run),
    }
    body = "".join([f"    # {name}\n    {line}\n" for name, flags in groups.items() if (line := " ".join(flags))])
    nodes = f"--nnodes {run.hosts} --nproc-per-node {min(run.config.world, run.machine.ranks)}"
    text = (
        f"MEGATRON_ARGS=(\n{body})\n"
        f'# torchrun {nodes} pretrain_gpt.py "${{MEGATRON_ARGS[@]}}" and your flags of data and tokenizer\n'
    )
    return make_export(run, _SYSTEM, "megatron_args.sh", text, _list_differences(run))


def _model_flags(run: PlannedRun) -> list[str]:
    """List the flags of the sizes, for a language model by name."""
    shape = run.shape
    if shape is None or shape.task != "causal":
        return []
    return [
        f"--num-layers {run.config.depth or shape.depth}",
        f"--hidden-size {shape.width}",
        f"--ffn-hidden-size {shape.mlp}",
        f"--num-attention-heads {shape.heads}",
        f"--kv-channels {shape.head_width}",
        *([f"--group-query-attention --num-query-groups {shape.kv_heads}"] if shape.kv_heads else []),
        f"--seq-length {run.length}",
        f"--max-position-embeddings {shape.positions or run.length}",
        f"--vocab-size {shape.vocab}",
        f"--make-vocab-size-divisible-by {128 if shape.vocab % 128 == 0 else 1}",
        *_option_flags(shape),
    ]


def _option_flags(shape: ModelShape) -> list[str]:
    """List the flags of the parts that a model has: its norms, biases, positions and experts."""
    flags = [
        (bool(shape.positions), "--position-embedding-type learned_absolute"),
        (not shape.positions, "--position-embedding-type rope --rotary-base 500000"),
        (shape.norm == "rms", "--normalization RMSNorm"),
        (shape.gated, "--swiglu"),
        (shape.biases != "all", "--disable-bias-linear"),
        (shape.biases == "qkv", "--add-qkv-bias"),
        (shape.head_norm, "--qk-layernorm"),
        (not shape.tied, "--untie-embeddings-and-output-weights"),
        "--attention-dropout 0 --hidden-dropout 0",
        (
            bool(shape.experts[0]),
            f"--num-experts {shape.experts[0]} --moe-router-topk {shape.experts[1]} --moe-grouped-gemm "
            "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.25 "
            "--moe-pad-expert-input-to-capacity",
        ),
    ]
    return applicable_lines(flags)


def _batch_flags(run: PlannedRun) -> list[str]:
    return [f"--micro-batch-size {run.config.micro_batch}", f"--global-batch-size {run.config.global_batch}"]


def _parallel_flags(run: PlannedRun) -> list[str]:
    """Return the flags of the axes of the mesh."""
    c = run.config
    flags = [
        f"--tensor-model-parallel-size {c.tp}",
        f"--pipeline-model-parallel-size {c.pp}",
    ]
    if c.cp > 1:
        flags.append(f"--context-parallel-size {c.cp}")
    if c.ep > 1:
        flags.append(f"--expert-model-parallel-size {c.ep}")
    if c.pp > 1 and c.schedule == "interleaved":
        flags.append(f"--num-virtual-stages-per-pipeline-rank {c.pipeline_stages}")
    if c.tp > 1:  # the row splits the activations between layers along tokens
        flags.append("--sequence-parallel")
    return flags


def _memory_flags(run: PlannedRun) -> list[str]:
    """Return the flags that save memory: the stage, offload and recomputation."""
    c = run.config
    flags = []
    if c.stage:
        flags.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    if c.stage in _STRATEGIES:
        flags.append(
            f"--use-megatron-fsdp --data-parallel-sharding-strategy {_STRATEGIES[c.stage]} "
            "--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"
        )
    if c.offload:
        flags.append(
            f"--optimizer-cpu-offload --optimizer-offload-fraction {c.offload:g} --use-precision-aware-optimizer"
        )
    if c.remat is True:
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if c.remat == EVERY_SECOND:
        depth = c.depth or (run.shape.depth if run.shape else 0)
        count = -(-depth // 2) if depth else "N"  # a user fills in the number
        flags.append(f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}")
    if c.remat == "matmuls":
        modules = "layernorm moe_act" if run.shape and run.shape.experts[0] else "layernorm"
        flags.append(f"--recompute-granularity selective --recompute-modules {modules}")
    return flags


def _number_flags(run: PlannedRun) -> list[str]:
    half = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(run.config.precision, [])
    adamw = "--optimizer adam --lr 3e-4 --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.999 --adam-eps 1e-8"
    return [*half, adamw, "--clip-grad 1.0"]


def _list_differences(run: PlannedRun) -> tuple[str, ...]:
    """List what Megatron-LM does otherwise than the row says, or leaves to the user."""
    c = run.config
    rules = {"chunked_loss": "Megatron-LM computes all logits at once, which take more memory than the row has"}
    if c.pp > 1 and c.schedule not in ("1f1b", "interleaved"):
        rules["pp"] = "Megatron-LM runs 1F1B in its place"
    if c.remat == "matmuls":
        rules["remat"] = "Megatron-LM recomputes the norms (and activations of experts), and keeps those of an MLP"
    if c.remat == EVERY_SECOND:
        rules["remat"] = "Megatron-LM recomputes the first half of the blocks"
    differences = []
    if run.shape is None:
        differences.append("The sizes of the model are left out: the row is of your own make_step.")
    elif run.shape.task != "causal":
        differences.append(f"The sizes are left out: {run.shape.name} is not a language model of pretrain_gpt.py.")
    differences += unsupported_settings(c, rules)
    if c.precision == "bfloat16" and c.stage < 2:
        differences.append("Gradients are float32 and as large as the model on each rank, through all micro-batches.")
    if c.stage in _STRATEGIES:
        differences.append("Leave CUDA_DEVICE_MAX_CONNECTIONS unset, as Megatron-FSDP demands.")
    elif max(c.cp, c.tp) > 1:
        differences.append("Set CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron-LM demands before Blackwell.")
    return tuple(differences)
