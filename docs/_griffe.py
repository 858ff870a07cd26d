"""Griffe, which reads our docstrings for the reference: two things that it would take otherwise."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Adapt docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Name the section `Example:` as griffe does, so that it is shown as code."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Put the annotation before what is returned: else griffe takes all up to a colon for the type."""
        if func.docstring is not None and func.returns is not None:
            func.docstring.value = re.sub(r"^(Returns:\n +)", rf"\1{func.returns}: ", func.docstring.value, flags=re.M)
