"""The states of fzero's optimizers, told by their names: a step that is given one in place of parameters says so."""

__all__ = ["is_opt_state"]


def is_opt_state(values: object) -> bool:
    """Return whether a value is the state of an optimizer of fzero, or of a chain with one.

    Such a state is a named tuple of a class of `fzero.optim` whose name ends with "State".
    """
    if type(values) is tuple:
        return any(is_opt_state(x) for x in values)
    # Dynamo knows the module of no other class, such as dict
    return isinstance(values, tuple) and _is_of_optim(type(values))


def _is_of_optim(kind: type) -> bool:
    return kind.__module__.startswith("fzero.optim.") and kind.__name__.endswith("State")
