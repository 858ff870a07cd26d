"""Elastic runs in simulation: after any sequence of losses and joins the run ends as if nothing had happened."""

import functools
import math
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero import optim
from fzero.elastic._shape import ShapeRequest, choose_shape
from tests.elastic.helpers import GLOBAL_BATCH, STEPS, final, train
from tests.helpers import examples


class Gone(Exception):
    """A rank's thread ends here, in the middle of its work."""


def run(root: Path, ranks: int, program: Any, every: int = 2, save_every: int = 4, **more: Any) -> Any:
    options: dict[str, Any] = {"steps": STEPS, "global_batch": GLOBAL_BATCH, "micro_batch": 1, **more}
    memory = root / "memory"
    memory.mkdir(exist_ok=True, parents=True)
    return fzero.elastic.run(
        program,
        root / "disk",
        copy_every=every,
        save_every=save_every,
        memory=str(memory),
        dp=-1,
        simulated_ranks=ranks,
        **options,
    )


def settle() -> None:
    """Let what was kept before the death be committed, as it is where other ranks live on."""
    for thread in threading.enumerate():
        if thread.name.startswith("fzero.save"):
            thread.join()


@functools.cache
def expected() -> Any:
    return final()


def assert_same(actual: Any) -> None:
    for name, x in expected().items():
        torch.testing.assert_close(actual[name], x, rtol=1e-12, atol=1e-12)


class Loss:
    """A rank's thread dies at the n-th visit of a moment in a step."""

    def __init__(self, moment: str, step: int, visit: int) -> None:
        self.moment, self.step, self.left, self.batches = moment, step, visit, list[int]()

    def at(self, moment: str, step: int) -> None:
        if moment == "updated":
            self.batches.append(step)
        if (moment, step) == (self.moment, self.step):
            self.left -= 1
            if self.left < 0:
                raise Gone


LOSSES = st.builds(Loss, st.sampled_from(["forward", "updated", "kept"]), st.integers(0, STEPS - 1), st.integers(0, 5))
STARTS = st.tuples(st.integers(1, 5), st.integers(0, 3), st.sampled_from(["vmap", "lockstep"]), LOSSES, st.booleans())


@examples(2, 12)
@given(
    starts=st.lists(STARTS, max_size=3), every=st.integers(1, 3), save_every=st.integers(1, 5), ranks=st.integers(1, 5)
)
def test_a_run_with_any_lost_and_joining_ranks_equals_an_uninterrupted_run(starts, every, save_every, ranks):
    with tempfile.TemporaryDirectory() as folder:
        root, done = Path(folder), 0
        for n, stage, simulate, loss, all_hosts in starts:
            program = functools.partial(train, stage=stage, at=loss.at)
            try:
                assert_same(run(root, n, program, every, save_every, simulate=simulate))
            except Gone:
                settle()
            first = min(loss.batches, default=done)
            assert done - first <= (save_every if all_hosts_were_lost(root) else every) or not loss.batches
            assert loss.batches == [*range(first, first + len(loss.batches))], "a batch was skipped, or taken twice"
            done = max(done, first + len(loss.batches))
            mark_lost(root, all_hosts)
        assert_same(run(root, ranks, train, every, save_every))


def mark_lost(root: Path, all_hosts: bool) -> None:
    """Lose the memory of all hosts, so that the disk is left."""
    (root / "lost").unlink(missing_ok=True)
    if all_hosts:
        shutil.rmtree(root / "memory", ignore_errors=True)
        (root / "lost").touch()


def all_hosts_were_lost(root: Path) -> bool:
    return (root / "lost").exists()


