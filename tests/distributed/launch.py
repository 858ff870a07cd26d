"""Starts Python as a user does: alone, or as the ranks of a world; forked from one process, which costs little.

`torchrun` is the real command, which starts each rank anew: some seconds of processor time a rank.
"""

import atexit
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "TORCHELASTIC_")  # a launcher's variables


class Done(NamedTuple):
    """The output of a process, and its exit code; of a world the code of the first that failed, else 0."""

    returncode: int
    stdout: str
    stderr: str


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def environment(**variables: object) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, one thread, and with these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in variables.items()}}


def rank_variables(rank: int, size: int, port: int) -> dict[str, object]:
    """Return the variables that torchrun sets."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **place}


def python(*words: str, read: str = "", **variables: object) -> Done:
    """Run the command `python *words`; `read` is what it reads."""
    (done,) = fork(words, [variables], read=read)
    return done


def world(ranks: int, *words: str, timeout: float = 1200, cwd: pathlib.Path = ROOT) -> Done:
    """Run the command `torchrun --nproc-per-node RANKS *words`, without torchrun."""
    port = free_port()
    done = fork(words, [rank_variables(rank, ranks, port) for rank in range(ranks)], timeout, cwd)
    errors = [f"---- rank {rank} ended with {d.returncode}:\n{d.stderr}" for rank, d in enumerate(done) if d.returncode]
    code = next((d.returncode for d in done if d.returncode), 0)
    return Done(code, "".join(d.stdout for d in done), "\n".join(errors) or "".join(d.stderr for d in done))


def torchrun(ranks: int, *words: str, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    """Run the real `torchrun --nproc-per-node RANKS *words`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    variables = environment(PYTHONWARNINGS="ignore")
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=timeout)


def fork(
    words: Sequence[str],
    variables: Sequence[Mapping[str, object]],
    timeout: float = 1200,
    cwd: pathlib.Path = ROOT,
    read: str = "",
) -> list[Done]:
    """Run `python *words` once with each of these sets of variables, all at the same time."""
    server = forkserver()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        environments = [environment(**v) for v in variables]
        request = {"words": words, "environments": environments, "cwd": str(cwd), "timeout": timeout, "folder": folder}
        pathlib.Path(folder, "in").write_text(read)
        print(json.dumps(request), file=server.stdin, flush=True)
        codes = json.loads(server.stdout.readline())
        output = [
            [pathlib.Path(folder, f"{rank}.{name}").read_text(errors="replace") for name in ("out", "err")]
            for rank in range(len(codes))
        ]
        return [Done(code, out, err) for code, (out, err) in zip(codes, output, strict=True)]


@functools.cache
def forkserver() -> subprocess.Popen[str]:
    """Start the process that forks, one for this process, at the first use."""
    variables = environment(TORCHINDUCTOR_COMPILE_THREADS=1, PYTHONWARNINGS="ignore")
    command = [sys.executable, "-m", "tests.distributed.forkserver"]
    server = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=-1, stdout=-1, text=True)
    atexit.register(server.communicate)  # its input ends, and then it does
    return server
