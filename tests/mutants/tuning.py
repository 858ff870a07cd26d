"""Faults in fzero/tuning: the ratio that fits, what a step costs at each."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, swapped
from tests.mutants.mutant import Fault, File

RATIO = ("tests/tuning/test_ratio.py",)
COSTS = ("tests/tuning/test_costs.py",)

MUTANTS = [
    *File("tuning/_ratio.py", RATIO).faults(
        Fault("a ratio that does not fit", "first_fit", returns("low", at="3 of 3")),
        Fault("one part too many", "first_fit", returns("min(high + 1, parts)", at="3 of 3")),
        Fault("the search ends early", "first_fit", becomes("A - B > 1", "A - B > 2")),
        Fault("a budget just met does not fit", "first_fit", swapped("(A := B(k)) <= C", "<")),
        Fault("each ratio is tried", "first_fit", becomes("min(max(A, B + C), D - C)", "B + 1")),
        Fault("lines alone look", "first_fit", becomes("min(A, (high - B) // 2)", "1")),
        Fault(
            "what fits at once is offloaded",
            "first_fit",
            (swapped("(A := B(0)) <= C", "<"), becomes("(A := B(0)) < C", "(A := B(0)) < 0")),
        ),
        Fault(
            "what never fits is let through",
            "first_fit",
            (swapped("(A := B(C)) > D", "<"), becomes("(A := B(C)) < D", "(A := B(C)) < 0")),
        ),
        Fault(
            "the host's budget is forgotten", "offload_ratio", (swapped(">", "<"), becomes("room", "0", at="3 of 4"))
        ),
        Fault("the world's size is forgotten", "offload_ratio.peak", becomes("world_size", "None")),
        Fault("a step that ignores the ratio is not told", "_does_not_fit", never("none.A == B")),
        Fault("what the host holds is said to be the device's", "_summary", constant("device", "host")),
    ),
    *File("tuning/_row.py", RATIO).faults(
        Fault("a budget may be nan", "check_bytes", becomes("not 0 < float(A) < math.inf", "float(A) <= 0")),
    ),
    *File("tuning/_costs.py", COSTS).faults(
        Fault(
            "results are written for nothing", "OffloadWork.update_bytes", becomes("2 * self.up_bytes", "self.up_bytes")
        ),
        Fault("the state is only read", "OffloadWork.update_bytes", bare("2 * A", at="1 of 2")),
        Fault("remat is free", "model_work", never("remat", at="3 of 3")),
        Fault("stage 2 cuts parameters", "model_work", becomes("A < 3", "A < 2")),
        Fault("whole gradients leave the device", "model_work", never("A < 2", at="2 of 2")),
        Fault("the host has the state alone", "model_work", bare("A + gradient_bytes + B")),
        Fault("activations count as gradients", "planned_work", bare("A - B(C, D)")),
        Fault("an update on the device counts as the host's", "planned_work", never("not A(B)")),
        Fault(
            "each rank has the host for itself",
            "OffloadCosts.chain_seconds",
            becomes("A.host_memory / A.B", "A.host_memory"),
        ),
        Fault(
            "the chain's parts take turns", "OffloadCosts.chain_seconds", becomes("(sum(A) - max(A)) / B.units", "0")
        ),
        Fault("DeepSpeed's passes are free", "OffloadCosts.chain_seconds", constant("deepspeed", "")),
        Fault(
            "copies both ways share the link",
            "OffloadCosts.chain_seconds",
            becomes("max(A.B / C.link, D)", "max(2 * A.B / C.link, D)"),
        ),
        Fault("the device updates all of it", "OffloadCosts.seconds", always("A == 'device'")),
        Fault("the host waits for no gradient", "OffloadCosts.seconds", bare("A + first_unit")),
        Fault(
            "the chain is beside the passes", "OffloadCosts.seconds", becomes("A + max(B, chain)", "max(A + B, chain)")
        ),
        Fault("a ratio is rounded down", "OffloadCosts.first_fit", becomes("math.ceil", "math.floor")),
        Fault("the fastest need not fit", "OffloadCosts.fastest", dropped("first")),
    ),
]
