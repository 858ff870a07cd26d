"""Build the usual train step of a transformer, for any configuration."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from fzero import optim, tree
from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.axes import axis_if_bound, axis_size
from fzero.nn import SIZE_MULTIPLE, float8_linear, linear_cross_entropy
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.parallel.pipeline import Pipeline, pipeline
from fzero.ranks import Mesh, mesh
from fzero.transforms import gather, remat, value_and_grad
from fzero.tuning._search_space import EVERY_SECOND, USUAL_REMATS, Configuration
from fzero.tuning.machines import Machine
from fzero.tuning.models._bounds import Bounds, bounds_of
from fzero.tuning.models._model_names import TENSOR, ModelParams, ModelShape, init, make_batch, shape_of
from fzero.zero import shard

__all__ = ["ModelStep", "model_step"]

# The forward pass of a transformer, split at its blocks: an ordinary functional model.
#
# Along an axis "tp" each rank holds some of the heads, of the hidden units and of the vocabulary. Between the layers it
# holds some of the tokens, if they divide. Along an axis "cp" each rank holds some of the tokens throughout. Without
# such an axis each rank holds full matrices and all tokens.


@dataclass(frozen=True)
class _ForwardOptions:
    """How a forward pass is computed.

    Attributes:
        explicit: whether attention is written out, so that its weights are saved for the backward pass.
        chunked: whether logits never exist as a whole.
        sequence: whether ranks along "tp" hold parts of the tokens between the layers, as `tp.enter` describes.
        float8: the scaling with which linear layers of blocks multiply in float8; None if they multiply in their dtype.
    """

    explicit: bool = False
    chunked: bool = False
    sequence: bool = False
    float8: str | None = None


_Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the rotary angles, by position


def _compute_loss(
    shape: ModelShape, options: _ForwardOptions, run: Callable[..., Any], params: ModelParams, batch: Any
) -> torch.Tensor:
    """Compute the loss of a batch. Parameters outside of blocks are gathered where they are used.

    Args:
        shape: the sizes of the model.
        options: how it is computed.
        run: returns the variants of a block that the model uses in turn, such as `[fzero.remat(block)]`.
        params: the parameters, or their boxes.
        batch: as `make_batch` makes it.
    """
    blocks = itertools.cycle(run(partial(_apply_block, shape, options)))
    x = _embed(shape, options, params, batch)
    tables = _rotary_tables(shape, options, x)
    for p, block in zip(params["blocks"], blocks, strict=False):
        x = block(p, x, tables)
    return _head_loss(shape, options, params, x, batch)


def _embed(shape: ModelShape, options: _ForwardOptions, params: ModelParams, batch: Any) -> torch.Tensor:
    """Return the input of the first block for a batch: `[samples, tokens, width]` of this rank's tokens."""
    inputs = batch[0]
    if shape.task == "image":
        n, p = len(inputs), shape.patch
        weights = gather(params["patches"])
        patches = inputs.to(weights["w"].dtype).unfold(2, p, p).unfold(3, p, p)
        x = _linear(weights, patches.permute(0, 2, 3, 1, 4, 5).reshape(n, -1, 3 * p * p))
        x = torch.cat([gather(params["first"]).expand(n, 1, -1), x], 1)
    else:
        x = tp.embed(inputs, gather(params["tokens"]), sequence=options.sequence)
    if shape.positions:
        x = x + _learned_positions(options, gather(params["positions"]), x)
    if shape.task == "masked":
        segment = _for_own_tokens(options, gather(params["segments"])[0])
        x = _norm(shape, _for_own_tokens(options, gather(params["norm0"])), x + segment)
    return x


