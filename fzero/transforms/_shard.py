"""shard: an unsharded train step, composed with the four transforms by stage."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from fzero import tree
from fzero._checksum import check_equal
from fzero._notice import notice
from fzero._torch import is_tracing
from fzero.layout import PerRank, axes_of, is_box
from fzero.mesh import Mesh
from fzero.mesh import mesh as make_mesh
from fzero.spmd import Spmd
from fzero.transforms._checks import check_arguments, check_params, check_plain, check_results, check_tree
from fzero.transforms._gather import assemble, replicate
from fzero.transforms._partition import partition, rule_of
from fzero.world import DEFAULT_RULES, AxisName, OverRule, Rules, SplitRule, UnitRule

__all__ = ["Layout", "ShardedStep", "shard"]


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


def shard(
    train_step: Callable[..., Any],
    stage: int,
    mesh: Mesh | None = None,
    axis: AxisName = None,
    params: int | Sequence[int] = 0,
    units: UnitRule | None = None,
    over: AxisName | OverRule = None,
    split: SplitRule | None = None,
    check: bool | str = "first",
) -> "ShardedStep":
    """Shard an unsharded train step by a ZeRO stage (arXiv:1910.02054).

    The sharded step has the same signature, and the numbers of unsharded training on the global batch. At stage 3
    it runs `train_step` on boxes. At stages 1 and 2 it cuts the parameters, runs `train_step` on the boxes, and
    gathers the new parameters. At stage 0 it runs `train_step` as it is.

    Args:
        train_step: a pure function, such as `(params, opt_state, batch) -> (params, opt_state, loss)`, that takes
            gradients with `fzero.value_and_grad`.
        stage: 0 to 3: what is sharded. See `ShardedStep.layout`.
        mesh: the ranks; by default the whole world under torchrun, else a simulated mesh of one rank.
        axis: the data-parallel axes of the mesh: those that the batch is split over, that losses and gradients are
            averaged over, and that units are sharded over; by default all of them.
        params: the position, or positions, of the arguments that are parameters. At stages 1 and 2 the results at
            the same positions are gathered.
        units: a rule `(path, leaf) -> unit name` that says which leaves are gathered together, or `None` for a leaf
            that stays replicated. By default each repeated block is a unit, and each other top-level child is one.
        over: those of `axis` that units are sharded over, or a rule `(path, leaf) -> axes`; by default all. Along the
            others they are replicated: hybrid sharding is `axis=("replica", "shard"), over="shard"`.
        split: a rule `(path, leaf) -> {axis: dimension}` for leaves of which each rank along an axis has its own part:
            tensor and expert parallelism. `init` takes them whole, and so gives `gather` them.
        check: whether a distributed run compares, by checksum, its plain arguments and results between the ranks:
            at the "first" call, at each (True), or never (False). It finds a forgotten `pmean` or `mesh.local`. A
            simulation always checks results, by type.

    Returns:
        A `ShardedStep`: call it like `train_step`.

    Raises:
        ValueError: if `stage` is not 0 to 3, `axis` not an axis of the mesh, or `check` none of its values.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> opt = optim.adam(0.1)
        >>> def train_step(params, opt_state, x):
        ...     loss, grads = fzero.value_and_grad(lambda p, x: (p["w"] * x).mean())(params, x)
        ...     updates, opt_state = opt.update(grads, opt_state, params)
        ...     return optim.apply_updates(params, updates), opt_state, loss
        >>> mesh = fzero.mesh(dp=2)
        >>> step = fzero.shard(train_step, stage=2, mesh=mesh)
        >>> params, opt_state = step.init({"w": torch.ones(3)}, opt)
        >>> params, opt_state, loss = step(params, opt_state, mesh.split(torch.ones(4, 3)))
        >>> params
        {'w': tensor([0.9000, 0.9000, 0.9000])}
        >>> opt_state.mu
        {'w': Shard('w', 2 of 3 elements, dp=2)}
    """
    if not callable(train_step):
        raise TypeError(f"train_step is {train_step!r}: expected a function")
    if check not in ("first", True, False):
        raise ValueError(f'check={check!r}: expected "first", True or False')
    if not isinstance(stage, int) or stage not in range(len(STAGES)):
        raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3")
    if mesh is None:
        mesh = make_mesh(dp=-1)
        if mesh.simulated:
            notice("fzero.shard: no mesh given and no torchrun world, so a simulated mesh of one rank is used")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r}: expected a mesh, such as fzero.mesh(dp=4)")
    names = mesh.names(axis)
    positions = (params,) if isinstance(params, int) else tuple(params)
    if any(i < 0 for i in positions):
        raise ValueError(f"params={params!r}: expected positions of arguments, counted from 0")
    return ShardedStep(train_step, stage, mesh, names, positions, Rules(units, rule_of(over), split), check)


@dataclass(frozen=True)
class ShardedStep:
    """A train step on a mesh, made by `fzero.shard`. Call it like the unsharded step.

    Attributes:
        train_step: the unsharded step.
        stage: 0 to 3.
        mesh: the ranks.
        axis: the axes that are sharded over.
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

    def __repr__(self) -> str:
        name = getattr(self.train_step, "__name__", "train_step")
        return f"ShardedStep({name}, stage={self.stage}, {self.mesh!r}, {self.layout})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

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
        """
        if is_tracing():
            return self._run(*args, **kwargs)
        return self.checked(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        check_arguments((args, kwargs), self.mesh)
        check_params(args, self.params, self.stage, self.layout.params == "sharded", self.rules.units)
        return self.program(self.rank_step)(*args, **kwargs)

    def checked(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, comparing plain arguments and results between the ranks if `check` says so now."""
        check = self._checks_now()
        if check:
            check_equal("argument", {**dict(enumerate(args)), **kwargs}, self.mesh)
        out = run(*args, **kwargs)
        if check:
            check_equal("result", out, self.mesh)
        return out

    def handed_on(self, args: Sequence[Any], out: Any) -> tuple[int, ...]:
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

    def on(self, mesh: Mesh) -> "ShardedStep":
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
        check_results(cut, out, self.params)
        del cut  # the old shards, before the new parameters are whole
        if not isinstance(out, tuple):
            return replicate(out)
        whole = [replicate(x) if i in self.params else x for i, x in enumerate(out)]
        return type(out)(*whole) if hasattr(out, "_fields") else tuple(whole)

    def init(self, params: Any, opt: Any) -> tuple[Any, Any]:
        """Put parameters into the stage's layout and make the optimizer's state for them.

        Args:
            params: a tree of plain tensors, equal on all ranks (compared by checksum in a distributed run).
            opt: an (init, update) pair.

        Returns:
            `(params, opt_state)`: what the step takes.

        Raises:
            ValueError: if `params` differs between ranks, holds boxes, or `opt` declares that it is not elementwise
                and the stage shards its state.
        """
        check_plain(params)
        check_equal("params", params, self.mesh)
        sharded = self.layout.opt_state == "sharded"
        elementwise = getattr(opt, "elementwise", None)
        if sharded and elementwise is None:
            notice(
                f"fzero: {type(opt).__name__} does not say whether it is elementwise and is taken to be: "
                "fzero.testing.check_elementwise(opt) finds out"
            )
        if sharded and elementwise is False:
            raise ValueError(
                f"stage={self.stage} runs the optimizer on flat shards, and this one declares elementwise=False: "
                "it needs whole leaves; use stage=0"
            )

        if self.layout.params == "replicated":
            params = tree.map(torch.clone, params)  # a jitted step overwrites what it is given

        def make(params: Any) -> tuple[Any, Any]:
            params = partition(params, ())  # split leaves, which are no rank's whole
            boxes = partition(params, reduce=self.layout.grads) if sharded else params
            return boxes if self.layout.params == "sharded" else params, opt.init(boxes)

        try:
            return self.program(make)(params)
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
            >>> from fzero import optim
            >>> step = shard(lambda p, s, x: (p, s), stage=3, mesh=make_mesh(dp=4))
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


def _apart_from(values: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies tensors that share memory with `values`, which a jitted step may overwrite."""
    lent = {x.untyped_storage().data_ptr() for x in tree.tensors(values)}
    return lambda x: x.clone() if x.untyped_storage().data_ptr() in lent else x


def _alike(x: Any, y: Any) -> bool:
    """Tell whether two trees have one structure and their tensors one shape and dtype each."""
    (xs, structure), (ys, other) = tree.flatten(x), tree.flatten(y)
    is_tree = not isinstance(x, torch.Tensor) and any(isinstance(a, torch.Tensor) for a in xs)
    return is_tree and structure == other and [tree.show(a) for a in xs] == [tree.show(b) for b in ys]
