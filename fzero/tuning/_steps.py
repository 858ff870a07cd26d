"""The usual train step of a transformer of some sizes, for any configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fzero import optim, tree
from fzero.axes import axis_size, where_bound
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.parallel.pipeline import Pipeline, pipeline
from fzero.ranks import mesh
from fzero.transforms import gather, remat, value_and_grad
from fzero.tuning._models import TENSOR, Params, Shape, batch_of, init, shape_of
from fzero.tuning._space import Configuration
from fzero.zero import shard

__all__ = ["apply_block", "embedded", "loss_of", "model_step", "told"]

# The forward pass of a transformer of some sizes, cut at its blocks: an ordinary functional model.
#
# Along an axis "tp" each rank has some heads, hidden units, and a part of the vocabulary. Without one nothing is cut.


Turns = tuple[torch.Tensor, torch.Tensor]  # by how much each position turns a query or key: cosines and sines


def loss_of(shape: Shape, explicit: bool, run: Callable[..., Any], params: Params, batch: Any) -> torch.Tensor:
    """Compute the loss of a batch. What is not in a block is gathered where it is used.

    Args:
        shape: of the model.
        explicit: whether attention is written out, so that its weights are kept, as before flash attention.
        run: wraps a block, as `fzero.remat` does.
        params: the parameters, or their boxes.
        batch: as `batch_of` makes it.
    """
    block = run(partial(_apply_block, shape, explicit))
    x = embedded(shape, params, batch)
    turns = _turns(shape, x)
    for p in params["blocks"]:
        x = block(p, x, turns)
    return told(shape, params, x, batch)


def embedded(shape: Shape, params: Params, batch: Any) -> torch.Tensor:
    """Return what the first block is given of a batch: `[samples, tokens, width]`."""
    given = batch[0]
    if shape.task == "image":
        n, p = len(given), shape.patch
        weights = gather(params["patches"])
        cut = given.to(weights["w"].dtype).unfold(2, p, p).unfold(3, p, p)
        x = _applied(weights, cut.permute(0, 2, 3, 1, 4, 5).reshape(n, -1, 3 * p * p))
        x = torch.cat([gather(params["first"]).expand(n, 1, -1), x], 1)
    else:
        x = tp.embed(given, gather(params["tokens"]))
    if shape.positions:
        x = x + gather(params["positions"])[: x.shape[1]]
    if shape.task == "masked":
        x = _normed(shape, gather(params["norm0"]), x + gather(params["segments"])[0])
    return x


def apply_block(shape: Shape, explicit: bool, p: Params, x: torch.Tensor) -> torch.Tensor:
    """Apply one block by itself, as a stage of a pipeline does."""
    return _apply_block(shape, explicit, p, x, _turns(shape, x))


def told(shape: Shape, params: Params, x: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the loss of what the last block made."""
    x = _normed(shape, gather(params["norm"]), x)
    if shape.task == "image":
        x = x[:, 0]
    if shape.task == "masked":
        x = F.gelu(_applied(gather(params["last"]), x))
    x = tp.enter(x)
    logits = x @ gather(params["tokens"]).T if shape.tied else _applied(gather(params["head"]), x)
    logits = (logits + gather(params["bias"]) if "bias" in params else logits).flatten(0, -2).float()
    loss = F.cross_entropy if axis_size(where_bound("tp")) == 1 else tp.cross_entropy
    return loss(logits, batch[1].flatten())


def _applied(p: Params, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] + p["b"] if "b" in p else x @ p["w"]


