"""The interface of a step for jit: its mesh, its parameters, and the arguments that its results replace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from fzero.ranks import Mesh, Spmd

__all__ = ["TrainStep", "as_step"]


@runtime_checkable
class TrainStep(Protocol):
    """A train step for jit: a `fzero.zero.ShardedStep`, or a `_PlainStep` around any other function."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    @property
    def train_step(self) -> Callable[..., Any]:
        """The user's function."""
        ...

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the step runs on, or None."""
        ...

    @property
    def param_argnums(self) -> tuple[int, ...]:
        """The positions of the parameters among the arguments."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        ...

    def run_checked(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run` in place of the step, with the step's checks of arguments and results."""
        ...

    def state_argnums(self, args: Sequence[Any], out: Any) -> tuple[int, ...]:
        """List the positions of the arguments that the results `out` replace."""
        ...

    def on_mesh(self, mesh: Mesh) -> "TrainStep":
        """Return the same step on another mesh."""
        ...


@dataclass(frozen=True)
class _PlainStep:
    """Any function as a step: its results replace no argument, and it has a mesh only if `mesh.spmd` made it."""

    function: Callable[..., Any]
    param_argnums: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The function's name."""
        f = self.train_step
        return getattr(f, "__name__", type(f).__name__)  # a callable object has none

    @property
    def train_step(self) -> Callable[..., Any]:
        """The function, without the `Spmd` of `mesh.spmd` around it."""
        return self.function.program if isinstance(self.function, Spmd) else self.function

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of `mesh.spmd`."""
        return self.function.mesh if isinstance(self.function, Spmd) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def run_checked(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def state_argnums(self, args: Sequence[Any], out: Any) -> tuple[int, ...]:
        return ()

    def on_mesh(self, mesh: Mesh) -> "_PlainStep":
        assert isinstance(self.function, Spmd)
        return _PlainStep(replace(self.function, mesh=mesh))


def as_step(function: Callable[..., Any]) -> TrainStep:
    """Wrap a function as a step, unless it is one already."""
    return function if isinstance(function, TrainStep) else _PlainStep(function)
