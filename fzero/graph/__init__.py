"""The whole step as one scheduled graph: `fzero.jit` and `fzero.plan`."""

from fzero._donated import DonatedError
from fzero.graph._jit import Jitted, jit
from fzero.graph._plan import Collective, Plan, Step
from fzero.graph._world import plan

__all__ = ["Collective", "DonatedError", "Jitted", "Plan", "Step", "jit", "plan"]
