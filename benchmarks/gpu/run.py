"""Run the parts within a budget of time, each in processes of its own, so that none can end another."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.case import Result
from tests.distributed.launch import environment, free_port, rank_variables

__all__ = ["ROOT", "Launch", "Outcome", "Part", "Run", "compile_all", "launch", "run_parts"]

ROOT = Path(__file__).parents[2]
LEAST = 5.0  # seconds that a part needs to begin
GRACE = 5.0  # seconds that a part may take beyond its share, to end by itself
MOST = 0.5  # of a part's time that is left: what one case may take while others wait
POLL = 0.1  # seconds
THE_PART = ("the part", True)  # the case that stands for a part none of whose cases is known


class Part(NamedTuple):
    """A part of the report.

    Attributes:
        name: of the file in `benchmarks/gpu/` with its cases.
        weight: its share of the time that is left, beside the weights of the parts after it.
        compiles: its share of the processes that compile, beside the shares of the others; 0 if it compiles nothing.
    """

    name: str
    weight: float
    compiles: int = 0


class Outcome(NamedTuple):
    """What became of the parts so far.

    Attributes:
        card: the name of the cards; "" before any part has begun.
        results: of all cases.
        seconds: since the start.
    """

    card: str
    results: list[Result]
    seconds: float


# Starts the processes of a part: takes its name, the file of its results, the seconds that it may take, the file of
# its log, and more options of `benchmarks.gpu.worker`.
Launch = Callable[[str, Path, float, Path, Sequence[str]], "subprocess.Popen[bytes]"]


def launch(ranks: int, options: Sequence[str], variables: Mapping[str, str]) -> Launch:
    """Make what starts a part: one process, or one a card by torchrun.

    Args:
        ranks: the number of processes.
        options: of `benchmarks.gpu.worker`.
        variables: of the environment, beside this process's own.
    """

    def start(part: str, out: Path, seconds: float, log: Path, more: Sequence[str]) -> "subprocess.Popen[bytes]":
        words = ["-m", "benchmarks.gpu.worker", part, str(out), "--seconds", str(seconds), *more]
        threads = max(1, (os.cpu_count() or 1) // ranks)  # for updates on the host; torchrun's own default is 1
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": threads, **variables, "PYTHONPATH": path}
        if ranks == 1:
            command = [sys.executable, *words]
            own = {**rank_variables(0, 1, free_port()), **own}
        else:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *torchrun, *words]
        with log.open("ab") as file:
            return subprocess.Popen(
                [*command, *options],
                cwd=ROOT,
                env=environment(**own),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    return start


class Run:
    """The processes of one part, started anew after each that dies, until the cases or the time are over.

    A case that takes half of the time that is left is ended, so that those after it run, too.
    """

    def __init__(self, part: str, seconds: float, launch: Launch, folder: Path) -> None:
        self.part, self.launch = part, launch
        self.end = time.monotonic() + seconds
        self.out, self.log = folder / f"{part}.jsonl", folder / f"{part}.log"
        self.out.unlink(missing_ok=True)  # of an earlier run
        self.cases: list[tuple[str, bool]] = []  # names, and which of them are checks
        self.card = ""
        self.current: int | None = None  # the case that runs
        self.done = 0  # cases with a result
        self._read = 0
        self._case_end = self.end

    def results(self) -> Iterator[Result]:
        """Yield each case's result as it comes."""
        while not self.cases or self.done < len(self.cases):
            self.out.touch()
            before = self.done
            skip = ["--skip", str(self.done)]
            process = self.launch(self.part, self.out, self.end - time.monotonic(), self.log, skip)
            try:
                end = self.end + GRACE
                while process.poll() is None and time.monotonic() < end and not self._is_slow():
                    yield from self._new_results()
                    if self.cases and self.done == len(self.cases):  # all that is left is to end, which may hang
                        end = min(end, time.monotonic() + GRACE)
                    time.sleep(POLL)
                is_slow, is_late = self._is_slow(), process.poll() is None
            finally:
                kill(process)
            yield from self._new_results()
            if is_slow and self.current is not None:
                case = self.cases[self.current]
                self.done, self.current = self.current + 1, None
                yield self._result(case, "left out", "stopped, since it took half of the time that its part had left")
                continue
            if is_late:
                yield from self._stopped()
                return
            if self.current is not None:
                case = self.cases[self.current]
                self.done, self.current = self.current + 1, None
                yield self._result(case, "failed", f"its process died: {last_line(self.log)}")
            elif self.done == before:
                yield self._result(THE_PART, "failed", f"it did not begin: {last_line(self.log)}")
                return

    def _is_slow(self) -> bool:
        """Whether a case runs that has taken too much of the part's time for those after it."""
        return self.current is not None and self._case_end < min(time.monotonic(), self.end)

    def _new_results(self) -> Iterator[Result]:
        lines = self.out.read_text().split("\n")[:-1]
        for line in lines[self._read :]:
            event: dict[str, Any] = json.loads(line)
            self._read += 1
            if "cases" in event:
                self.cases, self.card = event["cases"], event["card"]
            elif "start" in event:
                self.current = event["start"]
                now, is_last = time.monotonic(), self.current + 1 == len(self.cases)
                self._case_end = self.end if is_last else now + MOST * (self.end - now)
            else:
                self.done, self.current = self.done + 1, None
                yield Result(**event["end"])

    def _stopped(self) -> Iterator[Result]:
        """Yield what the end of the time does to the case that runs, and to those after it."""
        if self.current is not None:
            self.done += 1
            yield self._result(self.cases[self.current], "left out", "stopped, since its time was over")
        elif not self.cases:
            yield self._result(THE_PART, "left out", "its time was over before it began")
        for case in self.cases[self.done :]:
            yield self._result(case, "left out", "no time was left")

    def _result(self, case: tuple[str, bool], outcome: str, reason: str) -> Result:
        name, is_check = case
        return Result(self.part, name, outcome, reason, is_check=is_check)


