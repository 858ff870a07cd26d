"""remat: a block keeps only its inputs for the backward pass, and runs again there.

The algorithm, in five steps, each a file:

1. A call of the block is taken down as a function of distinct tensors; in the places of tensors, its arguments hold
   their numbers (`_stand_ins`, `_call`).
2. One Function runs it below all transforms of torch.func, where nothing is tracked and nothing stays alive. Guards
   refuse tensors that it captures, or leaves elsewhere: they would lose their gradients (`_guards`).
3. This first run records the results of random draws, and of operations that are chosen (`_tape`); they become outputs
   of the Function, and inputs of its backward pass.
4. A derivative is work: the call, and the steps that derive it, its vjp, the jvp of that, a map over a batch
   (`_steps`). To run it is to run the block again, with the recording played, inside these transforms (`_work`).
5. The backward pass, the jvp and the vmap rule of the Function are the same Function, applied to the work that they
   derive. So each order of differentiation keeps inputs only, in host memory if that is asked (`_waiting`).
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero._torch import in_transform, storage_id
from fzero.collectives import to_device, to_host
from fzero.random import draw_from, next_key
from fzero.transforms._remat._call import (
    Batched,
    BlockCall,
    Jvp,
    Map,
    StandIns,
    Step,
    Tuples,
    Vjp,
    call_of,
    called,
    tracked,
)
from fzero.transforms._remat._guards import Guard
from fzero.transforms._remat._tape import Chosen, Player, RandomTape, Script, is_matmul

__all__ = ["RunFinds", "Work", "brought_up", "remat", "taken_down"]

# Waiting: what a rematerialised block keeps for its backward pass lies in host memory, if that is asked.


Up = dict[int, torch.device]
"""The places of tensors that wait on the host, and the devices that they belong to."""


def taken_down(tensors: Sequence[torch.Tensor], places: Collection[int]) -> tuple[list[torch.Tensor], Up]:
    """Copy those tensors to the host that were computed; others, such as parameters, stay alive in any case.

    The copies are tracked, since a second derivative is one of what they hold.

    Args:
        tensors: what is kept.
        places: those that may wait on the host.

    Returns:
        What is kept, and what is to be brought up.
    """
    up = {i: tensors[i].device for i in places if tensors[i].dim() and not tensors[i].is_leaf}
    with torch.enable_grad():
        return [to_host(x) if i in up else x for i, x in enumerate(tensors)], up


def brought_up(tensors: Sequence[torch.Tensor], up: Mapping[int, torch.device]) -> list[torch.Tensor]:
    """Copy what waits on the host back to its device."""
    return [to_device(x, up[i]) if i in up else x for i, x in enumerate(tensors)]


# The runs of a rematerialised block: the first, which records, and the later ones, which compute derivatives.


Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Recording:
    """The finds of the first run besides tensors.

    Attributes:
        script: says which operations the kept tensors belong to.
        result: the block's result, with stand-ins for tensors.
        tracked: whether each run is within a transform of its own that differentiates.
    """

    script: Script
    result: StandIns
    tracked: bool


@dataclass(frozen=True)  # not a NamedTuple: torch.func would take it for a tree, and copy it
class RunFinds:
    """The finds of a run besides tensors.

    Attributes:
        batched: for each step of its work which outputs have the batch; empty for a step that is no map.
        recording: the first run's.
    """

    batched: tuple[Batched, ...]
    recording: Recording


@dataclass(frozen=True)
class Work:
    """A call of a block and the steps of its derivation: a function of tensors.

    Attributes:
        call: the call.
        steps: in the forward pass only maps over a batch.
        recording: None in the forward pass. Later its kept tensors come before the inputs.
    """

    call: BlockCall
    steps: tuple[Step, ...] = ()
    recording: Recording | None = None

    @property
    def kept(self) -> int:
        """How many kept tensors come before the inputs."""
        return 0 if self.recording is None else self.recording.script.kept

    @property
    def waiting(self) -> frozenset[int]:
        """Which inputs wait on the host for the backward pass; those of a derivative are needed at once."""
        return self.call.waiting if self.recording is None else frozenset()

    def then(self, step: Step) -> "Work":
        """Return the work with one more step."""
        return replace(self, steps=(*self.steps, step))

    def run(self, tensors: Tensors) -> tuple[RunFinds, tuple[torch.Tensor, ...]]:
        """Run the block and its steps, below all transforms.

        Args:
            tensors: the kept ones, then the inputs of the last step.

        Returns:
            The finds, and the outputs of the last step; in the forward pass the tensors to keep follow them.

        Raises:
            RuntimeError: if the block writes into an argument, or runs other operations than in the forward pass.
            ValueError: if it uses a tensor, or leaves one elsewhere, whose gradient would be lost.
        """
        return self._record(tensors) if self.recording is None else self._run_again(tensors, self.recording)

    def _record(self, tensors: Tensors) -> tuple[RunFinds, tuple[torch.Tensor, ...]]:
        call, tape = self.call, RandomTape(self.call.save)
        seen: list[tuple[Guard, StandIns]] = []

        def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            guard = Guard([x for x, d in zip(xs, call.differentiated, strict=True) if d])
            ys, result = call.run(xs, guard, tape)
            seen.append((guard, result))
            return ys

        is_tracked = any(call.differentiated) and (call.save is not None or bool(self.steps))
        versions = [x._version for x in tensors]
        out, batched = self._through(f, tensors, is_tracked)
        if versions != [x._version for x in tensors]:
            raise RuntimeError("remat: the block writes into an argument in place: let it return a new value instead")
        guard, result = seen[-1]
        guard.check_escapes([*out, *tape.kept])
        given = {storage_id(x) for x in tensors}  # writing into a result must not reach an argument
        out = tuple([y.clone() if storage_id(y) in given else y for y in out])
        return RunFinds(batched, Recording(tape.script(), result, is_tracked)), (*out, *[x.detach() for x in tape.kept])

    def _run_again(self, tensors: Tensors, recording: Recording) -> tuple[RunFinds, tuple[torch.Tensor, ...]]:
        # tangents are made by matrix products too, so that those of the block cannot be told from them
        selective = not any(isinstance(step, Jvp) for step in self.steps)
        tape = Player(recording.script, tensors[: self.kept], self.call.save if selective else None)

        def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.call.run(xs, Guard(None), tape)[0]

        out, batched = self._through(f, tensors[self.kept :], recording.tracked)
        tape.finish()
        return RunFinds(batched, recording), out

    def _through(
        self, f: Tuples, inputs: Tensors, is_tracked: bool
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Batched, ...]]:
        """Run `f` through the steps; return the outputs, and which have the batch of each step."""
        batched: list[list[Batched]] = [[] for _ in self.steps]
        if is_tracked:
            wanted = [i for i, d in enumerate(self.call.differentiated) if d]
            f = tracked(f, wanted, check=self.recording is None)
        for step, found in zip(self.steps, batched, strict=True):
            f = step.of(f, found)
        out = f(*[x.detach() for x in inputs])
        return tuple(out), tuple([found[-1] if found else () for found in batched])


class _Remat(torch.autograd.Function):
    """Runs work below all transforms: `(work, *tensors) -> (ran, *outputs)`."""

    @staticmethod
    def forward(work: Work, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ran, outputs = work.run(tensors)
        return ran, *outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        work, *tensors = inputs
        ran, *outputs = output
        ctx.work = replace(work, recording=ran.recording)
        ctx.before = 1 + work.kept  # arguments before the inputs
        ctx.inputs = len(tensors) - work.kept
        ctx.outputs = len(output)
        ctx.exposed = None  # until a loss finds that there is something to check
        last = len(outputs)
        if work.recording is None:
            last -= ctx.work.kept
            tensors = [*outputs[last:], *tensors]
        ctx.floats = [i for i, y in enumerate(outputs[:last]) if y.is_floating_point() or y.is_complex()]
        ctx.mark_non_differentiable(*[y for i, y in enumerate(outputs) if i not in ctx.floats])
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*tensors)
        waiting, ctx.up = taken_down(tensors, work.waiting)
        ctx.save_for_backward(*waiting)

    @staticmethod
    def backward(ctx: Any, _: None, *grads: Any) -> Any:
        given = tuple([i for i in ctx.floats if grads[i] is not None])
        wanted = tuple([i for i, needed in enumerate(ctx.needs_input_grad[ctx.before :]) if needed])
        found: list[Any] = [None] * (ctx.before + ctx.inputs)
        if given and wanted:
            work = ctx.work.then(Vjp(ctx.inputs, wanted, given, ctx.exposed))
            saved = brought_up(ctx.saved_tensors, ctx.up)
            gradients: Any = _Remat.apply(work, *saved, *[grads[i] for i in given])
            for i, g in zip(wanted, gradients[1:], strict=True):
                found[ctx.before + i] = g
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs = tangents[ctx.before :]
        given = tuple([i for i, t in enumerate(inputs) if t is not None])
        found: list[Any] = [None] * ctx.outputs
        if given and ctx.floats:
            work = ctx.work.then(Jvp(ctx.inputs, given, tuple(ctx.floats)))
            pushed: Any = _Remat.apply(work, *ctx.saved_tensors, *[inputs[i] for i in given])
            for i, t in zip(ctx.floats, pushed[1:], strict=True):
                found[1 + i] = t
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, work: Work, *tensors: torch.Tensor) -> Any:
        dims = tuple(in_dims[1 + work.kept :])
        # a vmap that the forward pass did not run under (jacrev's, over cotangents) must not draw anew for each
        known = any(d is not None for d in dims[: len(work.call.differentiated)])
        out: Any = _Remat.apply(work.then(Map(dims, info.randomness if known else "same")), *tensors)
        ran: RunFinds = out[0]
        batched = [0 if has_it else None for has_it in ran.batched[len(work.steps)]]
        return out, (None, *batched, *[None] * (len(out) - 1 - len(batched)))


def remat(block: Callable[..., Any], save: str | Chosen | None = None) -> Callable[..., Any]:
    """Make a function that computes as `block` does, and runs it again for the backward pass instead of remembering.

    Between the passes only the block's arguments are alive (rematerialisation, activation checkpointing). Arguments may
    hold boxes: the block is handed whole leaves, which are gathered for it alone, and gathered again for the backward
    pass. So `fzero.remat(block)(params["blocks"][i], x)` inside `value_and_grad(loss_fn, gather=False)` holds the whole
    parameters of one block at a time. Derivatives of any order, `vmap`, and plain autograd work, and `remat` nests.

    Random numbers that torch's generators draw in the block are kept for the second run, a byte for each element of a
    dropout mask. Draws by a key (`fzero.random`, also in a `seeded` function around it) cost nothing. Under
    `torch.compile` the block is called as it is: the compiler decides which operations to repeat.

    Args:
        block: a pure function of trees: all that is differentiated must be an argument. Constants may be captured.
        save: the results to keep besides; None for none. "matmuls" keeps those of matrix products, convolutions and
            attention, so that only the cheap rest is computed again. Or a function that is given an aten operation
            (`torch.ops.aten.mm.default`) and says whether to keep its results. Forward-mode derivatives (`jvp`) compute
            these again. "host" keeps nothing besides, and the arguments that earlier blocks computed wait in host
            memory for the backward pass; parameters stay where they are.

    Returns:
        A function of the block's arguments.

    Raises:
        ValueError: if the block uses a tensor that is no argument, and that a running transform tracks or that requires
            grad. Also if it leaves a tensor that depends on its arguments elsewhere than in its result: an attribute, a
            list, a hook that collects. Also if `save` is none of these.
        TypeError: if an argument or a result holds an object that is neither a tensor nor a simple constant. The block
            would write twice into such an object, as into the key-value cache of a language model.
        RuntimeError: if the block writes into an argument in place, or runs other operations the second time than those
            whose results were kept.

    Example:
        >>> import torch
        >>> def block(p, x):
        ...     return x + torch.tanh(x @ p["w"])
        >>> p, x = {"w": torch.eye(2)}, torch.ones(1, 2)
        >>> loss = lambda p: remat(block)(p, x).sum()
        >>> torch.func.grad(loss)(p)["w"].equal(torch.func.grad(lambda p: block(p, x).sum())(p)["w"])
        True
    """
    host = save == "host"
    chosen = None if host else is_matmul if save == "matmuls" else save
    if isinstance(chosen, str) or not (chosen is None or callable(chosen)):
        raise ValueError(f'save={save!r}: expected None, "matmuls", "host", or a function of an operation')

    @functools.wraps(block)
    def drawing(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return draw_from(key, block, *args, **kwargs)

    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        key = next_key()  # inside a seeded function: both runs draw from this key, which becomes an argument
        f, args = (block, args) if key is None else (drawing, (key, *args))
        if torch.compiler.is_dynamo_compiling() or not (torch.is_grad_enabled() or in_transform()):
            return called(f, args, kwargs)
        call, tensors = call_of(f, chosen, args, kwargs, host)
        ran, *outputs = _Remat.apply(Work(call), *tensors)  # pyright: ignore[reportGeneralTypeIssues]
        return ran.recording.result.filled(outputs)

    return rematerialised
