"""Reports: results that print themselves, draw themselves, and show text and picture in a notebook."""

import base64
import html
import io
import os
from typing import Any

from fzero._arguments import check_path

__all__ = ["FigureReport", "Report", "new_figure"]


class Report:
    """A result that prints itself. A notebook shows its text in a fixed-width font."""

    def _notebook_text(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._notebook_text())}</pre>"


class FigureReport(Report):
    """A report with a picture. A subclass draws it in `_draw_figure`, and describes it in `_caption`."""

    _caption = ""

    def _draw_figure(self) -> Any:
        """Draw the picture as a matplotlib figure."""
        raise NotImplementedError

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the picture into an image file (needs matplotlib).

        Args:
            path: the path of the file. Its ending sets the format, such as ".png" or ".svg".
        """
        path = check_path("path", path, "the path of an image file, such as 'plan.png'")
        self._draw_figure().savefig(path, dpi=120)

    def _repr_html_(self) -> str:
        page = super()._repr_html_()
        try:
            figure = self._draw_figure()
        except ImportError:  # without matplotlib the text stands alone
            return page
        with io.BytesIO() as file:
            figure.savefig(file, format="png", dpi=90)
            picture = base64.b64encode(file.getvalue()).decode()
        return f'{page}<img alt="{self._caption}" src="data:image/png;base64,{picture}"/>'


def new_figure(width: float, height: float) -> Any:
    """Make an empty matplotlib figure, in inches, that is drawn without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
