"""One thread a worker, and one hypothesis profile for all tests."""

import hypothesis
import torch

torch.set_num_threads(1)

# derandomize: a run on the same code tries the same examples, so that main is green or red for everybody
hypothesis.settings.register_profile(
    "fzero", deadline=None, derandomize=True, print_blob=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("fzero")
