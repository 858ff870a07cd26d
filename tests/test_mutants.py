"""The vocabulary of planted faults: each change, what is ambiguous or gone, and that names of others do not matter."""

import ast
import functools
import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import fzero
from tests.helpers import cases, either
from tests.mutants import MUTANTS, Mutant
from tests.mutants.__main__ import (
    KILLED,
    NOT_APPLICABLE,
    SURVIVED,
    Run,
    Verdict,
    not_applicable,
    summary,
    verdict,
    with_failing_tests,
    without_faults,
)
from tests.mutants.changes import (
    Change,
    after,
    always,
    bare,
    becomes,
    before,
    constant,
    dropped,
    in_symbol,
    negated,
    never,
    renamed,
    returns,
    skipped,
    swapped,
)
from tests.mutants.mutant import LAWS, Fault, File
from tests.mutants.patterns import Match, find_match, parse

ROOT = pathlib.Path(fzero.__file__).parent

TEXT = '''\
import math

WIDTHS = {"a": 1, **{"b": 2}}


def helper(x):
    return x


def f(a, b, c=3):
    """Add, of numbers."""
    total = a + b  # the sum
    if a < b and not c:
        total += helper(a)
    elif a is None:
        total = max(
            a,
            b,
            key=helper,
        )
    kept = [x for x in (a, b) if x > 1]
    return f"{total}", kept if total else math.floor(b), 0


class Box:
    size: int = 4

    @staticmethod
    def g(x):
        while x != 2:
            helper(x)
            x -= 1
        return x
'''


def is_same(text: str, expected: str) -> bool:
    return ast.dump(ast.parse(text)) == ast.dump(ast.parse(expected))


@pytest.mark.parametrize(
    ("symbol", "change", "old", "new"),
    [
        ("f", skipped("A += helper(B)"), "total += helper(a)", "pass"),
        ("Box.g", skipped("A(B)"), "helper(x)\n            x", "pass\n            x"),
        ("f", dropped("not A"), "a < b and not c", "a < b"),
        ("f", dropped("key=A"), "            key=helper,\n", ""),
        ("f", dropped("b", at="1 of 3"), "            b,\n", ""),
        ("f", dropped("A > 1"), " if x > 1", ""),
        ("f", dropped("0"), ", 0\n", "\n"),
        ("WIDTHS", dropped("'a': A"), '"a": 1, ', ""),
        ("WIDTHS", dropped("**A"), ', **{"b": 2}', ""),
        ("Box.g", dropped("staticmethod"), "    @staticmethod\n", ""),
        ("f", always("A is None"), "elif a is None", "elif True"),
        ("f", never("not A"), "not c", "False"),
        ("f", negated("A < B and C"), "if a < b and not c", "if not (a < b and not c)"),
        ("f", swapped("<", "<="), "a < b", "a <= b"),
        ("f", swapped("+", "-", at="1 of 2"), "a + b", "a - b"),
        ("f", swapped("A += B", "-"), "total += helper", "total -= helper"),
        ("f", swapped("and", "or"), "b and not", "b or not"),
        ("f", constant(1, 2), "x > 1", "x > 2"),
        ("f", constant(3, None), "c=3", "c=None"),
        ("Box.size", constant(4, 5), "size: int = 4", "size: int = 5"),
        (
            "Box.g",
            returns("None"),
            "return x\n",
            "return None\n",
        ),
        ("f", before("A = B + C", "B = C"), "total = a + b", "a = b\n    total = a + b"),
        ("f", after("A = B + C", "A *= 2"), "total = a + b", "total = a + b\n    total *= 2"),
        ("Box.g", renamed("h"), "def g", "def h"),
        ("f", bare("B.floor(A)"), "math.floor(b)", "b"),
        (
            "f",
            bare("B(A, ...)", at="2 of 3"),
            "max(\n            a,\n            b,\n            key=helper,\n        )",
            "a",
        ),
        ("f", becomes("A if B else C", "C"), "kept if total else math.floor(b)", "math.floor(b)"),
        ("f", becomes("A.floor", "A.ceil"), "math.floor", "math.ceil"),
        ("f", becomes("max(A, ...)", "max(A, A, ...)"), "            b,\n", "            a, b,\n"),
        ("f", becomes("max(..., key=A)", "min(..., key=A)"), "max(", "min("),
        ("f", becomes("f'{A}'", "f'{A} '"), "{total}", "{total} "),
        ("Box.g", becomes("while A: ...", "if A: ..."), "while x != 2", "if x != 2"),
        ("", becomes("import A", "import A, os"), "import math", "import math, os"),
        ("f", in_symbol("Box.g", swapped("A -= B", "+")), "x -= 1", "x += 1"),
    ],
    ids=lambda x: x.words if isinstance(x, Change) else "",
)
def test_a_change_changes_one_place(symbol, change, old, new):
    expected = TEXT.replace(old, new, 1) if symbol != "Box.g" else new.join(TEXT.rsplit(old, 1))
    assert is_same(change.plant(TEXT, symbol), expected)


