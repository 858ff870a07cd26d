"""A module divided at its repeated blocks into pure functions: before the blocks, a block, and after them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._tracebacks import api_boundary
from fzero.nn._closures import copy_module
from fzero.nn._functional import Apply, check_module, functional
from fzero.nn._shells import (
    BlockArguments,
    Changed,
    Form,
    Handing,
    HandsOut,
    OneOf,
    Reach,
    Records,
    Refused,
    Shell,
    Stopped,
    choose,
)
from fzero.parallel.tensor import Layers, of_block, outside
from fzero.parallel.tensor import cut as cut_tokens
from fzero.parallel.tensor import join as join_tokens

__all__ = ["CutModule", "OneOf", "SplitModule", "blocks_of", "cut", "own_names"]


# Which children of a module are its repeated blocks.


def blocks_of(module: torch.nn.Module, chosen: str | None) -> tuple[str, ...]:
    """Name a module's repeated blocks.

    Args:
        module: the module.
        chosen: the name of the list that holds them; None for the only one.

    Raises:
        ValueError: if there is no such list, or several and none was chosen; or if the parameters of the blocks differ.
    """
    lists = _lists(module)
    kind = type(module).__name__
    if chosen is not None and chosen not in lists:
        raise ValueError(f"blocks={chosen!r}: {kind} has no such list of blocks; it has {_listed(lists)}")
    if not lists:
        raise ValueError(
            f"{kind} has no repeated blocks: expected a ModuleList or Sequential of two modules or more of one class, "
            "with parameters"
        )
    if chosen is None and len(lists) > 1:
        raise ValueError(
            f"{kind} has {len(lists)} lists of blocks: {_listed(lists)}. A pipeline is cut at one of them: say which, "
            f"blocks={next(iter(lists))!r}; the others run whole, on the ranks that hold its ends"
        )
    names = lists[chosen if chosen is not None else next(iter(lists))]
    _check_alike(module, names)
    return names


def _lists(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the outermost lists of modules of one class, by name, with the names of their members."""
    found: dict[str, tuple[str, ...]] = {}
    for name, m in module.named_modules():
        inside = any(name.startswith(f"{other}." if other else "") for other in found)
        if inside or not isinstance(m, torch.nn.ModuleList | torch.nn.Sequential) or len(m) < 2:
            continue
        if len({type(child) for child in m}) == 1 and all(any(True for _ in child.parameters()) for child in m):
            found[name] = tuple([f"{name}.{key}" if name else key for key, _ in m.named_children()])
    return found


def _listed(lists: dict[str, tuple[str, ...]]) -> str:
    return ", ".join([f"{name!r} with {len(names)}" for name, names in lists.items()]) or "none"


def _check_alike(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    first = _facts(module.get_submodule(names[0]))
    for name in names[1:]:
        own = _facts(module.get_submodule(name))
        differing = [key for key in [*first, *own] if first.get(key) != own.get(key)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"blocks {names[0]!r} and {name!r} differ in {key!r}: {first.get(key, 'missing')} and "
                f"{own.get(key, 'missing')}. The blocks of a pipeline are stacked, so their parameters have the same "
                "names, shapes and dtypes"
            )


def _facts(block: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(p.shape), p.dtype) for name, p in block.named_parameters()}


