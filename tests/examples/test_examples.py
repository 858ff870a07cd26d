"""The examples run, as a user runs them, and say what they promise."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

import fzero
from tests.distributed.launch import ROOT, fork, python
from tests.examples.helpers import run
from tests.helpers import cases


def test_zero_by_hand_prints_the_bytes_of_each_stage():
    """It asserts that by hand, in one line and unsharded are equal; here is what it prints of memory."""
    out = run("examples/zero_by_hand.py")
    shown = (ROOT / "docs" / "_outputs" / "zero_by_hand.txt").read_text().splitlines()[1:]
    assert [line.rstrip() for line in out.splitlines()] == shown, "python docs/_outputs.py"
    match = re.search(r"on one rank: (\S+) unsharded, (\S+) by ZeRO-2", out)
    assert match is not None
    whole, sharded = (int(x.replace(",", "")) for x in match.groups())
    assert whole / 4 < sharded < whole / 3


def losses(folder: Path) -> list[float]:
    """Return the loss of each step in a program's log."""
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks,words", [(1, ["--capacity", "0", "--stage", "2"]), pytest.param(2, [], marks=pytest.mark.slow)]
)
def test_experts_learn_as_a_dense_model_does(ranks, words, tmp_path):
    """The experts learn as the dense equivalent does."""
    short = ["examples/moe.py", "--steps", "12", "--text", str(ROOT / "README.md")]
    out = run(*short, *words, "--out", str(tmp_path / "8"), ranks=ranks)
    run(*short, *words, "--experts", "0", "--out", str(tmp_path / "0"), ranks=ranks)
    experts, dense = losses(tmp_path / "8"), losses(tmp_path / "0")
    assert experts[-1] < experts[0] - 0.5 and abs(experts[-1] - dense[-1]) < 0.3
    assert "dropped" in out and "most" in out


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_local_sgd_replicas_learn(ranks):
    """The shared model's loss lies below that of a guess, and after the last average all replicas have it."""
    words = ["--steps", "45", "--every", "10", "--codec", "int8", "--text", str(ROOT / "README.md")]
    out = run("examples/diloco.py", *words, ranks=ranks)
    shared, *own = [float(x) for x in re.findall(r"held-out loss of .*: ([\d.]+)", out)]
    assert shared < 5 and own == ([shared, shared] if ranks == 1 else [])


def test_many_experts_are_planned_on_many_ranks():
    short = ["examples/moe.py", "--plan", "--world", "64", "--text", str(ROOT / "README.md")]
    out = run(*short, "--experts", "8", "--ep", "8")
    assert out.startswith("1 of 8 experts of each layer on a rank of 64:\n")
    assert "all_to_all" in out and "blocks.1" in out


@pytest.mark.parametrize(
    "ranks,words", [(1, ["--stage", "2", "--dp", "3", "--tp", "4"]), (2, ["--tp", "2"])], ids=["simulated", "processes"]
)
def test_the_tensor_parallel_mlp_example_trains_as_dense(ranks, words):
    out = run("examples/parallel_mlp.py", *words, "--steps", "5", ranks=ranks)
    losses = re.findall(r"loss (\S+), dense and unsharded (\S+)\n", out)
    assert len(losses) == 5 and all(float(a) == pytest.approx(float(b), abs=1e-10) for a, b in losses)
    held, whole = re.findall(r"a rank holds (\S+) bytes of (\S+);", out)[0]
    assert int(held.replace(",", "")) < 0.6 * int(whole.replace(",", ""))  # tp=2 halves the matrices at every stage
    assert float(out.split("from dense training: ")[1]) < 1e-10


