"""Faults in what a newcomer's mistake is told: the messages that docs/trouble.md lists."""

from tests.mutants.changes import becomes, dropped, never, skipped
from tests.mutants.mutant import Fault, File

MESSAGES = ("tests/docs/test_messages.py", "-k", "not processes and not listed")
PROCESSES = ("tests/docs/test_messages.py", "-k", "processes")

MUTANTS = [
    *File("optim/checks/_shapes.py", MESSAGES).faults(
        Fault("gradients pass as the parameters of an update", "_check_order", never('role_of(A) == "gradients"')),
        Fault("gradients are added as updates", "check_updates", never('role_of(A) == "gradients"')),
        Fault("a lone loss passes as gradients", "_check_order", never("A and not B and not C")),
        Fault("an update and its state pass as updates", "check_updates", never("A and not B")),
    ),
    *File("optim/checks/_roles.py", MESSAGES).faults(
        Fault("an old state is not told from a new one", "mark_state", skipped('mark_role(A, "old state")')),
        Fault("the new state of an update is not known", "mark_state", skipped('mark_role(A, "state")')),
    ),
    *File("zero/_call_checks.py", MESSAGES).faults(
        Fault("a step that returns its old parameters trains on", "_check_both_are_new", never("A and B in C and D")),
        Fault("a step that returns its old state trains on", "_check_both_are_new", never("not A and B in C")),
        Fault("a step that skips an update is refused", "_check_both_are_new", becomes('"state" in A', "True")),
        Fault("updates are returned as parameters", "_check_is_params", never("(A := role_of(B)) in C")),
        Fault("what a rank got is shown with all simulated ranks", "_batch_text", becomes("int(A)", "0")),
    ),
    *File("graph/trace/_python_state.py", MESSAGES).faults(
        Fault("a traced number of random is used in every step", "refuse_python_state", never("A != B[C]")),
        Fault("a counter of a jitted step stands still", "refuse_python_state", never("A and B and _differ(C, D)")),
        Fault("a tensor of a trace leaves in a list", "refuse_python_state", never("A and any(B for C in D)")),
    ),
    *File("_torch/tracing.py", MESSAGES).faults(
        Fault("a format within a trace has torch's message", "_READS", dropped("'FakeTensor.__format__': A")),
    ),
    *File("graph/run/_executable.py", MESSAGES).faults(
        Fault("a failing operation does not name its line", "_add_line", never("A and not B")),
    ),
    *File("ranks/_agreement.py", PROCESSES).faults(
        Fault("ranks split batches of their own", "_check_sources", never("A and B and C != D")),
    ),
]
