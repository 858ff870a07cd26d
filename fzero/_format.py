"""Formats of numbers in messages and tables."""

__all__ = ["format_bytes", "format_seconds"]


def format_bytes(count: float) -> str:
    """Format a number of bytes in a suitable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    if seconds >= 0.1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} us"
