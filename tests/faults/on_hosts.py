"""Faults of hosts and of the link between them: each rank that lives names a lost rank in time, and slow is not lost.

The hosts are network namespaces of this machine (`tests.faults.hosts`), and each has some ranks, which train and save.
"""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero.checkpoint import _files
from tests.faults import disks
from tests.faults.hosts import Hosts, Rule
from tests.faults.trainer import OPT, Breaking, Fault, batch_at, loss_fn, params, step_clock, use_memory

FORK = multiprocessing.get_context("fork")
MOMENTS = ("first step", "forward", "backward", "update", "save", "any")
CUTS = tuple([f"link cut, {moment}" for moment in MOMENTS])
BEFORE = ("rank missing, first mesh", "link cut, first mesh")  # before there are heartbeats
DISKS = dict(zip(("host disk full", "host disk read-only"), disks.KINDS, strict=True))
KINDS = (
    *CUTS,
    "one direction cut",
    "a link of three cut",
    "host gone",
    "processes killed",
    "host stopped",
    "rank stopped",
    "rank killed",
    "rank hangs",
    "rank polls",
    "rank out of memory",
    "rank missing, first mesh",
    "link cut, first mesh",
    "30% loss",
    "2 s delay",
    "1 MB/s",
    "host clock stepped",
    "host disk slow",
    *DISKS,
)
HARMLESS = {
    "30% loss": 8,
    "2 s delay": 5,
    "1 MB/s": 8,
    "host clock stepped": 12,
    "host disk slow": 12,
}  # and how many steps a run of each makes
FAULT_AT = 3  # the step in which it goes wrong


class Case(NamedTuple):
    """One run: what goes wrong, and how the ranks train.

    Attributes:
        kind: what goes wrong, one of `KINDS`.
        ranks: the number of ranks on each host.
        stage: the ZeRO stage.
        jitted: whether the step is jitted.
        host: which host it goes wrong on.
        background: whether saves run in the background.
        timeout: `fzero.mesh(timeout=)`.
        seed: of losses of the link, and of the moment.
    """

    kind: str
    ranks: int = 1
    stage: int = 3
    jitted: bool = False
    host: int = 1
    background: bool = True
    timeout: float = 40.0
    seed: int = 0

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return 3 if self.kind == "a link of three cut" else 2

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks


class Outcome(NamedTuple):
    """A rank's words at its end: when, the kind of its error, its text, and the lost rank."""

    rank: int
    time: float
    error: str
    text: str
    lost: int | None


class Run(NamedTuple):
    """The result of a case.

    Attributes:
        wrong: what should not have happened; empty if all is well.
        seconds: from the fault to the last named error; None for a harmless fault.
        outcomes: what each rank said; a rank that was killed said nothing.
    """

    wrong: list[str]
    seconds: float | None
    outcomes: list[Outcome]


def draw(rng: random.Random, kind: str) -> Case:
    jitted = kind.endswith(("any", "cut", "loss", "delay", "MB/s")) and rng.random() < 0.5  # others stop within Python
    ranks = 1 if kind == "2 s delay" else rng.choice((1, 1, 2))
    timeout = 20.0 if kind in BEFORE else 40.0  # all of it, there
    rest = rng.randrange(4), jitted, rng.randrange(2), rng.random() < 0.5, timeout, rng.randrange(1000)
    return Case(kind, ranks, *rest)


class Flag:
    """An event between processes, of which any may be killed at any time: a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self) -> None:
        self._path.touch()

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (is_set := self._path.exists()) and time.monotonic() < end:
            time.sleep(0.005)
        return is_set


class Trigger:
    """Within a rank: says that the moment of the fault has come, and waits until it has happened."""

    def __init__(self, case: Case, rank: int, now: Flag, done: Flag) -> None:
        self.moment = case.kind.rpartition(", ")[2] if case.kind in (*CUTS, *BEFORE) else "between"
        self.is_mine, self._now, self._done, self.step, self._is_over = rank == 0, now, done, 0, False

    def at(self, moment: str) -> None:
        """Reach a moment."""
        if self.moment == moment and (self.step == FAULT_AT or moment in ("save", "first mesh")) and not self._is_over:
            self._is_over = True
            if self.is_mine:
                self._now.set()
            if self.moment != "any":  # else it comes while the ranks train on
                self._done.wait(30)


class Backward(torch.autograd.Function):
    """The identity, whose backward pass is a moment for the fault."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, trigger: Any) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.trigger = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.trigger.at("backward")
        return grads[0], None


