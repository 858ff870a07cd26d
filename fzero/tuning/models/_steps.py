"""Build the usual train step of a transformer, for any configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fzero import optim, tree
from fzero._arguments import check_int
from fzero._tracebacks import api_boundary
from fzero.parallel import context
from fzero.parallel import experts as moe
from fzero.parallel import tensor as tp
from fzero.parallel.pipeline import Pipeline, pipeline
from fzero.ranks import Mesh, mesh
from fzero.transforms import gather, remat, value_and_grad
from fzero.tuning._search_space import EVERY_SECOND, USUAL_REMATS, Configuration
from fzero.tuning.machines import Machine
from fzero.tuning.models._bounds import Bounds, compute_bounds
from fzero.tuning.models._forward_pass import ForwardOptions, apply_single_block, compute_loss, embed, head_loss
from fzero.tuning.models._model_names import TENSOR, ModelShape, init, make_batch
from fzero.tuning.models._presets import model_shape
from fzero.zero import shard

__all__ = ["ModelStep", "model_step"]


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
    shape = model_shape(model)
    check_int("length", length)
    if shape.task == "image" and (length // shape.patch) ** 2 + 1 != shape.positions:
        raise ValueError(
            f"length={length}: {shape.name} takes images of {_image_side(shape.positions, shape.patch)} pixels"
        )
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
        return compute_bounds(self.shape, self.length, config, machine.as_hardware())

    def __call__(self, config: Configuration) -> Any:
        """Return the step of a configuration, and its arguments on the meta device.

        Raises:
            ValueError: if `config.ep` does not divide the experts, `config.tp` the heads, or `config.cp` the tokens;
                or if the pipeline has more stages than the model has blocks.
        """
        shape, depth = self.shape.pad_vocab(config.tp), config.depth or self.shape.depth
        self._check_axes(config, depth)
        axes: dict[str, Any] = {**config.axes}
        ranks = mesh(**axes)
        adamw = optim.adamw(3e-4, weight_decay=0.1, mask=_weight_decay_mask(config), moments=config.moments)
        opt = optim.master_weights(adamw, config.policy)
        opt = optim.offload(opt, config.offload) if config.offload else opt
        opt = optim.chain(optim.clip_by_global_norm(1.0), opt)
        grad_fn = self._make_gradients(shape, config, depth)

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = grad_fn(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        stage: Any = config.stage
        pp_loss = self._make_pipeline(shape, config, depth) if config.pp > 1 else None
        split = pp_loss.split if pp_loss else _split_rules(shape, config, depth)
        step = shard(train_step, stage=stage, mesh=ranks, axis=config.mean, split=split)
        params = init(shape, depth)
        params, opt_state = step.init(pp_loss.stack(params, ranks) if pp_loss else params, opt)
        return (
            step,
            params,
            opt_state,
            self._split_batch(make_batch(shape, config.global_batch, self.length), config, ranks),
        )

    def _split_batch(self, batch: Any, config: Configuration, ranks: Mesh) -> Any:
        """Split a batch over the ranks: its samples, and along "cp" the tokens of each."""
        if config.cp > 1:
            return context.split(ranks, batch, batch_axis=config.sample_axes)
        return ranks.split(batch, config.sample_axes)

    def _make_gradients(self, shape: ModelShape, config: Configuration, depth: int) -> Callable[..., Any]:
        """Return the function that computes loss and gradients: of the full model, or of a rank's stages."""
        policy = config.policy
        if config.pp > 1:
            return value_and_grad(self._make_pipeline(shape, config, depth), reduce="weighted", precision=policy)
        run = partial(_block_variants, config.remat)
        loss_fn = partial(compute_loss, shape, self._forward_options(config), run)
        return value_and_grad(loss_fn, precision=policy, micro_batches=config.accumulation, gather=not config.remat)

    def _make_pipeline(self, shape: ModelShape, config: Configuration, depth: int) -> Pipeline:
        """Return the loss of the model as a pipeline."""
        options = self._forward_options(config)
        return pipeline(
            first=partial(embed, shape, options),
            block=partial(apply_single_block, shape, options),
            last=partial(head_loss, shape, options),
            micro_batches=config.accumulation,
            schedule=config.schedule,
            stages_per_rank=config.pipeline_stages,
            depth=depth,
            remat=config.remat,
            split=_split_rules(shape, config, depth),
        )

    def _forward_options(self, config: Configuration) -> ForwardOptions:
        is_text = self.shape.task != "image"
        sequence = config.tp > 1 and is_text and self.length // config.cp % config.tp == 0
        return ForwardOptions(self.explicit, config.chunked_loss, sequence, config.float8)

    def _check_axes(self, config: Configuration, depth: int) -> None:
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


def _split_rules(shape: ModelShape, config: Configuration, depth: int) -> tuple[Callable[..., Any], ...] | None:
    """Return the rules that split leaves over axes other than those of ZeRO; None if there are none."""
    rules = [tp.split_rule(_split_dims(shape, depth))] if config.tp > 1 else []
    if config.ep > 1:
        rules.append(moe.split_rule("experts"))
    return tuple(rules) or None


def _weight_decay_mask(config: Configuration) -> Callable[..., Any]:
    """Return the mask of weight decay. It selects matrices, whose blocks a pipeline stacks along a first dimension."""

    def is_matrix(path: str, p: Any) -> bool:
        return p.ndim - (config.pp > 1 and path.startswith("blocks.")) >= 2

    return partial(tree.map_with_path, is_matrix)


def _block_variants(setting: bool | str, block: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the variants of a block that a model uses in turn, in a configuration's remat."""
    if setting is False:
        return [block]
    if setting == EVERY_SECOND:
        return [lambda p, *args: block(gather(p), *args), remat(block)]
    return [remat(block, save=None if setting is True else setting)]


def _image_side(positions: int, patch: int) -> int:
    return round((positions - 1) ** 0.5) * patch
