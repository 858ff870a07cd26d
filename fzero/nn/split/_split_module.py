"""Split a module at its repeated blocks into pure functions: the part before them, a block, and the part after.

The user's module is not edited. A copy of it has a shell in the place of each block. A shell returns its input.
To get the first block's input and every block's other arguments, the copy runs until its last shell, and stops there.
To get the module's output, the copy runs to its end, and the last shell returns the last block's real output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._torch.types import NamedTensors
from fzero._tracebacks import api_boundary
from fzero.nn._apply import Apply
from fzero.nn._copy import copy_module, shared_tensors
from fzero.nn._functional import functional
from fzero.nn._module_checks import check_module
from fzero.nn.split._dynamic_block import DynamicBlockCall, DynamicIndex, run_dynamic_block
from fzero.nn.split._find_blocks import check_ownership, find_blocks
from fzero.nn.split._shells import (
    ArgumentRecorder,
    BlockArguments,
    BlockHandler,
    BlockOrderError,
    DependencyTracker,
    HandoffError,
    OutputKind,
    OutputReplacer,
    Shell,
    StopForward,
)
from fzero.parallel.tensor import Layers, of_block, outside
from fzero.parallel.tensor import all_gather as gather_tokens
from fzero.parallel.tensor import scatter as scatter_tokens

__all__ = ["DynamicIndex", "split_module"]


class _ModuleSplit(NamedTuple):
    """A module split at its blocks: `split, params = split_module(module)`.

    Attributes:
        split: the pure functions.
        params: the trainable parameters: `{"blocks": [{name: tensor}, ...], "rest": {name: tensor}}`.
    """

    split: "_SplitModule"
    params: dict[str, Any]


class _SplitCache:
    """Results that the calls of a `_SplitModule` keep for later calls.

    Attributes:
        output_kind: how the module expects a block's output.
        calls: the torch functions that blocks call; see `fzero.nn.split._dynamic_block.run_dynamic_block`.
        checked_structures: the structures of batches whose block arguments were found to depend on no parameter.
    """

    def __init__(self) -> None:
        self.output_kind: OutputKind | None = None
        self.calls: dict[Any, Any] = {}
        self.checked_structures: set[Any] = set()


@dataclass(frozen=True)
class _SplitModule:
    """A module as pure functions of its blocks' parameters and of the rest of its parameters.

    A batch holds the arguments of the module's forward pass: a dict by name, a tuple, or one tensor.

    Attributes:
        shell: the module with shells in place of its blocks.
        constants: the buffers and frozen parameters of `shell`.
        param_meta: the full shapes and the dtypes of the parameters outside the blocks.
        blocks: the blocks.
        block_constants: the buffers of each block.
        names: the name of each block in the module.
        plain: like `shell`, but without tensor parallelism. It computes the arguments of blocks.
        tp: the layers that are split over an axis; None without tensor parallelism.
    """

    shell: Apply
    constants: NamedTensors
    param_meta: dict[str, tuple[torch.Size, torch.dtype]]
    blocks: tuple[Apply, ...]
    block_constants: tuple[NamedTensors, ...]
    names: tuple[str, ...]
    plain: Apply
    tp: Layers | None = None
    _cache: _SplitCache = field(default_factory=_SplitCache, repr=False, compare=False)

    def first(self, rest: NamedTensors, batch: Any) -> torch.Tensor:
        """Return the input of the first block: the embedded batch."""
        x = self._record_blocks(self.shell, rest, batch).x
        return x if self.tp is None or not self.tp.sequence else scatter_tokens(x, self.tp.axis)

    def block_arguments(self, batch: Any, dtype: torch.dtype | None = None) -> tuple[BlockArguments, ...]:
        """Return each block's arguments besides `x`, such as masks and rotary tables.

        Each rank that holds blocks computes them from the batch, so none of them is sent. Blocks that receive the same
        tensor share it. No parameter is needed: the module's forward pass runs on zeros in place of the
        parameters outside the blocks. The embedding that these zeros give is not used.

        Args:
            batch: the batch.
            dtype: the dtype of these zeros, which masks and tables follow; by default that of each parameter.

        Raises:
            TypeError: if an argument of a block is neither a tensor nor a constant, such as a cache.
            ValueError: if an argument of a block depends on a parameter.
        """
        zeros = {
            name: _expanded_zeros(shape, dtype or own_dtype, batch)
            for name, (shape, own_dtype) in self.param_meta.items()
        }
        structure = tree.flatten(batch)[1]
        if structure in self._cache.checked_structures:
            return tuple(self._record_blocks(self.plain, zeros, batch).arguments)
        with DependencyTracker(list(zeros.values())) as tracker:
            arguments = tuple(self._record_blocks(self.plain, zeros, batch).arguments)
        for name, block_args in zip(self.names, arguments, strict=True):
            for path, x in zip(*tree.flatten_with_paths([block_args.args, block_args.kwargs])[:2], strict=True):
                if tracker.holds(x):
                    raise ValueError(
                        f"block {name!r} is given {path.partition('.')[2]!r}, which depends on parameters outside the "
                        "blocks: a pipeline computes the arguments of blocks on ranks that do not hold these "
                        "parameters. Compute it in the block, or from the batch and buffers"
                    )
        self._cache.checked_structures.add(structure)
        return arguments

    def block(
        self,
        params: NamedTensors,
        x: torch.Tensor,
        arguments: tuple[BlockArguments, ...],
        index: int | torch.Tensor | DynamicIndex,
    ) -> torch.Tensor:
        """Run a block.

        Args:
            params: the block's parameters.
            x: the output of the previous block.
            arguments: the result of `block_arguments(batch)`.
            index: the number of the block in the module. If many ranks run one program, it is a tensor, or a
                `DynamicIndex` that lists the numbers it may be.
        """
        if isinstance(index, int):
            return self._run_block(index, params, self.block_constants[index], x, arguments[index])
        index = DynamicIndex(tuple(range(len(self.names))), index) if isinstance(index, torch.Tensor) else index
        call = DynamicBlockCall(
            run=self._run_block, params=params, constants=self.block_constants, x=x, arguments=arguments
        )
        return run_dynamic_block(call, self._cache.calls, index)

    def last(self, rest: NamedTensors, x: torch.Tensor, batch: Any) -> Any:
        """Return the module's output, given the output `x` of its last block."""
        output_kind = self._cache.output_kind or self._record_blocks(self.shell, rest, batch).output_kind
        x = x if self.tp is None or not self.tp.sequence else gather_tokens(x, self.tp.axis)
        return self._run_shell(self.shell, rest, batch, OutputReplacer(self.names, output_kind, x))

    def join(self, params: Mapping[str, Any]) -> NamedTensors:
        """Return all parameters by their names in the module.

        Example:
            >>> layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
            >>> split, params = split_module(torch.nn.Sequential(layers, torch.nn.Linear(2, 1)))
            >>> list(split.join(params))[:3]
            ['0.0.weight', '0.0.bias', '0.1.weight']
        """
        block_params = {
            f"{name}.{key}": x for name, p in zip(self.names, params["blocks"], strict=True) for key, x in p.items()
        }
        return {**block_params, **params["rest"]}

    def _record_blocks(self, shell: Apply, rest: NamedTensors, batch: Any) -> ArgumentRecorder:
        """Run the module until its last block, and record the arguments of its blocks."""
        first_error: Exception | None = None
        for output_kind in [self._cache.output_kind] if self._cache.output_kind else [*OutputKind]:
            records = ArgumentRecorder(self.names, output_kind)
            try:
                self._run_shell(shell, rest, batch, records)
            except StopForward:
                self._cache.output_kind = output_kind
                return records
            except Exception as error:
                if records.count == 0 or isinstance(error, BlockOrderError):
                    raise
                first_error = first_error or error
            else:
                raise ValueError(_missing_block_message(self.names, records.count))
        if not isinstance(first_error, HandoffError):
            raise first_error or AssertionError
        raise ValueError(str(first_error))

    def _run_shell(self, shell: Apply, rest: NamedTensors, batch: Any, handler: BlockHandler) -> Any:
        args, kwargs = _call_arguments(batch)
        with handler:
            out, written_buffers = shell(rest, self.constants, *args, **kwargs)
        _check_constants(self.constants, written_buffers, "")
        return out

    def _run_block(
        self, index: int, params: NamedTensors, constants: NamedTensors, x: torch.Tensor, arguments: BlockArguments
    ) -> torch.Tensor:
        out, written_buffers = arguments.call(partial(self.blocks[index], params, constants), x)
        _check_constants(constants, written_buffers, f"{self.names[index]}.")
        return _one_tensor(out, self.names[index], self._cache.output_kind)


