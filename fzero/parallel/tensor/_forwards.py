"""The forward passes of layers that run on a rank's part of their parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fzero.axes import axis_if_bound, axis_index, axis_size
from fzero.parallel.tensor._boundaries import all_gather, enter, leave, scatter
from fzero.parallel.tensor._functions import own_rows
from fzero.parallel.tensor._shared_inputs import SharedInputModule, override_parameters
from fzero.parallel.tensor._style_splits import kv_groups
from fzero.parallel.tensor._styles import (
    ColumnParallel,
    Embedding,
    Experts,
    LatentProjection,
    ParamSplit,
    ReplicatedParams,
    RowParallel,
    Style,
)

__all__ = ["Layer"]


@dataclass(frozen=True)
class Layer:
    """A layer that runs in one of the parallel styles.

    Attributes:
        name: the module's name, for messages.
        module: the layer.
        style: the layer's parallel style.
        axis: the axis over which its parameters are split.
        param_splits: how each split parameter is split.
        sizes: for each split parameter, the full size of the dimension that is split.
        shared_input: the module that holds this layer and others with the same input; None if there is none.
        is_gathered: whether it lies in a module that gathers all tokens, and leaves parts of them.
        groups: for keys and values of attention, the number of query heads that share one of their heads; else 0.
        run: the module's own forward pass.
        linear: the function that computes a linear layer's product.
    """

    name: str
    module: torch.nn.Module
    style: Style
    axis: str
    param_splits: Mapping[str, ParamSplit]
    sizes: Mapping[str, int]
    shared_input: SharedInputModule | None
    is_gathered: bool
    groups: int
    run: Callable[..., Any]
    linear: Callable[..., torch.Tensor] = F.linear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with this rank's part of its parameters."""
        if isinstance(self.style, ColumnParallel):
            return self._column_forward(*args, **kwargs)
        if isinstance(self.style, RowParallel):
            return self._row_forward(*args, **kwargs)
        if isinstance(self.style, Embedding):
            return self._embedding_forward(*args, **kwargs)
        if isinstance(self.style, LatentProjection):
            return self._latent_forward(*args, **kwargs)
        if isinstance(self.style, ReplicatedParams | Experts):
            return self._run_on_parts(*args, **kwargs)
        with override_parameters(self.module, self._parameters(), {}):
            return self.run(*args, **kwargs)

    def _column_forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if not self.is_gathered and isinstance(self.style, ColumnParallel) and self.style.sums_input_gradient:
            x = enter(x, self.axis) if self.shared_input is None else self.shared_input.enter_once(x)
        if self._shares_heads():
            w, b = self._own_heads(w), None if b is None else self._own_heads(b)
        y = self.linear(x, w.mT if self.param_splits["weight"].dim else w, b)
        return all_gather(y, self.axis, dim=-1) if isinstance(self.style, ColumnParallel) and self.style.gather else y

    def _row_forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        w, b = p["weight"], p.get("bias")
        if isinstance(self.style, RowParallel) and self.style.split_input:
            x = scatter(x, self.axis, dim=-1)
        w = w if self.param_splits["weight"].dim else w.mT
        y = leave(self.linear(x, w, None), self.axis, sequence=self.is_gathered)
        if b is None:
            return y
        return y + (enter(b, self.axis) if self.is_gathered else b)

    def _latent_forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self._parameters()
        return enter(self.linear(x, p["weight"], p.get("bias")), self.axis)

    def _embedding_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not axis_if_bound(self.axis):
            return self.run(tokens)
        w, padding = self._parameters()["weight"], vars(self.module)["padding_idx"]
        local, is_local, fill = own_rows(tokens, w, self.axis)
        with override_parameters(self.module, {}, {"padding_idx": None}):  # padding_idx is a row of the full table
            y = self.run(local)
        if padding is not None:  # the padding row gets no gradient
            y = torch.where((tokens == padding % self.sizes["weight"]).unsqueeze(-1), y.detach(), y)
        return leave(torch.where(is_local, y, fill), self.axis)

    def _run_on_parts(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on inputs that differ by rank, or on parts of its own parameters, whose results are summed."""
        replicated = [name for name, _ in self.module.named_parameters(recurse=False) if name not in self.param_splits]
        params = {name: enter(getattr(self.module, name), self.axis) for name in replicated}
        if isinstance(self.style, ReplicatedParams):
            with override_parameters(self.module, params, {}):
                return self.run(*args, **kwargs)

        def enter_input(x: Any) -> Any:
            return enter(x, self.axis) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        with override_parameters(self.module, {**params, **self._parameters()}, {}):
            out = self.run(*map(enter_input, args), **{name: enter_input(x) for name, x in kwargs.items()})
        return leave(out, self.axis)

    # Parameters.

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the layer's parameters in the shapes that its own forward pass takes.

        Raises:
            ValueError: if a parameter does not have the size of a rank's part.
        """
        params = {}
        for name, x in self.module.named_parameters(recurse=False):
            if (param_split := self.param_splits.get(name)) is not None:
                self._check_split(name, x, param_split)
                x = param_split.pack(x)
            params[name] = x
        return params

    def _check_split(self, name: str, x: torch.Tensor, param_split: ParamSplit) -> None:
        n, size = axis_size(axis_if_bound(self.axis)), self.sizes[name]
        expected = size if param_split.may_replicate and param_split.heads % n else size // n
        if x.shape[param_split.unpacked_dim] != expected:
            raise ValueError(
                f"parameter '{self.name}.{name}' is {list(x.shape)}: of the {size} along dimension "
                f"{param_split.unpacked_dim}, each of the {n} ranks along {self.axis!r} holds {expected}. Pass the "
                "layers' rule to fzero.shard, split=layers.split, and split frozen parameters too, with step.partition"
            )

    def _shares_heads(self) -> bool:
        """Return whether this rank's query heads use key and value heads that other ranks use too."""
        return self.groups > 0 and self.param_splits["weight"].heads % axis_size(axis_if_bound(self.axis)) > 0

    def _own_heads(self, w: torch.Tensor) -> torch.Tensor:
        """Select the heads of a full weight or bias `[heads k, ..]` that this rank's query heads use."""
        kv, n = self.param_splits["weight"].heads, axis_size(axis_if_bound(self.axis))
        count = kv * self.groups // n  # query heads of a rank
        group_size = kv_groups(kv * self.groups, self.groups, n)
        first = axis_index(self.axis, device=w.device) * count + torch.arange(0, count, group_size, device=w.device)
        heads = enter(w, self.axis).unflatten(0, (kv, -1))
        return heads[first // self.groups].flatten(0, 1)
