"""The pages list the optimizers that there are."""

import pytest

from tests.optim.pages import ROOT, merge, of_plugs, pages


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_lists_the_optimizers_that_there_are(path):
    assert path.read_text() == pages()[path], "python -m tests.optim writes it"


def test_a_list_keeps_its_order_and_takes_new_names_behind_it():
    assert merge(["b", "gone", "a"], ["a", "b", "c"]) == ["b", "a", "c"]
    assert of_plugs("one of torch's Gone, SGD and Adam.").startswith("one of torch's SGD, Adam, ")
