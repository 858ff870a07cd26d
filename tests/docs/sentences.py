"""The prose of a page: one line a sentence, so that a diff shows the sentences that changed.

`python -m tests.docs.sentences` writes the pages that way, and `make format` runs it.
"""

import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.docs.pages import PAGES, ROOT

LATER = ("models",)  # a script writes it
WRITTEN = [*[page for page in PAGES if page.stem not in LATER], ROOT / "CHANGELOG.md"]  # the README has 120 lines

_MARKER = re.compile(r"(?:[-*]|\d+\.) +")
_NO_PROSE = re.compile(r"\||#|<|!!!|\?\?\?|:::|---|\[[^\]]+\]: ")  # tables, headings, HTML, boxes, names, rules, links
_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][)\"]))\s+(?:(?![a-z])|(?=fzero\b|torch|bfloat16\b|int[48]\b))")


class Paragraph(NamedTuple):
    """Lines of a page: a paragraph or the text of a list's item, or with no sentences, other lines as they are."""

    indent: str
    marker: str
    sentences: list[str]
    lines: list[str]


def paragraphs(text: str) -> Iterator[Paragraph]:
    """Divide a page into its paragraphs."""
    prose: list[str] = []
    in_fence = in_options = False
    for line in text.splitlines():
        stripped = line.lstrip()
        is_fence = stripped.startswith("```")
        in_options = bool(stripped) and (in_options or stripped.startswith(":::"))
        if in_fence or is_fence or in_options or not stripped or _NO_PROSE.match(stripped):
            yield from _paragraph(prose)
            prose = []
            yield Paragraph("", "", [], [line])
            in_fence ^= is_fence
            continue
        if _MARKER.match(stripped) and prose:
            yield from _paragraph(prose)
            prose = []
        prose.append(line)
    yield from _paragraph(prose)


def _paragraph(lines: list[str]) -> Iterator[Paragraph]:
    if lines:
        stripped = lines[0].lstrip()
        marker = match[0] if (match := _MARKER.match(stripped)) else ""
        joined = " ".join(line.strip() for line in lines).removeprefix(marker)
        yield Paragraph(lines[0][: len(lines[0]) - len(stripped)], marker, _sentences(joined), lines)


def _sentences(text: str) -> list[str]:
    """Divide prose at the ends of sentences outside of code; a bold label such as "**Limits.**" ends none."""
    hidden = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: "_" * len(match[0]), text)
    ends = [0, *itertools.chain.from_iterable(match.span() for match in _END.finditer(hidden)), len(text)]
    return [text[first:last] for first, last in zip(ends[::2], ends[1::2], strict=True)]


def one_line_a_sentence(text: str) -> str:
    """Write a page with each sentence on a line of its own."""
    lines = []
    for part in paragraphs(text):
        if not part.sentences:
            lines += part.lines
        for i, sentence in enumerate(part.sentences):
            lines.append(part.indent + (" " * len(part.marker) if i else part.marker) + sentence)
    return "\n".join([*lines, ""])


def long_items(text: str, most: int = 2) -> list[str]:
    """List the items of a page's lists that have more than `most` sentences, each by its first one."""
    return [part.sentences[0] for part in paragraphs(text) if part.marker and len(part.sentences) > most]


def rewrite(pages: list[pathlib.Path]) -> None:
    """Write the pages with one line a sentence."""
    for page in pages:
        text = page.read_text()
        if (new := one_line_a_sentence(text)) != text:
            page.write_text(new)


if __name__ == "__main__":
    rewrite(WRITTEN)
