"""Finding the world: torchrun's variables, Slurm's, and processes that never arrive."""

import re
from typing import Any

import pytest

import fzero
from fzero.ranks._launch import _first_host, find_world
from tests.distributed.launch import Done, fork, free_port, python, rank_variables

SCRIPT = """
import sys, torch, fzero
torch.set_num_threads(1)
mesh = fzero.mesh(dp=-1, tp=2, timeout=float(sys.argv[1]))
print(mesh, mesh.spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index(("dp", "tp")), ("dp", "tp")))().item())
"""


def launch_alone(timeout: float, script: str = SCRIPT, **variables: Any) -> Done:
    return python("-c", script, str(timeout), **variables)


def slurms(rank: int, size: int, job: int) -> dict[str, Any]:
    return {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_LOCALID": rank,
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NODELIST": "localhost",
    }


def test_the_tasks_of_a_slurm_step_are_a_world():
    job = free_port() % 10000  # the port is 20000 + it
    done = fork(["-c", SCRIPT, "60"], [slurms(r, 2, job) for r in range(2)])
    assert [d.stdout for d in done] == [f"Mesh(dp=1, tp=2, rank {r}) 1\n" for r in range(2)], done


def test_a_rank_that_never_arrives_is_named_in_time():
    port = free_port()
    err = launch_alone(3, **rank_variables(0, 2, port)).stderr
    assert f"RuntimeError: rank 1 did not arrive within 3 s: 2 processes should meet at localhost:{port}" in err


def test_launching_without_rank_0_fails_and_names_it():
    err = launch_alone(3, **rank_variables(1, 2, free_port())).stderr
    assert "RuntimeError: rank 1 did not reach rank 0 within 3 s: 2 processes should meet at localhost" in err


ONE = """
import os, socket, sys, fzero, torch
first, again = fzero.mesh(dp=-1, simulated_ranks=4), fzero.mesh(dp=1, tp=-1)
print(first, again, again.spmd(lambda: fzero.collectives.psum(fzero.axes.axis_index("tp") + 1, ("dp", "tp")))().item())
sys.stdout.flush()
if not os.fork():
    try:
        fzero.mesh(dp=-1)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
torch.distributed.destroy_process_group()
print(fzero.mesh(dp=1, tp=1))
torch.distributed.destroy_process_group()
with socket.socket() as taken:
    taken.bind(("localhost", 0))
    taken.listen()
    os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    try:
        fzero.mesh(dp=-1, timeout=20)
    except RuntimeError as error:
        print(error)
"""


def test_a_world_of_one_process_is_no_simulation():
    """It is not a simulation; it makes several meshes, and anew after destroy_process_group, but none in a fork."""
    _, out, err = launch_alone(60, ONE, **rank_variables(0, 1, free_port()))
    lines = out.splitlines()
    assert lines[0] == "Mesh(dp=1, rank 0) Mesh(dp=1, tp=1, rank 0) 1", out + err
    assert lines[1].startswith("this process was forked from rank 0 and has its connections"), out + err
    assert lines[2] == "Mesh(dp=1, tp=1, rank 0)", out + err
    assert lines[3].startswith("rank 0 could not open a store: 1 process should meet at localhost:"), out + err


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("RANK", "first", "RANK='first': expected a number, 0 or more"),
        ("RANK", "-1", "RANK='-1': expected a number, 0 or more"),
        ("RANK", "2", "RANK=2 and WORLD_SIZE=2: ranks are 0 to WORLD_SIZE - 1"),
        ("WORLD_SIZE", "", "WORLD_SIZE='': expected a number"),
        ("MASTER_PORT", "http", "MASTER_PORT='http': expected a number"),
        ("LOCAL_RANK", "1.0", "LOCAL_RANK='1.0': expected a number"),
    ],
)
def test_a_variable_that_is_wrong_is_named(monkeypatch, name, value, message):
    for key, said in {**rank_variables(1, 2, 1234), name: value}.items():
        monkeypatch.setenv(key, str(said))
    with pytest.raises(ValueError, match=re.escape(message)):
        fzero.mesh(dp=-1)


def test_an_sbatch_script_without_srun_is_a_world_of_one(monkeypatch):
    """In an sbatch script Slurm's variables tell of tasks that only srun starts."""
    for name, value in {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    assert find_world() is None and fzero.mesh(dp=-1).simulated
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # srun --pty bash
    assert find_world() is None


def test_torchruns_variables_go_before_slurms(monkeypatch):
    """torchrun inside srun: one torchrun a machine is a task, and its workers are the ranks."""
    for name, value in {**slurms(1, 2, 7), **rank_variables(5, 16, 1234), "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert find_world() == (5, 16, 1, "localhost:1234")


def test_slurms_tasks_meet_at_the_first_node(monkeypatch):
    variables = {**slurms(3, 8, 123456), "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_STEP_ID": 2, "SLURM_LOCALID": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert find_world() == (3, 8, 1, "gpu07:23458")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    assert find_world() == (3, 8, 1, "10.0.0.1:4711")


@pytest.mark.parametrize(
    "nodes,first",
    [
        ("node1", "node1"),
        ("a1,a2", "a1"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("rack-1-n[001-128],rack-2", "rack-1-n001"),
        ("n[1-2].cluster", "n1.cluster"),
        ("login.example.org", "login.example.org"),
        ("rack[1-2]node[03-4],other", "rack1node03"),
    ],
)
def test_ranks_read_the_first_machine_of_slurms_list(nodes, first):
    assert _first_host(nodes) == first