def own_names(module: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Check that blocks own their parameters, that all are trained, and that the module asks its blocks for one output.

    Raises:
        ValueError: if a parameter of a block is frozen or shared; or if the configuration asks for further outputs.
    """
    places: dict[int, list[str]] = {}
    for key, p in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(p), []).append(key)
    for name in names:
        for key, p in module.get_submodule(name).named_parameters():
            others = [x for x in places[id(p)] if not x.startswith(f"{name}.")]
            if others:
                raise ValueError(
                    f"'{name}.{key}' is {others[0]!r} too: a block of a pipeline shares no parameter, for its rank "
                    "alone holds it"
                )
            if not p.requires_grad:
                raise ValueError(
                    f"'{name}.{key}' is frozen (requires_grad=False), and a pipeline has no place for a block's "
                    "constants: let it be trained, with a mask in the optimizer (optim.masked)"
                )
    config = getattr(module, "config", None)
    for flag in ("output_router_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, flag, False):
            raise ValueError(
                f"config.{flag} is set: blocks would leave these outputs on their own ranks, and a loss at the end of "
                "the model would go without them: set it to False"
            )


# A module cut at its repeated blocks into pure functions: what comes before them, a block, and what comes after.
#
# The module is not edited. A copy of it has a shell in the place of each block, which hands on what it is given. Its
# own forward pass, stopped at the last shell, says what the first block is given, and what each block is given besides.
# Run to its end, with a given value out of the last shell, it is what comes after the blocks.


Tensors = dict[str, torch.Tensor]


class CutModule(NamedTuple):
    """A module cut at its blocks: `cut, params = cut(module)`.

    Attributes:
        cut: the functions.
        params: the trainable parameters: `{"blocks": [{name: tensor}, ...], "rest": {name: tensor}}`.
    """

    cut: "SplitModule"
    params: dict[str, Any]


class _SplitMemory:
    """What the calls of a cut have found out.

    Attributes:
        form: in which the module takes what a block returns.
        seen: which torch functions blocks call.
        checked: structures of batches for which what blocks are given is known to depend on no parameter.
    """

    def __init__(self) -> None:
        self.form: Form | None = None
        self.seen: dict[Any, Any] = {}
        self.checked: set[Any] = set()


@dataclass(frozen=True)
class SplitModule:
    """A module as pure functions of the parameters of its blocks and of the rest.

    A batch is what the module's forward pass is called with: a dict by name, a tuple, or one tensor.

    Attributes:
        shell: the module with shells in the places of its blocks.
        constants: its buffers and frozen parameters.
        facts: the shapes and dtypes of its parameters.
        blocks: each block.
        block_constants: the buffers of each.
        names: the name of each block in the module.
        plain: the shell without what its layers are cut over, which says what blocks are given.
        tp: the layers that are cut over an axis, if there are.
    """

    shell: Apply
    constants: Tensors
    facts: dict[str, tuple[torch.Size, torch.dtype]]
    blocks: tuple[Apply, ...]
    block_constants: tuple[Tensors, ...]
    names: tuple[str, ...]
    plain: Apply
    tp: Layers | None = None
    _memory: _SplitMemory = field(default_factory=_SplitMemory, repr=False, compare=False)

    def first(self, rest: Tensors, batch: Any) -> torch.Tensor:
        """Return what the first block is given: the embedded batch."""
        x = self._recorded(self.shell, rest, batch).x
        return x if self.tp is None or not self.tp.sequence else cut_tokens(x, self.tp.axis)

    def given(self, batch: Any, dtype: torch.dtype | None = None) -> tuple[BlockArguments, ...]:
        """Return what each block is given besides: masks, rotary tables.

        It is computed of the batch, on each rank that holds blocks, so that nothing of it is sent. Blocks that are
        given one tensor share it. The rest of the parameters is not needed: the module's forward pass runs on zeros in
        their places, and the embedding of these is used by none.

        Args:
            batch: the batch.
            dtype: of the parameters that the others are run with, if not the module's own: masks and tables follow it.

        Raises:
            TypeError: if a block is given an object that is no tensor or constant, such as a cache.
            ValueError: if what a block is given depends on a parameter.
        """
        zeros = {name: _zeros(shape, dtype or own, batch) for name, (shape, own) in self.facts.items()}
        structure = tree.flatten(batch)[1]
        if structure in self._memory.checked:
            return tuple(self._recorded(self.plain, zeros, batch).given)
        with Reach(list(zeros.values())) as reach:
            given = tuple(self._recorded(self.plain, zeros, batch).given)
        for name, one in zip(self.names, given, strict=True):
            for path, x in zip(*tree.flatten_with_paths([one.args, one.kwargs])[:2], strict=True):
                if reach.holds(x):
                    raise ValueError(
                        f"block {name!r} is given {path.partition('.')[2]!r}, which depends on parameters outside the "
                        "blocks: a pipeline computes what blocks are given on ranks that do not hold these"
                    )
        self._memory.checked.add(structure)
        return given

    def block(
        self, params: Tensors, x: torch.Tensor, given: tuple[BlockArguments, ...], index: int | torch.Tensor | OneOf
    ) -> torch.Tensor:
        """Run a block.

        Args:
            params: the block's parameters.
            x: what the block before it returned.
            given: of `given(batch)`.
            index: the number of the block in the module. Where one program is that of many ranks it is a tensor, or
                `OneOf` some.
        """
        if isinstance(index, int):
            return self._run_block(index, params, self.block_constants[index], x, given[index])
        index = OneOf(tuple(range(len(self.names))), index) if isinstance(index, torch.Tensor) else index
        return choose(self._run_block, self._memory.seen, params, self.block_constants, x, given, index)

    def last(self, rest: Tensors, x: torch.Tensor, batch: Any) -> Any:
        """Return the module's output, where its last block returned `x`."""
        form = self._memory.form or self._recorded(self.shell, rest, batch).form
        x = x if self.tp is None or not self.tp.sequence else join_tokens(x, self.tp.axis)
        return self._run_shell(self.shell, rest, batch, HandsOut(self.names, form, x))

    def join(self, params: Mapping[str, Any]) -> Tensors:
        """Return the parameters by their names in the module.

        Example:
            >>> layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
            >>> made, params = cut(torch.nn.Sequential(layers, torch.nn.Linear(2, 1)))
            >>> list(made.join(params))[:3]
            ['0.0.weight', '0.0.bias', '0.1.weight']
        """
        found = {
            f"{name}.{key}": x for name, p in zip(self.names, params["blocks"], strict=True) for key, x in p.items()
        }
        return {**found, **params["rest"]}

    def _recorded(self, shell: Apply, rest: Tensors, batch: Any) -> Records:
        """Run the module until its last block, and take down what its blocks are given."""
        first: Exception | None = None
        for form in [self._memory.form] if self._memory.form else [*Form]:
            records = Records(self.names, form)
            try:
                self._run_shell(shell, rest, batch, records)
            except Stopped:
                self._memory.form = form
                return records
            except Exception as error:
                if records.count == 0 or isinstance(error, Refused):
                    raise
                first = first or error
            else:
                raise ValueError(f"the module ran {records.count} of its {len(self.names)} blocks: {self.names}")
        if not isinstance(first, Changed):
            raise first or AssertionError
        raise ValueError(
            f"{first} the module changes what is handed on, or takes more than one tensor of a block: a pipeline hands "
            "on one tensor as it is"
        )

    def _run_shell(self, shell: Apply, rest: Tensors, batch: Any, handing: Handing) -> Any:
        args, kwargs = _arguments(batch)
        with handing:
            out, written = shell(rest, self.constants, *args, **kwargs)
        _check_constants(self.constants, written, "")
        return out

    def _run_block(
        self, index: int, params: Tensors, constants: Tensors, x: torch.Tensor, given: BlockArguments
    ) -> torch.Tensor:
        out, written = given.call(partial(self.blocks[index], params, constants), x)
        _check_constants(constants, written, f"{self.names[index]}.")
        return _one_tensor(out, self.names[index], self._memory.form)


@api_boundary
def cut(module: torch.nn.Module, blocks: str | None = None, tp: Layers | None = None) -> CutModule:
    """Cut a module at its repeated blocks, without editing it.

    They are the children of a ModuleList or Sequential: two or more of one class, with parameters of the same names and
    shapes. The module calls each once, in their order, and hands on what one returns to the next, unchanged.

    Blocks may differ in all but their parameters: in attributes (the number of a layer, a sliding window), in buffers,
    and in what they are given. Each block is run as it is, by its number.

    Args:
        module: any module that `fzero.nn.functional` takes apart.
        blocks: the name of the list of blocks, where the module has several.
        tp: the layers that are cut over an axis, as `fzero.parallel.tensor.layers(module)` lists them.

    Returns:
        `(cut, params)`.

    Raises:
        TypeError: if `module` cannot be taken apart; see `functional`.
        ValueError: if it has no list of blocks, or several; if its blocks' parameters differ, are frozen, or are shared
            with others. Names them. Also if its configuration asks for outputs that blocks would have to leave
            elsewhere (`output_router_logits`, `output_attentions`, `output_hidden_states`).

    Example:
        >>> layers = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 2), layers, torch.nn.Linear(2, 1))
        >>> made, params = cut(module)
        >>> batch = torch.ones(1, 4)
        >>> x, given = made.first(params["rest"], batch), made.given(batch)
        >>> for i, p in enumerate(params["blocks"]):
        ...     x = made.block(p, x, given, i)
        >>> made.last(params["rest"], x, batch).equal(module(batch))
        True
    """
    check_module(module)
    names = blocks_of(module, blocks)
    own_names(module, names)
    found = [module.get_submodule(name) for name in names]
    parts = [
        functional(block, tp=None if tp is None else of_block(tp, name))
        for name, block in zip(names, found, strict=True)
    ]
    shells = {id(block): Shell(i, part.apply.module) for i, (block, part) in enumerate(zip(found, parts, strict=True))}
    shared = {id(x): x for x in [*module.parameters(), *module.buffers()]}  # the copy needs no memory of its own
    plain = functional(copy_module(module, {**shells, **shared}))
    rest = plain
    if tp is not None:
        rest = functional(copy_module(module, {**shells, **shared}), tp=outside(tp, names))
    made = SplitModule(
        _unwritten(rest.apply),
        rest.buffers,
        {name: (p.shape, p.dtype) for name, p in plain.params.items()},
        tuple([_unwritten(part.apply) for part in parts]),
        tuple([_shared(part.buffers, parts[0].buffers) for part in parts]),
        names,
        _unwritten(plain.apply),
        tp,
    )
    return CutModule(made, {"blocks": [part.params for part in parts], "rest": rest.params})


def _shared(constants: Tensors, first: Tensors) -> Tensors:
    """Put the first block's constants into the places of equal ones."""

    def one(name: str, x: torch.Tensor) -> torch.Tensor:
        other = first.get(name)
        alike = other is not None and other.dtype == x.dtype and not x.is_meta and torch.equal(other, x)
        return other if alike and other is not None else x

    return {name: one(name, x) for name, x in constants.items()}


def _unwritten(apply: Apply) -> Apply:
    """Have a forward pass refuse to write statistics: each micro-batch would write them, and some on other ranks.

    Whether examples differ along tp is asked of the batch, and not here, where a block may be given its rank's tokens.
    """
    return replace(apply, mutable=frozenset(), tp=None)


def _check_constants(before: Tensors, after: Tensors, prefix: str) -> None:
    for name, x in before.items():
        if after[name] is not x:
            raise RuntimeError(
                f"the module's forward pass replaced buffer '{prefix}{name}', which a pipeline cannot hand on from "
                "one micro-batch to the next: have it keep no statistics (eval mode, or a norm without them)"
            )


def _zeros(shape: torch.Size, dtype: torch.dtype, batch: Any) -> torch.Tensor:
    """Make zeros that take no memory, where a batch lies."""
    device = next((x.device for x in tree.tensors(batch)), None)
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def _one_tensor(out: Any, name: str, form: Form | None) -> torch.Tensor:
    """Return the one tensor that a block returns, alone or first in a tuple of which the module reads no more."""
    values = out if isinstance(out, tuple | list) else (out,)
    others = form is not Form.FIRST and any(x is not None for x in values[1:])
    if not values or not isinstance(values[0], torch.Tensor) or others:
        raise ValueError(
            f"block {name!r} returns {[type(x).__name__ for x in values]}: expected one tensor, which is handed on; "
            "a pipeline has no way for the others"
        )
    return values[0]