def _left(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Multiply by this rank's rows, sum over the ranks, and add a bias once."""
    y = tp.leave(x @ p["w"])
    return y + p["b"] if "b" in p else y


def _normed(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    size = p["w"].shape
    return F.layer_norm(x, size, p["w"], p["b"]) if shape.norm == "layer" else F.rms_norm(x, size, p["w"])


def _apply_block(shape: Shape, explicit: bool, p: Params, x: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    """Apply a block; BERT's norms follow its parts, all others precede theirs."""
    if shape.task == "masked":
        x = _normed(shape, p["norm1"], x + _attended(shape, explicit, p, x, turns))
        return _normed(shape, p["norm2"], x + _fed(shape, p["mlp"], x))
    x = x + _attended(shape, explicit, p, _normed(shape, p["norm1"], x), turns)
    h = _normed(shape, p["norm2"], x)
    return x + (_sent(shape, p, h) if "experts" in p else _fed(shape, p["mlp"], h))


CAPACITY = 1.25  # seats of an expert, by even routing


def _sent(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    """Send tokens to their experts, of each of which a rank along "tp" has a part."""
    routing = moe.route(_applied(p["router"], x).float(), k=shape.experts[1], normalise=True)
    routing = routing._replace(gates=tp.enter(routing.gates))
    return tp.leave(moe.layer(partial(_fed_rows, shape), p["experts"], tp.enter(x), routing, capacity=CAPACITY))


def _fed(shape: Shape, p: Params, x: torch.Tensor) -> torch.Tensor:
    x = tp.enter(x)
    up = _applied(p["up"], x)
    return _left(p["down"], F.silu(_applied(p["gate"], x)) * up if shape.gated else F.gelu(up))


def _fed_rows(shape: Shape, p: Params, rows: torch.Tensor, linear: moe.Linear) -> torch.Tensor:
    up = linear(rows, p["up"]["w"])
    return linear(F.silu(linear(rows, p["gate"]["w"])) * up if shape.gated else F.gelu(up), p["down"]["w"])


def _attended(shape: Shape, explicit: bool, p: Params, x: torch.Tensor, turns: Turns | None) -> torch.Tensor:
    n, t, _ = x.shape
    x = tp.enter(x)
    q, k, v = (_applied(p[name], x).view(n, t, -1, shape.head_width).transpose(1, 2) for name in "qkv")
    if shape.head_norm:
        own = {name: {part: tp.enter(w) for part, w in p[f"{name}_norm"].items()} for name in "qk"}
        q, k = _normed(shape, own["q"], q), _normed(shape, own["k"], k)
    if turns is not None:
        q, k = _turned(q, turns), _turned(k, turns)
    attend = _explicit if explicit else _fused
    return _left(p["o"], attend(q, k, v, shape.task == "causal").transpose(1, 2).reshape(n, t, -1))


def _turns(shape: Shape, x: torch.Tensor) -> Turns | None:
    """Say how far the positions turn queries and keys; None where they do not."""
    if shape.task != "causal" or shape.positions:
        return None
    t, width = x.shape[1], shape.head_width
    speeds = torch.logspace(0, -1, width // 2, base=500_000.0, device=x.device)
    angles = torch.arange(t, device=x.device)[:, None] * speeds
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def _turned(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn queries or keys by their positions."""
    cos, sin = turns
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        t = q.shape[-2]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def model_step(model: str, *, length: int, explicit: bool = False) -> "ModelStep":
    """Return what `fzero.tune` takes as `make_step`, for a transformer by its name.

    The step is AdamW on float32 masters behind a clip by the global norm. Its activations are those that torch keeps
    for such a model, with no dropout. Nothing is downloaded, and nothing has memory.

    Args:
        model: a preset ("llama-3-8b", "llama-3-70b", "qwen3-8b", "mixtral-8x7b", "gpt2", "gpt2-xl", "bert-large",
            "vit-g-14"), or a Hugging Face config.json (llama, mistral, mixtral, qwen2, qwen3, gpt2, bert, vit), or its
            folder.
        length: tokens of a sequence; of an image model the image's side, in pixels.
        explicit: whether attention is written out, so that its weights are kept; else it is fused.

    Returns:
        A function from a configuration to `(step, params, opt_state, batch)`.

    Raises:
        ValueError: if the model is unknown, or the length is not one that it takes.

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
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"length={length!r}: expected an int, at least 1")
    if shape.task == "image" and (length // shape.patch) ** 2 + 1 != shape.positions:
        raise ValueError(f"length={length}: {shape.name} takes images of {_side(shape.positions, shape.patch)} pixels")
    if shape.task != "image" and 0 < shape.positions < length:
        raise ValueError(f"length={length}: {shape.name} has {shape.positions} positions")
    return ModelStep(shape, length, explicit)


@dataclass(frozen=True)
class ModelStep:
    """Makes steps of a transformer, for any configuration; `model_step` makes one.

    Attributes:
        shape: the sizes of the model.
        length: tokens of a sequence, or pixels of a side.
        explicit: whether attention is written out.
    """

    shape: Shape
    length: int
    explicit: bool

    @property
    def blocks_alike(self) -> bool:
        """That all blocks are: `fzero.tune` then plans fewer of them."""
        return True

    @property
    def cache_key(self) -> str:
        """All that the steps depend on beside the configuration: `fzero.tune` keeps rows by it."""
        return repr(self)

    def __call__(self, config: Configuration) -> Any:
        """Return the step of a configuration, and its arguments on the meta device.

        Raises:
            ValueError: if `config.ep` does not divide the experts, or `config.tp` the heads; or if the pipeline has
                more stages than the model has blocks.
        """
        shape, depth = self.shape.padded(config.tp), config.depth or self.shape.depth
        self._check(config, depth)
        axes: dict[str, Any] = {**config.axes}
        ranks = mesh(**axes)
        pair = optim.master_weights(optim.adamw(3e-4, weight_decay=0.1, mask=_matrices(config)), config.policy)
        pair = optim.offload(pair, config.offload) if config.offload else pair
        opt = optim.chain(optim.clip_by_global_norm(1.0), pair)
        take = self._gradients(shape, config, depth)

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = take(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        stage: Any = config.stage
        piped = self._pipeline(shape, config, depth) if config.pp > 1 else None
        split = piped.split if piped else _rules(config)
        step = shard(train_step, stage=stage, mesh=ranks, axis=config.mean, split=split)
        params = init(shape, depth)
        params, opt_state = step.init(piped.stack(params, ranks) if piped else params, opt)
        data = tuple([name for name in config.mean if name != "pp"])
        return step, params, opt_state, ranks.split(batch_of(shape, config.global_batch, self.length), data)

    def _gradients(self, shape: Shape, config: Configuration, depth: int) -> Callable[..., Any]:
        """Return the function that takes gradients: of the whole model, or of a rank's stages."""
        policy = config.policy
        if config.pp > 1:
            return value_and_grad(self._pipeline(shape, config, depth), reduce="weighted", precision=policy)
        loss_fn = partial(loss_of, shape, self.explicit, _again(config.remat))
        return value_and_grad(loss_fn, precision=policy, micro_batches=config.accumulation, gather=not config.remat)

    def _pipeline(self, shape: Shape, config: Configuration, depth: int) -> Pipeline:
        return pipeline(
            first=partial(embedded, shape),
            block=partial(apply_block, shape, self.explicit),
            last=partial(told, shape),
            micro_batches=config.accumulation,
            schedule=config.schedule,
            stages=config.pipeline_stages,
            depth=depth,
            remat=config.remat,
            split=_rules(config),
        )

    def _check(self, config: Configuration, depth: int) -> None:
        shape = self.shape
        if shape.experts[0] % config.ep or (config.ep > 1 and not shape.experts[0]):
            raise ValueError(f"ep={config.ep} does not divide the {shape.experts[0]} experts of {shape.name}")
        sizes = {"heads": shape.heads, "heads of keys and values": shape.kv_heads or shape.heads}
        for what, n in (*sizes.items(), ("hidden units", shape.mlp)):
            if n % config.tp:
                raise ValueError(f"tp={config.tp} does not divide the {n} {what} of {shape.name}")
        if config.pp * config.pipeline_stages > depth:
            raise ValueError(
                f"pp={config.pp} by {config.schedule!r}: {shape.name} has {depth} blocks, fewer than stages"
            )


def _rules(config: Configuration) -> tuple[Callable[..., Any], ...] | None:
    """Return the rules by which leaves are split over axes beside those of ZeRO; None for none."""
    rules = [tp.split(TENSOR)] if config.tp > 1 else []
    rules += [moe.split("experts")] if config.ep > 1 else []
    return tuple(rules) or None


def _matrices(config: Configuration) -> Callable[..., Any]:
    """Return the mask of what weight decay applies to: matrices, whose blocks a pipeline stacks."""

    def is_matrix(path: str, p: Any) -> bool:
        return p.ndim - (config.pp > 1 and path.startswith("blocks.")) >= 2

    return partial(tree.map_with_path, is_matrix)


def _again(how: bool | str) -> Callable[..., Any]:
    """Return what wraps a block for a configuration's remat."""
    if how is False:
        return lambda block: block
    return partial(remat, save=None if how is True else how)


def _side(positions: int, patch: int) -> int:
    return round((positions - 1) ** 0.5) * patch
