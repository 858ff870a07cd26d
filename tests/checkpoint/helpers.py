"""Manifests: reading and writing them."""

import json
import zlib
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fzero.checkpoint.layout import MANIFEST

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def memory_in(path: Path) -> str:
    """Make a folder that stands for shared memory."""
    (path / "memory").mkdir(exist_ok=True, parents=True)
    return str(path / "memory")


def write_manifest(path: Path, body: Any) -> None:
    text = json.dumps(body).encode()
    (path / MANIFEST).write_bytes(b'{"crc32":"%08x","checkpoint":%s}\n' % (zlib.crc32(text), text))


def body_of(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_bytes())["checkpoint"]
