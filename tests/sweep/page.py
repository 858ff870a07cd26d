"""The page docs/models.md, from the results of a sweep."""

import re
from collections.abc import Mapping
from typing import Any

from tests.sweep.cases import cases_of
from tests.sweep.families import MODELS, Model

__all__ = ["render_page"]

_NO_PLAN = "carries no tp_plan"

Results = Mapping[tuple[str, str], Mapping[str, Any]]

HEAD = """# Models

What was trained by `fzero.jit(step)` in its default backend, Inductor, beside the same step in "fx" and beside
unsharded training: losses of three steps, and the parameters after them. The models are tiny, with random weights, but
have heads of 16 and sequences of 32, so that real kernels are chosen. `make sweep` trains them again, and
`python -m tests.sweep --write` writes this page.

- **compiled**: one simulated rank at stage 3; eager attention, a mask and two micro-batches at stage 2; bfloat16, a
  mask and `remat` at stage 0; bfloat16, eager attention, `remat` and two micro-batches at stage 3. Images have no mask.
- **processes**: two gloo ranks, at stage 0, 2 or 3; every third model.
- **pipeline**: `fzero.nn.pipeline` over two stages. **tensor parallel**: `fzero.parallel.tensor.layers` over two ranks.
- "4 of 4" counts cases whose numbers agree; "refused" says why below; "not run" was not reached by the last sweep.
- "needs a plan": the model carries none, so [`tp.layers`](tensor.md#your-own-plan) needs yours.

"""


def render_page(results: Results) -> str:
    """Write the page."""
    lines = [HEAD + "| model | compiled | processes | pipeline | tensor parallel |\n| --- | --- | --- | --- | --- |"]
    reasons: dict[tuple[str, str], list[str]] = {}  # outcome and reason -> models, each with the column
    for number, model in enumerate(MODELS.values()):
        groups: dict[str, list[Mapping[str, Any] | None]] = {}
        for case in cases_of(model, number):
            result = results.get((model.name, case.name))
            groups.setdefault(_column(case.name), []).append(result)
            if result is not None and result["outcome"] in ("refused", "failed", "wrong", "uncompiled"):
                why = _short(result["why"] or f"{result['from fx']:.0e} from fx")
                if _NO_PLAN not in why:
                    reasons.setdefault((result["outcome"], why), []).append(f"{model.name} ({_column(case.name)})")
        cells = [_cell(groups.get(name, [])) for name in ("compiled", "processes", "pipeline", "tensor parallel")]
        lines.append(f"| {_title(model)} | {' | '.join(cells)} |")
    lines.append("\n## What is refused or went wrong, and why\n")
    lines += [
        f"- {outcome}, {why}: {', '.join(dict.fromkeys(names))}" for (outcome, why), names in sorted(reasons.items())
    ]
    return "\n".join(lines) + "\n"


def _title(model: Model) -> str:
    return (
        model.name if model.library in ("torchvision", "timm", "diffusers", "peft") else f"{model.name} ({model.kind})"
    )


def _column(case: str) -> str:
    if case in ("pipeline", "tensor parallel"):
        return case
    return "processes" if case.startswith("processes") else "compiled"


def _cell(actual: list[Mapping[str, Any] | None]) -> str:
    outcomes = [x for x in actual if x is not None and x["outcome"] != "absent"]
    if not outcomes:
        return "not run" if actual else ""
    if len({x["outcome"] for x in outcomes}) == 1 and outcomes[0]["outcome"] == "refused":
        return "needs a plan" if _NO_PLAN in outcomes[0]["why"] else "refused"
    good = sum(x["outcome"] == "ok" for x in outcomes)
    return f"{good} of {len(outcomes)}" if good < len(outcomes) or len(outcomes) > 1 else "yes"


def _short(text: str) -> str:
    """Return the first sentence of a message, with "the model" for its class."""
    sentence = text.split(". ")[0].split("; ")[0].replace("|", "/")[:220]
    return re.sub(r"\b[A-Z]\w*(?:For[A-Z]\w+|Model)\b", "the model", sentence)
