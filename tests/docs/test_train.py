"""docs/train.md: its script trains on two processes, is killed, and goes on alone, as the page shows."""

import json
import pathlib
import re

import pytest

from tests.distributed.launch import python, world

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "train.md"


@pytest.fixture
def script() -> str:
    body = PAGE.read_text().split('title="train.py"}\n')[1].split("```")[0]
    return body.replace("fzero.jit(step)", 'fzero.jit(step, backend="fx")')


def parse_output(text: str) -> list[tuple[str, list[str]]]:
    """Return the steps that were printed, and the names of what was measured."""
    matches = re.findall(r"^step (\d+) of 120: (.*)$", text, re.MULTILINE)
    return [(step, re.findall(r"([a-z/ ]+) [\d.e-]+", rest)) for step, rest in matches]


@pytest.mark.slow
def test_the_training_script_of_the_page_resumes_after_a_kill(script, tmp_path):
    assert "steps, folder = 120," in script
    killed = script.replace("        log(i + 1, metrics)\n", "        log(i + 1, metrics)\n        assert i < 75\n", 1)
    (tmp_path / "killed.py").write_text(killed)
    (tmp_path / "train.py").write_text(script)
    first = world(2, "killed.py", cwd=tmp_path)
    assert "AssertionError" in first.stderr
    second = world(1, "train.py", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    sessions = PAGE.read_text().split("```text\n")[1:3]
    assert parse_output(first.stdout)[:3] == parse_output(sessions[0])
    assert parse_output(second.stdout) == parse_output(sessions[1])
    rows = [json.loads(line) for line in (tmp_path / "runs/spiral/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 121))
    assert rows[-1]["test accuracy"] > 0.95


def test_the_training_script_of_the_page_runs_in_one_process(script, tmp_path):
    (tmp_path / "train.py").write_text(script.replace('= 120, "runs', f'= 20, "{tmp_path}/runs'))
    done = python(str(tmp_path / "train.py"))
    assert done.returncode == 0 and "step 20 of 20" in done.stdout, done.stderr
