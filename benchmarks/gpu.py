"""Measure one rank of 8 on a GPU: peak memory and step time of BERT-large and of ViT-G/14 at each stage.

python benchmarks/gpu.py [--models bert-large vit-g] [--stages 0 1 2 3] [--backend inductor] [--write]
python benchmarks/gpu.py --toy                  # the same models, tiny; what a machine without a GPU runs

Adam in bfloat16 with float32 masters, 16 bytes a parameter. The other ranks do not exist (benchmarks/one_rank.py), so a
step's time is that of the rank's own work; it is compared with the same train step, unsharded, under torch.compile (for
`--backend fx` as it is). The peak is that of torch's caching allocator, on a CPU of the counting one
(benchmarks/allocator.py), from before the state is made to the end of the step; the formula is README's:
state and the gradients given to the update.
"""

import argparse
import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import fzero
from benchmarks.one_rank import alone, state_of
from benchmarks.report import machine, publish, table
from fzero import optim, tree

RANKS, MB = 8, 1e6
PRECISION = fzero.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
# What ZeRO's stages take for ViT-g/14 on 8 GPUs, 16 images a rank, by a published reading of DeepSpeed, in MB.
PUBLISHED = {("vit-g", 1): 20_201, ("vit-g", 2): 21_152, ("vit-g", 3): 20_208}


class Config(NamedTuple):
    """A transformer encoder, of words or of images.

    Attributes:
        width: of the stream.
        layers: of them.
        heads: of each.
        hidden: width of the feed-forward part.
        context: words, or patches and one more.
        classes: words to tell apart, or classes of images.
        pixels: values in a patch; 0 for words.
        batch: sequences or images a rank.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    context: int
    classes: int
    pixels: int
    batch: int


MODELS = {
    "bert-large": Config(1024, 24, 16, 4096, 128, 30522, 0, 64),
    "vit-g": Config(1664, 48, 16, 8192, 257, 1000, 3 * 14 * 14, 16),
}
TOY = {
    "bert-large": Config(64, 3, 4, 256, 16, 256, 0, 4),
    "vit-g": Config(64, 3, 4, 256, 17, 10, 3 * 4 * 4, 2),
}


def init(c: Config) -> dict[str, Any]:
    """Make the parameters: embeddings, repeated blocks, a head."""

    def linear(rows: int, columns: int) -> dict[str, Tensor]:
        return {"w": torch.randn(rows, columns) / rows**0.5, "b": torch.zeros(columns)}

    def norm() -> dict[str, Tensor]:
        return {"scale": torch.ones(c.width), "shift": torch.zeros(c.width)}

    def block() -> dict[str, Any]:
        attention = {"qkv": linear(c.width, 3 * c.width), "proj": linear(c.width, c.width)}
        feed = {"up": linear(c.width, c.hidden), "down": linear(c.hidden, c.width)}
        return {"norm1": norm(), **attention, "norm2": norm(), **feed}

    inputs = linear(c.pixels, c.width) if c.pixels else {"w": torch.randn(c.classes, c.width) / 50}
    return {
        "inputs": inputs,
        "places": torch.randn(c.context, c.width) / 50,
        "blocks": [block() for _ in range(c.layers)],
        "norm": norm(),
        "head": linear(c.width, c.classes),
    }


def loss_fn(c: Config, params: Any, batch: Any) -> Tensor:
    """Predict every word, or the class of an image. Blocks are pre-norm, in both."""
    x, target = batch

    def linear(p: Any, x: Tensor) -> Tensor:
        return x @ p["w"] + p["b"]

    def norm(p: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, (c.width,), p["scale"], p["shift"])

    if c.pixels:
        x = F.pad(linear(params["inputs"], x.to(params["places"].dtype)), (0, 0, 1, 0))  # room for the class
    else:
        x = F.embedding(x, params["inputs"]["w"])
    x = x + params["places"]
    for p in params["blocks"]:
        q, k, v = linear(p["qkv"], norm(p["norm1"], x)).unflatten(-1, (3, c.heads, -1)).movedim(-2, -4).unbind(-2)
        attended = F.scaled_dot_product_attention(q, k, v).movedim(-3, -2).flatten(-2)
        x = x + linear(p["proj"], attended)
        x = x + linear(p["down"], F.gelu(linear(p["up"], norm(p["norm2"], x))))
    x = norm(params["norm"], x[:, 0] if c.pixels else x)
    return F.cross_entropy(linear(params["head"], x).flatten(0, -2).float(), target.flatten())


def batch_of(c: Config) -> tuple[Tensor, Tensor]:
    """Make a rank's batch: words to reconstruct, or patches and a class."""
    if c.pixels:
        return torch.randn(c.batch, c.context - 1, c.pixels), torch.randint(c.classes, (c.batch,))
    words = torch.randint(c.classes, (c.batch, c.context))
    return words, words.clone()


class Row(NamedTuple):
    """A step; bytes and seconds. `stage` is None for the plain one."""

    model: str
    stage: int | None
    formula: int
    plan: int | None
    peak: int
    seconds: float


class Meter:
    """What is held, by the allocator of the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if not self.cuda:
            from benchmarks import allocator

            self.counter = allocator

    def held(self) -> int:
        """Count the bytes that are alive, when garbage is gone."""
        gc.collect()
        return torch.cuda.memory_allocated() if self.cuda else self.counter.held_bytes()

    def peak(self, run: Callable[[], Any]) -> int:
        """Return the most bytes that are alive while `run()` runs."""
        torch.cuda.reset_peak_memory_stats() if self.cuda else self.counter.restart()
        run()
        return torch.cuda.max_memory_allocated() if self.cuda else self.counter.most_bytes()

    def seconds(self, run: Callable[[], Any], rounds: int) -> float:
        """Return the median time of a call."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            if self.cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def train_step_of(c: Config) -> tuple[Callable[..., Any], Any]:
    """Make the step that is measured, and its optimizer."""
    opt = optim.master_weights(optim.adam(1e-4), PRECISION)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda p, b: loss_fn(c, p, b), precision=PRECISION)(params, batch)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state, loss

    return train_step, opt


