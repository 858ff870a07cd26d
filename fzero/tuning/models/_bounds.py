"""Bounds of a configuration of a model by name: what its step takes and holds at least, without a plan."""

import math
from typing import NamedTuple

from fzero.codecs import CODECS
from fzero.graph import Hardware, product_seconds, transfer_seconds
from fzero.parallel.schedules import NAMES
from fzero.tuning._search_space import EVERY_SECOND, Configuration
from fzero.tuning.models._model_names import ModelShape

__all__ = ["Bounds", "compute_bounds"]

_NORM_VALUES = 8  # values of the residual stream that two norms and two sums of a block read and write, fused
_MOMENT_BYTES = {None: 8, "bfloat16": 4, "int8": 2}  # of both moments of AdamW, an element
_CODED_BYTES = {name: make().code_kind.bits / 8 for name, make in CODECS.items()}


class Bounds(NamedTuple):
    """What a configuration takes and holds at least, by the formulas of the cost model.

    Attributes:
        seconds: of a step.
        bytes: of the fullest rank's peak.
    """

    seconds: float
    bytes: float


class _BlockSeconds(NamedTuple):
    """The least seconds of one block on a micro-batch."""

    forward: float
    backward: float
    weights: float  # of the backward pass, for the gradients of weights


def compute_bounds(shape: ModelShape, length: int, config: Configuration, hardware: Hardware) -> Bounds:
    """Return a lower bound of the seconds and of the peak that a plan of the configuration has.

    The seconds are those of the chain that no schedule shortens. It has matrix products and attention at the cost
    model's rates, the traffic of norms and activations, the collectives along "tp", and the bubble of the pipeline. If
    the wire takes longer, they are the time of the gradients and parameters that ZeRO sends. The bytes are parameters,
    optimizer state, and the values that wait for the backward pass.

    Args:
        shape: the sizes of the model.
        length: tokens of a sequence, or the side of an image in pixels.
        config: the configuration.
        hardware: the hardware of a rank.
    """
    shape = shape.pad_vocab(config.tp)
    tokens = (length // shape.patch) ** 2 + 1 if shape.task == "image" else length
    bounds = _StepBounds(shape, tokens, config, hardware._replace(axes=tuple(config.axes.items())))
    return Bounds(bounds.seconds(), bounds.state_bytes() + bounds.activation_bytes())


class _StepBounds(NamedTuple):
    """A step of a configuration, and the formulas of its bounds."""

    shape: ModelShape
    tokens: int
    config: Configuration
    hardware: Hardware

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.config.micro_batch * self.tokens // self.config.cp

    @property
    def width_bytes(self) -> int:
        """The bytes of a value."""
        return 4 if self.config.precision == "float32" else 2

    @property
    def blocks(self) -> int:
        """The number of blocks of a rank; in a pipeline the least that any rank has."""
        config, depth = self.config, self.config.depth or self.shape.depth
        stages = config.pipeline_stages if config.pp > 1 else 1
        return depth // (config.pp * stages) * stages

    def widths(self) -> list[tuple[int, int]]:
        """List the inner and the outer width of each product of a block on one rank, the last of the block last."""
        shape, tp = self.shape, self.config.tp
        d, heads = shape.width, shape.heads * shape.head_width // tp
        kv = (shape.kv_heads or shape.heads) * shape.head_width // tp
        mlp = shape.mlp // tp
        inward = [(d, mlp)] * (2 if shape.gated else 1)
        return [(d, heads), (d, kv), (d, kv), (heads, d), *inward, (mlp, d)]

    def product(self, m: int, k: int, n: int, in_block: bool = True) -> float:
        """Return the least seconds of a product of `[m, k]` and `[k, n]`; those in blocks may be in float8."""
        hardware, is_float8 = self.hardware, in_block and self.config.float8 is not None
        fastest = hardware.product_flops or hardware.flops
        # the shapes of the products of experts depend on the routing
        seconds = 2 * m * k * n / fastest if self.shape.experts[0] else product_seconds(m, k, n, hardware)
        if is_float8:
            return seconds / hardware.float8_speedup
        return seconds * (hardware.float32_slowdown if self.width_bytes > 2 else 1.0)

    def block(self) -> _BlockSeconds:
        """Return the least seconds of a block."""
        experts_per_token = self.shape.experts[1] or 1  # each token has rows at so many experts
        rows = [self.tokens_per_rank] * 4 + [self.tokens_per_rank * experts_per_token] * (len(self.widths()) - 4)
        sizes = [(m, k, n) for m, (k, n) in zip(rows, self.widths(), strict=True)]
        forward = [self.product(m, k, n) for m, k, n in sizes]
        inputs = sum([self.product(m, n, k) for m, k, n in sizes])
        weights = sum([self.product(k, m, n) for m, k, n in sizes])
        attention, elementwise, tensor_sums = self._attention_seconds(), self._between_seconds(), self._tensor_seconds()
        # nothing reads the result of the last product a second time
        recompute = (sum(forward[:-1]) + attention) * {True: 1.0, EVERY_SECOND: 0.5}.get(self.config.remat, 0.0)
        backward = recompute + elementwise + inputs + 2 * attention + max(weights, tensor_sums)
        return _BlockSeconds(sum(forward) + attention + elementwise + tensor_sums, backward, weights)

    def _attention_seconds(self) -> float:
        """Return the least seconds of attention: two products over all pairs of tokens."""
        config, shape, hardware = self.config, self.shape, self.hardware
        flops = 4 * config.micro_batch * shape.heads // config.tp * shape.head_width * self.tokens**2 / config.cp
        return flops / (max(hardware.attention_flops, hardware.product_flops) or hardware.flops)

    def _between_seconds(self) -> float:
        """Return the least seconds of the operations between products, which only read and write."""
        shape, tp = self.shape, self.config.tp
        stream = _NORM_VALUES * self.tokens_per_rank * shape.width / tp
        hidden = (3 if shape.gated else 2) * self.tokens_per_rank * (shape.experts[1] or 1) * shape.mlp / tp
        return (stream + hidden) * self.width_bytes / self.hardware.memory_bandwidth

    def _tensor_seconds(self) -> float:
        """Return the least seconds of the collectives along "tp" in one pass of a block: two gathers, two sums."""
        if self.config.tp == 1:
            return 0.0
        size = self.tokens_per_rank * self.shape.width * self.width_bytes
        return 2 * sum(
            [transfer_seconds(kind, size, ("tp",), self.hardware) for kind in ("all_gather", "reduce_scatter")]
        )

    def seconds(self) -> float:
        """Return the least seconds of a step.

        Gradients are clipped by their global norm, so no update begins before the last gradient has come. At stages 1
        and 2 the new parameters are gathered after that.
        """
        config, block, k = self.config, self.block(), self.config.accumulation
        forward, backward, weights = [self.blocks * x for x in block]
        head_forward, head_backward = self._head_seconds()
        reduce_seconds, gather_seconds = self._wire_seconds()
        update_seconds = (
            0.0
            if config.offload
            else 12 * self._params_per_rank() / self._shard_ranks() / self.hardware.memory_bandwidth
        )
        end = max(update_seconds, gather_seconds) if config.layout.shards_within_step else update_seconds
        if config.pp > 1:
            splits = NAMES[config.schedule].splits_backward
            bubble = forward + (0.0 if splits else backward - weights)
            # a rank has the most blocks, and the last rank has the head
            max_stage_seconds = math.ceil((config.depth or self.shape.depth) / config.pp) * (
                block.forward + block.backward
            )
            busiest = max(max_stage_seconds, forward + backward + head_forward + head_backward)
            chain = k * busiest + (config.pp - 1) * bubble / config.pipeline_stages
            return max(chain + end, reduce_seconds + gather_seconds)
        chain = k * (forward + backward + head_forward + head_backward)
        # sums of a micro-batch hide behind its backward pass
        exposed_seconds = max(reduce_seconds - backward - head_backward, 0.0)
        return max(chain + exposed_seconds + end, reduce_seconds + gather_seconds)

    def _head_seconds(self) -> tuple[float, float]:
        """Return the least seconds of the output head, forward and backward."""
        shape = self.shape
        rows = self.config.micro_batch if shape.task == "image" else self.tokens_per_rank
        classes = shape.vocab // self.config.tp
        forward, inputs, weights = (
            self.product(*sizes, in_block=False)
            for sizes in ((rows, shape.width, classes), (rows, classes, shape.width), (shape.width, rows, classes))
        )
        return forward, inputs + weights

    def _params_per_rank(self) -> float:
        """Return the number of parameters of a rank before ZeRO, on average over a pipeline."""
        shape, config = self.shape, self.config
        experts = shape.experts[0] or 1
        dense = sum([k * n for k, n in self.widths()[:4]])
        mlp = sum([k * n for k, n in self.widths()[4:]]) * experts / config.ep
        depth = config.depth or shape.depth
        table = shape.vocab * shape.width / config.tp if shape.task != "image" else 0
        head = 0 if shape.tied else shape.vocab * shape.width / config.tp
        return (depth * (dense + mlp) + table + head) / config.pp

    def _shard_ranks(self) -> int:
        """Return over how many ranks ZeRO shards at most."""
        return self.config.ranks * self.config.cp

    def _wire_seconds(self) -> tuple[float, float]:
        """Return the least seconds in which the ranks of ZeRO send gradients, and those in which they gather."""
        config = self.config
        names = tuple([name for name in ("dp", "cp") if name in config.axes])
        elements = 0.0 if self.shape.experts[0] else self._params_per_rank()  # experts have fewer copies
        if config.host > 1:  # the part of a rank's place within its host
            names, elements = ("host",), elements / config.axes["dp"]
        gather = _CODED_BYTES.get(config.gather or "", self.width_bytes) * elements
        reduce = _CODED_BYTES.get(config.reduce or "", 4.0) * elements
        reduce_seconds = transfer_seconds("reduce_scatter", reduce, names, self.hardware)
        if not config.layout.shards_state:  # one all_reduce
            return 2 * reduce_seconds, 0.0
        return reduce_seconds, transfer_seconds("all_gather", gather, names, self.hardware)

    def state_bytes(self) -> float:
        """Return the bytes of parameters and optimizer state between steps."""
        config, n = self.config, self._params_per_rank()
        shards = self._shard_ranks() if config.layout.shards_state else 1
        half = config.precision != "float32"
        full = 0.0
        if not config.layout.shards_params:
            full = self.width_bytes * n if half else 4 * n
        masters = 4 if half or config.layout.shards_params else 0
        return full + (masters + _MOMENT_BYTES[config.moments]) * n / shards * (1 - config.offload)

    def activation_bytes(self) -> float:
        """Return the bytes of the values that wait for the backward pass, when a micro-batch has gone forward."""
        config, shape = self.config, self.shape
        stream = shape.width / config.tp
        products = sum([n for _, n in self.widths()[:3]]) + sum([n for _, n in self.widths()[4:-1]])
        residuals = {True: stream, EVERY_SECOND: (stream + products) / 2}.get(config.remat, products)
        logits = 0 if config.chunked_loss or config.pp > 1 or shape.task == "image" else shape.vocab / config.tp
        # the first rank has run so many micro-batches forward when its first backward pass begins
        in_flight = {"gpipe": config.accumulation, "1f1b": min(config.pp, config.accumulation)}.get(config.schedule, 1)
        return (
            self.tokens_per_rank
            * ((in_flight if config.pp > 1 else 1) * self.blocks * residuals + logits)
            * self.width_bytes
        )
