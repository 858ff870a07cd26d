"""The loss as a function of the variables of all gradient groups."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero._torch import is_tracing
from fzero._torch.levels import version_key
from fzero.axes import InvariantLoss, call_as_invariant_loss
from fzero.collectives import check_copies
from fzero.transforms._accumulate import MicroBatches
from fzero.transforms._fence import fence
from fzero.transforms._gradient_groups import Argument

__all__ = ["LossOfGroups"]


@dataclass(frozen=True, kw_only=True, eq=False)  # as Spmd, for Dynamo of torch 2.11
class LossOfGroups:
    """The loss as a function of the variables of all gradient groups.

    Attributes:
        loss_and_aux: the user's function, wrapped to return `(loss, aux)`.
        args: the positional arguments, of all micro-batches; the differentiated ones are in `arguments` instead.
        kwargs: the keyword arguments, which are not split.
        arguments: the differentiated arguments, by their indices.
        batch: how the arguments are split into micro-batches.
        divisor: the number of losses in the mean, or 1.
        is_fenced: whether units are reduced in the order of the tree.
        invariant_axes: the axes along which the loss is one value.
        name: the name of the user's function.
        is_reached_by_call: by call, whether the loss depends on a variable.
    """

    loss_and_aux: Callable[..., tuple[torch.Tensor, Any]]
    args: list[Any]
    kwargs: dict[str, Any]
    arguments: dict[int, Argument]
    batch: MicroBatches
    divisor: int
    is_fenced: bool
    invariant_axes: tuple[str, ...]
    name: str
    is_reached_by_call: list[bool]

    @property
    def is_reached(self) -> bool:
        """Whether the loss of any micro-batch depends on a variable."""
        return any(self.is_reached_by_call)

    def __call__(self, j: int | torch.Tensor) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, Any]]:
        """Return the loss of micro-batch j, a function `variables -> (loss, aux)`."""
        return functools.partial(self._micro_batch_loss, j, [self.batch.part(x, i, j) for i, x in enumerate(self.args)])

    def _micro_batch_loss(
        self, j: int | torch.Tensor, parts: list[Any], variables: list[torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """Return the loss and the aux of one micro-batch, as a function of the variables of all groups."""
        args, inputs, anchor = self._build_arguments(j, parts, variables)
        # a trace detects writes itself
        versions = {} if is_tracing() else {i: [version_key(x) for x in xs] for i, xs in inputs.items()}
        loss, aux = (
            self._compute_invariant(variables, args) if self.invariant_axes else self.loss_and_aux(*args, **self.kwargs)
        )
        self._check_not_written(inputs, versions)
        is_known = not torch.compiler.is_dynamo_compiling() and bool(variables)
        self.is_reached_by_call.append(loss.requires_grad or not is_known)
        loss = loss if self.divisor == 1 else loss / self.divisor
        return (fence([loss], anchor)[0][0] if self.is_fenced else loss), aux

    def _build_arguments(
        self, j: int | torch.Tensor, parts: list[Any], variables: list[torch.Tensor]
    ) -> tuple[list[Any], dict[int, list[torch.Tensor]], torch.Tensor]:
        """Build the loss's arguments from the variables.

        Returns:
            The arguments, the leaves of each differentiable one by its position, and the anchor of their fences.
        """
        args, remaining_variables, anchor = list(parts), iter(variables), torch.zeros(0, device="cpu")
        inputs: dict[int, list[torch.Tensor]] = {}
        for i, argument in self.arguments.items():
            leaves = []
            for group in argument.groups:
                xs = group.leaves([next(remaining_variables) for _ in group.variables])
                if self.is_fenced:
                    xs, anchor = fence(xs, anchor)
                leaves.append(xs)
            args[i] = self.batch.part(argument.build(leaves), i, j)
            inputs[i] = [x for xs in leaves for x in xs]
        return args, inputs, anchor

    def _check_not_written(self, inputs: Mapping[int, list[torch.Tensor]], versions: Mapping[int, list[Any]]) -> None:
        """Check that the leaves of the arguments still have their versions.

        Raises:
            RuntimeError: if the loss wrote into one.
        """
        for i, expected in versions.items():
            if expected != [version_key(x) for x in inputs[i]]:
                raise RuntimeError(
                    f"{self.name} wrote into its parameters in place (argument {i}): let it compute new values "
                    "(p = p * mask)"
                )

    def _compute_invariant(self, variables: list[torch.Tensor], args: list[Any]) -> tuple[torch.Tensor, Any]:
        """Compute a loss that is one value along some axes; check that no sum over them counts it several times."""
        invariant_loss = InvariantLoss(self.invariant_axes)
        loss, aux = call_as_invariant_loss(invariant_loss, self.loss_and_aux, *args, **self.kwargs)
        if invariant_loss.has_calls:
            rest = iter(variables)
            groups = [group for x in self.arguments.values() for group in x.groups]
            varying = [(group.varies, [next(rest) for _ in group.variables]) for group in groups]
            check_copies(
                [loss],
                invariant_loss,
                {a: {id(x) for v, xs in varying if a in v for x in xs} for a in self.invariant_axes},
            )
        return loss, aux
