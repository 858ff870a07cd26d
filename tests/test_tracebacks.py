"""The traceback of an error in a user's step ends at the user's line."""

import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch

import fzero
from fzero import optim

OPT = optim.adam(1e-2)


def loss_fn(params: Any, batch: Any) -> torch.Tensor:
    return (batch["x"] @ params["w"].T).square().mean()


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = OPT.update(grads, opt_state, params)
    return optim.apply_updates(params, updates), opt_state, loss


def failing(jit: bool, simulate: Any = True, w: torch.Tensor | None = None) -> Exception:
    mesh = fzero.mesh(dp=2, simulate=simulate)
    step = fzero.shard(train_step, stage=3, mesh=mesh)
    state = step.init({"w": torch.ones(16, 8) if w is None else w}, OPT)
    batch = mesh.split({"x": torch.ones(8, 16)})
    with pytest.raises((RuntimeError, ValueError)) as caught:
        (fzero.jit(step, backend="fx") if jit else step)(*state, batch)
    return caught.value


@pytest.mark.parametrize("jit,simulate", [(False, True), (True, True), (False, "lockstep")])
def test_it_ends_at_the_line_that_raised(jit, simulate, capfd):
    error = failing(jit, simulate)
    frames = traceback.extract_tb(error.__traceback__)
    assert [f.name for f in frames] == ["failing", "train_step", "loss_fn"]
    assert "@ params" in (frames[-1].line or "")
    assert "python -X dev" in "".join(traceback.format_exception(error))
    assert "Traceback" not in capfd.readouterr().err  # torch logs none beside it


def test_an_error_of_fzero_is_at_the_users_call():
    def loss_of_two(params: Any, batch: Any) -> Any:
        return torch.ones(2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        return fzero.value_and_grad(loss_of_two)(params, batch)

    sharded = fzero.shard(step, stage=0, mesh=fzero.mesh(dp=2))
    with pytest.raises(Exception) as caught:
        sharded({"w": torch.ones(2)}, (), sharded.mesh.split(torch.ones(2)))
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "step"


def test_so_do_those_that_caused_it():
    """What torch says of a value that is read in a trace, and what fzero makes of it, have no frames of their own."""

    def reading(params: Any, batch: Any) -> torch.Tensor:
        return params["w"].sum() * (2.0 if batch.sum().item() > 0 else 1.0)

    def step(params: Any, batch: Any) -> Any:
        return fzero.value_and_grad(reading)(params, batch)

    with pytest.raises(RuntimeError, match="reads the value of a tensor") as caught:
        fzero.jit(step, backend="fx")({"w": torch.ones(2)}, torch.ones(2))
    error: BaseException | None = caught.value
    causes = []
    while error is not None:
        causes += [[f.filename for f in traceback.extract_tb(error.__traceback__)]]
        error = error.__cause__ or error.__context__
    assert len(causes) >= 2 and any(len(files) > 1 for files in causes)
    assert {file for files in causes for file in files} == {__file__}


def test_an_error_that_passed_no_code_of_the_user_keeps_its_frames():
    step = fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2))
    with pytest.raises(Exception) as caught:
        step({"w": torch.ones(2, 2)}, (), torch.ones(2))
    assert "fzero" in traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert not getattr(caught.value, "__notes__", ())


def test_all_frames_stay_in_development_mode():
    code = """if True:
        import traceback
        from tests.test_tracebacks import failing
        print(len(traceback.extract_tb(failing(False).__traceback__)))"""
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert int(done.stdout) > 10, done.stderr