@api_boundary
def split_module(
    module: torch.nn.Module,
    blocks: str | None = None,
    tp: Layers | None = None,
    ignore_writes: Sequence[str] = (),
) -> _ModuleSplit:
    """Split a module at its repeated blocks into pure functions, without editing it.

    The blocks are the children of a ModuleList or Sequential: at least two modules of one class, whose parameters have
    the same names and shapes. The module must call each block once, in order, and must pass on the output of each
    block unchanged to the next.

    Blocks may differ in everything else: attributes (the number of a layer, a sliding window), buffers and arguments.
    Each block runs with its own attributes, selected by its number.

    Args:
        module: any module that `fzero.nn.functional` accepts.
        blocks: the name of the list of blocks, if the module has several.
        tp: the layers that are split over an axis, as `fzero.parallel.tensor.layers(module)` lists them.
        ignore_writes: the paths of attributes that forward may write; see `fzero.nn.functional`.

    Returns:
        `(split, params)`.

    Raises:
        TypeError: if `module` cannot be taken apart; see `functional`.
        ValueError: if the module has no list of blocks, or several. Also if its blocks' parameters differ, are frozen
            or are shared; the message names them. Also if its configuration requests outputs that blocks would leave
            on other ranks (`output_router_logits`, `output_attentions`, `output_hidden_states`).

    Example:
        >>> layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 2), layers, torch.nn.Linear(2, 1))
        >>> split, params = split_module(module)
        >>> batch = torch.ones(1, 4)
        >>> x, arguments = split.first(params["rest"], batch), split.block_arguments(batch)
        >>> for i, p in enumerate(params["blocks"]):
        ...     x = split.block(p, x, arguments, i)
        >>> split.last(params["rest"], x, batch).equal(module(batch))
        True
    """
    check_module(module)
    names = find_blocks(module, blocks)
    check_ownership(module, names)
    block_modules = [module.get_submodule(name) for name in names]
    parts = [
        functional(block, tp=None if tp is None else of_block(tp, name), ignore_writes=ignore_writes)
        for name, block in zip(names, block_modules, strict=True)
    ]
    shells = {
        id(block): Shell(i, part.apply.module) for i, (block, part) in enumerate(zip(block_modules, parts, strict=True))
    }
    tied_tensors = shared_tensors(module)
    plain = functional(copy_module(module, {**shells, **tied_tensors}), ignore_writes=ignore_writes)
    outer_part = plain
    if tp is not None:
        module_copy = copy_module(module, {**shells, **tied_tensors})
        outer_part = functional(module_copy, tp=outside(tp, names), ignore_writes=ignore_writes)
    split = _SplitModule(
        shell=_read_only(outer_part.apply),
        constants=outer_part.buffers,
        param_meta={name: (p.shape, p.dtype) for name, p in plain.params.items()},
        blocks=tuple([_read_only(part.apply, f"{name}.") for name, part in zip(names, parts, strict=True)]),
        block_constants=tuple([_share_constants(part.buffers, parts[0].buffers) for part in parts]),
        names=names,
        plain=_read_only(plain.apply),
        tp=tp,
    )
    return _ModuleSplit(split, {"blocks": [part.params for part in parts], "rest": outer_part.params})


