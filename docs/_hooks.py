"""MkDocs: the repository's pages outside docs/ are pages of the site, and links between them lead there."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}  # in the repository: on the site
for pattern in ("benchmarks/*.md", "benchmarks/results/*.md", "benchmarks/results/*.png", "examples/*.py"):
    for path in sorted(ROOT.glob(pattern)):
        source = path.relative_to(ROOT).as_posix()
        ELSEWHERE[source] = source.removesuffix(".py") + ".md" * source.endswith(".py")
SOURCE = {site: source for source, site in ELSEWHERE.items()}


def on_files(files: Any, config: Any) -> Any:
    for source, site in ELSEWHERE.items():
        if source.endswith(".png"):
            files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))
            continue
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = f"# {source}\n\n````python\n{text}````\n"
        files.append(File.generated(config, site, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    site = page.file.src_uri
    folder = posixpath.dirname(SOURCE.get(site, f"docs/{site}"))

    def lead(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        on_site = ELSEWHERE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if on_site is None:
            return match[0]
        return f"]({posixpath.relpath(on_site, posixpath.dirname(site) or '.')}{anchor})"

    return re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)", lead, markdown)