def _learned_positions(options: _ForwardOptions, table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of the positions of a rank's tokens `x`."""
    t = _token_count(options, x)
    rows = F.embedding(context.positions(t, device=table.device), table) if axis_if_bound("cp") else table[:t]
    return tp.scatter(rows) if options.sequence else rows


def _apply_single_block(shape: ModelShape, options: _ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Apply one block by itself, as a stage of a pipeline does."""
    return _apply_block(shape, options, p, x, _rotary_tables(shape, options, x))


def _head_loss(
    shape: ModelShape, options: _ForwardOptions, params: ModelParams, x: torch.Tensor, batch: Any
) -> torch.Tensor:
    """Return the loss, given the output of the last block."""
    x = _norm(shape, _for_own_tokens(options, gather(params["norm"])), x)
    if shape.task == "image":
        x = x[:, 0]
    if shape.task == "masked":
        x = F.gelu(_linear(_for_own_tokens(options, gather(params["last"])), x))
    if options.chunked:
        weight, bias = _head(shape, params)
        axis = "tp" if axis_size(axis_if_bound("tp")) > 1 else None
        return linear_cross_entropy(tp.all_gather(x) if options.sequence else x, weight, batch[1], bias, axis=axis)
    x = tp.enter(x, sequence=options.sequence)
    logits = x @ gather(params["tokens"]).T if shape.tied else _linear(gather(params["head"]), x)
    logits = (logits + gather(params["bias"]) if "bias" in params else logits).flatten(0, -2).float()
    loss = F.cross_entropy if axis_size(axis_if_bound("tp")) == 1 else tp.cross_entropy
    return loss(logits, batch[1].flatten())


def _head(shape: ModelShape, params: ModelParams) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight `[classes, width]` of the output head, and its bias."""
    if shape.tied:
        return gather(params["tokens"]), gather(params["bias"]) if "bias" in params else None
    head = gather(params["head"])
    return head["w"].mT, head.get("b")


def _linear(p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def _product(options: _ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Multiply by the weight of a linear layer of a block, in float8 if its sizes allow it."""
    if options.float8 is None or any(n % SIZE_MULTIPLE for n in p["w"].shape):
        return x @ p["w"]
    return float8_linear(x, p["w"].mT, scaling=options.float8)


def _block_linear(options: _ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    y = _product(options, p, x)
    return y + p["b"] if "b" in p else y


def _for_own_tokens(options: _ForwardOptions, weights: Any) -> Any:
    """Return replicated weights for use on a rank's own tokens: their gradients are summed over the ranks."""
    return tree.map(tp.enter, weights) if options.sequence else weights


def _token_count(options: _ForwardOptions, x: torch.Tensor) -> int:
    """Return the number of tokens that a rank's layers read, given the values `[samples, tokens, ..]` between them."""
    return x.shape[1] * (axis_size("tp") if options.sequence else 1)


def _row_linear(options: _ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Multiply by this rank's rows, sum over the ranks, and add the bias once."""
    y = tp.leave(_product(options, p, x), sequence=options.sequence)
    return y + _for_own_tokens(options, p["b"]) if "b" in p else y


def _norm(shape: ModelShape, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    size = p["w"].shape
    return F.layer_norm(x, size, p["w"], p["b"]) if shape.norm == "layer" else F.rms_norm(x, size, p["w"])


def _apply_block(
    shape: ModelShape, options: _ForwardOptions, p: ModelParams, x: torch.Tensor, tables: _Rotary | None
) -> torch.Tensor:
    """Apply a block. The norms follow attention and MLP in BERT, and precede them in all other models."""
    norm1, norm2 = (partial(_norm, shape, _for_own_tokens(options, p[name])) for name in ("norm1", "norm2"))
    if shape.task == "masked":
        x = norm1(x + _attention(shape, options, p, x, tables))
        return norm2(x + _mlp(shape, options, p["mlp"], x))
    x = x + _attention(shape, options, p, norm1(x), tables)
    h = norm2(x)
    return x + (_moe(shape, options, p, h) if "experts" in p else _mlp(shape, options, p["mlp"], h))


_CAPACITY = 1.25  # positions at an expert, relative to even routing


def _moe(shape: ModelShape, options: _ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    """Send tokens to their experts. A rank along "tp" holds part of each expert, and routes all tokens."""
    x = tp.all_gather(x) if options.sequence else x
    routing = moe.route(_linear(p["router"], x).float(), k=shape.experts[1], normalize=True)
    routing = routing._replace(gates=tp.enter(routing.gates))
    y = moe.layer(partial(_expert_mlp, shape), p["experts"], tp.enter(x), routing, capacity=_CAPACITY)
    return tp.leave(y, sequence=options.sequence)


def _mlp(shape: ModelShape, options: _ForwardOptions, p: ModelParams, x: torch.Tensor) -> torch.Tensor:
    x = tp.enter(x, sequence=options.sequence)
    up = _block_linear(options, p["up"], x)
    hidden = F.silu(_block_linear(options, p["gate"], x)) * up if shape.gated else F.gelu(up)
    return _row_linear(options, p["down"], hidden)


def _expert_mlp(shape: ModelShape, p: ModelParams, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    up = linear(rows, p["up"]["w"])
    return linear(F.silu(linear(rows, p["gate"]["w"])) * up if shape.gated else F.gelu(up), p["down"]["w"])


def _attention(
    shape: ModelShape, options: _ForwardOptions, p: ModelParams, x: torch.Tensor, tables: _Rotary | None
) -> torch.Tensor:
    """Return the output of a block's attention, `[n, t, width]`, with this rank's heads."""
    x = tp.enter(x, sequence=options.sequence)
    n, t, _ = x.shape
    q, k, v = (_block_linear(options, p[name], x).view(n, t, -1, shape.head_width).transpose(1, 2) for name in "qkv")
    if shape.head_norm:
        norms = {name: {part: tp.enter(w) for part, w in p[f"{name}_norm"].items()} for name in "qk"}
        q, k = _norm(shape, norms["q"], q), _norm(shape, norms["k"], k)
    if tables is not None:
        q, k = _rotate(q, tables), _rotate(k, tables)
    attend = _explicit if options.explicit else context.attention
    return _row_linear(
        options, p["o"], attend(q, k, v, causal=shape.task == "causal").transpose(1, 2).reshape(n, t, -1)
    )


def _rotary_tables(shape: ModelShape, options: _ForwardOptions, x: torch.Tensor) -> _Rotary | None:
    """Return the tables of rotary embeddings for a rank's tokens; None for a model without them."""
    if shape.task != "causal" or shape.positions:
        return None
    width = shape.head_width
    speeds = torch.logspace(0, -1, width // 2, base=500_000.0, device=x.device)
    angles = context.positions(_token_count(options, x), device=x.device)[:, None] * speeds
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def _rotate(x: torch.Tensor, tables: _Rotary) -> torch.Tensor:
    """Rotate queries or keys by their positions."""
    cos, sin = tables
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        t = q.shape[-2]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


@api_boundary
def model_step(model: str, *, length: int, explicit: bool = False) -> "ModelStep":
    """Return the `make_step` of a transformer, by the name of the model, for `fzero.tune`.

    The step clips gradients by the global norm, and updates float32 master weights with AdamW. The model has no
    dropout, and torch keeps its usual residuals. Nothing is downloaded, and no memory is allocated.

    Args:
        model: a preset ("llama-3-8b", "llama-3-70b", "llama-3-405b", "qwen3-8b", "mixtral-8x7b", "gpt2", "gpt2-xl",
            "bert-large", "vit-g-14"), or a Hugging Face config.json (llama, mistral, mixtral, qwen2, qwen3, gpt2, bert,
            vit), or its folder.
        length: tokens of a sequence; for an image model, the side of an image in pixels.
        explicit: whether attention is written out, so that its weights are saved for the backward pass; by default it
            is fused.

    Returns:
        A function from a configuration to `(step, params, opt_state, batch)`.

    Raises:
        ValueError: if the model is unknown, or does not take the length.

    Example:
        >>> import fzero
        >>> from fzero import tuning
        >>> make_step = tuning.model_step("gpt2", length=1024)
        >>> config = tuning.Configuration(stage=3, micro_batch=1, accumulation=1, ranks=8, depth=12)
        >>> step, params, opt_state, batch = make_step(config)
        >>> fzero.tree.numel(params)
        124439808
    """
    shape = shape_of(model)
    check_int("length", length)
    if shape.task == "image" and (length // shape.patch) ** 2 + 1 != shape.positions:
        raise ValueError(f"length={length}: {shape.name} takes images of {_side(shape.positions, shape.patch)} pixels")
    if shape.task != "image" and 0 < shape.positions < length:
        raise ValueError(
            f"length={length}: {shape.name} has {shape.positions} positions, and takes no longer sequences"
        )
    return ModelStep(shape, length, explicit)


@dataclass(frozen=True)
class ModelStep:
    """Makes the steps of a transformer, for any configuration. `model_step` returns one.

    Attributes:
        shape: the sizes of the model.
        length: tokens of a sequence, or the side of an image in pixels.
        explicit: whether attention is written out.
    """

    shape: ModelShape
    length: int
    explicit: bool

    @property
    def blocks_alike(self) -> bool:
        """Whether all blocks are alike, as they are here: `fzero.tune` then plans models of fewer blocks."""
        return True

    @property
    def cache_key(self) -> str:
        """All that the steps depend on besides the configuration: the key under which `fzero.tune` caches rows."""
        return repr(self)

    def bounds(self, config: Configuration, machine: Machine) -> Bounds:
        """Return what a step of the configuration takes and holds at least, without a plan."""
        return bounds_of(self.shape, self.length, config, machine.as_hardware())

    def __call__(self, config: Configuration) -> Any:
        """Return the step of a configuration, and its arguments on the meta device.

        Raises:
            ValueError: if `config.ep` does not divide the experts, `config.tp` the heads, or `config.cp` the tokens;
                or if the pipeline has more stages than the model has blocks.
        """
        shape, depth = self.shape.pad_vocab(config.tp), config.depth or self.shape.depth
        self._check(config, depth)
        axes: dict[str, Any] = {**config.axes}
        ranks = mesh(**axes)
        adamw = optim.adamw(3e-4, weight_decay=0.1, mask=_matrices(config), moments=config.moments)
        opt = optim.master_weights(adamw, config.policy)
        opt = optim.offload(opt, config.offload) if config.offload else opt
        opt = optim.chain(optim.clip_by_global_norm(1.0), opt)
        grad_fn = self._gradients(shape, config, depth)

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = grad_fn(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        stage: Any = config.stage
        pp_loss = self._pipeline(shape, config, depth) if config.pp > 1 else None
        split = pp_loss.split if pp_loss else _rules(shape, config, depth)
        step = shard(train_step, stage=stage, mesh=ranks, axis=config.mean, split=split)
        params = init(shape, depth)
        params, opt_state = step.init(pp_loss.stack(params, ranks) if pp_loss else params, opt)
        return step, params, opt_state, self._split(make_batch(shape, config.global_batch, self.length), config, ranks)

    def _split(self, batch: Any, config: Configuration, ranks: Mesh) -> Any:
        """Split a batch over the ranks: its samples, and along "cp" the tokens of each."""
        if config.cp > 1:
            return context.split(ranks, batch, batch_axis=config.sample_axes)
        return ranks.split(batch, config.sample_axes)

    def _gradients(self, shape: ModelShape, config: Configuration, depth: int) -> Callable[..., Any]:
        """Return the function that computes loss and gradients: of the full model, or of a rank's stages."""
        policy = config.policy
        if config.pp > 1:
            return value_and_grad(self._pipeline(shape, config, depth), reduce="weighted", precision=policy)
        run = partial(_forms_of_block, config.remat)
        loss_fn = partial(_compute_loss, shape, self._options(config), run)
        return value_and_grad(loss_fn, precision=policy, micro_batches=config.accumulation, gather=not config.remat)

    def _pipeline(self, shape: ModelShape, config: Configuration, depth: int) -> Pipeline:
        """Return the loss of the model as a pipeline."""
        options = self._options(config)
        return pipeline(
            first=partial(_embed, shape, options),
            block=partial(_apply_single_block, shape, options),
            last=partial(_head_loss, shape, options),
            micro_batches=config.accumulation,
            schedule=config.schedule,
            stages_per_rank=config.pipeline_stages,
            depth=depth,
            remat=config.remat,
            split=_rules(shape, config, depth),
        )

    def _options(self, config: Configuration) -> _ForwardOptions:
        is_text = self.shape.task != "image"
        sequence = config.tp > 1 and is_text and self.length // config.cp % config.tp == 0
        return _ForwardOptions(self.explicit, config.chunked_loss, sequence, config.float8)

    def _check(self, config: Configuration, depth: int) -> None:
        """Raise an error for sizes of axes that the model cannot be divided by."""
        shape = self.shape
        if config.cp > 1:
            self._check_tokens(config)
        if shape.experts[0] % config.ep or (config.ep > 1 and not shape.experts[0]):
            raise ValueError(
                f"ep={config.ep} does not divide the {shape.experts[0]} experts of {shape.name}: choose a divisor, or "
                "ep=1 for a model without experts"
            )
        sizes = {"heads": shape.heads, "heads of keys and values": shape.kv_heads or shape.heads}
        for name, n in (*sizes.items(), ("hidden units", shape.mlp)):
            if n % config.tp:
                raise ValueError(f"tp={config.tp} does not divide the {n} {name} of {shape.name}: choose a divisor")
        if config.pp > 1 and config.remat == EVERY_SECOND:
            raise ValueError(
                f"remat={config.remat!r} with pp={config.pp}: a pipeline treats all blocks alike: choose pp=1, or "
                f"one of remat={USUAL_REMATS}"
            )
        if config.pp * config.pipeline_stages > depth:
            raise ValueError(
                f"pp={config.pp} by {config.schedule!r}: {shape.name} has {depth} blocks, "
                "fewer than the pipeline has stages"
            )

    def _check_tokens(self, config: Configuration) -> None:
        """Check that tokens can be split over "cp".

        Raises:
            ValueError: if they cannot.
        """
        if self.shape.task == "image":
            raise ValueError(f"cp={config.cp}: {self.shape.name} reads images, which are not split: choose cp=1")
        if self.explicit:
            raise ValueError(f"cp={config.cp}: attention across ranks is always fused: leave explicit attention out")
        if self.length % (2 * config.cp):
            raise ValueError(
                f"cp={config.cp}: each rank holds two equal parts of a sequence, but length={self.length} does not "
                f"divide by {2 * config.cp}: choose a multiple"
            )


@cache
def _split_dims(shape: ModelShape, depth: int) -> dict[str, int]:
    """Return the dimensions of `TENSOR` for the leaves that a model of some blocks has."""
    paths = tree.flatten_with_paths(init(shape, depth))[0]
    return {name: dim for name, dim in TENSOR.items() if any(f".{path}".endswith(f".{name}") for path in paths)}


def _rules(shape: ModelShape, config: Configuration, depth: int) -> tuple[Callable[..., Any], ...] | None:
    """Return the rules that split leaves over axes other than those of ZeRO; None if there are none."""
    rules = [tp.split_rule(_split_dims(shape, depth))] if config.tp > 1 else []
    rules += [moe.split_rule("experts")] if config.ep > 1 else []
    return tuple(rules) or None


def _matrices(config: Configuration) -> Callable[..., Any]:
    """Return the mask of weight decay. It selects matrices, whose blocks a pipeline stacks along a first dimension."""

    def is_matrix(path: str, p: Any) -> bool:
        return p.ndim - (config.pp > 1 and path.startswith("blocks.")) >= 2

    return partial(tree.map_with_path, is_matrix)


def _forms_of_block(setting: bool | str, block: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the variants of a block that a model uses in turn, in a configuration's remat."""
    if setting is False:
        return [block]
    if setting == EVERY_SECOND:
        return [lambda p, *args: block(gather(p), *args), remat(block)]
    return [remat(block, save=None if setting is True else setting)]


def _side(positions: int, patch: int) -> int:
    return round((positions - 1) ** 0.5) * patch
