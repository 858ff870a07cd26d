"""A process that has imported torch, fzero and what the tests run, and forks: each is a Python that starts at once.

It reads requests from its input, one a line, and answers each when its processes have ended; see `launch.py`. It runs
no operation of torch itself: the threads that one starts would not survive a fork.
"""

import builtins
import faulthandler
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
import time
import traceback
import warnings
from typing import Any, NamedTuple

# Each is optional: a test that needs one that is missing says so itself.
PRELOAD = (
    "fzero.testing",
    "matplotlib.figure",
    "rich.progress",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch.distributed.fsdp",
    "transformers",
    "tests.distributed.axes_cases",
    "tests.distributed.cases",
    "tests.distributed.checkpoint_cases",
    "tests.distributed.compiler_cases",
    "tests.distributed.jit_cases",
    "tests.distributed.schedule_cases",
    "tests.distributed.training_cases",
)


class Request(NamedTuple):
    """Python's words, an environment for each process, where and how long they run, and where their output goes."""

    words: list[str]
    environments: list[dict[str, str]]
    cwd: str
    timeout: float
    folder: str


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print is not an answer
    for line in sys.stdin:
        request = Request(**json.loads(line))
        children = [start(request, rank) for rank in range(len(request.environments))]
        print(json.dumps(wait(children, request.timeout)), file=answers, flush=True)


def wait(children: list[int], timeout: float) -> list[int]:
    """Wait for all to end; 10 s after one fails the others are ended. Returns their codes."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout + 10  # a child stops itself at the timeout, and says where it stood
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                codes[child] = os.waitstatus_to_exitcode(status)
                end = end if codes[child] == 0 else min(end, time.monotonic() + 10)
        if time.monotonic() > end:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def start(request: Request, rank: int) -> int:
    """Fork a process that runs Python's words as the command `python *words` does; returns its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        into_files(pathlib.Path(request.folder), rank)
        faulthandler.dump_traceback_later(request.timeout, exit=True)
        os.environ.clear()
        os.environ.update(request.environments[rank])
        os.chdir(request.cwd)
        run(request.words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def into_files(folder: pathlib.Path, rank: int) -> None:
    """Read from a file; write to a file for the output and one for the errors."""
    os.dup2(os.open(folder / "in", os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)


def run(words: list[str]) -> None:
    """Run `[-W FILTER]... SCRIPT | -m MODULE | -c CODE`, then its own words."""
    while words[0] == "-W":
        action, _, category = words[1].partition("::")
        warnings.simplefilter(action, vars(builtins)[category or "Warning"])  # pyright: ignore[reportArgumentType]
        words = words[2:]
    kind, *rest = words
    sys.argv = {"-m": rest, "-c": [kind, *rest[1:]]}.get(kind, words)
    names: dict[str, Any] = {"__name__": "__main__"}
    if kind == "-c":
        exec(rest[0], names)
    elif kind == "-m":
        sys.modules.pop(rest[0], None)  # it is run, not imported
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(pathlib.Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.freeze()  # what is imported is not garbage: children need not search it
    gc.set_threshold(20_000, 20, 50)
    serve()
    os._exit(0)  # taking down what was imported would take a second
