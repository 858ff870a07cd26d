"""The pages of docs/ and their fenced blocks."""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
TUTORIAL = sorted((DOCS / "tutorial").glob("*.md"))
REFERENCE = sorted((DOCS / "api").glob("*.md"))
GUIDES = [p for p in PAGES if p not in [*TUTORIAL, *REFERENCE]]


class Block(NamedTuple):
    """A fenced block: its language, the rest of its first line, its body, its line, and what it should print."""

    language: str
    options: str
    body: str
    line: int
    output: str

    @property
    def runs(self) -> bool:
        return self.language == "python" and "notest" not in self.options

    @property
    def file(self) -> str:
        return "".join(re.findall(r'title="([^"]+)"', self.options))


def blocks(page: pathlib.Path) -> list[Block]:
    text = page.read_text()
    results = list(re.finditer(r"^```(\w*)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    out = []
    for i, fence in enumerate(results):
        following = results[i + 1] if i + 1 < len(results) else None
        shown = following and following[1] == "text" and not text[fence.end() : following.start()].strip()
        line = text.count("\n", 0, fence.start()) + 1
        out.append(Block(fence[1], fence[2], fence[3], line, following[3] if following and shown else ""))
    return out