def test_tensor_parallel_groups_are_made_anew_of_the_ranks_that_are_left(tmp_path):
    """8 ranks train by columns, then 5, of which 4 can; each start has other groups, and one of them loses a rank."""
    opt = optim.adamw(1e-2)
    g = torch.Generator().manual_seed(0)
    sizes = {"up": (6, 8), "down": (8, 6)}
    whole = {name: torch.randn(size, generator=g, dtype=torch.float64) for name, size in sizes.items()}

    def loss_fn(p: Any, x: Any) -> torch.Tensor:
        tp = "tp" if "tp" in fzero.axes.axis_names() else ()
        h = torch.tanh(fzero.collectives.pvary(x, tp) @ p["up"])
        return (fzero.collectives.psum_invariant(h @ p["down"], tp) - x).square().mean()

    def train_step(p: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(p, x)
        updates, opt_state = opt.update(grads, opt_state, p)
        return optim.apply_updates(p, updates), opt_state, loss

    def program(dies: int, this: Any) -> Any:
        split = lambda path, leaf: {"tp": int(path == "up")}  # noqa: E731
        step = fzero.shard(train_step, stage=3, mesh=this.mesh, axis="dp", split=split)
        state = this.restore(step.init(whole, opt))
        rows = torch.arange(240, dtype=torch.float64).reshape(40, 6).sin()
        data = fzero.data.batches(rows, this.mesh, global_batch=12, axis="dp", shuffle=False)
        for i, batch in data.steps(this.step, this.steps):
            if i == dies:
                raise Gone
            *state, _ = step(*state, batch)
            this.save(i + 1, tuple(state))
        return this.mesh.shape, step.gather(state[0])

    options: dict[str, Any] = {"axis": "dp", "tp": 2, "micro_batch": None}
    with pytest.raises(Gone):
        run(tmp_path, 8, functools.partial(program, 5), **options)
    settle()
    shape, actual = run(tmp_path, 5, functools.partial(program, -1), **options)
    assert shape == (("dp", 2), ("tp", 2))
    _, expected = run(tmp_path / "whole", 2, functools.partial(program, -1), **options)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=1e-12, atol=1e-12)
        assert not torch.equal(x, whole[name])


SIZES = st.dictionaries(st.sampled_from(["tp", "ep"]), st.integers(1, 3), max_size=2)


@given(alive=st.integers(1, 24), fixed=SIZES, batch=st.integers(1, 48), rows=st.integers(1, 3), least=st.integers(1, 8))
def test_the_mesh_is_the_largest_that_shares_the_batch(alive, fixed, batch, rows, least):
    axes = {"dp": -1, **fixed}
    data_axes = tuple([name for name in axes if name != "tp"])
    rest = math.prod(fixed.values())
    shares = rest // fixed.get("tp", 1)
    possible = [n for n in range(1, alive + 1) if n * rest <= alive and batch % (n * shares * rows) == 0]
    possible = [n for n in possible if n * rest >= least]
    request = ShapeRequest(axes, data_axes, batch, rows, least)
    if possible:
        assert choose_shape(alive, request) == {"dp": max(possible), **fixed}
    else:
        with pytest.raises(RuntimeError, match="Start it with more ranks"):
            choose_shape(alive, request)


@pytest.mark.parametrize(
    ("alive", "axes", "batch", "least", "message"),
    [
        (
            3,
            {"dp": -1, "tp": 4},
            8,
            1,
            r"elastic.run\(dp=-1, tp=4\) with 3 ranks alive: the other axes .* need 4 ranks",
        ),
        (3, {"dp": 2, "pp": 2}, 8, 1, "with 3 ranks alive: the mesh needs 4 ranks"),
        (1, {"dp": -1}, 8, 2, "with 1 rank alive: min_ranks=2 asks for more"),
        (7, {"dp": -1}, 8, 5, "global_batch=8 cannot be shared by min_ranks=5 or more of them"),
    ],
)
def test_an_elastic_mesh_that_no_ranks_can_form_is_refused(alive, axes, batch, least, message):
    with pytest.raises(RuntimeError, match=message):
        choose_shape(alive, ShapeRequest(axes, ("dp",), batch, 1, least))


