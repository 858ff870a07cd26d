"""Checks of what a user passes to an optimizer: trees in each other's place, shapes, and torch's arguments."""

from fzero.optim.checks._roles import has_role, is_opt_state, mark_role, role_of, watch_roles
from fzero.optim.checks._shapes import REMEDIES, check_gradients_like, check_updates, checks_gradients, checks_params
from fzero.optim.checks._torch_hints import check_has_method, torch_equivalents, torch_hints, torch_optimizer_message

__all__ = [
    "REMEDIES",
    "check_gradients_like",
    "check_has_method",
    "check_updates",
    "checks_gradients",
    "checks_params",
    "has_role",
    "is_opt_state",
    "mark_role",
    "role_of",
    "torch_equivalents",
    "torch_hints",
    "torch_optimizer_message",
    "watch_roles",
]
