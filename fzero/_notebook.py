"""HTML for notebooks: the text of a value, and a picture."""

import base64
import html
import io
from collections.abc import Callable
from typing import Any

__all__ = ["as_html", "as_text"]


def as_text(text: str) -> str:
    """Return a text as HTML, in a fixed-width font."""
    return f"<pre>{html.escape(text)}</pre>"


def as_html(text: str, alt: str, draw: Callable[[], Any]) -> str:
    """Return a text as HTML, with a figure below it if matplotlib is installed."""
    page = as_text(text)
    try:
        figure = draw()
    except ImportError:
        return page
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=90)
        picture = base64.b64encode(file.getvalue()).decode()
    return f'{page}<img alt="{alt}" src="data:image/png;base64,{picture}"/>'
