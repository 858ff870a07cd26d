"""The cases of all modules in one world, which warms up once: python -m tests.distributed.all_cases MODULE.CASE ..."""

from types import ModuleType

from tests.distributed import (
    axes_cases,
    cases,
    checkpoint_cases,
    compiler_cases,
    context_cases,
    expert_cases,
    jit_cases,
    local_cases,
    pipeline_cases,
    schedule_cases,
    tensor_cases,
    training_cases,
)
from tests.distributed.harness import run

# jit last: its last case lets a rank trace alone, whose messages nobody receives
MODULES: dict[str, ModuleType] = {
    "core": cases,
    "axes": axes_cases,
    "training": training_cases,
    "checkpoint": checkpoint_cases,
    "experts": expert_cases,
    "pipeline": pipeline_cases,
    "tensor": tensor_cases,
    "context": context_cases,
    "local": local_cases,
    "schedules": schedule_cases,
    "compilers": compiler_cases,
    "jit": jit_cases,
}


def quick(name: str) -> list[str]:
    """List the cases of a module that `make test` runs."""
    module = MODULES[name]
    return [case for case in module.CASES if case not in getattr(module, "SLOW", ())]


if __name__ == "__main__":
    run({f"{name}.{case}": f for name, module in MODULES.items() for case, f in module.CASES.items()})
