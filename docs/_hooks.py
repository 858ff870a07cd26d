"""MkDocs: the repository's pages outside docs/ are pages of the site, and links between them lead there."""

import base64
import json
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
PATTERNS = (
    "benchmarks/*.md",
    "benchmarks/results/*.md",
    "benchmarks/results/*.png",
    "examples/*.py",
    "examples/*.ipynb",
)
for pattern in PATTERNS:
    for path in sorted(ROOT.glob(pattern)):
        source = path.relative_to(ROOT).as_posix()
        ELSEWHERE[source] = re.sub(r"\.(py|ipynb)$", ".md", source)
SOURCE = {site: source for source, site in ELSEWHERE.items()}


def on_files(files: Any, config: Any) -> Any:
    for source, site in ELSEWHERE.items():
        if source.endswith(".png"):
            files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))
            continue
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            output = ROOT / "docs" / "_outputs" / f"{Path(source).stem}.txt"
            shown = f"\n## What it prints\n\n```text\n{output.read_text()}```\n" if output.exists() else ""
            text = f"# {source}\n\n````python\n{text}````\n{shown}"
        if source.endswith(".ipynb"):
            text = notebook(json.loads(text), site, files, config)
        files.append(File.generated(config, site, content=text))
    return files


def notebook(cells: Any, site: str, files: Any, config: Any) -> str:
    """Write a notebook down as Markdown, with its outputs; its pictures become files."""
    parts = []
    for i, cell in enumerate(cells["cells"]):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown = "".join(output.get("text") or data["text/plain"]).rstrip()
            parts.append(f"```text\n{shown}\n```")
            if "image/png" in data:
                name = f"{site.removesuffix('.md')}-{i}.png"
                files.append(File.generated(config, name, content=base64.b64decode(data["image/png"])))
                parts.append(f"![The picture of cell {i}]({posixpath.basename(name)})")
    return "\n\n".join(parts) + "\n"


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
