"""The code of a train step in a configuration: the lines that `fzero plan` prints to paste."""

from fzero.tuning._search_space import EVERY_SECOND, Configuration

__all__ = ["recipe"]


def recipe(config: Configuration) -> str:
    """Return the code of a train step in a configuration."""
    c = config
    moments = f", moments={_quote(c.moments)}" if c.moments else ""
    opt = f"optim.master_weights(optim.adamw(3e-4{moments}), precision)"
    opt = f"optim.offload({opt}, {c.offload:g})" if c.offload else opt
    lines = [
        f"# {c}: {c.global_batch} samples a step on {c.world} ranks",
        f"precision = fzero.Precision(param=torch.{c.precision}{_policy_options(c)})",
        f"opt = optim.chain(optim.clip_by_global_norm(1.0), {opt})",
        *_model_lines(c),
        "",
        "def train_step(params, opt_state, batch):",
        f"    grad_fn = fzero.value_and_grad(loss_fn, precision=precision{_grad_options(c)})",
        "    loss, grads = grad_fn(params, batch)",
        "    updates, opt_state = opt.update(grads, opt_state, params)",
        "    return optim.apply_updates(params, updates), opt_state, loss",
        "",
        *_shard_lines(c),
    ]
    return "\n".join(lines)


def _policy_options(c: Configuration) -> str:
    """Write the further arguments of `Precision`."""
    kinds = (("gather", c.gather), ("reduce", c.reduce))
    shard = ", shard=torch.float32" if c.policy.has_master_shards else ""
    return shard + "".join([f", {name}=fzero.codecs.{kind}()" for name, kind in kinds if kind is not None])


def _split_rules(c: Configuration) -> list[str]:
    """List the rules that split leaves over "tp" and "ep"."""
    return [
        *(["fzero.parallel.tensor.split_rule(dims)"] if c.tp > 1 else []),
        *(['fzero.parallel.experts.split_rule("experts")'] if c.ep > 1 else []),
    ]


_CHUNKED_LOSS = "# in loss_fn: fzero.nn.linear_cross_entropy(hidden, head_weight, labels), in place of logits"

_ALTERNATE_BLOCKS = [
    "blocks = (lambda p, *args: block(fzero.gather(p), *args), fzero.remat(block))",
    "# in loss_fn: x = blocks[i % 2](p, x) for block number i",
]

_CONTEXT = [
    "# labels are shifted before the split, by fzero.parallel.context.shift_labels, and ranks may hold unequal numbers",
    '# of them: so the loss is (sum over labels, number of labels), and reduce="weighted" divides at the end',
    "# in loss_fn: attend by fzero.parallel.context.attention, and read positions from context.positions;",
    '# or, for a transformers model, fzero.nn.functional(model, context="cp")',
]


def _model_lines(c: Configuration) -> list[str]:
    """Write the lines about blocks, tensor parallelism and the pipeline."""
    rules, save = _split_rules(c), "" if c.remat is True else f", save={_quote(c.remat)}"
    lines = [*[_CHUNKED_LOSS] * c.chunked_loss, *_float8_lines(c), *(_CONTEXT if c.cp > 1 else [])]
    if c.tp > 1:
        lines += [
            "# names of leaves, and the dimension that is split; or, for a transformers model, layers.split of",
            "# layers = fzero.parallel.tensor.layers(model, sequence=True), for fzero.nn.functional(model, tp=layers)",
            'dims = {"up": -1, "down": 0}',
        ]
    if c.pp == 1:
        if c.remat == EVERY_SECOND:
            return [*lines, *_ALTERNATE_BLOCKS]
        return [*lines, *([f"block = fzero.remat(block{save})"] if c.remat else [])]
    stages_option = f", stages_per_rank={c.pipeline_stages}" if c.pipeline_stages > 1 else ""
    stages_option += f", depth={c.depth}" if c.depth and c.depth % (c.pp * c.pipeline_stages) else ""
    stages_option += f", remat={_quote(c.remat)}" if c.remat else ""
    stages_option += f", split={_join_arguments(rules)}" if rules else ""
    return [
        *lines,
        "# or, for a transformers model: loss_fn, params, join = fzero.nn.pipeline(model, ...)",
        "loss_fn = fzero.pipeline(",
        "    first=first, block=block, last=last,",
        f"    micro_batches={c.accumulation}, schedule={_quote(c.schedule)}{stages_option},",
        ")",
    ]


def _float8_lines(c: Configuration) -> list[str]:
    """Write how the linear layers of blocks multiply in float8."""
    if c.float8 is None:
        return []
    rowwise = f'fzero.nn.MatmulPrecision("float8", scaling={_quote(c.float8)})'
    precision = '"float8"' if c.float8 == "tensorwise" else rowwise
    return [
        f"# in block: fzero.nn.float8_linear(x, weight, bias, scaling={_quote(c.float8)}), in place of F.linear;",
        f"# or, for a transformers model, fzero.nn.functional(model, matmul_precision={precision})",
    ]


def _grad_options(c: Configuration) -> str:
    """Write the further arguments of `value_and_grad`."""
    if c.pp > 1:
        return ', reduce="weighted"'
    return (
        (', reduce="weighted"' if c.cp > 1 else "")
        + (f", micro_batches={c.accumulation}" if c.accumulation > 1 else "")
        + (", gather=False" if c.remat else "")
    )


def _shard_lines(c: Configuration) -> list[str]:
    """Write the lines of the mesh, and of the step on it."""
    sizes = ", ".join([f"{name}={-1 if name == 'dp' else n}" for name, n in c.axes.items()])
    rules = _split_rules(c)
    split = "loss_fn.split" if c.pp > 1 else _join_arguments(rules)
    axis = f", axis={_join_arguments([*map(_quote, c.mean)])}" if max(c.host, c.cp, c.tp, c.pp) > 1 else ""
    options = axis + (f", split={split}" if split else "")
    if not options:
        return [f"step = fzero.jit(fzero.shard(train_step, stage={c.stage}, mesh=fzero.mesh({sizes})))"]
    lines = [
        f"mesh = fzero.mesh({sizes})",
        f"step = fzero.jit(fzero.shard(train_step, stage={c.stage}, mesh=mesh{options}))",
    ]
    if c.pp > 1:
        lines.append("params, opt_state = step.init(loss_fn.stack(params, mesh), opt)")
    data = _join_arguments([*map(_quote, c.sample_axes)])
    split = (
        f"fzero.parallel.context.split(mesh, batch, batch_axis={data})" if c.cp > 1 else f"mesh.split(batch, {data})"
    )
    return [*lines, f"# call step with {split}"] if axis else lines


def _quote(word: object) -> str:
    return f'"{word}"' if isinstance(word, str) else str(word)


def _join_arguments(words: list[str]) -> str:
    if len(words) < 2:
        return "".join(words)
    return f"({', '.join(words)})"
