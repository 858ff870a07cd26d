"""Formats of numbers in messages and tables."""

__all__ = ["format_bytes"]


def format_bytes(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
