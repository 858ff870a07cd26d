"""tune: a table of the configurations of a step, and the fastest that fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fzero._tracebacks import api_boundary
from fzero.tuning._machines import Machine, machine_of
from fzero.tuning._row import MakeStep, Row, checked_bytes
from fzero.tuning._search import Measure, PlanCache, Skipped, in_order, pool_of, refined, rows_of
from fzero.tuning._space import Dimensions, space_of
from fzero.tuning._table import Table

__all__ = ["MARGIN", "tune"]

MARGIN = 0.07  # of a GPU's memory: its context, the communication library's buffers, and fragmentation


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
    """Plan a step in each configuration, and tabulate what fits, what it takes, and how fast it is by the cost model.

    Nothing runs, nothing is allocated, and no GPU is needed. What surely holds more than a configuration that does not
    fit is not planned. With `depth` a model of many blocks is told from two of few, and the best three are planned in
    full.

    Args:
        make_step: a function from a `Configuration` to `(step, *args)`, which is what `fzero.plan` takes: the step, and
            its arguments on meta tensors, on `fzero.mesh(**config.axes)`. It may return a `fzero.graph.Plan`.
        world_size: all ranks. Of these `world_size / (tp * pp)` are data-parallel.
        global_batch: samples of one step, over all ranks.
        device: "a100", "h100", "h200", "cpu", or a `Machine` of your measurements.
        memory: bytes of a device; by default what the machine says a step may take.
        margin: the share of `memory` that a plan does not see: a GPU's context, the communication library's buffers,
            fragmentation. By default 0.07; 0 on a CPU.
        stages: of ZeRO.
        micro_batches: samples that a rank differentiates at once; by default 1 to 16, as far as they divide.
        remat: what blocks run again for the backward pass, as `fzero.remat(save=)`: nothing, all but "matmuls", or all.
        precision: of parameters: "float32", "bfloat16", "float16".
        offload: shares of the optimizer's state on the host.
        ep: sizes of an axis that experts are split over, within the data-parallel ranks.
        tp: sizes of an axis along which each rank has a part of every matrix. Sizes of axes that do not go together are
            left out.
        pp: sizes of an axis of a pipeline. Its micro-batches are those of the accumulation.
        schedule: of pipelines, by name: "gpipe", "1f1b", "interleaved", "zb", "zbv".
        links: bytes a second that a device sends along an axis of the mesh, such as `{"dp": 40e9}`. By
            default they follow from the machine.
        depth: the number of blocks. Then `make_step` must build as many as `config.depth` says. Every second one may be
            of another kind; none is if `make_step` has a true attribute `blocks_alike`, and then rows take less time.
        seen: is called with each row as soon as it is planned, and with each configuration that is skipped.
        cache: whether rows are taken from the user's cache folder, and kept there. They are if `make_step` has an
            attribute `cache_key`, a string that says all that its steps depend on, as that of `model_step` does.
        workers: processes to plan on. They are forked, so ask for them before this process has used a GPU.

    Returns:
        A `Table`: print it, plot it, ask for its `best()`.

    Raises:
        TypeError: if `make_step` is no such function, or `device` no machine.
        ValueError: if a value is none of its dimension's, a batch does not divide, axes do not make up the world, or a
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
        >>> asked = {"world_size": 64, "global_batch": 64 * 8192, "device": "h100", "depth": 24}
        >>> dims = {"stages": (1, 3), "micro_batches": (1024, 8192), "remat": (False,)}
        >>> print(fzero.tune(make_step, **asked, memory=3e9, **dims).best().config)
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
        found: list[Row | Skipped] = []
        for x in rows_of(space, start, workers, budget):
            found.append(x)
            if seen is not None:
                seen(x)
        rows, skipped = in_order(space, found, budget)
        rows = refined(rows, start, budget)
    return Table(tuple(rows), tuple(skipped), machine, memory, budget)


def budget_of(machine: Machine, memory: float | None, margin: float | None) -> float:
    """Return the bytes that a plan may count.

    Raises:
        ValueError: if `memory` is no positive number of bytes.
    """
    if memory is None:
        return machine.device_bytes * (1 - (margin or 0))
    usual = MARGIN if machine.kind == "cuda" else 0.0
    return checked_bytes("memory", memory) * (1 - (usual if margin is None else margin))
