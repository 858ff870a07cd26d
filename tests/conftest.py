"""One thread a worker and its children, one hypothesis profile for all tests, and imports that the collector skips."""

import gc
import os

import pytest

# before torch: Inductor would start processes of its own, which take longer to begin than our code to compile
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# derandomize: a run on the same code tries the same examples, so that main is green or red for everybody
OPTIONS = {"deadline": None, "derandomize": True}


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. The one that hands them out to others needs neither torch nor hypothesis."""
    gc.set_threshold(20_000, 20, 50)  # a search each 700 objects would take a seventh of the time
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import HealthCheck, Phase, settings

    torch.set_num_threads(1)
    options = {**OPTIONS, "suppress_health_check": list(HealthCheck)}
    settings.register_profile("fzero", **options, max_examples=50)
    settings.register_profile("all", **options)  # more examples of some laws: tests.helpers.examples
    phases = [Phase.explicit, Phase.generate]  # no shrinking
    settings.register_profile("mutants", **options, max_examples=50, phases=phases)
    settings.register_profile("check", **options, max_examples=5)
    # other examples with each seed, so none from an earlier run: `make laws`
    options |= {"derandomize": False, "database": None, "print_blob": True}
    settings.register_profile("random", **options, max_examples=50)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fzero"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the laws alone where examples are random."""
    if os.environ.get("HYPOTHESIS_PROFILE") == "random":
        others = [item for item in items if not getattr(getattr(item, "obj", None), "is_hypothesis_test", False)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    """Leave what collection has made out of each later search for garbage, which would take a tenth of the time."""
    gc.collect()
    gc.freeze()
