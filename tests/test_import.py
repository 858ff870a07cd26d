"""What `import fzero` costs: it loads nothing that a step may never need, and Dynamo is told what it must know."""

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import fzero
from fzero._torch import on_import
from tests.distributed.launch import ROOT
from tests.helpers import cases
from tests.sources import imports_of, python_files

OF_TORCH = [
    "_dynamo",
    "_inductor",
    "distributed.checkpoint",
    "distributed.tensor",
    "distributed.fsdp",
    "utils.flop_counter",
]
OTHERS = ["sympy", "rich", "matplotlib", "fsspec", "hypothesis", "transformers", "safetensors", "tensorboard", "triton"]
PACKAGES = ["checkpoint", "data", "nn", "observe", "parallel.experts", "parallel.tensor", "testing", "tuning"]
LATE = [*[f"torch.{name}" for name in OF_TORCH], *OTHERS, "optree", *[f"fzero.{name}" for name in PACKAGES]]


def run(script: str) -> str:
    """Run a script in a fresh interpreter: the forkserver's has imported torch's parts already."""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = f"""
import sys, torch
before = set(sys.modules)
import fzero
assert {{*fzero.__all__}} <= {{*dir(fzero)}}
new = set(sys.modules) - before
others = [name for name in new if not name.startswith("fzero")]
print(len(others), [name for name in {LATE!r} if name in new])
import torch._dynamo
from torch._dynamo import trace_rules
from fzero._torch import on_import
assert id(fzero.collectives.apply) in trace_rules._allowed_callable_ids
from torch.utils.flop_counter import flop_registry
import fzero.parallel.experts
assert torch.ops.fzero.grouped_mm in flop_registry
import optree
assert not on_import._REGISTRATIONS and on_import._FINDER not in sys.meta_path
assert type(torch._dynamo.__loader__).__module__ != on_import.__name__
assert fzero.checkpoint.dcp.save
assert "hypothesis" not in sys.modules
fzero.testing.assert_trees_close([], [])
for package in (fzero, *[getattr(fzero.parallel, name) for name in fzero.parallel.__all__]):
    assert all(getattr(package, name) is getattr(package, name) for name in package.__all__)
"""


def test_importing_fzero_loads_nothing_that_a_step_may_not_need():
    """The rest is there at its first use: what Dynamo must know, fzero.testing, and every public name."""
    count, late = run(SCRIPT).split(" ", 1)
    assert late == "[]\n" and int(count) < 50, f"{count} modules of others, among them {late}"


def test_functions_are_registered_with_dynamo_at_once_if_it_is_imported():
    import torch._dynamo.trace_rules as rules

    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    assert on_import.allow_in_graph(f) is f and id(f) in rules._allowed_callable_ids
    assert "torch._dynamo" not in on_import._REGISTRATIONS


def test_the_import_hook_ignores_other_modules():
    finder = on_import._FINDER
    assert finder.find_spec("torch._dynamo.utils", None) is None and finder.find_spec("json", None) is None


def test_an_unknown_attribute_of_fzero_raises_with_a_hint():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fzero.nothing
    with pytest.raises(AttributeError, match=r"has no attribute 'psum': here it is fzero\.collectives\.psum$"):
        _ = fzero.psum


TREES = """
import torch
{imports}
assert optree.tree_map(torch.neg, fzero.sharding.PerRank(torch.ones(2))).value.tolist() == [-1, -1]
"""


@pytest.mark.parametrize("imports", cases(["import optree, fzero"], ["import fzero, optree"]))
def test_optree_knows_the_boxes_whichever_is_imported_first(imports: str):
    run(TREES.format(imports=imports))


def test_the_package_has_its_version():
    number = fzero.__version__.split(".")
    assert all(part.isdigit() for part in number[:3]), fzero.__version__


BESIDE = """
from fzero import _torch
thread = getattr(_torch, {name!r})()
import torch._dynamo
thread.join()
from torch._inductor.utils import IndentedBuffer
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["start_import", "start_cpu_probe"])
def test_inductor_is_imported_beside_a_first_trace(name):
    """Dynamo and Inductor import each other, so a trace and the thread must not begin at the two ends."""
    run(BESIDE.format(name=name))


def test_imports_within_functions_and_scripts_find_their_names():
    """A script in a string may run in a process whose errors nobody sees."""
    pairs = {
        (node.module, alias.name): path
        for path in python_files("fzero", "tests", "benchmarks")
        for node in imports_of(path)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fzero"
        for alias in node.names
    }
    missing = [
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for (module, name), path in pairs.items()
        if not hasattr(importlib.import_module(module), name) and not find_spec(f"{module}.{name}")
    ]
    assert missing == [] and len(pairs) > 1000
