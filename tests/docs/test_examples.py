"""The guide to the examples names each of them, and the site has a page for each."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
GUIDE, SITE = (ROOT / "docs" / "examples.md").read_text(), (ROOT / "mkdocs.yml").read_text()


def test_each_example_is_a_row_of_the_guide_and_a_page_of_the_site():
    for path in (ROOT / "examples").glob("*.py"):
        assert GUIDE.count(f"[`python {path.name}") == 1, path
        assert SITE.count(f" {path.name}: examples/{path.stem}.md") == 1, path


def test_a_program_has_at_most_120_lines():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path
