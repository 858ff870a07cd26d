"""The types of the states of fzero's optimizers: a step that is given one in place of parameters says so."""

from fzero.optim._adafactor import AdafactorState
from fzero.optim._adam import AdamState
from fzero.optim._averages import EmaState
from fzero.optim._links import ScaleByScheduleState
from fzero.optim._muon import MuonState
from fzero.optim._one_moment import AdagradState, LionState, SgdState
from fzero.optim.wrappers import (
    DelayedState,
    InjectHyperparamsState,
    LossScaleState,
    MasterState,
    StochasticRoundingState,
)

__all__ = ["is_opt_state"]

_STATES = (
    AdafactorState,
    AdagradState,
    AdamState,
    DelayedState,
    EmaState,
    InjectHyperparamsState,
    LionState,
    LossScaleState,
    MasterState,
    MuonState,
    ScaleByScheduleState,
    SgdState,
    StochasticRoundingState,
)


def is_opt_state(values: object) -> bool:
    """Return whether a value is the state of an optimizer of fzero, or of a chain with one."""
    return isinstance(values, _STATES) or (type(values) is tuple and any(is_opt_state(x) for x in values))
