"""The examples run, as a user runs them, and say what they promise."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

import fzero
from tests.distributed.launch import ROOT, python
from tests.examples.helpers import run
from tests.helpers import cases


def test_zero_by_hand():
    """It asserts that by hand, in one line and unsharded are equal; here is what it prints of memory."""
    out = run("examples/zero_by_hand.py")
    shown = (ROOT / "docs" / "_outputs" / "zero_by_hand.txt").read_text().splitlines()[1:]
    assert [line.rstrip() for line in out.splitlines()] == shown, "python docs/_outputs.py"
    found = re.search(r"on one rank: (\S+) unsharded, (\S+) by ZeRO-2", out)
    assert found is not None
    whole, sharded = (int(x.replace(",", "")) for x in found.groups())
    assert whole / 4 < sharded < whole / 3


@pytest.mark.parametrize(
    "ranks,words", [(1, ["--capacity", "0", "--stage", "2"]), pytest.param(2, [], marks=pytest.mark.slow)]
)
def test_experts(ranks, words, tmp_path):
    """The experts learn as the dense equivalent does, and the picture shows their load."""
    short = ["--steps", "12", "--text", str(ROOT / "README.md"), "--out", str(tmp_path / "moe.png"), "--dense"]
    out = run("examples/moe.py", *short, *words, ranks=ranks)
    last = {
        name: float(loss)
        for loss, name in re.findall(r"step +12: loss ([\d.]+),.*?(dense|8 experts)$", out, re.MULTILINE)
    }
    first = float(re.findall(r"step +1: loss ([\d.]+)", out)[0])
    assert last["8 experts"] < first - 0.5 and abs(last["8 experts"] - last["dense"]) < 0.3
    assert "dropped" in out and (tmp_path / "moe.png").exists()


def test_a_plan_of_many_experts_on_many_ranks():
    out = run(
        "examples/moe.py", "--plan", "--experts", "16", "--ep", "8", "--world", "64", "--text", str(ROOT / "README.md")
    )
    assert "all_to_all" in out and "blocks.1" in out


@pytest.mark.parametrize(
    "ranks,words", [(1, ["--stage", "2", "--dp", "3", "--tp", "4"]), (2, ["--tp", "2"])], ids=["simulated", "processes"]
)
def test_parallel_mlp_is_the_dense_one(ranks, words):
    out = run("examples/parallel_mlp.py", *words, "--steps", "5", ranks=ranks)
    losses = re.findall(r"loss (\S+), dense and unsharded (\S+)\n", out)
    assert len(losses) == 5 and all(float(a) == pytest.approx(float(b), abs=1e-10) for a, b in losses)
    held, whole = re.findall(r"a rank holds (\S+) bytes of (\S+);", out)[0]
    assert int(held.replace(",", "")) < 0.6 * int(whole.replace(",", ""))  # tp=2 halves the matrices at every stage
    assert float(out.split("from dense training: ")[1]) < 1e-10


@pytest.mark.parametrize(
    "words,limit,variables",
    [
        pytest.param("--no-jit --steps 8 --stage 2", 1e-4, {}, marks=pytest.mark.slow),
        ("--jit --steps 8 --stage 3", 1e-4, {"PATH": ""}),  # no compiler: the backend is fx
        pytest.param("--jit --steps 8 --stage 3", 1e-4, {}, marks=pytest.mark.slow),
        ("--no-jit --steps 4 --stage 3 --precision float16 --remat", 0.02, {}),
        pytest.param("--no-jit --steps 4 --stage 1 --precision bfloat16 --remat", 0.05, {}, marks=pytest.mark.slow),
    ],
    ids=["eager", "jit", "inductor", "float16", "bfloat16"],
)
def test_train_gpt(words, limit, variables, tmp_path):
    png = tmp_path / "curve.png"
    words = [*words.split(), "--ranks", "2", "--batch", "4", "--accumulate", "2", "--compare", "--out", str(png)]
    out = run("examples/train_gpt.py", *words, "--text", str(ROOT / "README.md"), **variables)
    (apart,) = re.findall(r"largest difference .*: (\S+)", out)
    assert float(apart) < limit
    assert png.stat().st_size > 5000
    assert "sample:\ndef main(" in out and "a unigram model's" in out


KILLED = """
import os, runpy
from fzero.checkpoint import Checkpoints

