"""The whole step as one scheduled graph: `fzero.jit` and `fzero.plan`."""

from fzero._donated import DonatedError
from fzero.graph._deferred import Deferred, defer
from fzero.graph._jit import Jitted, jit
from fzero.graph._plan import Collective, Plan, Step
from fzero.graph._world import plan

__all__ = ["Collective", "Deferred", "DonatedError", "Jitted", "Plan", "Step", "defer", "jit", "plan"]
