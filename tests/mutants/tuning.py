"""Faults in fzero/tuning: the ratio that fits, what a step costs at each."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, swapped
from tests.mutants.mutant import Fault, File

RATIO = ("tests/tuning/offload/test_ratio.py",)
COSTS = ("tests/tuning/offload/test_costs.py",)

MUTANTS = [
    *File("tuning/offload/_ratio.py", RATIO).faults(
        Fault("the search returns a ratio that does not fit", "_first_fit", returns("low", at="3 of 3")),
        Fault("the search returns one part too many", "_first_fit", returns("min(high + 1, parts)", at="3 of 3")),
        Fault("the search ends early", "_first_fit", becomes("A - B > 1", "A - B > 2")),
        Fault("a budget that is just met does not fit", "_first_fit", swapped("(A := B(k)) <= C", "<")),
        Fault("the search tries every ratio", "_first_fit", becomes("min(max(A, B + C), D - C)", "B + 1")),
        Fault("the search interpolates only and never bisects", "_first_fit", becomes("min(A, (high - B) // 2)", "1")),
        Fault(
            "a step that fits without offload is offloaded",
            "_first_fit",
            (swapped("(A := B(0)) <= C", "<"), becomes("(A := B(0)) < C", "(A := B(0)) < 0")),
        ),
        Fault(
            "a step that does not fit at ratio 1 is not refused",
            "_first_fit",
            (swapped("(A := B(C)) > D", "<"), becomes("(A := B(C)) < D", "(A := B(C)) < 0")),
        ),
        Fault("host_budget= is ignored", "offload_ratio", (swapped(">", "<"), becomes("room", "0", at="3 of 4"))),
        Fault("world_size= is ignored", "offload_ratio.peak", becomes("world_size", "None")),
        Fault("a step that ignores the ratio is not reported", "_does_not_fit", never("none.A == B")),
        Fault("the summary shows device bytes as the host's", "_summarize_trial", constant("device", "host")),
    ),
    *File("tuning/_configured_step.py", RATIO).faults(
        Fault("a budget of nan is accepted", "check_bytes", becomes("not 0 < float(A) < math.inf", "float(A) <= 0")),
    ),
    *File("tuning/offload/_offload_costs.py", COSTS).faults(
        Fault(
            "each rank counts the whole host's memory speed",
            "OffloadCosts.chain_seconds",
            becomes("A.host_memory_bandwidth / A.B", "A.host_memory_bandwidth"),
        ),
        Fault(
            "the parts of the offload chain do not overlap",
            "OffloadCosts.chain_seconds",
            becomes("(sum(A) - max(A)) / B.units", "0"),
        ),
        Fault("DeepSpeed's passes are free", "OffloadCosts.chain_seconds", constant("deepspeed", "")),
        Fault(
            "copies to and from the host share one link",
            "OffloadCosts.chain_seconds",
            becomes("max(A.B / C.host_link_bandwidth, D)", "max(2 * A.B / C.host_link_bandwidth, D)"),
        ),
        Fault("the device updates the host's part too", "OffloadCosts.seconds", always("A == 'device'")),
        Fault("the host's update starts before the first gradient", "OffloadCosts.seconds", bare("A + first_unit")),
        Fault(
            "the offload chain overlaps the forward and backward passes",
            "OffloadCosts.seconds",
            becomes("A + max(B, chain)", "max(A + B, chain)"),
        ),
        Fault("a ratio is rounded down", "OffloadCosts.first_fit", becomes("math.ceil", "math.floor")),
        Fault("the fastest ratio need not fit", "OffloadCosts.fastest", dropped("first")),
    ),
    *File("tuning/offload/_offload_work.py", COSTS).faults(
        Fault(
            "an offloaded update counts no writes of its results",
            "OffloadWork.update_bytes",
            becomes("2 * self.up_bytes", "self.up_bytes"),
        ),
        Fault(
            "an offloaded update counts no writes of its state", "OffloadWork.update_bytes", bare("2 * A", at="1 of 2")
        ),
        Fault("remat takes no time in the estimate", "model_work", never("remat", at="3 of 3")),
        Fault("stage 2 counts as sharding parameters", "model_work", becomes("A < 3", "A < 2")),
        Fault("full gradients are moved to the host at stages 2 and 3", "model_work", never("A < 2", at="2 of 2")),
        Fault("gradients in host memory are not counted", "model_work", bare("A + gradient_bytes + B")),
        Fault("activations count as gradients", "planned_work", bare("A - B(C, D)")),
        Fault("the device's update counts as the host's", "planned_work", never("not A(B)")),
    ),
]
