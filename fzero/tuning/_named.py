"""The machine of a name: of a data sheet, or the one that was calibrated."""

import json
from dataclasses import asdict
from typing import Any

from fzero.tuning._cache import cache_folder, written
from fzero.tuning._machine_constants import MACHINES
from fzero.tuning._machines import Machine

__all__ = ["calibrated", "machine_of", "save"]


def machine_of(device: Any) -> Machine:
    """Return the machine of a name, or the one that was given; "calibrated" is the one in the cache folder.

    Raises:
        TypeError: if `device` is neither a name nor a machine.
        ValueError: if no machine has that name, or none was calibrated.
    """
    if isinstance(device, Machine):
        return device
    names = ", ".join([*MACHINES, "calibrated"])
    if not isinstance(device, str):
        raise TypeError(
            f"device={device!r}: expected a fzero.tuning.Machine, or one of {', '.join(MACHINES)}, calibrated"
        )
    if device.lower() == "calibrated":
        return calibrated()
    if device.lower() not in MACHINES:
        raise ValueError(f"device={device!r} is unknown: expected {names}, or a fzero.tuning.Machine of your own")
    return MACHINES[device.lower()]


def _path() -> Any:
    return cache_folder() / "calibrated.json"


def save(machine: Machine) -> Any:
    """Keep a machine in the user's cache folder, and return its path."""
    written(_path(), json.dumps(asdict(machine), indent=1))
    return _path()


def calibrated() -> Machine:
    """Return the machine that `fzero calibrate` stored.

    Raises:
        ValueError: if there is none, or none that can be read.
    """
    try:
        return Machine(**json.loads(_path().read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ValueError(
            "device='calibrated': nothing is stored yet: run `fzero calibrate` on the machine, or "
            "`torchrun --nproc-per-node N -m fzero calibrate` to measure its links too"
        ) from error
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"device='calibrated': {_path()} cannot be read, run `fzero calibrate` again: {error}"
        ) from error
