"""The words of benchmarks/published.md around its tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.published.runs import runs

__all__ = ["parts"]

CONSTANTS = (
    "product_flops",
    "half_depth",
    "processors",
    "attention_flops",
    "memory_bandwidth",
    "link_bandwidth",
    "network_bandwidth",
)


def parts(
    results: Sequence[Any], tables: Mapping[str, str], left: Sequence[str], cards: Mapping[str, Any]
) -> list[str]:
    """Return the paragraphs and tables of the page."""
    every = runs()[0]
    fitting = [r for r in results if r.fits]
    ways = {way: sum(r.way == way for r in fitting) for way in dict.fromkeys(r.way for r in fitting)}
    told = ", ".join([f"{n} {way}" for way, n in ways.items()])
    constants = [
        f"- {card}: " + ", ".join([f"{name} {getattr(machine, name):.4g}" for name in CONSTANTS])
        for card, machine in cards.items()
    ]
    return [
        f"{len(every)} runs that others published, of which {len(results)} are planned here: the half that no constant "
        "was fitted to, and those whose memory was measured. Where the numbers come from: "
        "[benchmarks/published/README.md](published/README.md).",
        "![Predicted against measured tokens a second, and the error by the number of cards](published.png)",
        "## Speed",
        "Goals on the held half: Spearman at least 0.97, median error at most 10%, 90% of the runs within 25%.",
        tables["speed"],
        "The half of a run follows from a hash of its name: model, length, batch, stage, remat, ranks, card. `python "
        "-m benchmarks.published.fit` fits four constants of a card to the other half, for the least mean of "
        "|log(predicted / measured)|. `product_flops` and `half_depth` are among them, since no training reaches the "
        "rate of a data sheet at its clock. `attention_flops` is, since flash attention reaches another rate, and "
        "`network`, since that is the site's. No constant belongs to a model or a run. A closed formula of the same "
        "terms takes the place of plans in the fit, since a plan takes seconds. Of eight runs the plans of seven were"
        " within 2% of the formula, and that of a model of 125 M was 11% below it. A `half_depth` of 0 means that the"
        " fit saw no dependence on the inner dimension. The network does not matter to the fit for the H100: there it"
        " is 80% of the data sheet. For the A100 it is a tenth to a sixth of a port of 25 GB/s, which few runs "
        "decide. Take that for these sites only; `fzero plan` has 20 GB/s.",
        "The terms were chosen with the errors of both halves in view, and the fit was repeated after a correction "
        "of remat's second pass. So the held half shows that the constants carry over, and not that the terms do.",
        "\n".join(constants),
        "torchtitan's H100 has other memory (2.4 TB/s) and a limit of 500 W. Nothing is fitted to it.",
        "## Memory",
        "Goals: median error at most 4%, 90% within 10%. They are missed:",
        tables["memory"],
        "- torchtitan's every second block recomputes. fzero keeps more in the other blocks, and the logits of 16,384 "
        "tokens of 128,256 classes in float32.\n"
        "- DeepSpeed's numbers hold a CUDA context and buckets, which no plan counts; "
        "[the complete account](../docs/planner_truth.md#compared-with-published-measurements).",
        "## Does it fit?",
        f"All these runs ran, so each should fit 93% of its card. {len(fitting)} of {len(results)} do: {told}. "
        '"As it ran" keeps all that unfused torch operations keep, and the logits in float32; llm-foundry computes its '
        'loss in place. "Recompute" is the choice of fzero.jit to compute cheap operations again, which it makes by '
        "itself. Gradients of llm-foundry's runs are summed in bfloat16 over ranks, as there. Shards and gradients "
        "take 12 and 4 bytes a parameter, as in FSDP.",
        tables["runs"],
        "## Not planned",
        "\n".join([f"- {line}" for line in left]),
    ]
