"""Names that are not there: the error has what fzero has for another library's name, or the nearest name.

A module or class has a table `_FOREIGN_NAMES`: a name of another library, and what stands in its place here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fzero._arguments import did_you_mean

__all__ = ["missing_attribute", "missing_members", "missing_names"]


def missing_attribute(
    owner: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None, template: str = "{}"
) -> AttributeError:
    """Return the error of a name that an owner has not.

    Args:
        owner: the owner in words, such as "module 'fzero.optim'".
        name: the name that is not there.
        known: the owner's public names.
        elsewhere: names of other libraries, each with what fzero has in its place.
        template: how a nearest name is written, with "{}" in its place.

    Example:
        >>> str(missing_attribute("Mesh", "get_rank", ["rank"], {"get_rank": "mesh.rank"}))
        "Mesh has no attribute 'get_rank': here it is mesh.rank"
    """
    public = [x for x in known if not x.startswith("_")]
    here = f": here it is {elsewhere[name]}" if elsewhere and name in elsewhere else ""
    hint = here or did_you_mean(name, public, template, cutoff=0.7)
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)


def missing_names(
    module: str, names: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which Python calls for a name that is not there: it raises.

    Args:
        module: the name of the module.
        names: the module's public names.
        elsewhere: names of other libraries, each with what fzero has in its place.

    Raises:
        AttributeError: at each call.

    Example:
        >>> missing_names("fzero.optim", ["adamw", "sgd"])("adamW")
        Traceback (most recent call last):
        AttributeError: module 'fzero.optim' has no attribute 'adamW'; did you mean fzero.optim.adamw?
    """

    def raise_with_hint(name: str) -> Any:
        """Raise an AttributeError that says what stands in the name's place."""
        raise missing_attribute(f"module {module!r}", name, names, elsewhere, f"{module}.{{}}")

    return raise_with_hint


def missing_members(elsewhere: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """Return a class's `__getattr__`, which Python calls for an attribute that is not there: it raises.

    Args:
        elsewhere: names of other libraries, each with what fzero has in its place.

    Raises:
        AttributeError: at each call.

    Example:
        >>> class Mesh:
        ...     rank = 0
        ...     __getattr__ = missing_members({"get_rank": "mesh.rank"})
        >>> Mesh().get_rank()
        Traceback (most recent call last):
        AttributeError: 'Mesh' object has no attribute 'get_rank': here it is mesh.rank
        >>> hasattr(Mesh(), "world"), hasattr(Mesh(), "__array__")
        (False, False)
    """

    def raise_with_hint(self: Any, name: str) -> Any:
        """Raise an AttributeError that says what stands in the attribute's place."""
        members = () if name.startswith("_") else dir(self)  # copy, pickle and other protocols ask for the former
        raise missing_attribute(f"{type(self).__name__!r} object", name, members, elsewhere)

    return raise_with_hint
