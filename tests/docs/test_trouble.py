"""Errors point to headings of docs/trouble.md, and these exist."""

import pathlib
import re

import fzero
from fzero._notice import trouble_link
from tests.docs.lists import anchor

ROOT = pathlib.Path(fzero.__file__).parent
HEADINGS = re.findall(r"^## (.+)$", (ROOT.parent / "docs" / "trouble.md").read_text(), re.MULTILINE)


def test_every_pointer_has_its_heading():
    pointers = [
        (path, name)
        for path in ROOT.rglob("*.py")
        for name in re.findall(r"""\btrouble_link\(["']([\w-]+)["']\)""", path.read_text())
    ]
    anchors = {anchor(heading) for heading in HEADINGS}
    for path, name in pointers:
        assert name in anchors, f"{path}: docs/trouble.md has no heading for #{name}"
    silent = {"slow-steps", "a-long-traceback"}  # no error tells of them
    assert {name for _, name in pointers} == anchors - silent
    assert trouble_link("a-hang") == "; see docs/trouble.md#a-hang"


def test_every_link_to_a_heading_finds_it():
    docs = ROOT.parent / "docs"
    pages = [ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md", *docs.rglob("*.md")]
    lost = [
        f"{page.name}: {link}#{name}"
        for page in pages
        for link, name in re.findall(r"\]\((?!https?:)([\w./-]*\.md)?#([\w-]+)\)", page.read_text())
        if name not in headings_of(page.parent / link if link else page)
    ]
    assert not lost, lost


def headings_of(page: pathlib.Path) -> set[str]:
    code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {anchor(re.sub(r"[`*]", "", heading)) for heading in re.findall(r"^#+ (.+)$", code, re.MULTILINE)}
