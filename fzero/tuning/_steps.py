"""The usual train step of a transformer of some sizes, for any configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fzero import moe, optim, tp, tree
from fzero.pipelines import Pipeline, pipeline
from fzero.ranks.mesh import mesh
from fzero.stages._shard import shard
from fzero.transforms import remat, value_and_grad
from fzero.tuning._forward import apply_block, embedded, loss_of, told
from fzero.tuning._models import TENSOR, Shape, batch_of, init
from fzero.tuning._presets import shape_of
from fzero.tuning._space import Configuration

__all__ = ["model_step"]


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
