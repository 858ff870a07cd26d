"""The sharded step: what each stage does with parameters, gradients and optimizer state, around an unsharded step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._notice import notice
from fzero._torch import is_tracing
from fzero._torch.levels import is_wrapped
from fzero.axes.rules import DEFAULT_RULES, Rules
from fzero.init._build import build, deferred_or_whole
from fzero.init._deferred import Deferred
from fzero.init._module import initializer
from fzero.layout.boxes import PerRank, axes_of, is_box
from fzero.ranks.agreement import check_equal
from fzero.ranks.mesh import Mesh
from fzero.ranks.spmd import Spmd
from fzero.stages._checks import check_arguments, check_params, check_results, check_tree, check_unwritten
from fzero.transforms._gather import assemble, replicate
from fzero.transforms._partition import check_unsharded, partition

__all__ = ["STAGES", "Layout", "ShardedStep"]


class Layout(NamedTuple):
    """What a stage does with each tree: "replicated" on every rank, or "sharded" over them.

    Attributes:
        params: the parameters, between steps.
        grads: when gradients are reduced: "replicated" (never cut), "once" (in full until the last micro-batch,
            then into shards), or "each" (each micro-batch into shards).
        opt_state: the optimizer's state.
    """

    params: str
    grads: str
    opt_state: str


STAGES = (
    Layout(params="replicated", grads="replicated", opt_state="replicated"),
    Layout(params="replicated", grads="once", opt_state="sharded"),
    Layout(params="replicated", grads="each", opt_state="sharded"),
    Layout(params="sharded", grads="each", opt_state="sharded"),
)


@dataclass(frozen=True)
class ShardedStep:
    """A train step on a mesh, made by `fzero.shard`. Call it like the unsharded step.

    Attributes:
        train_step: the unsharded step.
        stage: 0 to 3.
        mesh: the ranks.
        axis: the data-parallel axes: those of the batch, of means, and of shards.
        params: the positions of the parameters.
        rules: how trees are cut: the rules given as `units`, `over` and `split`.
        check: whether a distributed run compares replicated values between the ranks: "first", True or False.
    """

    train_step: Callable[..., Any]
    stage: int
    mesh: Mesh
    axis: tuple[str, ...]
    params: tuple[int, ...]
    rules: Rules = DEFAULT_RULES
    check: bool | str = "first"
    _calls: list[None] = field(default_factory=list, repr=False, compare=False)

    @property
    def layout(self) -> Layout:
        """What the stage does with parameters, gradients and optimizer state."""
        return STAGES[self.stage]

    @property
    def name(self) -> str:
        """The name of the unsharded step's function."""
        return getattr(self.train_step, "__name__", type(self.train_step).__name__)

    def __repr__(self) -> str:
        return f"ShardedStep({self.name}, stage={self.stage}, {self.mesh!r}, {self.layout})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Parameters that require grad by themselves, as those of a module do, are taken as plain values. Otherwise
        torch would record each step, and keep all of them. To differentiate through a step use `torch.func`, or let
        an argument that is no parameter require grad.

        Args:
            *args: what `train_step` takes: parameters and optimizer state as `init` gave them or the last call
                returned them, the batch as `mesh.split` or `mesh.local` gave it, other values plain (replicated).
            **kwargs: likewise.

        Returns:
            What `train_step` returns; plain tensors are equal on all ranks.

        Raises:
            ValueError: if the parameters have not the stage's layout, a box was cut for another mesh, a plain result
                differs by rank (simulation, or with `check`), or the new parameters have another structure, shape or
                dtype than the old. Names the argument or result and the path.
            RuntimeError: if the step returns parameters that it wrote through `.data`, which torch does not count, at
                stages 1 and 2. Other in-place writes give the unsharded numbers; a jitted step refuses all.
        """
        if is_tracing():
            return self._run(*args, **kwargs)
        if any(x.is_meta for i in self.params for x in tree.tensors(args[i : i + 1])):
            raise ValueError(
                "the parameters are on the meta device, which is for fzero.plan: give step.init the module itself, or "
                "a function that makes the parameters"
            )
        return self._checked(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        check_arguments((args, kwargs), self.mesh, self.axis)
        check_params(args, self.params, self.stage, self.layout.params == "sharded", self.rules)
        args = tuple([tree.map(_value, x) if i in self.params else x for i, x in enumerate(args)])
        return self.program(self.rank_step)(*args, **kwargs)

    def _checked(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, comparing plain arguments and results between the ranks if `check` says so now."""
        check = self._checks_now()
        if check:
            check_equal("argument", {**dict(enumerate(args)), **kwargs}, self.mesh)
        out = run(*args, **kwargs)
        if check:
            check_equal("result", out, self.mesh)
        return out

    def _handed_on(self, args: Sequence[Any], out: Any) -> tuple[int, ...]:
        """List the arguments that the step hands on: its parameters, and each tree that it returns like it took it.

        A lone tensor is no state: a step's loss may look like one of its arguments.
        """
        results = out if isinstance(out, tuple) else (out,)
        return tuple(
            [i for i, x in enumerate(args) if i in self.params or (i < len(results) and _alike(x, results[i]))]
        )

    def _checks_now(self) -> bool:
        if not self.mesh.distributed:
            return False
        if self.check == "first" and not self._calls:
            self._calls.append(None)
            return True
        return self.check != "first" and bool(self.check)

    def program(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Run a rank program of your own on the step's mesh, with its axes and unit rule as the defaults."""
        return Spmd(self.mesh, f, self.axis, self.rules)

    def _on(self, mesh: Mesh) -> "ShardedStep":
        """Return the same step on another mesh with the same axes."""
        return replace(self, mesh=mesh, _calls=[])

    def rank_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one rank's step: what `fzero.shard` composes, to read."""
        if self.layout.params == self.layout.opt_state:  # stages 0 and 3: the layout in is the layout out
            out = self.train_step(*args, **kwargs)
            check_results(args, out, self.params)
            return out
        cut = [partition(x, reduce=self.layout.grads) if i in self.params else x for i, x in enumerate(args)]
        out = self.train_step(*cut, **kwargs)
        check_unwritten(cut, self.params)
        check_results(cut, out, self.params)
        del cut  # the old shards, before the new parameters are whole
        if not isinstance(out, tuple):
            return replicate(out)
        whole = [replicate(x) if i in self.params else x for i, x in enumerate(out)]
        return type(out)(*whole) if hasattr(out, "_fields") else tuple(whole)

    def init(self, params: Any, opt: Any) -> tuple[Any, Any]:
        """Put parameters into the stage's layout and make the optimizer's state for them.

        Args:
            params: a tree of plain tensors, equal on all ranks (compared by checksum in a distributed run); or what
                makes one: a function without arguments, or a module on the meta device, see `fzero.nn.initializer`.
                At stage 3 each leaf is made, cut and forgotten: no rank ever holds more than its shards and one leaf.
                It draws the random numbers of an ordinary call, so the values are the same for every mesh; seed all
                ranks alike.
            opt: an (init, update) pair.

        Returns:
            `(params, opt_state)`: what the step takes. With a pair that keeps master weights, the parameters are cast
            as its precision policy says.

        Raises:
            ValueError: if `params` differs between ranks, holds boxes, or `opt` declares that it is not elementwise
                and the stage shards its state.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init(lambda: {"w": torch.ones(100, 100)}, optim.sgd(0.1))
            >>> params
            {'w': Shard('w', 2500 of 10000 elements, dp=4)}
        """
        precision = getattr(opt, "precision", None)
        if precision is not None:  # its units are cut as those of the parameters that they become
            wide = replace(self, rules=self.rules._replace(dtype=precision.dtype_of))
            params, opt_state = wide._init(params, opt)
            return precision.cast(params), opt_state
        return self._init(params, opt)

    def _init(self, params: Any, opt: Any) -> tuple[Any, Any]:
        self._check_optimizer(opt)
        if isinstance(params, torch.nn.Module):
            params = initializer(params)
        if callable(params):
            made = deferred_or_whole(params) if self.layout.params == "sharded" else params()
            if isinstance(made, Deferred):
                boxes = build(made, self.program(self._cut), self.mesh)
                return boxes, self._state(opt, boxes)
            params = made
        check_unsharded(params)
        check_equal("params", params, self.mesh)
        params = tree.map(_value, params)
        if self.layout.params == "replicated":
            params = tree.map(torch.clone, params)  # a jitted step overwrites what it is given

        def make(params: Any) -> tuple[Any, Any]:
            params = partition(params, ())  # split leaves, which are no rank's whole
            boxes = partition(params, reduce=self.layout.grads) if sharded else params
            return boxes if self.layout.params == "sharded" else params, opt.init(boxes)

        sharded = self.layout.opt_state == "sharded"
        return self._noted(lambda: self.program(make)(params))

    def _cut(self, params: Any) -> Any:
        return partition(params, reduce=self.layout.grads)

    def _state(self, opt: Any, boxes: Any) -> Any:
        return self._noted(lambda: self.program(opt.init)(boxes))

    def _check_optimizer(self, opt: Any) -> None:
        elementwise = getattr(opt, "elementwise", None)
        if self.layout.opt_state == "replicated":
            return
        if elementwise is None:
            notice(
                f"fzero: {type(opt).__name__} does not say whether it is elementwise and is taken to be: "
                "fzero.testing.check_elementwise(opt) finds out"
            )
        if elementwise is False:
            raise ValueError(
                f"stage={self.stage} runs the optimizer on flat shards, and this one declares elementwise=False: "
                "it needs whole leaves; use stage=0"
            )

    @staticmethod
    def _noted(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ValueError as error:
            if "differs by rank" in str(error):
                error.add_note(
                    "A pair that takes trees apart by itself keeps unboxed state: wrap it, optim.leafwise(pair)"
                )
            raise

    def gather(self, params: Any) -> Any:
        """Gather every box of a tree, outside the step: plain tensors again, for evaluation or export.

        Args:
            params: a tree in the step's layout, such as its parameters, or a moment of the optimizer's state.

        Returns:
            The tree with plain tensors, in memory of their own, on every rank; `PerRank` values stay as they are. In a
            distributed run all ranks must call it: under `if mesh.rank == 0:` it would wait for the others for ever.

        Raises:
            ValueError: if a box was cut for another mesh.
        """
        check_tree(params, self.mesh)
        entries, structure = tree.flatten(params, is_box)
        kept = [x if isinstance(x, PerRank) else None for x in entries]
        whole = self.program(assemble)([None if isinstance(x, PerRank) else x for x in entries])
        whole = tree.map(_apart_from(params), whole)
        return tree.unflatten(structure, [x if x is not None else y for x, y in zip(kept, whole, strict=True)])

    def state_bytes(self, *trees: Any) -> int:
        """Count the bytes that one rank holds of trees in the step's layout; tied leaves count once.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init({"w": torch.zeros(100)}, optim.sgd(0.1))
            >>> step.state_bytes(params)
            100
        """
        total, seen = 0, set()
        for x in tree.flatten(trees, is_box)[0]:
            (axes,) = axes_of(x, self.mesh.axis_names)[:1] or [()]
            n = math.prod([size for name, size in self.mesh.shape if name in axes]) if self.mesh.simulated else 1
            for leaf in tree.tensors(x):
                if id(leaf) not in seen:
                    seen.add(id(leaf))
                    total += leaf.numel() * leaf.element_size() // n
        return total


def _value(x: Any) -> Any:
    """Return a tensor without its own `requires_grad`; what a graph or a transform made stays as it is."""
    own = isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf and not is_wrapped(x)
    return x.detach() if own else x


def _apart_from(values: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies tensors that share memory with `values`, which a jitted step may overwrite."""
    lent = {x.untyped_storage().data_ptr() for x in tree.tensors(values)}
    return lambda x: x.clone() if x.untyped_storage().data_ptr() in lent else x


def _alike(x: Any, y: Any) -> bool:
    """Tell whether two trees have one structure and their tensors one shape and dtype each."""
    (xs, structure), (ys, other) = tree.flatten(x), tree.flatten(y)
    is_tree = not isinstance(x, torch.Tensor) and any(isinstance(a, torch.Tensor) for a in xs)
    return is_tree and structure == other and [tree.show(a) for a in xs] == [tree.show(b) for b in ys]
