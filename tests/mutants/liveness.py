"""Faults in who is lost: fzero/_liveness, and the errors of waits that end."""

from tests.mutants.changes import always, becomes, constant, dropped, never, skipped
from tests.mutants.mutant import Fault, File

DETECTOR = ("tests/_liveness/test_failure_detector.py",)
BEATS = ("tests/_liveness/test_beats.py",)
SYSTEM = ("tests/_liveness/test_system.py",)
LINKS = ("tests/_liveness/test_cut_links.py",)
STRAGGLERS = ("tests/_liveness/test_stragglers.py",)
CLIENT = ("tests/_liveness/test_heartbeat_client.py",)
LOST = ("tests/_liveness/test_lost.py",)
RELEASE = ("tests/_torch/test_release.py",)

MUTANTS = [
    *File("_liveness/_failure_detector.py", DETECTOR).faults(
        Fault("a heartbeat that stops is ignored", "FailureDetector._find_lost", never("silent > limit")),
        Fault(
            "a slow rank is called lost", "FailureDetector._find_hanging", becomes("all(p.idle > A for p in B)", "True")
        ),
        Fault("ranks that hang are not told", "FailureDetector._find_hanging", never("all(p.idle > A for p in B)")),
        Fault("ranks that are all idle are told late", "FailureDetector._find_hanging", becomes("p.is_known", "False")),
        Fault(
            "ranks hang where the system does not tell", "FailureDetector._find_hanging", becomes("p.is_known", "True")
        ),
        Fault(
            "a rank that was never heard is not named",
            "FailureDetector._find_hanging",
            dropped("r not in self.activities"),
        ),
        Fault("rank 0 is blamed where nothing is heard", "RankZeroDetector.detect", dropped("own.text == FIRST_MESH")),
        Fault("a rank works without end", "FailureDetector._find_hanging", never("all(p.seconds > A for p in B)")),
        Fault(
            "a cut link between two ranks is not told", "FailureDetector._find_cut", never("any(A for _, seconds in B)")
        ),
        Fault(
            "a cut link names any of its ends", "FailureDetector._find_cut", becomes("(ends.count(r), r)", "(0, -r)")
        ),
        Fault("a stopped rank counts as one that hangs", "FailureDetector._find_lost", never("p.process != 'stopped'")),
        Fault("a beat counts without its echo", "FailureDetector.hear", becomes("rank == 0 or A", "True")),
        Fault("rank 0 is never lost", "RankZeroDetector.detect", never("A and silent > limit")),
        Fault(
            "a rank that ended is lost before it is missed",
            "FailureDetector._find_lost",
            becomes("A or (B and C != 'ended')", "True"),
        ),
        Fault(
            "a stopped process counts as silent never", "FailureDetector.hear", never("activity.process != 'stopped'")
        ),
        Fault(
            "a pause of rank 0's heartbeat blames the others", "ProcessClock.tick", becomes("min(A, self._step)", "A")
        ),
        Fault("a second verdict replaces the first", "RankZeroDetector.hear", dropped("self.verdict is None")),
        Fault("a text of places has no bound", "show_activities", never("A > _MAX_TEXT_BYTES")),
    ),
    *File("_liveness/_beats.py", BEATS).faults(
        Fault("a rank that does not leave its wait lives on", "_Heartbeat.end_rank", skipped("os.kill(A, B)")),
        Fault("a rank that works is idle", "_Process._idle_seconds", never("used_seconds - self._uses[0][1] > A")),
        Fault("a link is silent at the next place", "_Process.activity", skipped("self.links.silent = {}")),
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
            "ProcessMonitor._silent_links",
            becomes("since if size == tcp.acknowledged else now", "since"),
        ),
        Fault("a peer that does not read is a sign of work", "_read_connection", becomes("A != _PROBE_TIMER", "True")),
        Fault("the network is no work", "ProcessMonitor.sample", skipped("self._add_seconds(('network', A), B)")),
    ),
    *File("_liveness/_cut_links.py", LINKS).faults(
        Fault("a link that answers is cut", "LinkWatch._is_cut", always("now - self._echoed[link] > A")),
        Fault("an answer along a link does not count", "LinkWatch.hear_echo", skipped("self._echoed[key] = now")),
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
    *File("_liveness/_heartbeat_client.py", CLIENT).faults(
        Fault("a wait counts as work", "HeartbeatClient._count_time", dropped("not self._is_waiting")),
        Fault("a step counts as between steps", "HeartbeatClient.begin_step", skipped("self._in_step = True")),
        Fault("time after a caught error counts as a step", "_publish_step", skipped("heartbeat.leave_step()")),
    ),
    *File("_liveness/_heartbeat_client.py", CLIENT).faults(
        Fault(
            "a restarted rank counts its steps from 0",
            "HeartbeatClient.resume",
            becomes("self._step = step", "self._step = 0"),
        ),
        Fault(
            "a part of a step counts as a step",
            "HeartbeatClient.begin_step",
            becomes("self._step += is_own", "self._step += 1"),
        ),
    ),
    *File("_liveness/_heartbeat_client.py", LOST).faults(
        Fault("waits are not released", "HeartbeatClient._listen", skipped("release_waits(A)")),
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
