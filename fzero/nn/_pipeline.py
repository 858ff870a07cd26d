"""pipeline: a module's loss, run as a pipeline of its blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.axes import SplitRules
from fzero.nn._cut import cut
from fzero.parallel.pipeline import Pipeline
from fzero.parallel.pipeline import pipeline as pipeline_of
from fzero.parallel.schedules import Schedule
from fzero.parallel.tensor import Layers

__all__ = ["Pipelined", "pipeline"]


class Pipelined(NamedTuple):
    """A module as a pipeline: `loss, params, join = pipeline(module, ...)`.

    Attributes:
        loss: the loss `(params, batch) -> (total, weight)`, with `stack`, `unstack` and `split`; see `fzero.pipeline`.
        params: the module's parameters: `{"blocks": [{name: tensor}, ...], "rest": {name: tensor}}`.
        join: gives the parameters, or anything of their form, by their names in the module.
    """

    loss: Pipeline
    params: dict[str, Any]
    join: Callable[[Any], dict[str, Any]]

    @property
    def name(self) -> Callable[[str], str]:
        """Give the names in the module by the paths in `params`, for `name=` of `fzero.checkpoint.hf`."""
        names = {path: name for name, path in self.join(tree.map_with_path(lambda path, _: path, self.params)).items()}

        def name(path: str) -> str:
            if path not in names:
                raise ValueError(
                    f"leaf {path!r} is no parameter of the module: give a tree like `params`, and no other"
                )
            return names[path]

        return name


@api_boundary
def pipeline(
    module: torch.nn.Module,
    loss: Callable[[Any, Any], Any],
    *,
    micro_batches: int,
    axis: str = "pp",
    schedule: str | Schedule = "1f1b",
    stages: int = 1,
    depth: int | Sequence[int] | None = None,
    remat: Any = False,
    blocks: str | None = None,
    inputs: Callable[[Any], Any] | None = None,
    split: SplitRules | None = None,
    tp: Layers | None = None,
) -> Pipelined:
    """Make a loss function of a module that runs its repeated blocks as a pipeline. The module is not edited.

    Blocks are the children of a ModuleList or Sequential: two or more of one class, with parameters of the same names
    and shapes. The module calls each once, in their order, and hands on what one returns to the next, unchanged. Blocks
    may differ in all else: attributes (the number of a layer, a sliding window), buffers, what they are given.

    What comes before the blocks runs where the first one is, and what comes after where the last one is. Masks and
    rotary tables are computed of the batch where they are needed, so only one tensor goes from rank to rank.

    Args:
        module: any module that `functional` takes apart: models of transformers, with `use_cache=False`.
        loss: `(output, batch) -> (total, weight)`: of the module's output for a micro-batch, the sum of the losses and
            that of their weights. Or a mean over the micro-batch.
        micro_batches: how many equal parts a rank's batch is cut into.
        axis: of the mesh, along which stages lie.
        schedule: the name of a schedule, or a table; see `fzero.parallel.schedules.schedule`.
        stages: how many stages a rank holds, for a schedule by name.
        depth: the number of blocks, or that of each stage; needed where stages have unequally many.
        remat: whether each block runs again in the backward pass; or what it saves then, as `fzero.remat(save=)` takes.
        blocks: the name of the list of blocks, where the module has several.
        inputs: a function of the batch that gives what the module is called with: a dict by name, a tuple, or one
            tensor. By default it is the batch.
        split: a rule for leaves that are split along other axes, by their paths in `params`; or several.
        tp: the layers that are cut over an axis, as `fzero.parallel.tensor.layers(module)` lists them. `loss.split`
            has their rule.

    Returns:
        `(loss, params, join)`.

    Raises:
        TypeError: if `module` cannot be taken apart; see `functional`.
        ValueError: if it has no list of blocks, or several; or if its blocks' parameters differ, are frozen, or are
            shared with others. Names them. Also if its configuration asks for outputs of blocks that would be lost
            (`output_router_logits`, `output_attentions`, `output_hidden_states`); or as `fzero.pipeline` does.
            When called, if the module uses its blocks in another way, or a block writes into a buffer.

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
    if not callable(loss):
        raise TypeError(f"fzero.nn.pipeline: loss={loss!r}: expected a function (output, batch) -> (total, weight)")
    made, params = cut(module, blocks, tp)
    inputs_of = inputs or (lambda batch: batch)

    def first(params: Any, batch: Any) -> Any:
        if tp is not None:
            tp.check_shared(batch)
        return made.first(params["rest"], inputs_of(batch))

    def block(p: Any, x: Any, index: Any, batch: Any) -> Any:
        return made.block(p, x, made.given(inputs_of(batch), x.dtype), index)

    def last(params: Any, x: Any, batch: Any) -> Any:
        return loss(made.last(params["rest"], x, inputs_of(batch)), batch)

    piped = pipeline_of(
        block=block,
        first=first,
        last=last,
        micro_batches=micro_batches,
        axis=axis,
        schedule=schedule,
        stages=stages,
        depth=depth,
        remat=remat,
        split=split if tp is None else (TensorSplit(tp, made.names[0]), *_each(split)),
    )
    return Pipelined(piped, params, made.join)


@dataclass(frozen=True)
class TensorSplit:
    """The rule of layers that are cut over an axis, for the parameters of a pipeline.

    Attributes:
        layers: of the module.
        block: the name of its first block: all are cut alike.
    """

    layers: Layers
    block: str

    def __call__(self, path: str, leaf: torch.Tensor) -> dict[str, int] | None:
        """Say how a leaf is cut."""
        head, _, name = path.partition(".")
        return self.layers.split(f"{self.block}.{name.partition('.')[2]}" if head == "blocks" else name, leaf)


def _each(split: SplitRules | None) -> tuple[Any, ...]:
    return () if split is None else tuple(split) if isinstance(split, tuple | list) else (split,)
