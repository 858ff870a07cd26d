"""torch's switches and ranks in lockstep: a rank has its caller's, switches for itself, and leaves all as it was."""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import overrides
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _python_dispatch

import fzero
from fzero._torch.process_state import read_settings, write_settings
from fzero.axes._rank_threads import process_threads
from tests.helpers import either


def lockstep(size: int = 3) -> fzero.ranks.Mesh:
    return fzero.mesh(dp=size, simulate="lockstep")


class Functions(overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(_python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def pack(x: torch.Tensor) -> torch.Tensor:
    return x


@contextlib.contextmanager
def run_between(write: Callable[[Any], Any], on: Any, off: Any) -> Iterator[None]:
    write(on)
    try:
        yield
    finally:
        write(off)


# what a `with` switches: in the process first, then in the thread
SWITCHES: dict[str, Callable[[], Any]] = {
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "anomaly mode that lets nans pass": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "deterministic": lambda: run_between(lambda x: torch.use_deterministic_algorithms(x, warn_only=x), True, False),
    "dtype": lambda: run_between(torch.set_default_dtype, torch.float64, torch.float32),
    "precision": lambda: run_between(torch.set_float32_matmul_precision, "high", "highest"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH, set_priority=True),
    "mkldnn": lambda: run_between(torch._C._set_mkldnn_enabled, False, True),  # pyright: ignore
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True),
    "sparse checks": lambda: torch.sparse.check_sparse_tensor_invariants(True),
    "warnings": lambda: run_between(torch.set_warn_always, True, False),
    "threads": lambda: run_between(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "device": lambda: torch.device("meta"),
    "default device": lambda: run_between(torch.set_default_device, "meta", None),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(pack, pack),
    "no hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "functions": Functions,
    "operations": Operations,
}


def state() -> dict[str, Any]:
    """All that is switched where this is called."""
    return {
        **read_settings(),
        "default dtype of new tensors": torch.tensor(1.0).dtype,
        "device": (torch.get_default_device(), torch.empty(0).device),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),  # pyright: ignore
        "no hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),  # pyright: ignore
        "functions": [type(mode) for mode in overrides._get_current_function_mode_stack()],
        "operations": [type(mode) for mode in _python_dispatch._get_current_dispatch_mode_stack()],
        "forward": torch._C._is_fwd_grad_enabled(),  # pyright: ignore
    }


BASE = state()


@pytest.fixture(autouse=True)
def no_state_is_left():
    """A test that fails leaves the next one a clean process."""
    result = read_settings()
    yield
    write_settings(result)


def meet() -> None:
    fzero.collectives.psum(torch.zeros(2, device="cpu", dtype=torch.float32))


def states_of_ranks(size: int = 3) -> list[Any]:
    """Return what each rank has at its beginning and after a meeting."""
    records: list[Any] = []

    def program() -> None:
        records.append(state())
        meet()
        records.append(state())

    lockstep(size).spmd(program)()
    return records


@pytest.mark.parametrize("name", SWITCHES)
def test_a_rank_in_lockstep_has_its_callers_torch_settings(name):
    with SWITCHES[name]():
        switched = state()
        assert switched != BASE
        assert states_of_ranks() == [switched] * 6
        assert state() == switched
    assert state() == BASE and states_of_ranks() == [BASE] * 6


@pytest.mark.parametrize("name", SWITCHES)
def test_a_torch_setting_that_a_rank_changes_is_its_own(name):
    """Ranks 1 and 2 are within their `with`s at the same time, and rank 1 leaves it first."""
    with SWITCHES[name]():
        switched = state()
    records: list[Any] = []

    def program() -> None:
        rank = int(fzero.axes.axis_index())
        with SWITCHES[name]() if rank else contextlib.nullcontext():
            for _ in range(rank + 1):
                meet()
                records.append(state() == (switched if rank else BASE))
        records.append(state() == BASE)
        for _ in range(2 - rank):
            meet()

    lockstep().spmd(program)()
    assert len(records) == 9 and all(records)
    assert state() == BASE


# torch 2.15's sdpa_kernel resets a context variable, which cannot be where a rank ends in the middle of it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("end", ["raises", "diverges", "ends"])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_state_of_torch_is_restored_however_a_run_ends(name, end):
    """Two ranks are abandoned within their `with`s; or no rank leaves its `with`."""
    left = []

    def program() -> None:
        switch, rank = SWITCHES[name](), int(fzero.axes.axis_index())
        if end == "ends":
            left.append(switch)
            switch.__enter__()
            return
        with switch:
            if rank == 2:
                if end == "raises":
                    raise KeyError("mine")
                return
            meet()

    if end == "ends" and name == "inference":
        pytest.skip("torch restores inference mode when it forgets the guard, in whatever thread")
    with contextlib.suppress(KeyError, fzero.errors.DivergedError):
        lockstep().spmd(program)()
    assert state() == BASE and states_of_ranks() == [BASE] * 6


@pytest.mark.slow
def test_two_threads_may_each_run_ranks():
    """Forward-mode levels and settings are the process's: the runs share them, and leave none."""
    x = torch.linspace(0, 1, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            with torch.autograd.set_detect_anomaly(True):
                slope = torch.func.jvp(lambda y: torch.sin(y) * fzero.collectives.psum(y), (x,), (x,))[1]
                x = fzero.collectives.pmean(
                    slope + torch.func.grad(lambda y: (torch.cos(y) * fzero.collectives.psum(y)).sum())(x)
                )
        return x

    expected, actual, count = lockstep().spmd(program)(x), [], either(4, 10)

    def work() -> None:
        for _ in range(count):
            try:
                actual.append(torch.equal(lockstep().spmd(program)(x), expected))
            except Exception as error:
                actual.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert actual == [True] * 2 * count
    assert state() == BASE and process_threads().runs == 0
    with torch.autograd.forward_ad.dual_level():  # no level is open
        pass


def test_an_open_level_is_an_error_and_no_hang():
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="Nested forward mode AD"):
        lockstep().spmd(meet)()
    assert process_threads().runs == 0
    lockstep().spmd(meet)()


def test_ranks_run_in_a_fork():
    """It has none of its parent's threads."""
    lockstep().spmd(meet)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        child = os.fork()
    if not child:
        threading.Timer(30, lambda: os._exit(2)).start()  # a hang
        os._exit(int(lockstep().spmd(lambda: fzero.collectives.psum(torch.ones(())))().item() != 3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_jitted_step_is_traced_after_a_rank_looked_for_anomalies():
    """It was an error about a value that is read, at a line that reads none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def program(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.detect_anomaly():
                return fzero.collectives.pmean(torch.func.grad(lambda y: (y * fzero.collectives.psum(y)).sum())(x))

        lockstep().spmd(program)(torch.ones(3))
    step = fzero.jit(torch.func.grad(lambda x: x.sin().sum()), backend="fx")
    assert torch.equal(step(torch.zeros(3)), torch.ones(3))