def compile_all(
    parts: Sequence[Part], processes: int, seconds: float, launch: Launch, say: Callable[[str], None], logs: Path
) -> None:
    """Run the cases that wait for a compiler in many processes at once, which leaves what they compile on the disk.

    On a machine with many cores that takes a fraction of the time that one case after the other would wait. Nothing is
    measured, and what fails here fails again, and is told, in its own part.

    Args:
        parts: all that will run.
        processes: about as many, and at least one for each part that compiles.
        seconds: after which those that still compile are ended.
        launch: starts the processes of a part.
        say: takes a line on how far it is.
        logs: the folder of what they print.
    """
    shares = sum(part.compiles for part in parts)
    started: list[subprocess.Popen[bytes]] = []
    start = time.monotonic()
    try:
        for part in parts:
            n = max(1, processes * part.compiles // shares) if part.compiles else 0
            for i in range(n):
                out, log = (logs / f"compile-{part.name}-{i}.{end}" for end in ("jsonl", "log"))
                started.append(launch(part.name, out, seconds, log, ["--compile", str(i), str(n)]))
        say(f"compile: up to {seconds:.0f} s, {len(started)} processes")
        while any(process.poll() is None for process in started) and time.monotonic() < start + seconds:
            time.sleep(POLL)
    finally:
        late = sum(process.poll() is None for process in started)
        for process in started:
            kill(process)
    say(f"{time.monotonic() - start:4.0f} s, compile: " + (f"{late} processes were not done" if late else "done"))


def run_parts(
    parts: Sequence[Part],
    seconds: float,
    launch: Launch,
    say: Callable[[str], None],
    write: Callable[[Outcome], None],
    logs: Path,
) -> Outcome:
    """Run parts one after the other, and return their results.

    Args:
        parts: in their order. Each gets its share of the time that is left.
        seconds: for all of them.
        launch: starts the processes of a part.
        say: takes a line on how far it is.
        write: writes the report; called after each case.
        logs: the folder of what the parts print, an error's lines among it.
    """
    start, outcome = time.monotonic(), Outcome("", [], 0.0)
    for i, part in enumerate(parts):
        left = seconds - (time.monotonic() - start)
        share = left * part.weight / sum([p.weight for p in parts[i:]])
        if share < LEAST:
            results: Iterator[Result] = iter([Result(part.name, THE_PART[0], "left out", "no time was left")])
            run = None
        else:
            say(f"{part.name}: up to {share:.0f} s")
            run = Run(part.name, share, launch, logs)
            results = run.results()
        for result in results:
            passed = time.monotonic() - start
            outcome = Outcome((run and run.card) or outcome.card, [*outcome.results, result], passed)
            place = f"{run.done} of {len(run.cases)}" if run and run.cases else ""
            say(f"{passed:4.0f} s of {seconds:.0f}, {part.name} {place}: {line_of(result)}")
            write(outcome)
    return outcome


def line_of(result: Result) -> str:
    """Say what became of a case, in a line."""
    first = result.rows[0] if len(result.rows) == 1 else {}
    numbers = [f"{name} {value:.4g}" for name, value in first.items() if isinstance(value, float)]
    return " ".join([f"{result.case}: {result.outcome}", result.reason, ", ".join(numbers[:4])]).rstrip()


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End a part's processes, all of the group that it began."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1][:300] if lines else "it said nothing"
