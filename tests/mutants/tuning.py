"""Faults in fzero/tuning: the ratio that fits, what a step costs at each."""

from tests.mutants.mutant import Mutant

RATIO, COSTS = ("tests/tuning/test_ratio.py",), ("tests/tuning/test_costs.py",)

MUTANTS = [
    # the ratio
    Mutant("a ratio that does not fit", "tuning/_ratio.py", "    return high\n", "    return low\n", RATIO),
    Mutant("one part too many", "tuning/_ratio.py", "    return high\n", "    return min(high + 1, parts)\n", RATIO),
    Mutant("the search ends early", "tuning/_ratio.py", "while high - low > 1:", "while high - low > 2:", RATIO),
    Mutant(
        "a budget just met does not fit",
        "tuning/_ratio.py",
        "(value := peak(k)) <= budget",
        "(value := peak(k)) < budget",
        RATIO,
    ),
    Mutant(
        "each ratio is tried",
        "tuning/_ratio.py",
        "k = min(max(guess, low + least), high - least)",
        "k = low + 1",
        RATIO,
    ),
    Mutant("lines alone look", "tuning/_ratio.py", "min(max(1, 2**looks // 2), (high - low) // 2)", "1", RATIO),
    Mutant(
        "what fits at once is offloaded",
        "tuning/_ratio.py",
        "(above := peak(0)) <= budget",
        "(above := peak(0)) < 0",
        RATIO,
    ),
    Mutant(
        "what never fits is let through",
        "tuning/_ratio.py",
        "(below := peak(parts)) > budget",
        "(below := peak(parts)) < 0",
        RATIO,
    ),
    Mutant("the host's budget is forgotten", "tuning/_ratio.py", "> room:", "< 0:", RATIO),
    Mutant(
        "the world's size is forgotten",
        "tuning/_ratio.py",
        "planned_at(make_step, k / parts, world_size)",
        "planned_at(make_step, k / parts, None)",
        RATIO,
    ),
    Mutant("a budget may be nan", "tuning/_row.py", "not 0 < float(value) < math.inf", "float(value) <= 0", RATIO),
    Mutant(
        "a step that ignores the ratio is not told",
        "tuning/_ratio.py",
        "if none.peak_bytes == peak:",
        "if False:",
        RATIO,
    ),
    Mutant(
        "what the host holds is said to be the device's",
        "tuning/_ratio.py",
        'Tried(ratio, plan.peak_of("device")',
        'Tried(ratio, plan.peak_of("host")',
        RATIO,
    ),
    # the costs
    Mutant("results are written for nothing", "tuning/_costs.py", "+ 2 * self.up_bytes", "+ self.up_bytes", COSTS),
    Mutant("the state is only read", "tuning/_costs.py", "+ 2 * self.state_bytes", "+ self.state_bytes", COSTS),
    Mutant("remat is free", "tuning/_costs.py", "(8 if remat else 6) * parameters", "6 * parameters", COSTS),
    Mutant(
        "stage 2 cuts parameters",
        "tuning/_costs.py",
        "parameters if stage < 3 else",
        "parameters if stage < 2 else",
        COSTS,
    ),
    Mutant(
        "whole gradients leave the device",
        "tuning/_costs.py",
        "left = grads if stage < 2 else 0.0",
        "left = 0.0",
        COSTS,
    ),
    Mutant(
        "the host has the state alone",
        "tuning/_costs.py",
        "(state_bytes + gradient_bytes + parameter_bytes) * share",
        "state_bytes * share",
        COSTS,
    ),
    Mutant(
        "activations count as gradients",
        "tuning/_costs.py",
        "_moved(all_, kind) - _moved(none, kind)",
        "_moved(all_, kind)",
        COSTS,
    ),
    Mutant(
        "an update on the device counts as the host's",
        "tuning/_costs.py",
        "if not _computes_on_host(all_):",
        "if False:",
        COSTS,
    ),
    Mutant(
        "each rank has the host for itself",
        "tuning/_costs.py",
        "read / (machine.host_memory / machine.ranks)",
        "read / machine.host_memory",
        COSTS,
    ),
    Mutant("the chain's parts take turns", "tuning/_costs.py", "(sum(parts) - max(parts)) / work.units", "0", COSTS),
    Mutant(
        "DeepSpeed's passes are free",
        "tuning/_costs.py",
        'if update == "deepspeed" else 0',
        'if update == "" else 0',
        COSTS,
    ),
    Mutant(
        "copies both ways share the link",
        "tuning/_costs.py",
        "max(work.state_bytes / machine.link,",
        "max(2 * work.state_bytes / machine.link,",
        COSTS,
    ),
    Mutant(
        "the device updates all of it",
        "tuning/_costs.py",
        'mine = 1 if update == "device" else 1 - ratio',
        "mine = 1",
        COSTS,
    ),
    Mutant("the host waits for no gradient", "tuning/_costs.py", "chain + begun", "chain", COSTS),
    Mutant(
        "the chain is beside the passes",
        "tuning/_costs.py",
        "compute + max(device, chain)",
        "max(compute + device, chain)",
        COSTS,
    ),
    Mutant("a ratio is rounded down", "tuning/_costs.py", "math.ceil(round(", "math.floor(round(", COSTS),
    Mutant(
        "the fastest need not fit", "tuning/_costs.py", "range(first, self.parts + 1)", "range(self.parts + 1)", COSTS
    ),
]