def test_all_places_are_changed_if_the_row_says_so():
    assert is_same(
        becomes("helper", "abs", at="all").plant(TEXT, "f"),
        TEXT.replace("helper(a)", "abs(a)").replace("=helper", "=abs"),
    )


def test_the_lines_and_comments_around_a_change_stay():
    planted = becomes("max(...)", "min(...)").plant(TEXT, "f").splitlines()
    differing = [i for i, (x, y) in enumerate(zip(planted, TEXT.splitlines(), strict=True)) if x != y]
    assert differing == list(range(15, 20))


@pytest.mark.parametrize(
    ("symbol", "change", "message"),
    [
        ("f", becomes("A + B", "A", at="2 of 2"), "has 1 places for becomes('A + B', 'A') in 'f'"),
        ("f", constant("x", "y"), "has 0 places"),
        ("f", never("A"), "places for never('A') in 'f'"),
        ("f", swapped("+", "-"), 'in \'f\': at="1 of 2" takes the first, at="all" each'),
        ("h", never("A < B"), "has no 'h'"),
        ("f", becomes("math.floor(A)", "helpers(A)"), "knows no helpers in 'f'"),
        ("f", becomes("A + A", "A"), "has 0 places"),
    ],
    ids=lambda x: x.words if isinstance(x, Change) else "",
)
def test_an_ambiguous_or_missing_place_is_an_error(symbol, change, message):
    with pytest.raises(LookupError, match=re.escape(message)):
        change.plant(TEXT, symbol)


def test_a_fault_in_a_symbol_that_is_defined_twice_is_refused():
    with pytest.raises(LookupError, match="has 2 'f'"):
        returns("0").plant("def f():\n    return 1\n\n\ndef f():\n    return 2\n", "f")


@pytest.mark.parametrize(
    "wrong", [(becomes, "A", "B"), (skipped, "A"), (never, "A; B"), (swapped, "A", "<"), (bare, "B")]
)
def test_a_row_of_a_fault_with_a_wrong_pattern_is_refused(wrong):
    change, *words = wrong
    with pytest.raises(ValueError):
        change(*words)


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("A(B)", "f( x )", True),
        ("A(A)", "f(x)", False),
        ("A.B == 'x'", 'node.op == "x"', True),
        ("A(..., B)", "f(1, 2, 3)", True),
        ("A(..., B)", "f()", False),
        ("A(..., y=1)", "f(1, x=2, y=1)", True),
        ("A(y=1)", "f(x=2, y=1)", False),
        ("1", "True", False),
        ("0.0", "-0.0", False),
        ("[A, ..., A]", "[x, y, x]", True),
        ("lambda A: A + 1", "lambda x: x + 1", True),
    ],
)
def test_a_pattern_fits_syntax_and_not_text(pattern, text, fits):
    assert (find_match(parse(pattern), parse(text), Match({})) is not None) == fits


def test_a_table_is_of_files_with_tests_for_each_row():
    a, b = File("a.py", ("x",)).faults(
        Fault("one", "f", never("A")), Fault("two", "f", (never("A"), always("A")), ("y",))
    )
    assert a == Mutant("one", "a.py", "f", (a.changes[0],), ("x",)) and len(b.changes) == 2 and b.tests == ("y",)
    assert File("a.py").tests == LAWS


def test_a_fault_without_a_place_is_reported_as_not_applicable(tmp_path):
    (tmp_path / "fzero").mkdir()
    (tmp_path / "fzero" / "a.py").write_text(TEXT)
    rows = [
        Fault("there", "f", swapped("<", ">")),
        Fault("gone", "f", swapped("<=", ">")),
        Fault("lost", "h", returns("0")),
    ]
    mutants = [*File("a.py").faults(*rows), *File("b.py").faults(Fault("no file", "f", returns("0")))]
    result = not_applicable(mutants, tmp_path)
    assert [(v.mutant.name, v.outcome) for v in result] == [
        (name, NOT_APPLICABLE) for name in ("gone", "lost", "no file")
    ]
    assert "fzero/a.py has no 'h'" in result[1].by and "b.py" in result[2].by
    result += [Verdict(mutants[0], KILLED, "a test"), Verdict(mutants[0], SURVIVED, "exit code 0")]
    assert summary(result) == "5 faults: 1 killed, 1 survived, 3 not applicable"


