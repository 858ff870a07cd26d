"""Peaks of other systems on a device: their states by their own rules, and the activations that autograd saves.

An eager system keeps what autograd saves, where fzero.jit recomputes some of it. So the row is planned again, without
recomputation, and its parameters, state and gradients are replaced by those of the system.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fzero import tree
from fzero.graph import jit
from fzero.tuning._search_space import Configuration
from fzero.tuning.machines import Machine
from fzero.tuning.models import TENSOR, ModelShape, ModelStep, init
from fzero.tuning.search import ConfigurationPlanner, RowCache

__all__ = ["ParameterCounts", "StateBytes", "activation_bytes", "count_parameters", "deepspeed_states", "fsdp2_states"]

_KINDS = ("parameters", "optimizer state", "gradients", "gathered")  # of a plan, in whose place StateBytes stand
_BUCKET_ELEMENTS = 500_000_000  # elements of DeepSpeed's reduce_bucket_size
_MAX_LIVE = 1_000_000_000  # elements of DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True)
class _EagerStep(ModelStep):
    """Makes the steps of a model in a schedule like that of eager torch: nothing runs again but what `remat` says."""

    def __call__(self, config: Configuration) -> Any:
        step, *args = super().__call__(config)
        return jit(step, prefetch="fitting", in_flight=1, recompute=False), *args


def activation_bytes(make_step: ModelStep, machine: Machine, config: Configuration) -> float:
    """Plan a configuration as an eager system runs it, and return the bytes at its peak that are not state."""
    eager = _EagerStep(make_step.shape, make_step.length, make_step.explicit)
    planner = ConfigurationPlanner(eager, machine, RowCache(eager.cache_key, machine))
    row = planner(replace(config, offload=0.0, depth=config.depth or make_step.shape.depth))
    return sum([n for kind, n in row.device_bytes.items() if kind not in _KINDS])


class ParameterCounts(NamedTuple):
    """How many parameters a rank has.

    Attributes:
        full: those of the whole layers that it computes with, after `tp`, `ep` and `pp`.
        sharded: its share of them over the data-parallel ranks.
        unit: those of the largest block, or of the embedding.
    """

    full: float
    sharded: float
    unit: float


def count_parameters(shape: ModelShape, config: Configuration) -> ParameterCounts:
    """Count the parameters of a rank; of a rank in a pipeline, on average."""
    data_ranks = config.ranks * config.cp
    full: dict[str, float] = {}
    sharded = 0.0
    paths, leaves, _ = tree.flatten_with_paths(init(shape.pad_vocab(config.tp), config.depth or shape.depth))
    for path, leaf in zip(paths, leaves, strict=True):
        copies = config.ep if ".experts." in path else 1
        count = leaf.numel() / copies / (config.tp if path.endswith(tuple(TENSOR)) else 1)
        sharded += count * copies / data_ranks
        unit = ".".join(path.split(".")[:2]) if path.startswith("blocks") else path
        full[unit] = full.get(unit, 0.0) + count
    return ParameterCounts(sum(full.values()) / config.pp, sharded / config.pp, max(full.values()))


class StateBytes(NamedTuple):
    """Bytes of a system on a device, besides activations.

    Attributes:
        parameters: those between steps.
        gradients: those of a whole step.
        optimizer: the state of the optimizer, with master weights.
        buffers: gathered parameters and buckets, in the forward and backward pass.
        update: the bytes that an update takes besides.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    update: float

    def peak(self, activations: float, accumulates: bool) -> float:
        """Return the larger of the bytes at the end of a forward pass and in the update.

        Args:
            activations: the bytes of activations.
            accumulates: whether gradients of earlier micro-batches are alive in the forward pass.
        """
        always = self.parameters + self.optimizer
        return always + max(
            activations + self.buffers + self.gradients * accumulates,
            self.gradients + self.update,
        )


def fsdp2_states(sizes: ParameterCounts, config: Configuration) -> StateBytes:
    """Return the states of FSDP2, whose shards are float32 and whose gathers are cast.

    At stage 0 all is replicated. Stage 1 holds whole gradients where they are summed over micro-batches.
    """
    width = 4 if config.precision == "float32" else 2
    held_params = sizes.full if config.stage == 0 else sizes.sharded
    gathered_bytes = width * (2 * sizes.unit if config.stage == 3 else sizes.full)
    if config.host > 1 and config.stage == 3:
        # a host's shards, from the forward to the backward pass
        gathered_bytes += width * sizes.full / config.axes["dp"]
    gradients = 4 * (sizes.full if config.stage < 2 and config.accumulation > 1 else held_params)
    if config.offload:  # the update runs on the host
        return StateBytes(parameters=0.0, gradients=0.0, optimizer=0.0, buffers=gathered_bytes, update=0.0)
    return StateBytes(
        parameters=4 * held_params,
        gradients=gradients,
        optimizer=8 * held_params,
        buffers=gathered_bytes,
        update=4 * held_params,
    )


def deepspeed_states(sizes: ParameterCounts, config: Configuration) -> StateBytes:
    """Return the states of DeepSpeed with its default buckets. Its masters are float32 in any precision."""
    width = 4 if config.precision == "float32" else 2
    held_params = sizes.full if config.stage == 0 else sizes.sharded
    parameters = width * (sizes.sharded if config.stage == 3 else sizes.full)
    live = min(sizes.full, _MAX_LIVE) if config.stage == 3 else 0.0
    live += sizes.full / config.axes["dp"] if config.host > 1 and config.stage == 3 else 0.0  # a host's shards
    gradients = width * (sizes.full if config.stage < 2 else held_params)
    on_host = config.offload if config.stage == 3 else float(config.offload > 0)  # a share only at stage 3
    on_host = on_host if config.stage else 0.0
    return StateBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer=12 * held_params * (1 - on_host),
        buffers=width * (_BUCKET_ELEMENTS + live),
        update=4 * held_params * (1 - on_host),
    )
