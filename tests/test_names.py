"""Names that are not there: a table's hints lead to names that are, and protocols find nothing."""

import copy
import importlib
import inspect
import operator
import pickle
import re
from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch

import fzero
from fzero import _call_hints, optim, tree
from fzero._names import missing_attribute
from fzero.optim.checks import _torch_hints
from tests.sources import ROOT, python_files

# the modules with a table, and the classes that answer by it
TABLES = {
    name: importlib.import_module(name)
    for path in python_files("fzero")
    if re.search(r"^_FOREIGN_NAMES\b", path.read_text(), re.MULTILINE)
    for name in [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")]
}
TABLES_OF_ARGUMENTS = (_call_hints._FOREIGN_ARGUMENTS, _torch_hints._FOREIGN_ARGUMENTS)
STEP = fzero.shard(lambda p, s, x: (p, s), 3, fzero.mesh(dp=2))
FUNCTIONAL = fzero.nn.functional(torch.nn.Linear(2, 2))
OBJECTS: dict[str, Any] = {
    "fzero.zero._sharded_step": STEP,
    "fzero.ranks._mesh": STEP.mesh,
    "fzero.optim._base": optim.adamw(0.1),
    "fzero.optim._precision": fzero.Precision(torch.bfloat16),
    "fzero.nn._functional": FUNCTIONAL,
    "fzero.sharding._boxes": STEP.init({"w": torch.ones(4)}, optim.sgd(0.1))[0]["w"],
    "fzero.checkpoint._folder": fzero.checkpoint.checkpoints("/nowhere"),
}
ROWS = [(owner, name) for owner, module in TABLES.items() for name in module._FOREIGN_NAMES]
# what stands at the beginning of a hint, and the object that has the names after it
ROOTS: dict[str, Any] = {
    "fzero": fzero,
    "optim": optim,
    "step": STEP,
    "mesh": STEP.mesh,
    "opt": OBJECTS["fzero.optim._base"],
    "precision": OBJECTS["fzero.optim._precision"],
    "model": FUNCTIONAL,
    "checkpoints": OBJECTS["fzero.checkpoint._folder"],
    "box": OBJECTS["fzero.sharding._boxes"],
}
PATHS = re.compile(rf"(?<![\w.])({'|'.join(ROOTS)})((?:\.[a-z]\w*)+)")


@pytest.mark.parametrize("owner", sorted(TABLES))
def test_every_table_of_names_has_an_owner_that_answers_by_it(owner):
    assert owner in OBJECTS or hasattr(TABLES[owner], "__getattr__")


@pytest.mark.parametrize(("owner", "name"), ROWS)
def test_a_name_of_another_library_is_answered_with_names_that_are_there(owner, name):
    value, hint = OBJECTS.get(owner, TABLES[owner]), TABLES[owner]._FOREIGN_NAMES[name]
    assert not hasattr(value, name) and getattr(value, name, None) is None
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}: here it is {hint}")):
        getattr(value, name)
    for first, rest in PATHS.findall(hint):
        operator.attrgetter(rest[1:])(ROOTS[first])


def test_the_hints_of_arguments_lead_to_names_that_are_there():
    for table in TABLES_OF_ARGUMENTS:
        for hint in table.values():
            for first, rest in PATHS.findall(hint):
                operator.attrgetter(rest[1:])(ROOTS[first])


PROTOCOLS = (
    *("__array__", "__tensor_flatten__", "__torch_dispatch__", "__deepcopy__", "__getstate_extra__", "__len_hint__"),
    *(
        "_repr_html_",
        "_repr_mimebundle_",
        "_ipython_display_",
        "_ipython_canary_method_",
        "__wrapped__",
    ),
)


@pytest.mark.parametrize("owner", sorted(OBJECTS))
def test_an_object_with_a_table_of_names_still_keeps_the_protocols(owner):
    value = OBJECTS[owner]
    for name in PROTOCOLS:
        with pytest.raises(AttributeError) as caught:
            getattr(value, name)
        assert "here it is" not in str(caught.value) and "did you mean" not in str(caught.value)
    assert repr(copy.copy(value)) == repr(value)
    assert len(tree.flatten({"x": value})[0]) >= 1
    assert inspect.unwrap(value) is value
    if is_dataclass(value):
        assert repr(replace(value)) == repr(value)


def test_values_with_a_table_of_names_are_copied_and_pickled():
    for value in (STEP.mesh, OBJECTS["fzero.optim._precision"]):
        assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)
    assert FUNCTIONAL._replace(buffers={}).params is FUNCTIONAL.params and len(FUNCTIONAL) == 3


def test_the_nearest_name_is_public():
    assert str(missing_attribute("Mesh", "sise", ["_sise", "size"])) == (
        "Mesh has no attribute 'sise'; did you mean size?"
    )
    with pytest.raises(AttributeError, match=r"'Optimizer' object has no attribute 'updates'; did you mean update\?$"):
        getattr(optim.sgd(0.1), "updates")  # noqa: B009


# Names of the vocabulary that are methods of values, or need no answer of fzero's.
UNANSWERED = {"Function", "_flatten", "device", "item", "peft", "py", "set_epoch", "setup_context", "sum"}


def names_of_the_vocabulary() -> set[str]:
    """Collect the names of other libraries in the first column of the vocabulary's table of options."""
    options = (ROOT / "docs" / "vocabulary.md").read_text().split("## Options")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in options.splitlines() if line.count("|") > 2]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    matches = [re.fullmatch(r"(?:[\w.]*\.)?([A-Za-z_]\w*)(?:\(.*\)|=.*)?", code) for code in codes]
    return {match[1] for match in matches if match}


def test_every_name_of_the_vocabulary_is_answered_or_fzeros_own():
    names = [module._FOREIGN_NAMES for module in TABLES.values()]
    hints = {name for table in [*names, *TABLES_OF_ARGUMENTS] for name in table}
    arguments = {*_call_hints._WORDS, *_torch_hints._EQUIVALENT_ARGUMENTS}
    modules = [fzero, *[getattr(fzero, name) for name in fzero.__all__]]
    own = {name for module in modules for name in getattr(module, "__all__", ())}
    names = names_of_the_vocabulary()
    assert len(names) > 100 and not names - hints - arguments - own - UNANSWERED
