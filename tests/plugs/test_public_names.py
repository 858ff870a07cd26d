"""The public names of the plugs, held to the rules that `tests/test_structure.py` holds the others to."""

from tests.public_names import OF_PLUGS, public_names, undocumented, without_boundary, without_example


def test_public_names_of_plugs_are_documented():
    names = public_names(OF_PLUGS)
    assert len(OF_PLUGS) == 3 and len(names) > 3
    assert not undocumented(names), "begin the docstring with a sentence"
    assert not without_example(names), "add an example that runs"
    assert not without_boundary(names), "@api_boundary above the function"
