"""ShardedStep: a train step on a mesh, with the layouts of a ZeRO stage."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fzero import tree
from fzero._arguments import check_callable
from fzero._call_hints import explain_call
from fzero._liveness import publish_step
from fzero._names import missing_members
from fzero._torch import empty_cache, is_tracing
from fzero._torch.levels import vmaps
from fzero._tracebacks import UserFrames, api_boundary, api_boundary_with
from fzero.axes import DEFAULT_RULES, DiffersByRankError, LayoutRules
from fzero.optim import Optimizer, OptimizerLike, OptState, Params, as_optimizer, watch_roles
from fzero.ranks import Mesh, Spmd, check_equal
from fzero.sharding import PerRank, is_box
from fzero.transforms import assemble, partition, replicate
from fzero.tree import Tree
from fzero.zero._bytes import check_host_memory, state_bytes
from fzero.zero._call_checks import (
    as_value,
    check_arguments,
    check_params,
    check_results,
    check_tree,
    check_unwritten,
    dtype_notes,
    explain_error,
    is_like,
)
from fzero.zero._fill import fill_template
from fzero.zero._leaf_supply import supply_like
from fzero.zero._rerun import CallHistory, Rerun, run_and_compare
from fzero.zero._setup_checks import check_not_meta, check_optimizer, check_splits
from fzero.zero._source import make_source
from fzero.zero._stages import StageLayouts, stage_layouts
from fzero.zero._unit_buffers import copy_to_unit_buffers

__all__ = ["ShardedStep"]


_FOREIGN_NAMES = {  # names of DeepSpeed's engine, of FSDP's modules and of Accelerate
    "backward": "fzero.value_and_grad(loss_fn)(params, batch) within train_step, which takes gradients",
    "step": "a call: params, opt_state, loss = step(params, opt_state, batch)",
    "train_batch": "a call: params, opt_state, loss = step(params, opt_state, batch)",
    "eval_batch": "fzero.evaluate(step, f)",
    "zero_grad": "not needed: gradients are values, which no step keeps",
    "clip_grad_norm_": "the optimizer's: fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), opt)",
    "forward": "fzero.evaluate(step, f) or fzero.predict(step, f), which run a model",
    "train": "the module's, before fzero.nn.functional(module)",
    "eval": "the module's, before fzero.nn.functional(module); fzero.evaluate(step, f) evaluates",
    "to": "the mesh's: fzero.mesh(dp=4, device=...), and step.init puts the parameters there",
    "cuda": "the mesh's: fzero.mesh(dp=4, device=...), and step.init puts the parameters there",
    "compile": "fzero.jit(step)",
    "module": "an argument and a result: step.gather(params) makes the parameters full",
    "parameters": "an argument and a result: step.gather(params) makes the parameters full",
    "named_parameters": "an argument and a result: step.gather(params) makes the parameters full",
    "optimizer": "an argument of step.init(params, opt), whose state is an argument and a result of the step",
    "unshard": "step.gather(params)",
    "reshard": "step.partition(params)",
    "no_sync": "fzero.value_and_grad(loss_fn, micro_batches=4)",
    "set_requires_gradient_sync": "fzero.value_and_grad(loss_fn, micro_batches=4)",
    "set_reduce_scatter_divide_factor": 'fzero.value_and_grad(loss_fn, reduce="sum"), and your own division',
    "set_gradient_divide_factor": 'fzero.value_and_grad(loss_fn, reduce="sum"), and your own division',
    "state_dict": "step.gather(params) for full tensors; fzero.save(path, values, mesh) saves them in any layout",
    "load_state_dict": "step.partition(params) of full tensors, or fzero.load(path, like, mesh) of a checkpoint",
    "save_checkpoint": "fzero.save(path, values, mesh)",
    "load_checkpoint": "fzero.load(path, like, mesh)",
}


@dataclass(frozen=True)
class ShardedStep:
    """A train step on a mesh, returned by `fzero.shard`. Call it like the unsharded step.

    Attributes:
        train_step: the unsharded step.
        stage: the number of the ZeRO stage.
        mesh: the ranks.
        axis: the data-parallel axes. Losses are averaged and units sharded over them, and their order is that of a
            unit's parts. The batch is split over them, except over a pipeline's axis.
        param_argnums: the positions of the parameters among the arguments.
        rules: the rules for layouts: the arguments `units`, `over` and `split` of `fzero.shard`.
        check: whether a distributed run compares replicated values between ranks: "first", True, False or a `Rerun`.
    """

    train_step: Callable[..., Any]
    stage: int
    mesh: Mesh
    axis: tuple[str, ...]
    param_argnums: tuple[int, ...]
    rules: LayoutRules = DEFAULT_RULES
    check: Literal["first"] | bool | Rerun = "first"
    _history: CallHistory = field(default_factory=CallHistory, repr=False, compare=False)  # of checked calls

    @property
    def layout(self) -> StageLayouts:
        """The stage's layouts of parameters, gradients and optimizer state."""
        return stage_layouts(self.stage)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which a batch is split, in the mesh's order: `axis` without the axis of a pipeline."""
        batch_axes = set(self.axis).difference(self.rules.pipeline_axes)
        return tuple([name for name in self.mesh.axis_names if name in batch_axes])

    @property
    def name(self) -> str:
        """The name of the unsharded step."""
        return getattr(self.train_step, "__name__", type(self.train_step).__name__)

    def __repr__(self) -> str:
        return f"ShardedStep({self.name}, stage={self.stage}, {self.mesh!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Parameters that are leaves with `requires_grad`, such as a module's, are detached: otherwise torch would record
        every step. To differentiate a step, use `torch.func`, or let another argument require grad.

        Args:
            *args: the arguments of `train_step`: parameters and optimizer state from `init` or the previous call, the
                batch from `mesh.split` or `mesh.local`, and other values as plain (replicated) tensors.
            **kwargs: keyword arguments of `train_step`, likewise.

        Returns:
            The results of `train_step`. Plain tensors are equal on all ranks.

        Raises:
            ValueError: if the parameters do not have the stage's layout, or a box was sharded for another mesh. Also if
                a plain result differs by rank (in a simulation, or with `check`), or new parameters differ from the old
                in structure, shape or dtype.
            RuntimeError: if a step of stage 1 or 2 returns parameters that it wrote through `.data`, which torch does
                not count. Other in-place writes give the unsharded numbers. A jitted step refuses all in-place writes.
        """
        if is_tracing():
            return self._run_on_ranks(*args, **kwargs)
        with UserFrames():
            if any(x.is_meta for i in self.param_argnums for x in tree.tensors(args[i : i + 1])):
                raise ValueError(
                    "the parameters are on the meta device, which only fzero.plan supports: give step.init the module "
                    "itself, or a function that makes the parameters"
                )
            for i, x in enumerate(args):
                check_not_meta(f"argument {i}", x)
            with publish_step(self.name):
                return self.run_checked(self._run_on_ranks, *args, **kwargs)

    def _run_on_ranks(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, run the step on every rank, and add notes to an error that the user's code raised."""
        check_arguments((args, kwargs), self.mesh, self.axis, self.rules, has_batch=self.check is not False)
        check_params(args, self.param_argnums, self.stage, self.layout.shards_params, self.rules, [*kwargs])
        args = tuple([tree.map(as_value, x) if i in self.param_argnums else x for i, x in enumerate(args)])
        try:
            return self.program(self.rank_step)(*args, **kwargs)
        except Exception as error:
            for note in explain_error(error, args, self.param_argnums, self.stage, self.mesh.simulated):
                error.add_note(note)
            if isinstance(error, TypeError) and inspect.isfunction(self.train_step):
                signature_text = f"the step takes the arguments of {self.name}{inspect.signature(self.train_step)}"
                explain_call(error, self.train_step, kwargs, f"{signature_text}, and was given {len(args)} by position")
            raise

    def run_checked(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, and compare plain arguments and results between the ranks if `check` asks for it at this call."""
        try:
            return self._compare(run, *args, **kwargs)
        except RuntimeError as error:
            for note in dtype_notes(str(error), args):  # a jitted step has no other
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
            raise

    def _compare(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run`, and compare what `check` asks for."""
        if isinstance(self.check, Rerun) and not vmaps():
            out = run_and_compare(
                rerun=self.check, history=self._history, mesh=self.mesh, run=run, args=args, kwargs=kwargs
            )
            self._history.record(out)
            return out
        if not self._should_check():
            return run(*args, **kwargs)
        self._history.record()
        check_equal("argument", {**dict(enumerate(args)), **kwargs}, self.mesh)
        out = run(*args, **kwargs)
        check_equal("result", out, self.mesh)
        return out

    def state_argnums(self, args: Sequence[Any], out: Any) -> tuple[int, ...]:
        """List the arguments that the step updates: parameters, and each tree with a result like it at its position.

        A lone tensor does not count as state: a step's loss may look like one of its arguments.
        """
        results = out if isinstance(out, tuple) else (out,)
        return tuple(
            [i for i, x in enumerate(args) if i in self.param_argnums or (i < len(results) and is_like(x, results[i]))]
        )

    def _should_check(self) -> bool:
        if not self.mesh.distributed or vmaps():  # a value that a vmap batches cannot be read
            return False
        return self._history.is_first if self.check == "first" else bool(self.check)

    @api_boundary
    def program(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Make a rank program of `f` that runs on the step's mesh, with the step's axes and rules as defaults."""
        check_callable("f", f, "a function that each rank runs, as in step.program(f)(params, batch)")
        return Spmd(self.mesh, f, self.axis, self.rules)

    if not TYPE_CHECKING:  # a type checker finds a missing name itself
        __getattr__ = missing_members(_FOREIGN_NAMES)

    def on_mesh(self, mesh: Mesh) -> "ShardedStep":
        """Return the same step on another mesh with the same axes."""
        return replace(self, mesh=mesh, _history=CallHistory())

    def rank_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one rank's step.

        At stages 1 and 2 it partitions full parameters before the step and gathers the new ones after it. At stage 3
        the step receives shards. Gradients are reduced in `fzero.value_and_grad`.
        """
        if not self.layout.shards_within_step:  # parameters keep their layout within the step
            with watch_roles():
                out = self.train_step(*args, **kwargs)
                check_results(args, out, self.param_argnums)
            return out
        sharded = [
            partition(x, reduce_grads=self.layout.grads) if i in self.param_argnums else x for i, x in enumerate(args)
        ]
        with watch_roles():
            out = self.train_step(*sharded, **kwargs)
            check_unwritten(sharded, self.param_argnums)
            check_results(sharded, out, self.param_argnums)
        del sharded  # free the old shards before gathering the new parameters
        if not isinstance(out, tuple):
            return replicate(out)
        full = [replicate(x) if i in self.param_argnums else x for i, x in enumerate(out)]
        return type(out)(*full) if hasattr(out, "_fields") else tuple(full)

    @api_boundary
    def init(
        self,
        params: Params | torch.nn.Module | Callable[[], Params],
        opt: OptimizerLike,
        *,
        donate: bool = False,
    ) -> tuple[Params, OptState]:
        """Put parameters into the stage's layout, and make the optimizer's state for them, on the mesh's device.

        Leaves that lie elsewhere are copied there one after the other; leaves on the meta device stay there. At stage
        3 and on an accelerator, a function, or a module on the meta device, is run leaf by leaf: each leaf is
        computed, copied and freed. So at stage 3 a rank never holds more than its shards and one leaf. At stages 0 to
        2 a rank holds all parameters anyway: on a CPU a function computes them at once, and a tree is copied, unless
        it is donated. An accelerator gets the memory back that only full leaves needed. At stages 1 and 2 the leaves
        of a unit lie side by side in one buffer. At stages 1 to 3 the state is made for a rank's shards only.

        Args:
            params: a tree of plain tensors, equal on all ranks (compared by checksum in a distributed run); or a
                function without arguments that returns such a tree; or a module. A module keeps its weights; a module
                on the meta device initializes itself, see `fzero.nn.initializer`. A function draws the random numbers
                of an ordinary call, so the values are the same for every mesh; seed all ranks alike.
            opt: an (init, update) pair.
            donate: whether the results may reuse the memory of the tensors in `params`. Reading such a tensor
                afterwards raises `DonatedError`. Views of its memory share it with the results. At stages 1 and 2,
                units of several leaves are copied one after the other, and each leaf is freed after its copy.

        Returns:
            `(params, opt_state)` for the step: plain tensors and boxes without an autograd graph. They share memory
            with donated tensors only. With an optimizer that keeps master weights, the parameters have the dtypes of
            its precision policy.

        Raises:
            ValueError: if `params` differs between ranks, holds boxes, or is a module that is partly on the meta
                device. Also if `opt` declares that it is not exact on shards and the stage shards its state.
            TypeError: if `opt` is no (init, update) pair, or a leaf of `params` is no dense tensor. The message names
                the leaf.
            DonatedError: if a leaf was donated before.
            MemoryError: if the host has too little free memory for the state that `optim.offload` puts there.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init(lambda: {"w": torch.ones(100, 100)}, optim.sgd(0.1))
            >>> params
            {'w': Shard('w', float32 [100, 100], 2500 of 10000 elements, dp=4)}
        """
        optimizer = as_optimizer(opt)
        check_optimizer(opt, optimizer, self.stage, self.layout.shards_state)
        with torch.inference_mode(False), torch.no_grad():
            step = self._with_state_dtypes(optimizer)
            params, step_boxes = step._shard_values("params", params, "step.init(..., donate=True)" if donate else None)
            check_splits(step_boxes, self.rules, self.mesh, self.data_axes)
            check_host_memory(step.program(optimizer.init), step_boxes, params, optimizer, self.mesh)
            opt_state = step._make_state(params, optimizer)
            params = optimizer.cast_and_offload(params)
            opt_state = tree.copy_shared(opt_state, params)  # a state may start as the parameters themselves
            leaves, structure = tree.flatten(params, is_box)
            del params  # so each leaf is freed when it is copied
            params = tree.unflatten(structure, copy_to_unit_buffers(leaves, step_boxes))
            empty_cache(self.mesh.device)  # the segments of full leaves, in which no step's tensors would fit
            return params, opt_state

    def _with_state_dtypes(self, optimizer: Optimizer) -> "ShardedStep":
        """Return the step that assigns leaves to units by the dtypes that the optimizer will cast them to."""
        precision = optimizer.precision
        return self if precision is None else replace(self, rules=self.rules._replace(dtype=precision.leaf_dtype))

    def _shard_values(self, label: str, values: Tree, donated_to: str | None) -> tuple[Tree, Tree]:
        """Put a tree into the layout that parameters have between steps, leaf by leaf.

        Returns:
            The tree, and a tree of its boxes within a step, on the meta device.
        """
        lazy = self.layout.shards_params or self.mesh.device.type != "cpu"  # so the host never holds the whole tree
        source = make_source(label, values, lazy=lazy, donated_to=donated_to)
        del values
        boxes, step_boxes = self._abstract_boxes(tree.unflatten(source.structure, source.leaves))
        return fill_template(label, source, boxes, self.mesh), step_boxes

    def _abstract_boxes(self, params: Params) -> tuple[Params, Params]:
        """Return a tree's boxes on the meta device: those between steps, and those within a step.

        Between steps of stages 0 to 2 only split leaves are in boxes, over no axis.
        """

        def make_boxes(params: Any) -> tuple[Any, Any]:
            sharded = self.layout.shards_params
            boxes = partition(params, None if sharded else (), reduce_grads=self.layout.grads if sharded else "each")
            return boxes, self._partition_within(boxes)

        def to_meta(x: Any) -> Any:
            return torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else None

        return self.program(make_boxes)(tree.map(to_meta, params, is_leaf=is_box))

    def _make_state(self, params: Params, optimizer: Optimizer) -> OptState:
        """Make the optimizer's state: for a rank's shards if the stage shards it, else for full parameters.

        Raises:
            ValueError: if the state is on the meta device, and the parameters have values. An error gets a note if the
                optimizer flattens trees by itself.
        """

        def init(params: Any) -> Any:
            return optimizer.init(self._partition_within(params))

        try:
            opt_state = self.program(init)(params)
        except DiffersByRankError as error:
            paths, entries, _ = tree.flatten_with_paths(params, is_box)
            for path, x in zip(paths, entries, strict=True):
                if isinstance(x, PerRank):
                    raise ValueError(
                        f"{tree.leaf_name('params', path)} is a PerRank: step.init takes full parameters and shards "
                        "them itself; mesh.split is for batches"
                    ) from error
            error.add_note("An optimizer that flattens trees returns state without boxes: wrap it, optim.leafwise(opt)")
            raise
        if not any(x.is_meta for x in tree.tensors(params)):
            check_not_meta("opt_state", opt_state)
        return opt_state

    def _partition_within(self, params: Params) -> Params:
        """Partition parameters as they are within a step, and as the optimizer's state is."""
        return partition(params, reduce_grads=self.layout.grads) if self.layout.shards_within_step else params

    @api_boundary
    def partition(
        self, values: Tree | torch.nn.Module | Callable[[], Tree], like: Tree | None = None, *, donate: bool = False
    ) -> Tree:
        """Put a tree of full leaves into the step's layout, outside the step, on the mesh's device.

        This is the inverse of `gather`.

        A tree like the parameters, such as frozen parameters, needs no `like`: the step's rules partition it as in
        `init`. For any other tree, such as the optimizer's state, pass `like`, a tree in the layout of the result. A
        tree on the meta device is enough: `_, like = step.init(meta, opt)`.

        Args:
            values: a tree of plain tensors, equal on all ranks (compared by checksum in a distributed run). Without
                `like`, also a function that returns such a tree, or a module, as in `init`. `PerRank` values are
                copied.
            like: a tree in the layout, with the structure, shapes and dtypes of `values`. The contents of its tensors
                are not read.
            donate: whether the results may reuse the memory of the tensors in `values`, as in `init`.

        Returns:
            The tree in the layout, in memory of its own. `step.gather` returns `values` again, to the last bit.

        Raises:
            ValueError: if `values` differs between ranks, holds shards, or does not match `like`; or if `like` was
                sharded for another mesh. The message names the leaf.
            TypeError: if a leaf is no dense tensor. The message names the leaf.

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
        donated_to = "step.partition(..., donate=True)" if donate else None
        with torch.inference_mode(False), torch.no_grad():
            if like is None:
                result, step_boxes = self._shard_values("values", values, donated_to)
            else:
                check_tree(like, self.mesh)
                source = supply_like("values", values, like, donated_to)
                result = fill_template("values", source, like, self.mesh, like)
                del source
                step_boxes = self._abstract_boxes(result)[1] if self.layout.shards_within_step else like
            del values
            leaves, structure = tree.flatten(result, is_box)
            del result  # so each leaf is freed when it is copied
            return tree.unflatten(structure, copy_to_unit_buffers(leaves, step_boxes))

    @api_boundary_with("gather takes one tree: step.gather((params, opt_state))")
    def gather(self, params: Tree) -> Tree:
        """Gather every box of a tree into full tensors, with split leaves joined, outside the step.

        The result is for evaluation or export. All ranks must call `gather`: under `if mesh.rank == 0:`, rank 0 would
        wait for the other ranks forever.

        Args:
            params: a tree in the step's layout, such as its parameters, or a moment of the optimizer's state.

        Returns:
            The tree with plain tensors, in memory of their own, on every rank. `PerRank` values stay as they are.

        Raises:
            ValueError: if a box was sharded for another mesh.
            TypeError: if `params` is one value that is no tensor, such as an optimizer.
        """
        tree.check_is_tree("params", params, "step.gather(params)")
        check_tree(params, self.mesh)
        entries, structure = tree.flatten(params, is_box)
        per_rank = [x if isinstance(x, PerRank) else None for x in entries]
        full = self.program(assemble)([None if isinstance(x, PerRank) else x for x in entries])
        full = tree.copy_shared(full, params)
        return tree.unflatten(structure, [x if x is not None else y for x, y in zip(per_rank, full, strict=True)])

    def state_bytes(self, *trees: Tree, space: str | None = None) -> int:
        """Count the bytes that one rank holds of trees; tied leaves count once.

        Args:
            *trees: trees in the step's layout.
            space: "device" or "host" to count the bytes in one memory; by default both count.

        Example:
            >>> import fzero, torch
            >>> from fzero import optim
            >>> step = fzero.shard(lambda p, s, x: (p, s), stage=3, mesh=fzero.mesh(dp=4))
            >>> params, opt_state = step.init({"w": torch.zeros(100)}, optim.sgd(0.1))
            >>> step.state_bytes(params)
            100
        """
        return state_bytes(trees, self.mesh, space)
