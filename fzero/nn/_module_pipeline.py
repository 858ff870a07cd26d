"""pipeline: the loss of a module, computed by a pipeline over its blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._arguments import check_callable
from fzero._tracebacks import api_boundary
from fzero.axes import SplitRules
from fzero.nn._context import with_context
from fzero.nn.split import split_module
from fzero.parallel.pipeline import Pipeline
from fzero.parallel.pipeline import pipeline as functional_pipeline
from fzero.parallel.schedules import PipelineSchedule
from fzero.parallel.tensor import Layers

__all__ = ["ModulePipeline", "pipeline"]


class ModulePipeline(NamedTuple):
    """A module as a pipeline: `loss, params, join = pipeline(module, ...)`.

    Attributes:
        loss: the loss `(params, batch) -> (total, weight)`, with `stack`, `unstack` and `split`; see `fzero.pipeline`.
        params: the module's parameters: `{"blocks": [{name: tensor}, ...], "rest": {name: tensor}}`.
        join: a function from a tree like `params` to a dict by the parameters' names in the module.
    """

    loss: Pipeline
    params: dict[str, Any]
    join: Callable[[Any], dict[str, Any]]

    @property
    def name(self) -> Callable[[str], str]:
        """Return a function from paths in `params` to names in the module, for `name=` of `fzero.checkpoint.hf`."""
        path_of_name = self.join(tree.map_with_path(lambda path, _: path, self.params))
        name_of_path = {path: stored_name for stored_name, path in path_of_name.items()}

        def find_name(path: str) -> str:
            if path not in name_of_path:
                raise ValueError(
                    f"leaf {path!r} is not a parameter of the module: pass a tree with the structure of `params`"
                )
            return name_of_path[path]

        return find_name


@api_boundary
def pipeline(
    module: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    *,
    micro_batches: int,
    axis: str = "pp",
    schedule: str | PipelineSchedule = "1f1b",
    stages_per_rank: int = 1,
    depth: int | Sequence[int] | None = None,
    remat: Any = False,
    blocks: str | None = None,
    inputs: Callable[[Any], Any] | None = None,
    split: SplitRules | None = None,
    tp: Layers | None = None,
    context: str | None = None,
    ignore_writes: Sequence[str] = (),
) -> ModulePipeline:
    """Make a loss function that runs a module's repeated blocks as a pipeline. The module is not edited.

    The blocks are the children of a ModuleList or Sequential: at least two modules of one class, whose parameters have
    the same names and shapes. The module must call each block once, in order, and must pass on the output of each
    block unchanged to the next. Blocks may differ in everything else: attributes (the number of a layer, a sliding
    window), buffers and arguments.

    The part before the blocks runs on the first block's stage, and the part after them on the last block's stage. Masks
    and rotary tables are computed from the batch on each rank that needs them, so only one tensor is sent from rank to
    rank.

    Args:
        module: any module that `functional` accepts; a model of transformers needs `use_cache=False`.
        loss: `(output, batch) -> (total, weight)`: the sum of a micro-batch's losses, and the sum of their weights. It
            may also return a mean over the micro-batch. `output` is the module's output for the micro-batch.
        micro_batches: the number of equal parts into which a rank's batch is split.
        axis: the axis of the mesh along which the stages lie.
        schedule: the name of a schedule, or a table; see `fzero.parallel.schedules.schedule`.
        stages_per_rank: the number of stages per rank, for a schedule given by name.
        depth: the number of blocks, or a list with each stage's number of blocks; needed if these numbers differ.
        remat: True to run each block again in the backward pass, or a value for `fzero.remat(save=)`, which sets what a
            block saves.
        blocks: the name of the list of blocks, if the module has several.
        inputs: a function from the batch to the module's arguments: a dict by name, a tuple, or one tensor. By default
            the batch itself holds the arguments.
        split: one or several rules for leaves that are split along other axes, by their paths in `params`.
        tp: the layers that are split over an axis, as `fzero.parallel.tensor.layers(module)` lists them. `loss.split`
            includes their rule.
        context: the axis over which the tokens of sequences are split, such as "cp", for a model of transformers.
            Documents are an argument, `documents`, in place of a mask; see `fzero.nn.functional`.
        ignore_writes: the paths of attributes that forward may write; see `fzero.nn.functional`.

    Returns:
        `(loss, params, join)`.

    Raises:
        TypeError: if `module` cannot be taken apart, or its sequences cannot be split; see `functional`.
        ValueError: if the module has no list of blocks, or several. Also if its blocks' parameters differ, are frozen
            or are shared; the message names them. Also if its configuration requests outputs of blocks that would be
            lost (`output_router_logits`, `output_attentions`, `output_hidden_states`). Also where `fzero.pipeline`
            raises. The loss raises if the module uses its blocks in another way, or a block writes into a buffer.

    Example:
        >>> import fzero
        >>> layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(4)])
        >>> module = torch.nn.Sequential(torch.nn.Linear(3, 2), layers, torch.nn.Linear(2, 1))
        >>> loss, params, join = pipeline(
        ...     module,
        ...     lambda output, batch: (output - batch["y"]).square().mean(),
        ...     inputs=lambda batch: batch["x"],
        ...     micro_batches=2,
        ... )
        >>> step_loss = fzero.value_and_grad(loss, reduce="weighted")
        >>> batch = {"x": torch.ones(4, 3), "y": torch.ones(4, 1)}
        >>> value, grads = step_loss(params, batch)
        >>> bool(torch.isclose(value, (module(batch["x"]) - 1).square().mean()))
        True
        >>> list(join(grads)) == [name for name, _ in sorted(module.named_parameters(), key=lambda p: p[0][0] != "1")]
        True
    """
    check_callable("fzero.nn.pipeline: loss", loss, "a function (output, batch) -> (total, weight)")
    if inputs is not None:
        check_callable("fzero.nn.pipeline: inputs", inputs, "a function of the batch")
    module = module if context is None else with_context(module, context)
    split_model, params = split_module(module, blocks, tp, ignore_writes)
    module_arguments = inputs or (lambda batch: batch)

    def first(params: Any, batch: Any) -> Any:
        if tp is not None:
            tp.check_shared(batch)
        return split_model.first(params["rest"], module_arguments(batch))

    def block(p: Any, x: Any, index: Any, batch: Any) -> Any:
        return split_model.block(p, x, split_model.block_arguments(module_arguments(batch), x.dtype), index)

    def last(params: Any, x: Any, batch: Any) -> Any:
        return loss(split_model.last(params["rest"], x, module_arguments(batch)), batch)

    pipelined_loss = functional_pipeline(
        block=block,
        first=first,
        last=last,
        micro_batches=micro_batches,
        axis=axis,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        depth=depth,
        remat=remat,
        split=split if tp is None else (_TensorSplit(tp, split_model.names[0]), *_as_tuple(split)),
    )
    return ModulePipeline(pipelined_loss, params, split_model.join)


@dataclass(frozen=True)
class _TensorSplit:
    """The split rule of tensor-parallel layers, for the parameters of a pipeline.

    Attributes:
        layers: the module's layers that are split over an axis.
        block: the name of the module's first block; all blocks are split alike.
    """

    layers: Layers
    block: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Return the axes and dimensions along which a leaf is split."""
        head, _, name = path.partition(".")
        return self.layers.split(f"{self.block}.{name.partition('.')[2]}" if head == "blocks" else name, leaf)


def _as_tuple(split: SplitRules | None) -> tuple[Any, ...]:
    if split is None:
        return ()
    return tuple(split) if isinstance(split, tuple | list) else (split,)
