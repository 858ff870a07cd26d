"""The states of fzero's optimizers, told by their names: a step that is given one in place of parameters says so."""

__all__ = ["is_opt_state"]


def is_opt_state(values: object) -> bool:
    """Return whether a value is the state of an optimizer of fzero, or of a chain with one.

    Such a state is of a class of `fzero.optim` whose name ends with "State".
    """
    kind = type(values)
    is_own = kind.__module__.startswith("fzero.optim.") and kind.__name__.endswith("State")
    return is_own or (type(values) is tuple and any(is_opt_state(x) for x in values))
