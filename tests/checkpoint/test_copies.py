"""Copies: what is in memory is whole after the loss of hosts and processes at any moment."""

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import tree
from fzero.checkpoint._shared_memory import _copy_holders
from tests.checkpoint.helpers import memory_in
from tests.checkpoint.hosts import Death, Died, ThreadMesh, World, local
from tests.helpers import either, examples

HOSTS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=12)


@given(hosts=HOSTS, copies=st.integers(0, 4))
def test_copies_lie_on_as_many_other_hosts_as_there_are(hosts, copies):
    for rank, host in enumerate(hosts):
        holders = [hosts[r] for r in _copy_holders(hosts, rank, copies)]
        assert host not in holders, "a copy on the same host is lost with it"
        assert len(set(holders)) == len(holders) == min(copies, len(set(hosts)) - 1)


@given(count=st.integers(1, 6), ranks=st.integers(1, 8), copies=st.integers(0, 5))
def test_no_rank_holds_more_copies_than_another(count, ranks, copies):
    hosts = [f"host{r // ranks}" for r in range(count * ranks)]
    held = [r for rank in range(len(hosts)) for r in _copy_holders(hosts, rank, copies)]
    assert {held.count(r) for r in range(len(hosts))} == {min(copies, count - 1)}


@functools.cache
def state_at(step: int, ranks: int) -> Any:
    """The state after a step, as the ranks of a simulated mesh hold it."""
    mesh = fzero.mesh(dp=ranks)
    params = {"w": torch.arange(7.0) + 10 * step, "b": torch.full((2, 3), float(step))}
    boxes = mesh.spmd(fzero.partition)(params)
    return {"params": boxes, "key": torch.full((ranks, 3), step), "step": step}


def checkpoints_on(root: Path, mesh: Any, copies: int) -> Any:
    return fzero.checkpoint.checkpoints(root / "disk", mesh, memory=memory_in(root), copies=copies, timeout=20)


def saving(root: Path, steps: range, copies: int, done: set[int]) -> Any:
    """Return a program that saves a state in memory after each step."""

    def program(mesh: ThreadMesh) -> None:
        runs = checkpoints_on(root, mesh, copies)
        for step in steps:
            runs.save_in_memory(step, local(state_at(step, mesh.size), mesh.rank), background=False)
            done.add(step)

    return program


def restore(root: Path, hosts: list[str], copies: int) -> int:
    """Restore on the ranks that are left, and save it in memory; return the step, whose state has all its bits."""

    def program(mesh: ThreadMesh) -> Any:
        runs = checkpoints_on(root, mesh, copies)
        state = runs.restore(local(state_at(0, mesh.size), mesh.rank))
        runs.save_in_memory(state["step"], state, background=False)
        return state

    results = World(hosts, 0).run(program)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    (step,) = {result["step"] for result in results}
    for rank, result in enumerate(results):
        expected = local(state_at(step, len(hosts)), rank)
        pairs = zip(tree.leaves_up_to(expected, result), tree.flatten(expected)[0], strict=True)
        assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in pairs), f"mixed steps: {result}"
    return step


def run_and_lose(root: Path, hosts: list[str], copies: int, deaths: tuple[Death, ...], seed: int, steps: range) -> Any:
    """Save steps in memory while hosts and ranks die; return what is left, and what has to be there."""
    done, world = set[int](), World(hosts, seed, deaths)
    results = world.run(saving(root, steps, copies, done))
    for rank, result in enumerate(results):
        if not world.dead:
            assert result is None, result
        elif rank in world.dead and result is not None:  # it had not ended before
            assert isinstance(result, Died)
    return world, max(done, default=steps.start - 1)


