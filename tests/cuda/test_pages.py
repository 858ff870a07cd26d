"""The code of every page runs unchanged on a GPU: none of its statements meets a value on the CPU."""

import json
import re
import sys

import pytest

from tests.cuda import processes
from tests.docs.pages import GUIDES, TUTORIAL, blocks

# A kernel of `make cuda` computes nothing, so a page may stop at a value; it must not stop at where a value lies.
PLACE = r"on cpu|on cuda|same device|Expected .* device"
PAGES = [page for page in [*TUTORIAL, *GUIDES] if any(block.runs for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_on_a_gpu(page):
    output = processes.run([sys.executable, "-m", "tests.cuda.devices", "tests/cuda/pages.py", str(page)])
    (line,) = [x for x in output.splitlines() if x.startswith("FACTS ")]
    error = json.loads(line.removeprefix("FACTS ")).get("error", "")
    assert not re.search(PLACE, error) and not (processes.has_gpu() and error), line
