"""One thread a worker, and one hypothesis profile for all tests."""

import os

import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)

# derandomize: a run on the same code tries the same examples, so that main is green or red for everybody
options = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
settings.register_profile("fzero", **options)
settings.register_profile("mutants", **options, phases=[Phase.explicit, Phase.generate])  # no shrinking
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fzero"))
