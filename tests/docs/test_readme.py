"""The README: its example runs, its table is what is measured."""

import importlib.util
import pathlib
import re

import torch

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_learns_the_unsharded_numbers():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    results = []
    for n, stage in ((1, 0), (4, 2), (4, 3)):
        names: dict = {}
        exec(code.replace("dp=-1, alone=4", f"dp={n}").replace("stage=2", f"stage={stage}"), names)
        results.append(names["full"])
    for other in results[1:]:
        for name, p in results[0].items():
            torch.testing.assert_close(other[name], p)


def test_the_table_is_what_is_measured():
    path = ROOT / "benchmarks" / "bytes_per_rank.py"
    spec = importlib.util.spec_from_file_location("bytes_per_rank", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (table,) = re.findall(r"<!-- bytes_per_rank -->\n(.*?)\n<!-- /bytes_per_rank -->", README, re.DOTALL)
    assert table == module.table(8)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