def save(self, step, values, save=Checkpoints.save):
    save(self, step, values).wait()
    if step == 6:
        os.kill(os.getpid(), 9)

Checkpoints.save = save
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_train_gpt_goes_on_where_it_was_killed(tmp_path):
    """On the same ranks to the same bits, from another stage; on other ranks to the same losses up to rounding."""
    short = ["--no-jit", "--batch", "6", "--text", str(ROOT / "README.md"), "--out", str(tmp_path / "curve.png")]
    words = ["examples/train_gpt.py", *short, "--steps", "10", "--save-every", "3", "--ranks", "2"]
    undisturbed = run(*words, "--stage", "3", "--checkpoints", str(tmp_path / "one"))
    argv = [*words, "--stage", "1", "--checkpoints", str(tmp_path / "two")]
    assert python("-c", f"import sys; sys.argv = {argv}\n{KILLED}").returncode == -9
    again = run(*words, "--stage", "3", "--checkpoints", str(tmp_path / "two"))
    assert re.findall(r"step +\d+: loss \S+", again) == re.findall(r"step +\d+: loss \S+", undisturbed)[-4:]
    assert fzero_read(tmp_path / "one") == fzero_read(tmp_path / "two")
    other = run(*words[:-1], "3", "--steps", "12", "--stage", "3", "--checkpoints", str(tmp_path / "two"))
    assert re.findall(r"step +(\d+): loss", other) == ["11", "12"]


def fzero_read(folder: Path) -> tuple[Any, ...]:
    """All bits of the newest checkpoint of a folder."""
    newest = sorted(folder.iterdir())[-1]
    leaves = fzero.checkpoint.leaves(newest)
    return fzero.checkpoint.read(newest, "losses"), {k: fzero.checkpoint.read(newest, k).tolist() for k in leaves}


def test_train_gpt_plans(tmp_path):
    out = run("examples/train_gpt.py", "--plan", "--stage", "3", "--out", str(tmp_path / "curve.png"))
    assert "train_step: peak" in out and "reduce_scatter" in out and "blocks.1" in out and "step " not in out
    assert (tmp_path / "plan.png").stat().st_size > 5000 and not (tmp_path / "curve.png").exists()


@pytest.mark.parametrize(
    "model, stage, simulate", cases([("vit", 2, "vmap"), ("mixtral", 3, "lockstep")], [("gpt2", 3, "vmap")])
)
def test_hf_model(model, stage, simulate):
    out = run("examples/hf_model.py", "--model", model, "--stage", str(stage), "--simulate", simulate, "--steps", "4")
    losses = [float(x) for x in re.findall(r"step \d: loss (\S+)", out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    held, whole = (int(x.replace(",", "")) for x in re.findall(r"holds (\S+) of (\S+) bytes", out)[0])
    assert held / whole == pytest.approx({2: 2 / 3, 3: 1 / 2}[stage], rel=0.01)  # of parameters and two moments


@pytest.mark.slow
def test_hf_model_on_two_processes_prints_the_same():
    words = ["--model", "llama", "--stage", "3", "--steps", "2"]  # no dropout
    launched, alone = (run("examples/hf_model.py", *words, ranks=ranks) for ranks in (2, 1))
    steps = re.compile(r"step .*")
    assert steps.findall(launched) == steps.findall(alone) != []


def test_the_notebook_shows_what_its_cells_give():
    spec = importlib.util.spec_from_file_location("tour", ROOT / "docs" / "_tour.py")
    assert spec is not None and spec.loader is not None
    tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tour)
    stored = json.loads(tour.PATH.read_text())

    def texts(notebook):
        outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", [])]
        shown = ["".join(o.get("text") or o["data"]["text/plain"]) for o in outputs]
        return [re.sub(r"[\d.e-]+ s by the cost model", "", text) for text in shown], [
            list(o.get("data", {})) for o in outputs
        ]

    assert texts(tour.executed(stored)) == texts(stored), "python docs/_tour.py"