@pytest.mark.parametrize("hosts", ["ab", pytest.param("aabb", marks=pytest.mark.slow)])
def test_a_death_at_every_moment_leaves_one_whole_step(tmp_path, hosts):
    """A rank or a host dies at the first moment of two steps, then at the second moment, and so on.

    In `make test` every third moment has one death, of a rank and of a host in turn.
    """
    result = set[int]()
    for moment in range(1, 1000, either(3, 1)):
        for host in either((moment % 2 == 0,), (True, False)):
            root = tmp_path / f"{moment}-{host}"
            world, last = run_and_lose(root, [*hosts], 1, (Death(host, moment),), moment, range(1, 3))
            if not world.dead:
                assert moment > 70 and result == {0, 1, 2}
                return
            step = restore(root, world.lose(root / "memory"), 1)
            assert last <= step <= last + 1, f"{world.deaths}: step {last} was saved, and step {step} is there"
            result.add(step)
    raise AssertionError("the world never ends")


@examples(6, 20)
@given(data=st.data(), copies=st.integers(1, 2), seed=st.integers(0, 1000))
def test_a_step_in_memory_survives_hosts_that_are_lost_and_come_back(data, copies, seed):
    """As many hosts as there are copies are lost in each start, and others join: a step is whole in each."""
    with tempfile.TemporaryDirectory() as folder:
        root, last = Path(folder), 0
        for start in range(data.draw(st.integers(1, 3))):
            names = data.draw(st.lists(st.sampled_from("abcd"), min_size=copies + 1, max_size=4, unique=True))
            hosts = [name for name in names for _ in range(data.draw(st.integers(1, 2)))]
            if start:
                hosts += sorted(
                    {p.name for p in (root / "memory" / "fzero").glob("*")} - set(hosts)
                )  # who lives is there
            deaths = data.draw(st.lists(st.builds(Death, st.booleans(), st.integers(1, 400)), max_size=copies))
            world, done = run_and_lose(root, hosts, copies, tuple(deaths), seed + start, range(last + 1, last + 4))
            left = world.lose(root / "memory") or ["a"]
            step = restore(root, left, copies)
            assert max(last, done) <= step <= last + 3
            last = step


@pytest.mark.parametrize("missing", ["00000-of", "00001-of"])
def test_an_old_manifest_of_a_host_that_was_away_is_not_read(tmp_path, missing):
    """Its files of the step are not all there. The others made the step again, and that counts."""
    World(["a", "b"], 0).run(saving(tmp_path, range(1, 3), 1, set()))
    (away,) = (tmp_path / "memory" / "fzero").glob("b/*/step-00000002")
    contents = {file.name: file.read_bytes() for file in away.iterdir() if missing not in file.name}
    shutil.rmtree(tmp_path / "memory" / "fzero" / "b")
    World(["a", "c"], 0).run(saving(tmp_path, range(2, 3), 1, set()))
    away.mkdir(parents=True)
    for name, content in contents.items():
        (away / name).write_bytes(content)
    assert restore(tmp_path, ["b", "a", "c"], 1) == 2


@given(hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=5), copies=st.integers(0, 1), data=st.data())
@settings(max_examples=15)
def test_copies_in_memory_move_to_the_hosts_that_stay(hosts, copies, data):
    with tempfile.TemporaryDirectory() as folder:
        root, ranks = Path(folder), data.draw(st.integers(1, len(hosts)))
        World(hosts, 0).run(saving(root, range(1, 3), copies, set()))
        results = World(hosts, 1).run(lambda mesh: checkpoints_on(root, mesh, copies).move_memory(ranks))
        assert results == [None] * len(hosts)
        for host in {*hosts} - {*hosts[:ranks]}:
            shutil.rmtree(root / "memory" / "fzero" / host)
        assert restore(root, hosts[:ranks], copies) == 2


def test_copies_on_a_single_host_get_a_notice(tmp_path, caplog):
    for host in ("alone", "other"):
        World([host, host], 0).run(saving(tmp_path / host, range(1, 2), 1, set()))
    World(["alone", "other"], 0).run(saving(tmp_path / "two", range(1, 2), 1, set()))
    assert [r.message for r in caplog.records if "all ranks are on one host" in r.message and "'two'" not in r.message]


def test_a_negative_number_of_copies_is_refused(tmp_path):
    with pytest.raises(ValueError, match="copies=-1: expected a number of copies"):
        fzero.checkpoint.checkpoints(tmp_path, copies=-1)
