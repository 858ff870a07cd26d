"""Context parallelism: sequences whose tokens are split over an axis, and attention across its ranks."""

from fzero.parallel.context._attention import attention
from fzero.parallel.context._halo import causal_conv1d, halo, neighbours
from fzero.parallel.context._layout import all_gather, positions, shift_labels, split
from fzero.parallel.context._models import ContextAxis, check_model, install, notice_split_tokens, rope_types
from fzero.parallel.context._token_check import check_tokens

__all__ = ["all_gather", "attention", "causal_conv1d", "halo", "neighbours", "positions", "shift_labels", "split"]

# For other packages of fzero only. They may change in any release.
INTERNAL = ["ContextAxis", "check_model", "check_tokens", "install", "notice_split_tokens", "rope_types"]
