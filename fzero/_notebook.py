"""What a notebook shows of a value: its text, and a picture."""

import base64
import html
import io
from collections.abc import Callable
from typing import Any

__all__ = ["as_text", "shown"]


def as_text(text: str) -> str:
    """Show a text as HTML, as it stands."""
    return f"<pre>{html.escape(text)}</pre>"


def shown(text: str, alt: str, draw: Callable[[], Any]) -> str:
    """Show a text as HTML, and below it a figure, if matplotlib is there to draw it."""
    page = as_text(text)
    try:
        figure = draw()
    except ImportError:
        return page
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=90)
        picture = base64.b64encode(file.getvalue()).decode()
    return f'{page}<img alt="{alt}" src="data:image/png;base64,{picture}"/>'