def plain_step(train_step: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Make the step of a user who has one device: new values are written over the old; for "inductor" compiled."""

    def written(params: Any, opt_state: Any, batch: Any) -> Any:
        new_params, new_state, loss = train_step(params, opt_state, batch)
        new = tree.tensors((new_params, new_state))
        for x, y in zip(tree.tensors((params, opt_state)), new, strict=True):
            x.copy_(y)
        return params, opt_state, loss

    torch.compiler.reset()
    return torch.compile(written) if backend == "inductor" else written


def measured(name: str, stage: int | None, c: Config, mesh: fzero.ranks.Mesh, args: argparse.Namespace) -> Row:
    """Run a step of one rank, or the plain one, and measure it."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    train_step, opt = train_step_of(c)
    meter = Meter(device)
    before = meter.held()
    with device:
        batch = batch_of(c)
        if stage is None:
            params = init(c)
            state = [PRECISION.cast(params), opt.init(params)]
            run_step = plain_step(train_step, args.backend)
            plan = None
            del params
        else:
            sharded = fzero.shard(train_step, stage=stage, mesh=mesh, check=False)
            state = state_of(sharded, init(c), opt)
            batch = mesh.local(batch)
            run_step = fzero.jit(sharded, backend=args.backend)
            plan = run_step.plan(*state, batch).peak_bytes

    def run() -> None:
        state[:] = run_step(*state, batch)[:2]

    for _ in range(2):  # to compile, and to settle
        run()
    held = sum(x.numel() * x.element_size() for x in tree.tensors(state))
    grads = 2 * sum(s.numel() for s in tree.tensors(init_shapes(c)))
    formula = held + (grads if not stage else grads // RANKS)
    peak = min(meter.peak(run) for _ in range(3)) - before
    return Row(name, stage, formula, plan, peak, meter.seconds(run, args.rounds))


def init_shapes(c: Config) -> Any:
    """Make the parameters without memory."""
    with torch.device("meta"):
        return init(c)


def cells(row: Row, plain: Row | None, toy: bool) -> list[Any]:
    """Return a row of the table."""
    published = "" if toy else f"{PUBLISHED.get((row.model, row.stage or 0), '')}"
    ratio = f"{row.seconds / plain.seconds:.2f}" if plain else ""
    stage = "plain" if row.stage is None else row.stage
    plan = "" if row.plan is None else f"{row.plan / MB:,.1f}"
    shown = [f"{row.formula / MB:,.1f}", plan, f"{row.peak / MB:,.1f}"]
    return [row.model, stage, *shown, published, f"{row.seconds * 1e3:,.1f}", ratio]


def verdicts(rows: list[Row], toy: bool) -> list[list[Any]]:
    """Judge what must hold: memory falls with the stage, and stays below what was published."""
    found = []
    for name in dict.fromkeys(r.model for r in rows):
        peaks = [r.peak for r in rows if r.model == name and r.stage is not None]
        good = peaks == sorted(peaks, reverse=True)
        found.append([f"{name}: peak falls with the stage", " ≥ ".join(f"{p / MB:,.1f}" for p in peaks), good])
    for r in rows:
        limit = PUBLISHED.get((r.model, r.stage or 0))
        if limit and not toy:
            text = f"{r.peak / MB:,.0f} against {limit:,}"
            found.append([f"{r.model}: stage {r.stage} below the published reading", text, r.peak <= limit * MB])
    return [[what, text, "met" if good else "missed"] for what, text, good in found]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=list(range(4)))
    parser.add_argument("--backend", choices=("inductor", "fx"), default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="tiny models")
    parser.add_argument("--write", action="store_true", help="keep the tables in gpu.md")
    args = parser.parse_args()
    if args.device == "cpu" and not args.toy:
        parser.error("the models need a GPU; --toy runs tiny ones on a CPU")
    rows: list[Row] = []
    with alone(RANKS) as mesh:
        for name in args.models:
            for stage in (None, *args.stages):
                rows.append(measured(name, stage, (TOY if args.toy else MODELS)[name], mesh, args))
                print(rows[-1], file=sys.stderr, flush=True)
                if args.device != "cpu":
                    torch.cuda.empty_cache()
    plain = {r.model: r for r in rows if r.stage is None}
    on = torch.cuda.get_device_name() if args.device != "cpu" else machine().partition(",")[0]
    how = "under torch.compile" if args.backend == "inductor" else "run as it is"
    parts = [
        f"One rank of {RANKS}, on {on}, backend {args.backend!r}; MB are 1e6 bytes. `plain` is the same train step on "
        f"one device, unsharded, {how}: it updates all of the parameters, a rank its part, and no rank here waits for "
        "another.",
        table(
            ["model", "stage", "formula MB", "plan MB", "peak MB", "published MB", "ms a step", "of plain"],
            [cells(r, plain.get(r.model), args.toy) for r in rows],
        ),
        table(["what", "MB", "goal"], verdicts(rows, args.toy)),
    ]
    publish(__file__, f"python {' '.join(sys.argv)}", parts, args.write)


if __name__ == "__main__":
    main()
