"""The traceback of an error in a user's step ends at the user's line."""

import inspect
import subprocess
import sys
import traceback
from typing import Any

import pytest
import torch

import fzero
from fzero import codecs, optim, tuning
from fzero._tracebacks import api_boundary
from fzero.parallel import context, experts, schedules

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
def test_a_traceback_ends_at_the_line_that_raised(jit, simulate, capfd):
    error = failing(jit, simulate)
    frames = traceback.extract_tb(error.__traceback__)
    assert [f.name for f in frames] == ["failing", "train_step", "loss_fn"]
    assert "@ params" in (frames[-1].line or "")
    assert "python -X dev" in "".join(traceback.format_exception(error))
    assert "Traceback" not in capfd.readouterr().err  # torch logs none beside it


@pytest.mark.parametrize("simulate", [True, "lockstep"])
def test_an_error_of_a_rank_program_ends_at_its_line(simulate):
    def program(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    mesh = fzero.mesh(dp=2, simulate=simulate)
    with pytest.raises(KeyError) as caught:
        mesh.spmd(program)(mesh.split(torch.ones(4)))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [f.name for f in frames] == ["test_an_error_of_a_rank_program_ends_at_its_line", "program"]


class Broken:
    """A data set that cannot read its examples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        raise OSError(f"example {i} is gone")


@pytest.mark.parametrize("load", [lambda **kw: fzero.data.batches(**kw).steps(), fzero.data.epoch])
def test_an_error_of_a_data_set_ends_at_its_line(load):
    data = load(dataset=Broken(), mesh=fzero.mesh(dp=2), global_batch=4)
    with pytest.raises(OSError, match="is gone") as caught:
        next(data)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [f.name for f in frames] == ["test_an_error_of_a_data_set_ends_at_its_line", "__getitem__"]


def test_an_error_of_fzero_is_at_the_users_call():
    def loss_of_two(params: Any, batch: Any) -> Any:
        return torch.ones(2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        return fzero.value_and_grad(loss_of_two)(params, batch)

    sharded = fzero.shard(step, stage=0, mesh=fzero.mesh(dp=2))
    with pytest.raises(Exception) as caught:
        sharded({"w": torch.ones(2)}, (), sharded.mesh.split(torch.ones(2)))
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "step"


def test_causes_of_an_error_end_at_the_users_line_too():
    """torch's error about a value that is read in a trace, and fzero's error of it, have no frames of their own."""

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


STEP = fzero.shard(train_step, stage=3, mesh=fzero.mesh(dp=2))
X = STEP.mesh.split(torch.ones(2, 2))
W = {"w": torch.ones(2, 2)}
LOCAL = fzero.local_sgd.local_steps(fzero.shard(train_step, 2, fzero.mesh(replica=2, dp=1)), every=2)


def call_donated() -> Any:
    """Call a jitted step twice with what it took over."""
    step = fzero.jit(lambda x: x + 1, donate=0, backend="fx")
    x = torch.zeros(2)
    step(x)
    return step(x)


def call_shared() -> Any:
    """Call a jitted step with what a view holds on to."""
    x = torch.zeros(2)
    view = x[:1]
    return fzero.jit(lambda x: x + 1, donate=0, backend="fx")(x), view


ANSWERS: dict[str, Any] = {
    "a call of a step": lambda: STEP(W, (), torch.ones(2)),
    "a missing argument": lambda: STEP(STEP.init(W, OPT)[0]),
    "init": lambda: STEP.init(W, 3),
    "partition": lambda: STEP.partition({"w": 3}),
    "gather": lambda: fzero.shard(train_step, 3, fzero.mesh(dp=4)).gather(STEP.init(W, OPT)[0]),
    "shard": lambda: fzero.shard(train_step, stage=7),  # pyright: ignore
    "a word": lambda: fzero.shard(train_step, stge=3),  # pyright: ignore
    "jit": lambda: fzero.jit(train_step, backend="none"),  # pyright: ignore
    "donated": call_donated,
    "shared": call_shared,
    "plan of a jitted step": lambda: fzero.jit(STEP).plan(W, (), X),
    "plan": lambda: fzero.plan(STEP, W, (), X, world_size=-1),
    "mesh": lambda: fzero.mesh(4),  # pyright: ignore
    "split": lambda: STEP.mesh.split(torch.ones(3)),
    "save": lambda: fzero.save("unused", {"w": object()}),
    "load": lambda: fzero.load("/no/such/folder", like=W),
    "checkpoints": lambda: fzero.checkpoint.checkpoints("unused", keep=0),
    "value_and_grad": lambda: fzero.value_and_grad(train_step, micro_batches=0),
    "an optimizer": lambda: optim.adamw(lr=1e-3),  # pyright: ignore
    "functional": lambda: fzero.nn.functional(3),  # pyright: ignore
    "profile": lambda: fzero.profile(torch.sin, torch.ones(2), steps=0),
    "a program's result": lambda: STEP.mesh.spmd(lambda x: x)(X),
    "a program that evaluates": lambda: fzero.evaluate(STEP, lambda params, x: x.sum())(*STEP.init(W, OPT)[:1], X, 4),
    "a program that predicts": lambda: fzero.predict(STEP, lambda params, x: "x")(*STEP.init(W, OPT)[:1], X),
    "a mask": lambda: optim.masked(OPT, {"v": True}).init(W),
    "an update": lambda: OPT.update({"w": torch.ones(3)}, OPT.init(W), W),
    "updates": lambda: optim.apply_updates(W, {"w": torch.ones(3)}),
    "a pipeline's schedule": lambda: schedules.schedule("none", 2, 2),
    "a table of actions": lambda: schedules.PipelineSchedule.parse([["0F0"], ["1B0"]]),
    "a rate schedule": lambda: optim.warmup_cosine(0.1, -1, 4),
    "batches": lambda: fzero.data.batches(torch.ones(8, 2), STEP.mesh, global_batch=3),
    "a codec of floats": lambda: codecs.float8("e4m3fn"),
    "a codec of ints": lambda: codecs.int8(block=0),
    "a codec": lambda: codecs.Codec("int5"),
    "a tensor of ints in a codec": lambda: codecs.int8().encode(torch.ones(2).long()),
    "another shape of a codec": lambda: codecs.int8().decode(codecs.int8().encode(torch.ones(2)), (3,)),
    "failures": lambda: tuning.Reliability(0),
    "a routing": lambda: experts.route(torch.ones(2, 4), 5),
    "draws": lambda: fzero.random.uniform(torch.ones(2), (2,)),
    "a collective outside a mesh": lambda: fzero.collectives.psum(torch.ones(2), "dp"),
    "matmul_precision": lambda: fzero.nn.MatmulPrecision("float8", scaling="row"),
    "moments": lambda: optim.Moments("fp8"),  # pyright: ignore
    "a precision": lambda: fzero.Precision(param=torch.int8),
    "tiles": lambda: fzero.nn.tiled(torch.sin, chunk=0),
    "a call in tiles": lambda: fzero.nn.tiled(lambda x: x.sum(), chunk=1)(torch.ones(2, 2)),
    "a loss": lambda: fzero.nn.linear_cross_entropy(torch.ones(2, 2), torch.ones(3, 3), torch.ones(2).long()),
    "a float8 layer": lambda: fzero.nn.float8_linear(torch.ones(2, 10), torch.ones(16, 10)),
    "attention": lambda: context.attention(*[torch.ones(1, 2, 3, 4)] * 3, method="ulysses"),  # pyright: ignore
    "positions": lambda: fzero.mesh(cp=2).spmd(lambda: context.positions(3))(),
    "labels": lambda: context.shift_labels(torch.ones(2, 4), torch.ones(2, 3)),
    "split sequences": lambda: context.split(fzero.mesh(cp=2), torch.ones(2, 7)),
    "a model of split sequences": lambda: fzero.nn.functional(torch.nn.Linear(2, 2), context="cp"),
    "steps of replicas": lambda: LOCAL(W, (), X),
    "an elastic run": lambda: fzero.elastic.run(STEP, "unused", steps=1, global_batch=0, dp=-1),
    "what is remembered": lambda: fzero.checkpoint.checkpoints("unused").save_in_memory(1, W),
    "a batch": lambda: fzero.data.batches(torch.ones(8, 2), STEP.mesh, global_batch=2).steps(-1),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_error_that_fzero_raises_from_a_callback_ends_at_the_users_call(name):
    with pytest.raises((ValueError, TypeError, RuntimeError, OSError)) as caught:
        ANSWERS[name]()
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}


def test_an_error_that_fzero_did_not_mean_keeps_its_frames():
    """One that torch raised on its own, and one of another kind: they may be faults of fzero."""
    with pytest.raises(NotImplementedError) as of_torch:
        api_boundary(torch.nn.functional.interpolate)(torch.ones(2), 3)
    with pytest.raises(KeyError) as of_python:
        api_boundary({}.__getitem__)("x")
    for caught in (of_torch, of_python):
        assert "fzero" in traceback.extract_tb(caught.value.__traceback__)[1].filename
        assert not getattr(caught.value, "__notes__", ())


def test_a_misspelt_argument_is_reported_with_the_nearest_name():
    with pytest.raises(TypeError, match="stge") as caught:
        fzero.shard(train_step, stge=3)  # pyright: ignore
    assert "did you mean stage=, not stge=?" in caught.value.__notes__
    with pytest.raises(TypeError) as caught:
        fzero.value_and_grad(torch.sum, gradient_accumulation_steps=4)  # pyright: ignore
    assert "did you mean micro_batches=, not gradient_accumulation_steps=?" in caught.value.__notes__
    with pytest.raises(TypeError) as caught:
        fzero.jit(torch.sum, mode="max-autotune")  # pyright: ignore
    assert "did you mean backend=, not mode=?" in caught.value.__notes__
    with pytest.raises(TypeError) as caught:
        fzero.mesh(4)  # pyright: ignore
    assert "Give each axis a name: fzero.mesh(dp=4)" in caught.value.__notes__


def test_an_api_boundary_has_the_signature_and_the_help_of_its_function():
    assert list(inspect.signature(fzero.shard).parameters)[:3] == ["train_step", "stage", "mesh"]
    assert (inspect.getdoc(fzero.shard) or "").startswith("Shard an unsharded train step")
    assert list(inspect.signature(STEP.init).parameters) == ["params", "opt", "donate"]


@pytest.mark.slow
def test_all_frames_stay_in_development_mode():
    code = """if True:
        import traceback
        from tests.test_tracebacks import failing
        print(len(traceback.extract_tb(failing(False).__traceback__)))"""
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert int(done.stdout) > 10, done.stderr
