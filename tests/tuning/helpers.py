"""A tiny model, and machines to draw."""

from hypothesis import strategies as st

from fzero import tuning
from fzero.tuning.models import ModelShape

positive = st.floats(1e6, 1e15)


machines = st.builds(
    tuning.Machine, st.just("m"), positive, positive, positive, positive, positive, positive, st.integers(1, 16)
)


TINY = {
    "causal": ModelShape("llama", 32, 2, 4, 48, 64, kv_heads=2, gated=True, norm="rms", biases="", head_norm=True),
    "gpt2": ModelShape("gpt2", 32, 2, 4, 48, 64, positions=16, tied=True),
    "masked": ModelShape("bert", 32, 2, 4, 48, 64, positions=16, tied=True, task="masked"),
    "image": ModelShape("vit", 32, 2, 4, 48, 10, positions=5, patch=8, task="image"),
    "experts": ModelShape("mixtral", 32, 2, 4, 48, 64, gated=True, norm="rms", biases="", experts=(4, 2)),
}