def test_a_fault_whose_tests_fail_without_it_is_not_applicable():
    rows = [Fault("one", "f", never("A")), Fault("two", "f", never("B")), Fault("three", "f", never("C"), ("y",))]
    mutants = File("a.py", ("x",)).faults(*rows)
    bare_runs = without_faults(mutants)
    assert [m.tests for m in bare_runs] == [("x",), ("y",)] and all(m.plant(TEXT) == TEXT for m in bare_runs)
    for outcome, by in ((KILLED, "x::test_f"), (SURVIVED, "exit code 2: no such file")):
        healthy = Verdict(bare_runs[1], SURVIVED, "exit code 0: 3 passed")
        result = with_failing_tests(mutants, [Verdict(bare_runs[0], outcome, by), healthy])
        assert [(v.mutant.name, v.outcome) for v in result] == [("one", NOT_APPLICABLE), ("two", NOT_APPLICABLE)]
        assert result[0].by == f"the tests fail without the fault: {by}"


@pytest.mark.parametrize(
    ("last_line", "exit_code", "outcome", "by"),
    [
        ("FAILED tests/x.py::test_f - assert 1 == 2", 1, KILLED, "tests/x.py::test_f"),
        ("ERROR tests/x.py::test_f - a fixture raised", 1, KILLED, "ERROR tests/x.py::test_f"),
        ("ERROR tests/x.py - NameError", 1, NOT_APPLICABLE, "the tests cannot be imported: tests/x.py - NameError"),
        ("ERROR tests/x.py", 2, NOT_APPLICABLE, "the tests cannot be imported: tests/x.py"),
        ("3 passed", 0, SURVIVED, "exit code 0: 3 passed"),
    ],
)
def test_a_fault_with_which_the_tests_cannot_be_imported_is_not_applicable(last_line, exit_code, outcome, by, tmp_path):
    (mutant,) = File("a.py").faults(Fault("one", "f", never("A")))
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "output").write_text(last_line)
    assert verdict(Run(mutant, 0, folder, 0.0), exit_code << 8) == Verdict(mutant, outcome, by)
    assert not folder.exists()


def test_each_fault_has_a_name_of_its_own():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


FILES = sorted({mutant.file for mutant in MUTANTS})


def list_defined(tree: ast.Module) -> set[str]:
    """List the private functions and classes that stand by themselves in a file."""
    actual = (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {name for name in actual if name.startswith("_")}


@functools.cache
def with_other_names(text: str, keep: frozenset[str]) -> tuple[str, dict[str, str]]:
    """Rename the private functions and classes of a file, but for some."""
    tree = ast.parse(text)
    names = {name: f"{name}_renamed" for name in list_defined(tree) - keep}
    for node in ast.walk(tree):
        for field in ("id", "name"):
            if getattr(node, field, None) in names:
                setattr(node, field, names[getattr(node, field)])
    return ast.unparse(tree), names


def back(text: str, names: dict[str, str]) -> str:
    """Return the syntax of a text in which renamed functions have their names again."""
    for old, new in names.items():
        text = re.sub(rf"\b{new}\b", old, text)
    return ast.dump(ast.parse(text))


def faults_of_file(file: str) -> Iterator[Mutant]:
    return (mutant for mutant in MUTANTS if mutant.file == file)


@pytest.mark.parametrize("file", cases(FILES[::12], FILES))
def test_no_fault_depends_on_the_names_of_other_functions(file):
    """Each plants the same where all private helpers but its own symbols have other names, in another layout."""
    text = (ROOT / file).read_text()
    for mutant in itertools.islice(faults_of_file(file), either(1, None)):
        own = {part for s in (mutant.symbol, *[c.symbol or "" for c in mutant.changes]) for part in s.split(".")}
        new = {name for change in mutant.changes for name in change.uses}
        other, names = with_other_names(text, frozenset(own | new))
        assert back(mutant.plant(other), names) == back(mutant.plant(text), {}), mutant.name


def test_faults_are_planted_by_a_process_that_imports_no_fzero():
    """It forks one that imports the package with the fault, whose operators are registered once."""
    program = "import sys, tests.mutants; sys.exit('fzero' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, check=False).returncode == 0
