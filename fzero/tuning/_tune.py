"""tune: tabulate the configurations of a step, and find the fastest that fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fzero._tracebacks import api_boundary
from fzero.tuning._machines import Machine, machine_of
from fzero.tuning._row import MakeStep, Row, check_bytes
from fzero.tuning._search import Measure, PlanCache, Skipped, in_order, pool_of, refine, rows_of
from fzero.tuning._space import Dimensions, space_of
from fzero.tuning._table import Table

__all__ = ["MARGIN", "tune"]

MARGIN = 0.07  # the share of a GPU's memory for its context, the communication library's buffers, and fragmentation


@api_boundary
def tune(
    make_step: MakeStep,
    *,
    world_size: int,
    global_batch: int,
    device: str | Machine,
    memory: float | None = None,
    margin: float | None = None,
    stages: Sequence[int] = (0, 1, 2, 3),
    micro_batches: Sequence[int] | None = None,
    remat: Sequence[bool | str] = (False, "matmuls", True),
    precision: Sequence[str] = ("bfloat16",),
    offload: Sequence[float] = (0.0,),
    ep: Sequence[int] = (1,),
    tp: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    schedule: Sequence[str] = ("1f1b",),
    links: Mapping[str, float] | None = None,
    depth: int | None = None,
    workers: int = 1,
    cache: bool = True,
    seen: Callable[[Row | Skipped], None] | None = None,
) -> Table:
    """Plan a step in each configuration, and tabulate which fit, what memory they need, and how fast they are.

    Nothing runs, nothing is allocated, and no GPU is needed. Seconds are estimates by the cost model. A configuration
    that surely holds no less than another that does not fit is skipped. With `depth`, a model of many blocks is
    extrapolated from two models of few blocks, and the best three configurations are planned in full.

    Args:
        make_step: a function from a `Configuration` to `(step, *args)`, the arguments of `fzero.plan`: the step on
            `fzero.mesh(**config.axes)`, and its arguments as meta tensors. It may return a `fzero.graph.Plan`.
        world_size: the number of all ranks. `world_size / (tp * pp)` of them are data-parallel.
        global_batch: samples of one step, over all ranks.
        device: "a100", "h100", "h200", "cpu", "calibrated", or a `Machine` of your measurements.
        memory: bytes of a device; by default the machine's `device_bytes`.
        margin: the share of `memory` that plans do not count: a GPU's context, the communication library's buffers,
            fragmentation. By default 0.07 on a GPU, and 0 on a CPU.
        stages: stages of ZeRO.
        micro_batches: sizes of a rank's micro-batch; by default 1, 2, 4, 8 and 16, as far as they divide.
        remat: what blocks recompute in the backward pass: False for nothing, "matmuls" for all but matrix products,
            True for all.
        precision: dtypes of parameters: "float32", "bfloat16", "float16".
        offload: shares of the optimizer state on the host.
        ep: sizes of the axis over which experts are split, within the data-parallel ranks.
        tp: sizes of the axis along which each rank holds part of every matrix. Combinations of axes that do not make up
            the world are left out.
        pp: sizes of the axis of a pipeline. It runs as many micro-batches as `accumulation`.
        schedule: names of pipeline schedules: "gpipe", "1f1b", "interleaved", "zb", "zbv".
        links: bytes a second that a device sends along an axis of the mesh, such as `{"dp": 40e9}`. By
            default they follow from the machine.
        depth: the number of blocks. With it, `make_step` must build `config.depth` blocks. Every second block may be of
            another kind. If all are alike, give `make_step` a true attribute `blocks_alike`: rows then take less time.
        seen: called with each row as soon as it is planned, and with each configuration that is skipped.
        cache: whether rows are read from the user's cache folder, and stored there. This needs an attribute `cache_key`
            of `make_step`: a string that covers all that its steps depend on. The result of `model_step` has one.
        workers: the number of processes to plan on. They are forked, so call this before the process uses a GPU.

    Returns:
        A `Table`. Print it, plot it, or call its `best()`.

    Raises:
        TypeError: if `make_step` is no such function, or `device` no machine.
        ValueError: if a dimension does not take a value, a batch does not divide, axes do not make up the world, or a
            device is unknown. Also if the step's mesh lacks an axis of its configuration.

    Example:
        >>> import fzero, torch
        >>> from fzero import optim
        >>> def make_step(config):
        ...     pair = optim.master_weights(optim.adam(1e-3), config.policy)
        ...     opt = optim.offload(pair, config.offload)
        ...
        ...     def loss_fn(params, x):
        ...         for p in params["blocks"]:
        ...             x = torch.tanh(x @ p["w"])
        ...         return x.float().square().mean()
        ...
        ...     def train_step(params, opt_state, x):
        ...         take = fzero.value_and_grad(loss_fn, precision=config.policy, micro_batches=config.accumulation)
        ...         loss, grads = take(params, x)
        ...         updates, opt_state = opt.update(grads, opt_state, params)
        ...         return optim.apply_updates(params, updates), opt_state, loss
        ...
        ...     step = fzero.shard(train_step, stage=config.stage, mesh=fzero.mesh(dp=config.ranks))
        ...     with torch.device("meta"):
        ...         params = {"blocks": [{"w": torch.zeros(4096, 4096)} for _ in range(config.depth)]}
        ...         x = torch.zeros(config.global_batch, 4096, dtype=torch.bfloat16)
        ...     return step, *step.init(params, opt), step.mesh.split(x)
        >>> options = {"world_size": 64, "global_batch": 64 * 8192, "device": "h100", "depth": 24}
        >>> dims = {"stages": (1, 3), "micro_batches": (1024, 8192), "remat": (False,)}
        >>> print(fzero.tune(make_step, **options, memory=3e9, **dims).best().config)
        stage 3, micro-batch 8192 x 1, bfloat16
    """
    machine = replace(machine_of(device), links=tuple((links or {}).items()) or machine_of(device).links)
    batch = (world_size, global_batch, stages, micro_batches)
    space = space_of(Dimensions(*batch, remat, precision, offload, ep, tp, pp, schedule, depth))
    if margin is not None and not (isinstance(margin, int | float) and 0 <= margin < 1):
        raise ValueError(f"margin={margin!r}: expected a share of the memory, from 0 to less than 1")
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers={workers!r}: expected an int, at least 1")
    budget = budget_of(machine, memory, margin)
    key = getattr(make_step, "cache_key", None) if cache else None
    measure = Measure(make_step, machine, None if key is None else PlanCache(key, machine))
    with pool_of(workers, measure) as start:
        results: list[Row | Skipped] = []
        for x in rows_of(space, start, workers, budget):
            results.append(x)
            if seen is not None:
                seen(x)
        rows, skipped = in_order(space, results, budget)
        rows = refine(rows, start, budget)
    return Table(tuple(rows), tuple(skipped), machine, memory, budget)


def budget_of(machine: Machine, memory: float | None, margin: float | None) -> float:
    """Return the bytes that a plan may use.

    Raises:
        ValueError: if `memory` is no positive number of bytes.
    """
    if memory is None:
        return machine.device_bytes * (1 - (margin or 0))
    default = MARGIN if machine.kind == "cuda" else 0.0
    return check_bytes("memory", memory) * (1 - (default if margin is None else margin))