def _share_constants(constants: NamedTensors, first_constants: NamedTensors) -> NamedTensors:
    """Replace constants that equal the first block's by the first block's own tensors."""

    def share(name: str, x: torch.Tensor) -> torch.Tensor:
        other = first_constants.get(name)
        is_equal = other is not None and other.dtype == x.dtype and not x.is_meta and torch.equal(other, x)
        return other if is_equal and other is not None else x

    return {name: share(name, x) for name, x in constants.items()}


def _read_only(apply: Apply, prefix: str = "") -> Apply:
    """Make a forward pass refuse to write statistics, which each micro-batch would write, some of them on other ranks.

    `tp` is removed because the pipeline checks the whole batch for differences along that axis. A block's input cannot
    be checked: it may be its rank's part of the tokens.
    """
    return replace(apply, mutable_names=frozenset(), tp=None, prefix=prefix)


def _check_constants(before: NamedTensors, after: NamedTensors, prefix: str) -> None:
    for name, x in before.items():
        if after[name] is not x:
            raise RuntimeError(
                f"the module's forward pass replaced buffer '{prefix}{name}', which a pipeline cannot pass from one "
                "micro-batch to the next: have it update no statistics (eval mode, or a norm without statistics)"
            )


def _missing_block_message(names: tuple[str, ...], count: int) -> str:
    return (
        f"the module ran {count} of its {len(names)} blocks, and did not call {names[count]!r}: a pipeline runs each "
        "block once, in order. Have forward call all of them, or name another list of blocks, as in blocks='layers'"
    )


def _expanded_zeros(shape: torch.Size, dtype: torch.dtype, batch: Any) -> torch.Tensor:
    """Return zeros of a shape that take no memory, on the batch's device."""
    device = next((x.device for x in tree.tensors(batch)), None)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _one_tensor(out: Any, name: str, output_kind: OutputKind | None) -> torch.Tensor:
    """Return a block's output tensor: its result, or the first item of a tuple whose other items the module ignores."""
    values = out if isinstance(out, tuple | list) else (out,)
    has_more = output_kind is not OutputKind.FIRST and any(x is not None for x in values[1:])
    if not values or not isinstance(values[0], torch.Tensor) or has_more:
        raise ValueError(
            f"block {name!r} returns {[type(x).__name__ for x in values]}: expected one tensor. A pipeline passes on "
            "one tensor from block to block, and would lose the others: have the block return this tensor alone"
        )
    return values[0]
