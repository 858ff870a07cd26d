"""The README: its example runs, its table is what is measured."""

import importlib.util
import pathlib
import re

import torch

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_readmes_example_trains_as_unsharded():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    results = []
    for n, stage in ((1, 0), (4, 2), (4, 3)):
        names: dict = {}
        exec(code.replace("dp=-1, simulated_ranks=4", f"dp={n}").replace("stage=2", f"stage={stage}"), names)
        results.append(names["full"])
    for other in results[1:]:
        for name, p in results[0].items():
            torch.testing.assert_close(other[name], p)


def test_the_readmes_table_has_the_measured_bytes():
    path = ROOT / "benchmarks" / "bytes_per_rank.py"
    spec = importlib.util.spec_from_file_location("bytes_per_rank", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (table,) = re.findall(r"<!-- bytes_per_rank -->\n(.*?)\n<!-- /bytes_per_rank -->", README, re.DOTALL)
    assert table == module.table(8), "`make format` writes it"


def test_links_of_the_readme_lead_to_files():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / target).exists(), target


def test_the_readme_is_short_and_plain():
    assert len(README.splitlines()) <= 120
    prose = re.sub(r"```.*?```|^\|.*?$|^#.*?$|^!.*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    for sentence in re.split(r"(?<=[.:;!?])\s+|\n\n|\n- ", re.sub(r"\]\([^)]*\)|`", "", prose)):
        assert len(sentence.split()) <= 30, sentence


def test_the_line_counts_in_the_comparison_are_those_of_the_scripts():
    page = (ROOT / "docs" / "compare.md").read_text()
    bodies = [(ROOT / "examples" / "finetune.py").read_text(), *re.findall(r"\.py\"}\n(.*?)```", page, re.DOTALL)]
    counts = [len([line for line in body.splitlines() if line.strip()]) for body in bodies]
    row = next(line for line in page.splitlines() if line.startswith("| fine-tune"))
    assert [int(n) for n in re.findall(r"\| (\d+), ", row)] == counts
    for body in bodies:
        compile(body, "script", "exec")
