"""The command `python -m fzero.checkpoint`: what it prints, what it writes, and how it ends."""

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fzero
from fzero.checkpoint import _differences
from fzero.checkpoint.__main__ import main
from tests.checkpoint.states import Layout, fill, state_in
from tests.distributed.launch import python

PARAMS: dict[str, Any] = {"w": torch.zeros(9, 5), "b": torch.zeros(4), "n": torch.zeros(3, dtype=torch.int64)}
PARAMS["tied"] = PARAMS["b"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder of two checkpoints, and the whole state of the second one."""
    path = tmp_path_factory.mktemp("run")
    step, state = state_in(Layout({"dp": 3}, 3), PARAMS)
    (one, _), (other, whole) = [fill(step, state, seed) for seed in (0, 1)]
    runs = fzero.checkpoint.checkpoints(path, step.mesh)
    runs.save(7, one).wait()
    runs.save(12, {**other, "step": 4}).wait()
    return path, whole


def flip(path: Path) -> None:
    name = next(n for n in sorted(os.listdir(path)) if n.endswith(".safetensors"))
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)


def test_ls_lists_the_steps_of_a_run(run, capsys):
    assert main(["ls", str(run[0])]) == 0
    head, seven, twelve = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "date", "size", "ranks", "mesh", "leaves", "state"]
    assert seven.split()[0] == "7" and twelve.split()[0] == "12" and "dp=3" in seven and "whole" in twelve


def test_ls_lists_the_leaves_of_one_checkpoint(run, capsys):
    path = str(run[0] / "step-00000012")
    assert main(["ls", path]) == 0
    out = capsys.readouterr().out
    assert "of 3 ranks (dp=3)" in out and "is params.b" in out
    (line,) = [line for line in out.splitlines() if line.startswith("params.w")]
    assert line.split() == ["params.w", "float32", "[9,", "5]", "180"]
    assert main(["ls", path, "--limit", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5  # what it is, the head, two leaves, and how many more


def test_ls_says_why_a_checkpoint_is_incomplete(tmp_path, capsys):
    runs = fzero.checkpoint.checkpoints(tmp_path)
    runs.save(1, {"w": torch.zeros(3)}).wait()
    (tmp_path / "step-00000002").mkdir()
    assert main(["ls", str(tmp_path)]) == 0
    assert "it has no file manifest.json" in capsys.readouterr().out


def test_verify_finds_damage(run, tmp_path, capsys):
    assert main(["verify", str(run[0])]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and all(": whole, " in line and line.endswith(" bytes") for line in out)
    runs = fzero.checkpoint.checkpoints(tmp_path)
    for i in (1, 2):
        runs.save(i, {"w": torch.zeros(3)}).wait()
    flip(tmp_path / "step-00000001")
    assert main(["verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "step-00000002: whole" in out and "is damaged" in err and "'w'" in err and "Traceback" not in err


def test_diff_lists_the_leaves_that_differ(run, tmp_path, capsys):
    one, other = (str(run[0] / name) for name in ("step-00000007", "step-00000012"))
    assert main(["diff", one, one]) == 0 and "bit for bit" in capsys.readouterr().out
    same = {"same": torch.ones(2)}
    fzero.save(tmp_path / "a", {"w": torch.tensor([1.0, 2.0, 3.0]), "x": torch.zeros(2), "step": 1, **same})
    fzero.save(tmp_path / "b", {"w": torch.tensor([1.0, 2.5, -1.0]), "x": torch.zeros(3), "step": 2, **same})
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    _, step, w, x = capsys.readouterr().out.splitlines()
    assert "step" in step and "the value 1" in step and "the value 2" in step
    assert w.split() == ["w", "float32", "[3]", "float32", "[3]", "2", "4"]
    assert x.split() == ["x", "float32", "[2]", "float32", "[3]"]
    assert main(["diff", one, other]) == 1
    assert {"params.w", "opt_state.count"} & {line.split()[0] for line in capsys.readouterr().out.splitlines()}


def test_diff_shows_the_largest_difference_of_all_parts_of_a_leaf(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_differences, "_AT_ONCE", 2)
    for name, values in (("one", [0.0, 0.0, 0.0, 0.0]), ("other", [1.0, 3.0, 0.0, 2.0])):
        fzero.save(tmp_path / name, {"w": torch.tensor(values)})
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["3", "3"]


def test_export_writes_one_file(run, tmp_path, capsys):
    path, whole = str(run[0] / "step-00000012"), run[1]["params"]
    assert main(["export", path, str(tmp_path / "all.safetensors"), "--prefix", "params"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'all.safetensors'}: 4 leaves\n"
    result = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert sorted(result) == ["b", "n", "tied", "w"]
    for name, x in result.items():
        assert torch.equal(x.view(torch.uint8), whole[name].contiguous().view(torch.uint8)), name
    assert main(["export", path, str(tmp_path / "folder"), "--prefix", "params", "--dtype", "bfloat16"]) == 0
    cast = safetensors.torch.load_file(tmp_path / "folder" / "model.safetensors")
    assert cast["w"].dtype == torch.bfloat16 and cast["n"].dtype == torch.int64
    assert torch.equal(cast["w"].nan_to_num(), whole["w"].bfloat16().nan_to_num())
    with safetensors.safe_open(tmp_path / "folder" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert main(["export", path, str(tmp_path / "w.safetensors"), "--prefix", "params.w"]) == 0
    assert list(safetensors.torch.load_file(tmp_path / "w.safetensors")) == ["w"]
    assert main(["export", path, str(tmp_path / "all.pt"), "--torch"]) == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded["step"] == 4 and loaded["params.b"] is loaded["params.tied"] and len(os.listdir(tmp_path)) == 4


WRONG: list[tuple[list[str], str]] = [
    (["ls", "nowhere"], "is neither a checkpoint nor a run"),
    (["verify", "nowhere"], "is neither a checkpoint nor a run"),
    (["diff", "RUN", "RUN"], "is the folder of a run: give one checkpoint, such as step-00000012"),
    (
        ["export", "RUN/step-00000012", "OUT/x.safetensors", "--prefix", "model"],
        "has no leaves below 'model': its first keys are",
    ),
    (["export", "RUN/step-00000012", "RUN/step-00000012/manifest.json/x"], "Not a directory"),
    (["export", "RUN/step-00000012", "OUT/x.bin"], "neither a .safetensors file nor a folder: use --torch"),
    (["export", "RUN/step-00000012", "OUT/x.safetensors", "--torch"], "torch.save writes no safetensors"),
]


@pytest.mark.parametrize("words,text", WRONG, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_an_error_of_the_checkpoint_command_is_one_line(words, text, run, tmp_path, capsys):
    assert main([w.replace("RUN", str(run[0])).replace("OUT", str(tmp_path)) for w in words]) == 1
    out, err = capsys.readouterr()
    assert text in err and len(err.splitlines()) == 1 and not out and os.listdir(tmp_path) == []


def test_the_checkpoint_command_runs_as_a_module(run):
    done = python("-m", "fzero.checkpoint", "ls", str(run[0]))
    assert done.returncode == 0 and "dp=3" in done.stdout
    assert python("-m", "fzero.checkpoint", "ls", "nowhere").returncode == 1
