"""The public names of the plugs, held to the rules that `tests/test_structure.py` holds the others to."""

from tests.public_names import OF_PLUGS, missing_parts, public_names


def test_public_names_of_plugs_are_documented():
    names = public_names(OF_PLUGS)
    assert len(OF_PLUGS) == 3 and len(names) > 3
    assert not missing_parts(names), "\n".join(missing_parts(names))
