"""The runs of a block under remat: the first run records, and later runs compute derivatives."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero._torch import storage_id
from fzero._torch.types import Tensors
from fzero.collectives import to_device, to_host
from fzero.transforms._block_call import BlockCall
from fzero.transforms._derivation_steps import BatchFlags, Jvp, Map, Step, TupleFunction, Vjp, within_vjp
from fzero.transforms._indexed_tree import IndexedTree
from fzero.transforms._remat_guards import Guard
from fzero.transforms._remat_tape import OperationLog, RandomTape, TapeReplayer

__all__ = ["Computation", "RematFunction"]


_Devices = dict[int, torch.device]
"""The indices of offloaded tensors, and the devices that they come from."""


def _copy_to_host(tensors: Sequence[torch.Tensor], indices: Collection[int]) -> tuple[list[torch.Tensor], _Devices]:
    """Copy the computed tensors among `indices` to the host. Leaves, such as parameters, stay alive in any case.

    Autograd tracks the copies, since a second derivative differentiates through them.

    Args:
        tensors: the tensors to save.
        indices: the indices of tensors that may be offloaded.

    Returns:
        The tensors to save, and the devices of the offloaded ones.
    """
    devices = {i: tensors[i].device for i in indices if tensors[i].dim() and not tensors[i].is_leaf}
    with torch.enable_grad():
        return [to_host(x) if i in devices else x for i, x in enumerate(tensors)], devices


def _reload_tensors(tensors: Sequence[torch.Tensor], devices: Mapping[int, torch.device]) -> list[torch.Tensor]:
    """Copy offloaded tensors back to their devices."""
    return [to_device(x, devices[i]) if i in devices else x for i, x in enumerate(tensors)]


@dataclass(frozen=True)
class _FirstRun:
    """The first run's results besides tensors.

    Attributes:
        log: the operations whose results are on the tape.
        result: the block's result, with indices in place of tensors.
        is_tracked: whether each run is within a vjp of its own.
    """

    log: OperationLog
    result: IndexedTree
    is_tracked: bool


@dataclass(frozen=True)  # not a NamedTuple: torch.func would treat it as a tree, and copy it
class _RunInfo:
    """A run's results besides tensors.

    Attributes:
        batch_flags: for each step of the computation which outputs have its batch; empty for a step that is not a map.
        recording: the recording of the first run.
    """

    batch_flags: tuple[BatchFlags, ...]
    recording: _FirstRun


@dataclass(frozen=True)
class Computation:
    """A call of a block and the steps of its derivation: a function of tensors.

    Attributes:
        call: the call.
        steps: the steps; in the forward pass only maps over a batch.
        recording: the first run's recording, whose tape comes before the inputs; None in the forward pass.
    """

    call: BlockCall
    steps: tuple[Step, ...] = ()
    recording: _FirstRun | None = None

    @property
    def tape_size(self) -> int:
        """The number of tensors from the tape, which come before the inputs."""
        return 0 if self.recording is None else self.recording.log.size

    @property
    def offload_indices(self) -> frozenset[int]:
        """The inputs to offload to the host until the backward pass; none in a derivative, which needs them at once."""
        return self.call.offload_indices if self.recording is None else frozenset()

    def then(self, step: Step) -> "Computation":
        """Return the computation with one more step."""
        return replace(self, steps=(*self.steps, step))

    def run(self, tensors: Tensors) -> tuple[_RunInfo, tuple[torch.Tensor, ...]]:
        """Run the block and its steps, below all transforms.

        Args:
            tensors: the tape, then the inputs of the last step.

        Returns:
            The run's information, and the outputs of the last step; in the forward pass the tape follows the outputs.

        Raises:
            RuntimeError: if the block writes into an argument, or runs other operations than in the forward pass.
            ValueError: if the block captures a tensor, or stores one elsewhere, whose gradient would be lost.
        """
        return self._record_run(tensors) if self.recording is None else self._run_again(tensors, self.recording)

    def _record_run(self, tensors: Tensors) -> tuple[_RunInfo, tuple[torch.Tensor, ...]]:
        """Run the block once, and return its results, the tape, and all that the backward pass must know of the run."""
        call, tape = self.call, RandomTape(self.call.save)
        runs: list[tuple[Guard, IndexedTree]] = []

        def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            guard = Guard([x for x, d in zip(xs, call.differentiated, strict=True) if d])
            ys, result = call.run(xs, guard, tape)
            runs.append((guard, result))
            return ys

        is_tracked = any(call.differentiated) and (call.save is not None or bool(self.steps))
        versions = [x._version for x in tensors]
        out, batch_flags = self._run_through(f, tensors, is_tracked)
        if versions != [x._version for x in tensors]:
            raise RuntimeError("remat: the block writes into an argument in place: return a new value instead")
        guard, result = runs[-1]
        guard.check_escapes([*out, *tape.tape])
        arg_storages = {storage_id(x) for x in tensors}  # a write into a result must not change an argument
        out = tuple([y.clone() if storage_id(y) in arg_storages else y for y in out])
        recording = _FirstRun(tape.log(), result, is_tracked)
        return _RunInfo(batch_flags, recording), (*out, *[x.detach() for x in tape.tape])

    def _run_again(self, tensors: Tensors, recording: _FirstRun) -> tuple[_RunInfo, tuple[torch.Tensor, ...]]:
        # a jvp computes tangents by matrix products too, which cannot be told from the block's own
        is_selective = not any(isinstance(step, Jvp) for step in self.steps)
        tape = TapeReplayer(recording.log, tensors[: self.tape_size], self.call.save if is_selective else None)

        def f(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.call.run(xs, Guard(None), tape)[0]

        out, batch_flags = self._run_through(f, tensors[self.tape_size :], recording.is_tracked)
        tape.finish()
        return _RunInfo(batch_flags, recording), out

    def _run_through(
        self, f: TupleFunction, inputs: Tensors, is_tracked: bool
    ) -> tuple[tuple[torch.Tensor, ...], tuple[BatchFlags, ...]]:
        """Run `f` through the steps; return the outputs, and for each step which outputs have its batch."""
        batch_flags: list[list[BatchFlags]] = [[] for _ in self.steps]
        if is_tracked:
            wrt = [i for i, d in enumerate(self.call.differentiated) if d]
            f = within_vjp(f, wrt, check=self.recording is None)
        for step, runs in zip(self.steps, batch_flags, strict=True):
            f = step.derive(f, runs)
        out = f(*[x.detach() for x in inputs])
        return tuple(out), tuple([runs[-1] if runs else () for runs in batch_flags])


class RematFunction(torch.autograd.Function):
    """Runs a computation below all transforms: `(computation, *tensors) -> (info, *outputs)`."""

    @staticmethod
    def forward(computation: Computation, *tensors: torch.Tensor) -> tuple[Any, ...]:
        info, outputs = computation.run(tensors)
        return info, *outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the inputs and the tape for the derivatives, some of them in host memory."""
        computation, *tensors = inputs
        info, *outputs = output
        ctx.computation = replace(computation, recording=info.recording)
        ctx.first_input = 1 + computation.tape_size  # the arguments before it are the computation and the tape
        ctx.num_inputs = len(tensors) - computation.tape_size
        ctx.num_outputs = len(output)
        ctx.deferred_checks = None  # set by check_copies, if a loss depends on results that it must check later
        end = len(outputs)
        if computation.recording is None:
            end -= ctx.computation.tape_size
            tensors = [*outputs[end:], *tensors]
        ctx.floats = [i for i, y in enumerate(outputs[:end]) if y.is_floating_point() or y.is_complex()]
        ctx.mark_non_differentiable(*[y for i, y in enumerate(outputs) if i not in ctx.floats])
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*tensors)
        saved_tensors, ctx.devices = _copy_to_host(tensors, computation.offload_indices)
        ctx.save_for_backward(*saved_tensors)

    @staticmethod
    def backward(ctx: Any, _: None, *grads: Any) -> Any:
        outputs = tuple([i for i in ctx.floats if grads[i] is not None])
        wrt = tuple([i for i, needs_grad in enumerate(ctx.needs_input_grad[ctx.first_input :]) if needs_grad])
        results: list[Any] = [None] * (ctx.first_input + ctx.num_inputs)
        if outputs and wrt:
            computation = ctx.computation.then(Vjp(ctx.num_inputs, wrt, outputs, ctx.deferred_checks))
            saved_tensors = _reload_tensors(ctx.saved_tensors, ctx.devices)
            gradients: Any = RematFunction.apply(computation, *saved_tensors, *[grads[i] for i in outputs])
            for i, g in zip(wrt, gradients[1:], strict=True):
                results[ctx.first_input + i] = g
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        inputs = tangents[ctx.first_input :]
        wrt = tuple([i for i, t in enumerate(inputs) if t is not None])
        results: list[Any] = [None] * ctx.num_outputs
        if wrt and ctx.floats:
            computation = ctx.computation.then(Jvp(ctx.num_inputs, wrt, tuple(ctx.floats)))
            jvp: Any = RematFunction.apply(computation, *ctx.saved_tensors, *[inputs[i] for i in wrt])
            for i, t in zip(ctx.floats, jvp[1:], strict=True):
                results[1 + i] = t
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, computation: Computation, *tensors: torch.Tensor) -> Any:
        dims = tuple(in_dims[1 + computation.tape_size :])
        # under a vmap that the forward pass was not under (jacrev's, over cotangents) all examples share the draws
        has_batch = any(d is not None for d in dims[: len(computation.call.differentiated)])
        out: Any = RematFunction.apply(computation.then(Map(dims, info.randomness if has_batch else "same")), *tensors)
        run_info: _RunInfo = out[0]
        out_dims = [0 if is_mapped else None for is_mapped in run_info.batch_flags[len(computation.steps)]]
        return out, (None, *out_dims, *[None] * (len(out) - 1 - len(out_dims)))
