"""The ready programs learn, evaluate, go on after a stop to the last bit, and run alike on real ranks."""

import json
import pathlib
from typing import Any

import pytest

import fzero
from tests.examples.helpers import run

PROGRAMS = {  # what each prints of its evaluation, and the options with which a simulation has two ranks
    "pretrain": ("held-out loss",),
    "long_context": ("held-out loss",),
    "sft": ("held-out loss",),
    "finetune_hf": ("held-out loss",),
    "lora": ("held-out loss",),
    "dpo": ("held-out accuracy",),
    "distill": ("held-out agreement",),
    "vit": ("held-out accuracy",),
    "train_gpt": ("held-out loss", "--ranks", "2"),
    "moe": ("held-out loss", "--dp", "1"),
}
PEFT = ("-W", "ignore::FutureWarning")  # it asks a model for a name that is deprecated


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the metrics of each step."""
    results = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: x for name, x in row.items() if name != "steps/s"} for row in results]


def bits(checkpoint: pathlib.Path) -> dict[str, Any]:
    return {name: fzero.checkpoint.read(checkpoint, name).tolist() for name in fzero.checkpoint.leaves(checkpoint)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_learns_and_goes_on_to_the_last_bit(name, tmp_path):
    pytest.importorskip("peft" if name == "lora" else "transformers")
    whole, rest, world = (tmp_path / folder for folder in ("whole", "rest", "world"))
    evaluated, *options = PROGRAMS[name]
    words = [*PEFT, f"examples/{name}.py", *options, "--steps", "6", "--every", "3", "--out"]
    printed = run(*words, str(whole))
    uninterrupted = rows(whole)
    assert [row["step"] for row in uninterrupted] == [1, 2, 3, 4, 5, 6]
    assert uninterrupted[-1]["loss"] < uninterrupted[0]["loss"]
    assert printed.count(evaluated) == 1 and evaluated in uninterrupted[2]  # progress prints the newest row

    (rest / "checkpoints").mkdir(parents=True)  # as a run that was stopped after step 3 leaves them
    (whole / "checkpoints" / "step-00000003").rename(rest / "checkpoints" / "step-00000003")
    run(*words, str(rest))
    assert rows(rest) == uninterrupted[3:]
    newest = pathlib.Path("checkpoints", "step-00000006")
    assert bits(rest / newest) == bits(whole / newest) != {}

    run(*words, str(world), ranks=2)
    for real, simulated in zip(rows(world), uninterrupted, strict=True):
        assert real == pytest.approx(simulated, rel=1e-2)  # in bfloat16, whose last bit is 4e-3
