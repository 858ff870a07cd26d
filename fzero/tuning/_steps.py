"""The usual train step of a transformer of some sizes, for any configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fzero import moe, optim, tree
from fzero.ranks.mesh import Mesh, mesh
from fzero.stages._shard import shard
from fzero.transforms import remat, value_and_grad
from fzero.tuning._models import Shape, batch_of, init, loss_of
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
    def cache_key(self) -> str:
        """All that the steps depend on beside the configuration: `fzero.tune` keeps rows by it."""
        return repr(self)

    def __call__(self, config: Configuration) -> Any:
        """Return the step of a configuration, and its arguments on the meta device.

        Raises:
            ValueError: if `config.ep` does not divide the experts.
        """
        shape = self.shape
        if shape.experts[0] % config.ep or (config.ep > 1 and not shape.experts[0]):
            raise ValueError(f"ep={config.ep} does not divide the {shape.experts[0]} experts of {shape.name}")
        pair = optim.master_weights(optim.adamw(3e-4, weight_decay=0.1, mask=_matrices), config.policy)
        pair = optim.offload(pair, config.offload) if config.offload else pair
        opt = optim.chain(optim.clip_by_global_norm(1.0), pair)
        loss_fn = partial(loss_of, shape, self.explicit, _again(config.remat))

        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            take = value_and_grad(
                loss_fn, precision=config.policy, micro_batches=config.accumulation, gather=not config.remat
            )
            loss, grads = take(params, batch)
            updates, opt_state = opt.update(grads, opt_state, params)
            return optim.apply_updates(params, updates), opt_state, loss

        stage: Any = config.stage
        split = moe.split("experts") if config.ep > 1 else None
        step = shard(train_step, stage=stage, mesh=_mesh(config), split=split)
        params, opt_state = step.init(init(shape, config.depth or shape.depth), opt)
        return step, params, opt_state, step.mesh.split(batch_of(shape, config.global_batch, self.length))


def _mesh(config: Configuration) -> Mesh:
    """Make the ranks of a configuration, of which those along `ep` are neighbours."""
    return mesh(dp=config.ranks) if config.ep == 1 else mesh(dp=config.ranks // config.ep, ep=config.ep)


def _matrices(params: Any) -> Any:
    return tree.map(lambda p: p.ndim >= 2, params)


def _again(how: bool | str) -> Callable[..., Any]:
    """Return what wraps a block for a configuration's remat."""
    if how is False:
        return lambda block: block
    return partial(remat, save=None if how is True else how)


def _side(positions: int, patch: int) -> int:
    return round((positions - 1) ** 0.5) * patch
