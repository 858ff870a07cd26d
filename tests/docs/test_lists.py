"""The lists of the pages are those of the code."""

import pytest

from fzero.graph._pass_manager import PASSES, Pass
from tests.docs.lists import PASSES_PAGE, ROOT, contents, pages, table_of_passes, without_lost_names, write_names
from tests.optim.pages import merge, of_plugs


@pytest.fixture(scope="module")
def written():
    return pages()


def test_the_lists_of_the_pages_are_those_of_the_code(written):
    stale = [str(path.relative_to(ROOT)) for path, text in written.items() if path.read_text() != text]
    assert not stale, "`make format` writes them, by `python -m tests.docs.lists`"


def test_a_list_keeps_its_order_and_takes_new_names_behind_it():
    assert merge(["b", "gone", "a"], ["a", "b", "c"]) == ["b", "a", "c"]
    assert of_plugs("one of torch's Gone, SGD and Adam.").startswith("one of torch's SGD, Adam, ")


def test_a_new_name_of_a_package_follows_its_first_list():
    page = "# tree\n\n::: fzero.tree.map\n::: fzero.tree.flatten\n\n## More\n\n::: fzero.tree.gone\n"
    longer = page.replace("flatten\n", "flatten\n::: fzero.tree.new\n")
    assert write_names(page, "fzero.tree", ["new"]) == longer
    assert write_names(page, "fzero.tree", []) == page == write_names(page, "fzero.axes", ["new"])
    assert without_lost_names(page, {"fzero.tree"}) == page.replace("::: fzero.tree.gone\n", "")


def test_a_new_pass_gets_a_row_of_its_docstring_in_the_order_of_the_passes():
    def a_new_pass(graph):
        """Leave out multiplications by one."""

    new = Pass("a_new_pass", a_new_pass, lambda settings, context: (settings.bucket_bytes,))
    text = PASSES_PAGE.read_text()
    first = next(line for line in text.splitlines() if line.startswith(f"| `{PASSES[0].name}`"))
    row = "| `a_new_pass` | Leave out multiplications by one. | `bucket_bytes` |"
    assert table_of_passes(text, (PASSES[0], new, *PASSES[1:])) == text.replace(first, f"{first}\n{row}")
    assert first not in table_of_passes(text, PASSES[1:])


def test_the_contents_of_a_page_are_its_headings_and_not_its_comments():
    page = "# P\n\n<!-- contents -->\n\n- [Old](#old)\n\n<!-- /contents -->\n\n## Out of `memory`\n\n### One, two\n"
    links = "- [Out of `memory`](#out-of-memory)\n    - [One, two](#one-two)\n"
    comment = "\n```python\n## a comment\n```\n"
    assert contents(page + comment) == page.replace("- [Old](#old)\n", links) + comment
