"""Faults in who is lost: fzero/_liveness, and the errors of waits that end."""

from tests.mutants.changes import always, becomes, constant, dropped, never, skipped
from tests.mutants.mutant import Fault, File

JUDGE = ("tests/_liveness/test_judge.py",)
BEATS = ("tests/_liveness/test_beats.py",)
SYSTEM = ("tests/_liveness/test_system.py",)
LINKS = ("tests/_liveness/test_cut_links.py",)
STRAGGLERS = ("tests/_liveness/test_stragglers.py",)
HEART = ("tests/_liveness/test_heart.py",)
LOST = ("tests/_liveness/test_lost.py",)
RELEASE = ("tests/_torch/test_release.py",)

MUTANTS = [
    *File("_liveness/_judge.py", JUDGE).faults(
        Fault("a heartbeat that stops is ignored", "WorldJudge._lost", never("silent > limit")),
        Fault("a slow rank is called lost", "WorldJudge._hanging", becomes("all(p.idle > A for p in B)", "True")),
        Fault("ranks that hang are not told", "WorldJudge._hanging", never("all(p.idle > A for p in B)")),
        Fault("ranks that are all idle are told late", "WorldJudge._hanging", becomes("p.is_known", "False")),
        Fault("ranks hang where the system does not tell", "WorldJudge._hanging", becomes("p.is_known", "True")),
        Fault("a rank that was never heard is not named", "WorldJudge._hanging", dropped("r not in self.places")),
        Fault("rank 0 is blamed where nothing is heard", "RankZeroJudge.judge", dropped("own.text == FIRST_MESH")),
        Fault("a rank works without end", "WorldJudge._hanging", never("all(p.seconds > A for p in B)")),
        Fault("a cut link between two ranks is not told", "WorldJudge._cut", never("any(A for _, seconds in B)")),
        Fault("a cut link names any of its ends", "WorldJudge._cut", becomes("(ends.count(r), r)", "(0, -r)")),
        Fault("a stopped rank counts as one that hangs", "WorldJudge._lost", never("p.process != 'stopped'")),
        Fault("a beat counts without its echo", "WorldJudge.hear", becomes("rank == 0 or A", "True")),
        Fault("rank 0 is never lost", "RankZeroJudge.judge", never("A and silent > limit")),
        Fault(
            "a rank that ended is lost before it is missed",
            "WorldJudge._lost",
            becomes("A or (B and C != 'ended')", "True"),
        ),
        Fault("a stopped process counts as silent never", "WorldJudge.hear", never("place.process != 'stopped'")),
        Fault("a pause of the judge blames the others", "Awake.tick", becomes("min(A, self._step)", "A")),
        Fault("a second verdict replaces the first", "RankZeroJudge.hear", dropped("self.verdict is None")),
        Fault("a text of places has no bound", "show_places", never("A > _LENGTH")),
    ),
    *File("_liveness/_beats.py", BEATS).faults(
        Fault("a rank that does not leave its wait lives on", "_Heartbeat.end_rank", skipped("os.kill(A, B)")),
        Fault("a rank that works is idle", "_Process._idle", never("used - self._uses[0][1] > A")),
        Fault("a link is silent at the next place", "_Process.place", skipped("self.links.silent = {}")),
        Fault("a rank that writes its files is killed", "_Heartbeat.end_rank", becomes("min(A, B)", "B")),
        Fault(
            "a rank that works without end lives on",
            "_Heartbeat.end_rank",
            becomes("seconds if is_endless else A", "A"),
        ),
        Fault("a rank that works long is killed", "_Heartbeat.end_rank", dropped("self.verdict.rank == A")),
    ),
    *File("_liveness/_system.py", SYSTEM).faults(
        Fault("the children of a rank do not work", "_descendants", skipped("pids += A")),
        Fault("data under way is no sign of work", "ProcessMonitor.sample", becomes("any(A for B in C)", "False")),
        Fault(
            "data without an answer is work for ever",
            "ProcessMonitor.sample",
            becomes("seconds <= self._patience", "True"),
        ),
        Fault(
            "an answer does not end a silence",
            "ProcessMonitor._silent",
            becomes("since if size == tcp.acknowledged else now", "since"),
        ),
        Fault("a peer that does not read is a sign of work", "_connection", becomes("A != _PROBE", "True")),
        Fault("the network is no work", "ProcessMonitor.sample", skipped("self._count(('network', A), B)")),
    ),
    *File("_liveness/_cut_links.py", LINKS).faults(
        Fault("a link that answers is cut", "LinkWatch._is_cut", always("now - self._echoed[link] > A")),
        Fault("an answer along a link does not count", "LinkWatch.echo", skipped("self._echoed[key] = now")),
        Fault("a rank is asked for its own link", "LinkEnds.questions", dropped("asker != rank")),
        Fault("a rank learns of others' links", "LinkEnds.answers", dropped("asker == rank")),
    ),
    *File("_liveness/_stragglers.py", STRAGGLERS).faults(
        Fault("one slow comparison names a straggler", "Stragglers.compare", always("A in self._since")),
        Fault("the others include the slow rank", "Stragglers.compare", dropped("r != rank")),
        Fault(
            "a straggler is slow since its last comparison",
            "Stragglers.compare",
            skipped("self._starts = B", at="2 of 2"),
        ),
    ),
    *File("_liveness/_heart.py", HEART).faults(
        Fault("a wait counts as work", "Heart.at", dropped("not self._is_waiting")),
        Fault("a step counts as between steps", "Heart.begin_step", skipped("self._in_step = True")),
    ),
    *File("_liveness/_heart.py", HEART).faults(
        Fault(
            "a restarted rank counts its steps from 0", "Heart.resume", becomes("self._step = step", "self._step = 0")
        ),
        Fault(
            "a part of a step counts as a step", "Heart.begin_step", becomes("self._step += is_own", "self._step += 1")
        ),
    ),
    *File("_liveness/_heart.py", LOST).faults(
        Fault("waits are not released", "Heart._listen", skipped("release_waits(A)")),
    ),
    *File("_torch/release.py", RELEASE).faults(
        Fault(
            "a released wait is no error of a connection",
            "_GLOO",
            constant("Application timeout caused pair closure", ""),
        ),
        Fault("a wait is released by its neighbour alone", "_time_out", becomes("range(1, A)", "range(1, 2)")),
        Fault(
            "every error counts as one of a connection",
            "is_connection_error",
            always("isinstance(error, RuntimeError)"),
        ),
    ),
]