@pytest.mark.parametrize(
    "words,limit",
    [
        ("--backend fx --stage 3 --accumulate 2", 1e-4),
        pytest.param("--backend fx --stage 2 --offload 0.5", 1e-4, marks=pytest.mark.slow),
        pytest.param("--backend fx --stage 3 --moments bfloat16", 0.01, marks=pytest.mark.slow),
        pytest.param("--backend inductor --stage 3", 1e-4, marks=pytest.mark.slow),
        pytest.param("--backend fx --stage 3 --matmul-precision float8 --remat", 0.02, marks=pytest.mark.slow),
        pytest.param("--backend fx --stage 3 --precision float16 --remat --accumulate 2", 0.02, marks=pytest.mark.slow),
        pytest.param("--backend fx --stage 1 --precision bfloat16 --remat", 0.05, marks=pytest.mark.slow),
    ],
    ids=["fx", "offload", "moments", "inductor", "float8", "float16", "bfloat16"],
)
def test_train_gpt_on_ranks_has_the_losses_of_one_in_float32(words, limit, tmp_path):
    short = ["examples/train_gpt.py", "--steps", "6", "--batch", "4", "--text", str(ROOT / "README.md"), "--out"]
    run(*short, str(tmp_path / "ranks"), "--ranks", "2", *words.split())
    run(*short, str(tmp_path / "one"), "--ranks", "1", "--stage", "0")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), abs=limit)


def test_train_gpt_refuses_a_share_above_one_without_a_traceback():
    done = python("examples/train_gpt.py", "--offload", "1.5")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith("error: --offload 1.5: expected a share, from 0 to 1\n")


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


@pytest.mark.slow
def test_train_gpt_resumes_after_a_kill(tmp_path):
    """The same ranks reach the same bits, from another stage; other ranks the same losses up to rounding."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    words = ["examples/train_gpt.py", "--batch", "6", "--text", str(ROOT / "README.md"), "--every", "3"]
    words += ["--steps", "10", "--ranks", "2"]
    run(*words, "--stage", "3", "--out", one)
    argv = [*words, "--stage", "1", "--out", two]
    assert python("-c", f"import sys; sys.argv = {argv}\n{KILLED}").returncode == -9
    run(*words, "--stage", "3", "--out", two)
    assert losses(tmp_path / "two")[-4:] == losses(tmp_path / "one")[-4:]
    assert bits(tmp_path / "one") == bits(tmp_path / "two") != {}
    before = losses(tmp_path / "two")
    run(*words[:-1], "3", "--steps", "12", "--stage", "3", "--out", two)
    assert losses(tmp_path / "two")[:-2] == before


def bits(folder: Path) -> dict[str, Any]:
    """All bits of the newest checkpoint of a folder."""
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return {name: fzero.checkpoint.read(newest, name).tolist() for name in fzero.checkpoint.leaves(newest)}


def test_train_gpt_prints_a_plan(tmp_path):
    words = [str(ROOT / "examples" / "train_gpt.py"), "--plan", "--stage", "3"]
    (done,) = fork(words, [{}], cwd=tmp_path)
    assert "train_step: peak" in done.stdout and "reduce_scatter" in done.stdout and "blocks.1" in done.stdout
    assert (tmp_path / "plan.png").stat().st_size > 5000 and [*tmp_path.iterdir()] == [tmp_path / "plan.png"]


@pytest.mark.parametrize(
    "model, stage, simulate", cases([("vit", 2, "vmap"), ("mixtral", 3, "lockstep")], [("gpt2", 3, "vmap")])
)
def test_hf_model_learns_and_holds_its_shards(model, stage, simulate):
    out = run("examples/hf_model.py", "--model", model, "--stage", str(stage), "--simulate", simulate, "--steps", "4")
    losses = [float(x) for x in re.findall(r"step \d: loss (\S+)", out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    held, whole = (int(x.replace(",", "")) for x in re.findall(r"holds (\S+) of (\S+) bytes", out)[0])
    assert held / whole == pytest.approx({2: 2 / 3, 3: 1 / 2}[stage], rel=0.01)  # of parameters and two moments


@pytest.mark.slow
def test_hf_model_on_two_processes_prints_the_losses_of_one():
    words = ["--model", "llama", "--stage", "3", "--steps", "2"]  # no dropout
    launched, alone = (run("examples/hf_model.py", *words, ranks=ranks) for ranks in (2, 1))
    steps = re.compile(r"step .*")
    assert steps.findall(launched) == steps.findall(alone) != []


def test_the_notebooks_stored_outputs_are_those_of_its_cells():
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
