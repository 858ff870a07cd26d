"""Parse JSON that anybody may have written, in bounded memory."""

import json
from typing import Any

__all__ = ["parse_json"]

MOST = 1 << 20  # lists and objects, of some 64 bytes each: a checkpoint of a hundred thousand leaves has fewer


def parse_json(data: bytes) -> Any:
    """Parse a JSON text of a limited size. An empty list takes 2 bytes of it, and thirty times as much memory.

    Raises:
        ValueError: if the text is no JSON, has too many lists and objects, or nests them too deep.
    """
    count = data.count(b"[") + data.count(b"{")
    if count > MOST:
        raise ValueError(f"it has {count:,} lists and objects: expected at most {MOST:,}")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    except MemoryError:
        raise ValueError("it takes more memory than there is") from None