def test_a_batch_that_is_skipped_or_taken_twice_is_an_error(tmp_path):
    def program(this: Any) -> None:
        with pytest.raises(ValueError, match=r"save: call run.restore\(state\) first"):
            this.save(1, {})
        assert this.restore({"w": torch.zeros(2)})["w"].tolist() == [0, 0] and this.step == 0
        this.save(1, {"w": torch.ones(2)})
        for step in (1, 3):
            with pytest.raises(
                ValueError, match=rf"save\({step}, ...\) after step 1: a batch was skipped or taken twice"
            ):
                this.save(step, {})

    run(tmp_path, 1, program)


def test_a_process_that_got_sigterm_leaves_after_a_saved_step(tmp_path):
    def leave(this: Any) -> None:
        this.restore({"w": torch.zeros(2)})
        this._is_leaving = True
        for step in range(1, 9):
            this.save(step, {"w": torch.full((2,), float(step))})

    def go_on(this: Any) -> None:
        assert this.restore({"w": torch.zeros(2)})["w"].tolist() == [3, 3] and this.step == 3

    with pytest.raises(SystemExit):
        run(tmp_path, 1, leave, every=3)
    run(tmp_path, 1, go_on)


def test_memory_is_released_when_the_run_is_on_disk_to_its_end(tmp_path):
    def stops_at(last: int) -> Any:
        def program(this: Any) -> Any:
            state = this.restore({"w": torch.zeros(2)})
            begin = this.step
            for step in range(begin + 1, last + 1):
                this.save(step, {"w": state["w"] + step})
            return begin

        return program

    def files() -> int:
        return len(list((tmp_path / "memory").rglob("*.safetensors")))

    assert run(tmp_path, 1, stops_at(6), save_every=3) == 0 and files() == 1
    shutil.rmtree(tmp_path / "memory")
    assert run(tmp_path, 1, stops_at(6)) == 6 and files() == 1, "what came from the disk is in memory at once"
    assert run(tmp_path, 1, stops_at(STEPS), save_every=3) == 6 and files() == 0
    assert fzero.checkpoint.checkpoints(tmp_path / "disk").steps()[-1] == STEPS


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"micro_batch": 5}, ValueError, "micro_batch=5 does not divide global_batch=8"),
        ({"micro_batch": "2"}, ValueError, "micro_batch='2'"),
        ({"save_evry": 5}, TypeError, r"save_evry=5: did you mean save_every="),
        ({"axis": "data"}, ValueError, "axis='data': 'data' is not an axis of the mesh, which has dp"),
        ({"simulated_ranks": 0}, ValueError, "simulated_ranks=0"),
        ({"dp": None}, ValueError, "elastic.run needs the axes of its mesh: dp=-1"),
        ({"train": 3}, TypeError, "train is 3: expected a function of an ElasticRun"),
    ],
)
def test_an_elastic_run_refuses_wrong_arguments_at_once(options, error, message, tmp_path):
    arguments: dict[str, Any] = {
        "train": lambda run: None,
        "steps": 2,
        "global_batch": 8,
        "simulated_ranks": 2,
        "dp": -1,
    }
    arguments |= {"root": tmp_path, "memory": str(tmp_path), **options}
    with pytest.raises(error, match=message):
        fzero.elastic.run(**{name: x for name, x in arguments.items() if x is not None})


def saves_two_steps(this: Any) -> None:
    state = this.restore({"w": torch.zeros(2)})
    for step in range(this.step, min(this.steps, 2)):
        this.save(step + 1, state)


def test_resuming_an_elastic_run_with_another_global_batch_is_refused(tmp_path):
    run(tmp_path, 2, saves_two_steps, steps=2, every=1)
    with pytest.raises(ValueError, match="global_batch=24, and the run in this folder has 12"):
        run(tmp_path, 2, saves_two_steps, steps=4, global_batch=24, every=1)


def test_a_run_without_saves_gets_a_notice(tmp_path, caplog):
    run(tmp_path, 2, saves_two_steps, steps=4, every=1)
    assert "the function returned after step 2 of 4" in caplog.text
