"""The runs of a rematerialised block: the first, which records, and the later ones, which compute derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fzero._torch import storage_id
from fzero.transforms._remat._call import BlockCall
from fzero.transforms._remat._guards import Guard
from fzero.transforms._remat._stand_ins import StandIns
from fzero.transforms._remat._steps import Batched, Jvp, Step, Tuples, tracked
from fzero.transforms._remat._tape import Player, RandomTape, Script

__all__ = ["RunFinds", "Work"]

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
