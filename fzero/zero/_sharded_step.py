"""The sharded step: what each stage does with parameters, gradients and optimizer state, around an unsharded step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from fzero import tree
from fzero._torch import is_tracing
from fzero._torch.levels import vmaps
from fzero._tracebacks import UsersFrames, api_boundary
from fzero.axes import DEFAULT_RULES, LayoutRules
from fzero.optim import offload_params
from fzero.ranks import Mesh, Spmd, check_equal
from fzero.sharding import PerRank, is_box
from fzero.transforms import assemble, partition, replicate
from fzero.zero._build import build, given_like, lay_side_by_side
from fzero.zero._bytes import check_host_memory, state_bytes
from fzero.zero._checks import (
    as_value,
    check_arguments,
    check_device,
    check_memory,
    check_optimizer,
    check_params,
    check_results,
    check_tree,
    check_unwritten,
    copied_from,
    is_like,
    noted,
)
from fzero.zero._source import source_of
from fzero.zero._stages import STAGES, StageLayouts

__all__ = ["ShardedStep"]


@dataclass(frozen=True)
class ShardedStep:
    """A train step on a mesh, made by `fzero.shard`. Call it like the unsharded step.

    Attributes:
        train_step: the unsharded step.
        stage: 0 to 3.
        mesh: the ranks.
        axis: the data-parallel axes. Losses are averaged and units sharded over them; the batch is split over all of
            them but a pipeline's.
        params: the positions of the parameters.
        rules: how trees are cut: the rules given as `units`, `over` and `split`.
        check: whether a distributed run compares replicated values between the ranks: "first", True or False.
    """

    train_step: Callable[..., Any]
    stage: int
    mesh: Mesh
    axis: tuple[str, ...]
    params: tuple[int, ...]
    rules: LayoutRules = DEFAULT_RULES
    check: Literal["first"] | bool = "first"
    _calls: list[None] = field(default_factory=list, repr=False, compare=False)

    @property
    def layout(self) -> StageLayouts:
        """What the stage does with parameters, gradients and optimizer state."""
        return STAGES[self.stage]

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that a batch is split over: those of `axis`, but for a pipeline's, whose ranks share one."""
        return tuple([name for name in self.axis if name not in self.rules.apart])

    @property
    def name(self) -> str:
        """The name of the unsharded step's function."""
        return getattr(self.train_step, "__name__", type(self.train_step).__name__)

    def __repr__(self) -> str:
        return f"ShardedStep({self.name}, stage={self.stage}, {self.mesh!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Parameters that require grad by themselves, as those of a module do, are taken as plain values: else torch would
        record each step. To differentiate a step use `torch.func`, or let another argument require grad.

        Args:
            *args: what `train_step` takes: parameters and optimizer state as `init` or the last call gave them, the
                batch as `mesh.split` or `mesh.local` did, other values plain (replicated).
            **kwargs: likewise.

        Returns:
            What `train_step` returns; plain tensors are equal on all ranks.

        Raises:
            ValueError: if the parameters have not the stage's layout, or a box was cut for another mesh. Also if a
                plain result differs by rank (simulation, or with `check`), or new parameters are not like the old.
            RuntimeError: if a step of stage 1 or 2 returns parameters that it wrote through `.data`, which torch does
                not count. Other in-place writes give the unsharded numbers; a jitted step refuses all.
        """
        if is_tracing():
            return self._run(*args, **kwargs)
        with UsersFrames():
            if any(x.is_meta for i in self.params for x in tree.tensors(args[i : i + 1])):
                raise ValueError(
                    "the parameters are on the meta device, which is for fzero.plan: give step.init the module itself, "
                    "or a function that makes the parameters"
                )
            for i, x in enumerate(args):
                check_memory(f"argument {i}", x)
            return self._checked(self._run, *args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        check_arguments((args, kwargs), self.mesh, self.axis, self.rules)
        check_params(args, self.params, self.stage, self.layout.shards_params, self.rules)
        args = tuple([tree.map(as_value, x) if i in self.params else x for i, x in enumerate(args)])
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
            [i for i, x in enumerate(args) if i in self.params or (i < len(results) and is_like(x, results[i]))]
        )

    def _checks_now(self) -> bool:
        if not self.mesh.distributed or vmaps():  # what a vmap has batched cannot be read
            return False
        if self.check == "first" and not self._calls:
            self._calls.append(None)
            return True
        return self.check != "first" and bool(self.check)

    def program(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Run a rank program of your own on the step's mesh, with its axes and rules as the defaults."""
        return Spmd(self.mesh, f, self.axis, self.rules)

    def _on(self, mesh: Mesh) -> "ShardedStep":
        """Return the same step on another mesh with the same axes."""
        return replace(self, mesh=mesh, _calls=[])

    def rank_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one rank's step: what `fzero.shard` composes, to read."""
        if not self.layout.shards_within_step:  # the layout in is the layout out
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

    @api_boundary
    def init(self, params: Any, opt: Any, *, donate: bool = False) -> tuple[Any, Any]:
        """Put parameters into the stage's layout and make the optimizer's state for them.

        At stage 3 each leaf of a function, or of a module on the meta device, is made, cut and forgotten. So no rank
        ever holds more than its shards and one leaf. At stages 0 to 2 a rank holds all parameters anyway; from a
        function they are made at once, and from a tree they are copied, unless it is donated. At stages 1 and 2 the
        leaves of a unit lie side by side in one buffer. At stages 1 to 3 the state is made for a rank's shards alone.

        Args:
            params: a tree of plain tensors, equal on all ranks (compared by checksum in a distributed run); or what
                makes one: a function without arguments, or a module. A module keeps the weights that it has; one on
                the meta device fills itself, see `fzero.nn.initializer`. A function draws the random numbers of an
                ordinary call, so the values are the same for every mesh; seed all ranks alike.
            opt: an (init, update) pair.
            donate: whether the results may take over the memory of the tensors in `params`. Afterwards
                reading these raises `DonatedError`. Views of their memory share it with the results. Units of several
                leaves are copied at stages 1 and 2, one by one, and each leaf is freed when it is.

        Returns:
            `(params, opt_state)`: what the step takes, plain tensors and boxes without an autograd graph. They share no
            memory with anything that was given and not donated. With a pair that keeps master weights, the parameters
            are cast as its precision policy says.

        Raises:
            ValueError: if `params` differs between ranks, holds boxes, or is a module that is partly on the meta
                device. Also if `opt` declares that it is not elementwise and the stage shards its state.
            TypeError: if `opt` is no (init, update) pair, or a leaf of `params` is no dense tensor. The message names
                it.
            DonatedError: if a leaf was donated before.
            MemoryError: if the host has less free than `optim.offload` is about to put there.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init(lambda: {"w": torch.ones(100, 100)}, optim.sgd(0.1))
            >>> params
            {'w': Shard('w', float32 [100, 100], 2500 of 10000 elements, dp=4)}
        """
        check_optimizer(opt, self.stage, self.layout.shards_state)
        precision = getattr(opt, "precision", None)
        # units are cut as those of the parameters that theirs become
        wide = self if precision is None else replace(self, rules=self.rules._replace(dtype=precision.dtype_of))
        with torch.inference_mode(False), torch.no_grad():
            params = wide._placed("params", params, "step.init(..., donate=True)" if donate else "")
            check_host_memory(wide._state, params, opt, self.mesh)
            opt_state = wide._state(params, opt)
            params = params if precision is None else precision.cast(params)
            # a state that starts as the parameters: a jitted step writes into both
            opt_state = tree.map(copied_from(params), opt_state)
            if ratio := getattr(opt, "lowers", 0):
                params = offload_params(params, ratio, precision)
            leaves, structure = tree.flatten(params, is_box)
            del params
            return self._in_units(leaves, structure), opt_state

    def _in_units(self, leaves: list[Any], structure: Any) -> Any:
        """Lay whole leaves side by side by units, where a rank updates its part of each. Takes `leaves`."""
        whole = [x if isinstance(x, torch.Tensor) else None for x in leaves]
        if self.layout.shards_within_step:
            whole = tree.map(lambda x: torch.empty_like(x, device="meta"), whole)
            lay_side_by_side(leaves, self.program(partition)(tree.unflatten(structure, whole)))
        return tree.unflatten(structure, leaves)

    def _placed(self, what: str, values: Any, by: str) -> Any:
        """Put a tree into the layout that parameters have between steps: its leaves one by one into their places."""
        source = source_of(what, values, one_by_one=self.layout.shards_params, by=by)
        del values
        plain = [None if isinstance(x, PerRank) else x for x in source.leaves]
        layout = self.program(self._cut)(tree.unflatten(source.structure, plain))
        return build(what, source, layout, self.mesh)

    def _cut(self, params: Any) -> Any:
        """Cut parameters, as a rank program: at stages 0 to 2 only leaves that are split, of which no rank has all."""
        sharded = self.layout.shards_params
        return partition(params, None if sharded else (), reduce=self.layout.grads if sharded else "each")

    def _state(self, params: Any, opt: Any) -> Any:
        """Make the optimizer's state, for a rank's shards where the stage shards it."""
        further = self.layout.shards_within_step

        def make(params: Any) -> Any:
            return opt.init(partition(params, reduce=self.layout.grads) if further else params)

        state = noted(lambda: self.program(make)(params))
        check_device(params, state)
        return state

    @api_boundary
    def partition(self, values: Any, like: Any = None, *, donate: bool = False) -> Any:
        """Put a tree of whole leaves into the step's layout, outside the step: the inverse of `gather`.

        A tree like the parameters, such as frozen ones, needs no `like`: the step's rules cut it as `init` does, at
        stage 3 in shards. For any other tree, such as the optimizer's state, of which only some leaves are cut, give
        `like`, a tree in the layout of the result. One without memory will do: `_, like = step.init(meta, opt)`.

        Args:
            values: a tree of plain tensors, equal on all ranks (compared by checksum in a distributed run). Without
                `like`, also a function that makes one, or a module, as `init` takes them. `PerRank` values are copied.
            like: a tree in the layout, with the structure, shapes and dtypes of `values`, whatever its tensors hold.
            donate: whether the results may take over the memory of the tensors in `values`, as in `init`.

        Returns:
            The tree in the layout, in memory of its own. `step.gather` of it is `values`, to the last bit.

        Raises:
            ValueError: if `values` differs between ranks, holds shards, or is not like `like`; or if `like` was cut for
                another mesh. Names the leaf.
            TypeError: if a leaf is no dense tensor. The message names it.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init({"w": torch.ones(100)}, optim.adam(0.1))
            >>> step.partition({"w": torch.ones(8)})
            {'w': Shard('w', float32 [8], 2 of 8 elements, dp=4)}
            >>> saved = step.gather(opt_state)
            >>> step.partition(saved, like=opt_state).mu
            {'w': Shard('w', float32 [100], 25 of 100 elements, dp=4)}
        """
        by = "step.partition(..., donate=True)" if donate else ""
        with torch.inference_mode(False), torch.no_grad():
            if like is None:
                placed = self._placed("values", values, by)
            else:
                check_tree(like, self.mesh)
                placed = build("values", given_like("values", values, like, by), like, self.mesh)
            del values
            leaves, structure = tree.flatten(placed, is_box)
            del placed
            return self._in_units(leaves, structure)

    @api_boundary
    def gather(self, params: Any) -> Any:
        """Gather every box of a tree, outside the step: plain tensors again, for evaluation or export.

        Args:
            params: a tree in the step's layout, such as its parameters, or a moment of the optimizer's state.

        Returns:
            The tree with plain tensors, in memory of their own, on every rank; `PerRank` values stay as they are. All
            ranks must call it: under `if mesh.rank == 0:` it would wait for the others for ever.

        Raises:
            ValueError: if a box was cut for another mesh.
        """
        check_tree(params, self.mesh)
        entries, structure = tree.flatten(params, is_box)
        kept = [x if isinstance(x, PerRank) else None for x in entries]
        whole = self.program(assemble)([None if isinstance(x, PerRank) else x for x in entries])
        whole = tree.map(copied_from(params), whole)
        return tree.unflatten(structure, [x if x is not None else y for x, y in zip(kept, whole, strict=True)])

    def state_bytes(self, *trees: Any, space: str | None = None) -> int:
        """Count the bytes that one rank holds of trees, in both memories or one; tied leaves count once.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init({"w": torch.zeros(100)}, optim.sgd(0.1))
            >>> step.state_bytes(params)
            100
        """
        return state_bytes(trees, self.mesh, space)