class SavingOs(Breaking):
    """The module `os` for saves, whose second operation is a moment for the fault."""

    def __init__(self, trigger: Trigger, seconds: float) -> None:
        super().__init__(Fault("none", save=2, operation=1))
        self.trigger, self.seconds = trigger, seconds

    def wait_for_disk(self) -> None:
        time.sleep(self.seconds)

    def strike(self, args: Any) -> None:
        self.trigger.at("save")


def train(case: Case, root: Path, trigger: Trigger) -> None:
    trigger.at("first mesh")
    if case.kind in BEFORE and not lives(case, int(os.environ["RANK"])):
        hang(case.kind)
    mesh = fzero.mesh(dp=-1, timeout=case.timeout)

    def traced_loss(params: Any, batch: Any, key: Any) -> torch.Tensor:
        trigger.at("forward")
        loss = loss_fn(params, batch, key)
        return loss if case.jitted else Backward.apply(loss, trigger)  # pyright: ignore

    def train_step(params: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        key, use = fzero.random.split(key)
        loss, grads = fzero.value_and_grad(traced_loss)(params, batch, use)
        trigger.at("update")
        updates, opt_state = OPT.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, key, loss

    step = fzero.shard(train_step, stage=case.stage, mesh=mesh)
    state: Any = [*step.init(params(), OPT), fzero.random.key(7)]
    run = fzero.jit(step, backend="fx") if case.jitted else step
    saving_os = SavingOs(trigger, 0.3 if case.kind == "host disk slow" else 0.0)
    _files.os = saving_os  # pyright: ignore
    with fzero.checkpoint.checkpoints(root / "run", mesh, keep=3, timeout=100) as runs:
        for i in range(HARMLESS.get(case.kind, 1000)):
            trigger.step = FAULT_AT if trigger.moment == "first step" else i
            trigger.at("first step")
            trigger.at("between")
            trigger.at("any")
            if i == FAULT_AT and not lives(case, mesh.rank):
                hang(case.kind)
            if i == FAULT_AT and case.kind == "host clock stepped" and mesh.rank // case.ranks == case.host:
                step_clock((case.seed - 500) * 3600.0)
            *state, _ = run(*state, mesh.split(batch_at(i)))
            if i % 3 == 0:
                runs.wait()
                saving_os.begin()
                runs.save(i + 1, {"params": state[0], "opt_state": state[1]}, background=case.background)
        runs.wait()


def hang(kind: str) -> None:
    """Do not go on, if the fault says so."""
    if kind == "rank hangs":
        time.sleep(1000)
    if kind == "rank out of memory":
        use_memory()
    if kind == "rank missing, first mesh":
        os._exit(1)
    while kind == "rank polls" and not os.path.exists("/never"):
        time.sleep(0.1)


def child(hosts: Hosts, host: int, rank: int, case: Case, root: Path, trigger: Trigger, says: Any) -> None:
    """Be a rank."""
    os.setpgid(0, 0)
    out = os.open(root / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    warnings.filterwarnings("ignore")
    hosts.enter(host)
    place = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": 29500}
    own = {"RANK": rank, "LOCAL_RANK": rank % case.ranks, "WORLD_SIZE": case.size, **place}
    os.environ.update({name: str(value) for name, value in own.items()})
    torch.set_num_threads(1)
    error, text, lost = "", "", None
    try:
        train(case, root, trigger)
    except BaseException as e:
        error, text, lost = type(e).__name__, str(e), getattr(e, "rank", None)
    says.send(Outcome(rank, time.monotonic(), error, text, lost))
    sys.stdout.flush()
    os._exit(int(bool(error)))


def strike(case: Case, hosts: Hosts, ranks: list[Any], root: Path) -> None:
    """Let it go wrong."""
    if case.kind in DISKS:
        disks.strike(root / "run", DISKS[case.kind])
    on_host = [r for i, r in enumerate(ranks) if i // case.ranks == case.host]
    if case.kind.startswith("link cut") or case.kind == "host gone":
        hosts.set(Rule(loss=1.0))
    if case.kind == "one direction cut":
        hosts.set(Rule(loss=1.0), case.host)
    if case.kind == "a link of three cut":  # both ends still reach rank 0
        hosts.set(Rule(loss=1.0), 1, 2)
        hosts.set(Rule(loss=1.0), 2, 1)
    rules = {"30% loss": Rule(loss=0.3), "2 s delay": Rule(delay=2.0), "1 MB/s": Rule(rate=1e6)}
    if case.kind in rules:
        hosts.set(rules[case.kind])
    number = signal.SIGSTOP if "stopped" in case.kind else signal.SIGKILL
    for rank in on_host:
        if case.kind in ("host gone", "processes killed", "host stopped"):
            os.killpg(rank.pid, number)
    if case.kind in ("rank stopped", "rank killed"):
        os.kill(on_host[-1].pid, number)


def run_case(case: Case, patience: float) -> Run:
    """Run a case, and judge what came of it.

    Args:
        case: the case.
        patience: how many seconds after the fault each rank that lives has named a lost one.
    """
    root = Path(tempfile.mkdtemp(prefix="hosts-"))
    now, done = Flag(root / "now"), Flag(root / "done")
    size, outcomes, ends = case.size, [], []
    own_disk = disks.disk(root / "run") if case.kind in DISKS else contextlib.nullcontext()
    with own_disk, Hosts(case.hosts, case.seed) as hosts:
        ranks: list[Any] = []
        for r in range(size):
            receives, says = FORK.Pipe(duplex=False)
            arguments = (hosts, r // case.ranks, r, case, root, Trigger(case, r, now, done), says)
            ranks.append(FORK.Process(target=child, args=arguments))
            ranks[-1].start()
            says.close()
            ends.append(receives)
        came = now.wait(100)
        time.sleep(random.Random(case.seed).uniform(0, 0.5) if case.kind.endswith("any") else 0)
        strike(case, hosts, ranks, root)
        struck = time.monotonic()
        done.set()
        gone = [i for i in range(size) if not lives(case, i)]
        limit = struck + (300 if case.kind in HARMLESS else patience)
        while time.monotonic() < limit and any(r.is_alive() for i, r in enumerate(ranks) if i not in gone):
            time.sleep(0.02)
        for receives in ends:
            with contextlib.suppress(EOFError, OSError):
                outcomes += [receives.recv()] if receives.poll() else []
        codes = [r.exitcode for r in ranks]
        for r in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(r.pid, signal.SIGKILL)
            r.join()
    wrong = [] if came else ["the moment of the fault did not come"]
    wrong += judge(case, gone, outcomes, codes)
    named = [o.time - struck for o in outcomes if o.rank not in gone]
    if wrong:
        logs = [f"--- {path}\n{path.read_text()[-2000:]}" for path in sorted(root.glob("log.*"))]
        wrong.append("\n".join(logs))
    shutil.rmtree(root)
    return Run(wrong, None if case.kind in HARMLESS else max(named, default=None), outcomes)


def lives(case: Case, rank: int) -> bool:
    """Return whether a rank outlives a fault."""
    on_host = rank // case.ranks == case.host
    if case.kind in ("host gone", "processes killed", "host stopped"):
        return not on_host
    last = case.host * case.ranks + case.ranks - 1
    return not (case.kind.startswith("rank ") and rank == last)


def judge(case: Case, gone: list[int], outcomes: list[Outcome], codes: list[int | None]) -> list[str]:
    """List what is wrong with the outcomes of a case."""
    wrong, said = [], {o.rank: o for o in outcomes}
    for rank in range(case.size):
        if rank in gone:
            continue
        host, o = rank // case.ranks, said.get(rank)
        if o is None:
            wrong.append(f"rank {rank} said nothing, and ended with {codes[rank]}")
        elif case.kind in HARMLESS:
            wrong += [f"rank {rank} has {o.error}: {o.text}"] if o.error else []
        elif case.kind in DISKS:
            texts = ("its disk has", "No space left"), ("Read-only file system",)
            is_named = any(text in o.text for text in texts[case.kind == "host disk read-only"])
            wrong += [] if is_named else [f"rank {rank} has {o.error}: {o.text}"]
        elif case.kind in BEFORE:
            far = gone or [r for r in range(case.size) if r // case.ranks != host]
            texts = [f"rank {rank} did not reach rank 0" if 0 in far else f"rank {r} did not arrive" for r in far]
            is_named = o.error == "RuntimeError" and any(text in o.text for text in texts)
            wrong += [] if is_named else [f"rank {rank} has {o.error}: {o.text}"]
        elif o.error != "LostRankError" or o.lost is None:
            wrong.append(f"rank {rank} has {o.error}: {o.text}")
        elif gone and o.lost not in gone:
            wrong.append(f"rank {rank} names {o.lost}, and {gone} are gone: {o.text}")
        elif case.hosts == 3 and o.lost // case.ranks == 0:
            wrong.append(f"rank {rank} names {o.lost}, whose links are whole: {o.text}")
        elif not gone and case.hosts == 2 and o.lost // case.ranks == host and case.kind != "one direction cut":
            wrong.append(f"rank {rank} names {o.lost} of its own host: {o.text}")
        elif codes[rank] != 1:
            wrong.append(f"rank {rank} ended with {codes[rank]}")
    return wrong
