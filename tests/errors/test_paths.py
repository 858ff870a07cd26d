"""A tree, a number or None in place of a path: the error names the argument, what it is, and the right call."""

from typing import Any

import pytest
import torch

import fzero
from fzero import checkpoint, observe
from fzero.checkpoint import dcp, hf
from fzero.parallel.schedules import schedule

TREE: dict[str, Any] = {"w": torch.ones(2)}
CALLS: dict[str, Any] = {
    "path: fzero.save(path, values)": lambda bad: fzero.save(bad, "runs"),
    "path: fzero.load(path, like)": lambda bad: fzero.load(bad, "runs"),
    "path: fzero.checkpoint.leaves(path)": checkpoint.leaves,
    "path: fzero.checkpoint.read(path, name)": lambda bad: checkpoint.read(bad, "w"),
    "path: fzero.checkpoint.verify(path)": checkpoint.verify,
    "root: fzero.checkpoint.checkpoints(root, mesh)": checkpoint.checkpoints,
    "memory:": lambda bad: checkpoint.checkpoints("runs", memory=bad),
    "path: fzero.checkpoint.dcp.save(path, values)": lambda bad: dcp.save(bad, "runs"),
    "path: fzero.checkpoint.dcp.load(path, like)": lambda bad: dcp.load(bad, "runs"),
    "folder: fzero.checkpoint.hf.read(folder, like)": lambda bad: hf.read(bad, "runs"),
    "folder: fzero.checkpoint.hf.write(folder, params)": lambda bad: hf.write(bad, "runs"),
    "root: fzero.elastic.run(train, root, steps=100)": lambda bad: fzero.elastic.run(
        print, bad, steps=1, global_batch=2, dp=2
    ),
    "path: such as 'runs/gpt.jsonl'": observe.jsonl,
    "folder: such as 'runs/gpt'": observe.tensorboard,
    "dump: the path of a folder": lambda bad: fzero.jit(torch.sin, dump=bad),
    "trace: the path of a file": lambda bad: fzero.profile(torch.sin, torch.ones(2), trace=bad),
    "path: 'plan.png'": fzero.plan(torch.sin, torch.ones(2)).plot,
    "path: 'schedule.png'": schedule("1f1b", ranks=2, micro_batches=2).plot,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("bad", "given"), [(TREE, " is a dict"), (3, "=3"), (b"runs", "=b'runs'")])
def test_another_value_than_a_path_is_an_error_with_the_right_call(call, bad, given):
    name, _, words = call.partition(":")
    with pytest.raises(TypeError) as caught:
        CALLS[call](bad)
    message = str(caught.value)
    assert message.startswith(f"{name}{given}: expected ") and words.strip() in message
    assert not isinstance(bad, dict) or len(caught.traceback) <= 3


@pytest.mark.parametrize("bad", ["", "runs\0"])
def test_an_empty_path_and_one_with_the_character_nul_are_errors(bad):
    with pytest.raises(ValueError, match=r"path='.*': expected the path of a folder"):
        fzero.load(bad, TREE)
