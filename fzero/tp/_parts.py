"""The layers of a part of a module: of a block, or of all but the blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fzero.tp._layers import Layers

__all__ = ["of_block", "outside"]

from fzero.tp._split import T


def of_block(layers: Layers, name: str) -> Layers:
    """Return the layers of a block, named as it names them itself.

    Args:
        layers: of the whole module.
        name: of the block.
    """

    def own(table: Mapping[str, T]) -> dict[str, T]:
        return {key.removeprefix(f"{name}."): x for key, x in table.items() if key.startswith(f"{name}.")}

    styles, cuts, sizes = own(layers.styles), own(layers.cuts), own(layers.sizes)
    return replace(layers, styles=styles, cuts=cuts, sizes=sizes, in_block=True)


def outside(layers: Layers, names: Sequence[str]) -> Layers:
    """Return the layers that lie in none of some blocks. What blocks hand on is cut by who runs these.

    Args:
        layers: of the whole module.
        names: of the blocks.
    """
    places = tuple([f"{name}." for name in names])

    def rest(table: Mapping[str, T]) -> dict[str, T]:
        return {key: x for key, x in table.items() if not key.startswith(places)}

    styles, cuts, sizes = rest(layers.styles), rest(layers.cuts), rest(layers.sizes)
    return replace(layers, sequence=False, styles=styles, cuts=cuts, sizes=sizes)
