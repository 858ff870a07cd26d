"""Plant one-line faults in fzero, one at a time, and show that the tests catch each.

python tests/mutants.py [NAME ...]      (`make mutants`)
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).parents[1]
GRAPH = ("tests/graph/test_passes.py",)
JIT = ("tests/graph/test_jit.py",)
P, L = ("tests/optim/test_optim_pairs.py",), ("tests/optim/test_optim_laws.py",)
AXES = ("tests/stages/test_axes.py",)
HALF = ("tests/test_precision.py",)
STEP = ("tests/axes/test_lockstep.py",)
RANDOM = ("tests/random/test_random.py",)
REMAT = ("tests/transforms/test_remat.py",)
LAWS = (  # the quickest first
    "tests/layout/test_layout.py",
    "tests/stages/test_equivalence.py",
    "tests/collectives/test_collectives.py",
    "tests/stages/test_programs.py",
    "tests/collectives/test_record.py",
)


class Mutant(NamedTuple):
    """A fault: in a file of fzero, `old` becomes `new`; `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = LAWS


GLOO = ("tests/distributed/test_gloo.py", "-k", "core-2")
MUTANTS = [
    Mutant("drop the padding", "layout/spec.py", "-(-self.numel // self.ranks)", "self.numel // self.ranks"),
    Mutant("sum for mean", "transforms/gradients/_value_and_grad.py", "loss / parts", "loss / micro_batches"),
    Mutant("mean over ranks only", "transforms/gradients/_value_and_grad.py", "micro_batches * math.prod", "math.prod"),
    Mutant("scale a sum", "transforms/gradients/_value_and_grad.py", 'if reduce == "mean" else 1', ""),
    Mutant(
        "no version check", "transforms/gradients/_value_and_grad.py", "if versions != ", "if False and versions != "
    ),
    Mutant(
        "keywords stay boxed",
        "transforms/gradients/_value_and_grad.py",
        "kwargs = gathered(kwargs) if gather else kwargs",
        "pass",
    ),
    Mutant("a tie breaks in tree.map", "tree.py", "if key not in done:", "if True:"),
    Mutant("half-precision sums", "collectives/sums.py", 'psum", x / n, axes, ())', 'psum", x, axes, ()) / n'),
    Mutant(
        "reduce only the last micro-batch",
        "transforms/gradients/_accumulate.py",
        "= xs[i] + ys[i], None",
        "= ys[i], None",
    ),
    Mutant(
        "first micro-batch each time",
        "transforms/gradients/_accumulate.py",
        "x.narrow(0, j * m, m)",
        "x.narrow(0, 0, m)",
    ),
    Mutant(
        "shift the rank in the simulation",
        "transforms/_partition.py",
        "return [_split(flat.pack(spec_of(uid), xs, lead), n, lead)]",
        "return [_split(flat.pack(spec_of(uid), xs, lead), n, lead).roll(1, 0)]",
    ),
    Mutant(
        "shift the rank in a process",
        "transforms/_partition.py",
        "xs, meta[3], meta[2], params[1])]",
        "xs, (meta[3] + 1) % meta[2], meta[2], params[1])]",
        ("tests/distributed",),
    ),
    Mutant(
        "swap the gather order",
        "transforms/_gather.py",
        "_narrow(params, xs[0]).movedim(0",
        "_narrow(params, xs[0]).flip(0).movedim(0",
    ),
    Mutant("gather is no transpose", "transforms/_gather.py", 'transpose="reduce_scatter"', 'transpose="partition"'),
    Mutant(
        "lose the remembered gradient",
        "transforms/_gather.py",
        "return (None, None, shard,",
        "return (None, None, shard * 0,",
    ),
    Mutant(
        "origin that outlives a change",
        "layout/boxes.py",
        "Shard(children[0], uid)",
        "Shard(children[0], uid, _LAST.get(uid))",
    ),
    Mutant(
        "skip the psum in the norm",
        "layout/segments.py",
        "[psum(square, axes) for axes, square in",
        "[square for axes, square in",
    ),
    Mutant(
        "count the padding in the norm",
        "layout/segments.py",
        "position < numel, box.data",
        "position < numel + 9, box.data",
    ),
    Mutant("count a tied leaf twice", "layout/segments.py", "plain[id(x)] =", "plain[len(plain)] ="),
    Mutant("untie a leaf", "layout/units.py", "or tree.identity(leaf) in seen", "or False"),
    Mutant(
        "skip the all_reduce of stage 0",
        "transforms/gradients/_all_reduce.py",
        "x.sum(0, dtype=flat",
        "x[0].to(dtype=flat",
    ),
    Mutant("forget leaves that no rule names", "transforms/gradients/_opened.py", 'rest="replicated"', "rest=None"),
    Mutant("an inner vmap is the axis", "collectives/table.py", "if in_dims[0] is None:", "if False:"),
    Mutant("a user's vmap shifts no dimension", "collectives/sums.py", "(params[0] + 1,)", "params"),
    Mutant("an axis leaks", "axes/scope.py", "_SCOPES.stack.pop()", "pass"),
    Mutant("results need no check", "axes/replicated.py", "if not message:", "if True:", ("tests/test_errors.py",)),
    Mutant(
        "bias correction one step late",
        "optim/_adam.py",
        "state.count + 1",
        "state.count + 2",
        ("tests/optim/test_optim.py",),
    ),
    Mutant(
        "decay every leaf", "optim/_adam.py", "weight_decay * d * p", "weight_decay * p", ("tests/optim/test_optim.py",)
    ),
    Mutant(
        "late reduction",
        "_torch/__init__.py",
        "if not is_tracing() and",
        "if False and",
        ("tests/transforms/test_memory.py",),
    ),
    Mutant(
        "the loss is not fenced",
        "transforms/gradients/_value_and_grad.py",
        "(fence([loss], anchor)[0][0] if fenced else loss)",
        "loss",
        ("tests/distributed",),
    ),
    Mutant("integer means become floats", "collectives/sums.py", "axes, ()) // n).to(leaf.dtype)", "axes, ()) / n)"),
    # optimizers
    Mutant("padding counts in leaf norms", "optim/_norms.py", ".sum(1)[:-1]", ".sum(1)[1:]", P),
    Mutant(
        "leaf norms of the own part",
        "optim/_norms.py",
        "totals = psum(torch.cat(list(own.values())), axes)",
        "totals = torch.cat(list(own.values()))",
        P,
    ),
    Mutant("a trust ratio of zero", "optim/_lamb.py", "(norm == 0) | (step_norm == 0)", "step_norm == 0", P),
    Mutant("a mask of whole units", "optim/_masked.py", "return torch.where(mask != 0, x, y)", "return x", P),
    Mutant("masked leaves count in norms", "optim/_masked.py", "chosen(grads, applies), state", "grads, state", L),
    Mutant(
        "average the old parameters", "optim/_ema.py", "apply_updates(params, grads), state.ema", "params, state.ema", P
    ),
    Mutant("an average shares memory", "optim/_ema.py", "copy=True", "copy=False", L),
    Mutant(
        "hyperparameters in float32",
        "optim/_inject.py",
        "dtype=torch.float64, device",
        "dtype=torch.float32, device",
        P,
    ),
    Mutant(
        "columns of stacked matrices mix",
        "optim/_factored.py",
        "inner // area * width + inner % width",
        "inner % width",
        P,
    ),
    Mutant(
        "padding counts as a row",
        "optim/_factored.py",
        "entries.append([0, 1, 1, slot, slot])",
        "entries.append([0, 1, 1, 0, slot])",
        L,
    ),
    # several axes
    Mutant(
        "copies keep their own gradients",
        "transforms/gradients/_opened.py",
        'copies = [a for a in axes if a.name not in fact(uid, "varies")]',
        "copies: list[Axis] = []",
        AXES,
    ),
    Mutant(
        "experts are averaged",
        "transforms/gradients/_opened.py",
        'a.name not in fact(uid, "varies")]',
        "a.name not in own]",
        AXES,
    ),
    Mutant("f adds nothing up", "collectives/invariant.py", 'transpose="psum_invariant"', 'transpose="pvary"', AXES),
    Mutant("g adds up twice", "collectives/invariant.py", 'transpose="pvary"', 'transpose="psum_invariant"', AXES),
    Mutant("every part is cut along dimension 0", "layout/units.py", "dim=split[i][name]", "dim=0", AXES),
    Mutant("axes in the wrong order", "layout/units.py", "for a in rest[::-1]:", "for a in rest:", AXES),
    Mutant(
        "count the other axis's ranks",
        "collectives/_record.py",
        "full.get(kind, sent) // meta[4]",
        "full.get(kind, sent)",
        AXES,
    ),
    Mutant("nobody receives from others", "collectives/exchange.py", "[xs[0].transpose(0, params[0] + 1)]", "[xs[0]]"),
    Mutant("the way back is the way there", "collectives/exchange.py", "for i in (b, a)]", "for i in (a, b)]"),
    Mutant(
        "a broadcast's gradient goes to all", "collectives/exchange.py", "rank == source, total", "rank >= 0, total"
    ),
    Mutant(
        "what differs is called invariant",
        "collectives/table.py",
        "if row.invariant and any(",
        "if False and any(",
        AXES,
    ),
    # half precision
    Mutant(
        "the scale is not undone",
        "transforms/gradients/_loss_scale.py",
        "torch.float32)) / factor",
        "torch.float32))",
        HALF,
    ),
    Mutant(
        "the loss is scaled as well",
        "transforms/gradients/_loss_scale.py",
        "return x.clone()",
        "return x * scale",
        HALF,
    ),
    Mutant(
        "the master copy is dropped",
        "optim/_master.py",
        "masters = master_params(params, state)",
        "masters = tree.map(lambda p: p.to(master), params)",
        HALF,
    ),
    Mutant(
        "masters start rounded",
        "stages/_sharded_step.py",
        "wide._init(params, opt)",
        "wide._init(precision.cast(params() if callable(params) else params), opt)",
        HALF,
    ),
    Mutant(
        "a rank skips alone",
        "optim/_loss_scale.py",
        "[psum(torch.stack(found).sum(), axes) for",
        "[torch.stack(found).sum() for",
        HALF,
    ),
    Mutant("a skipped step counts", "optim/_loss_scale.py", "torch.where(good, new, old) if", "new if", HALF),
    Mutant(
        "zero is taken for nothing", "optim/_loss_scale.py", "torch.full_like(u, -0.0)", "torch.zeros_like(u)", HALF
    ),
    Mutant(
        "growth is not begun again",
        "optim/_loss_scale.py",
        "torch.where(grows, torch.zeros_like",
        "torch.where(grows & False, torch.zeros_like",
        HALF,
    ),
    Mutant(
        "gradients are rounded before the update",
        "transforms/gradients/_opened.py",
        "Shard(box.data.to(dtype), cast",
        "Shard(box.data, cast",
        HALF,
    ),
    Mutant(
        "whole weights on the wire",
        "transforms/_gather.py",
        "return x.to(flat.gathered_dtype",
        "return x.to(flat.wire_dtype",
        HALF,
    ),
    Mutant("summed in half precision", "layout/flat.py", "else spec.cast[0]", "else spec.dtype", HALF),
    Mutant(
        "accumulated in half precision", "transforms/gradients/_accumulate.py", "xs[i] = xs[i].to(dtype)", "pass", HALF
    ),
    Mutant(
        "norms are narrowed", "precision.py", "return self.master if self.full", "return self.param if self.full", HALF
    ),
    Mutant(
        "weights of the own rank",
        "transforms/gradients/_returned.py",
        "weight = psum(weights",
        "weight = (lambda x, _: x)(weights",
        HALF,
    ),
    Mutant("micro-batches weigh alike", "transforms/gradients/_returned.py", ".sum(), axis)", ".mean(), axis)", HALF),
    Mutant(
        "the world for the data-parallel ranks",
        "ranks/_batch_plan.py",
        "names = mesh.names(axis)",
        "names = mesh.axis_names",
        HALF,
    ),
    # lockstep
    Mutant(
        "ranks share results",
        "collectives/table.py",
        "(y if row.replicated else y[r]).clone()",
        "(y if row.replicated else y[r])",
        STEP,
    ),
    Mutant(
        "results are not compared", "ranks/spmd.py", "if not lockstep.same(", "if False and not lockstep.same(", STEP
    ),
    Mutant(
        "diverging calls meet", "axes/lockstep.py", "if len({call.what for call, _ in calls}) > 1:", "if False:", STEP
    ),
    Mutant("one module for all ranks", "nn/__init__.py", "if not in_lockstep():", "if True:", STEP),
    # graph
    Mutant(
        "prefetch one more",
        "graph/passes/_schedule.py",
        "[i + 1 : i + 1 + prefetch]",
        "[i + 1 : i + 2 + prefetch]",
        GRAPH,
    ),
    Mutant("gathers start ahead without room", "graph/passes/_schedule.py", "+ size <= limit:", "<= limit:", GRAPH),
    Mutant(
        "what starts ahead is forgotten",
        "graph/passes/_schedule.py",
        "live[start:until] = [x + size for x in live[start:until]]",
        "pass",
        GRAPH,
    ),
    Mutant(
        "nothing starts ahead",
        "graph/passes/_schedule.py",
        "found.setdefault(order[start], []).append(g)",
        "pass",
        GRAPH,
    ),
    Mutant(
        "schedules in another order are taken for the same",
        "graph/_agree.py",
        "[n.name for n in graph.nodes if is_collective(n)]",
        "[]",
        GRAPH,
    ),
    Mutant(
        "updates wait for the end",
        "graph/passes/_schedule.py",
        "                self._drain()\n            self._require(needed)",
        "                pass\n            self._require(needed)",
        GRAPH,
    ),
    Mutant("overwrite under a gather", "graph/passes/_schedule.py", "if is_wait(n) else []", "if False else []", GRAPH),
    Mutant(
        "more in flight than asked",
        "graph/passes/_schedule.py",
        "if len(starts) > self.in_flight else",
        "if False else",
        GRAPH,
    ),
    Mutant(
        "hand on what is about to be overwritten",
        "graph/passes/_donate.py",
        "if not given & set(lent.of[value]):",
        "if True:",
        GRAPH,
    ),
    Mutant(
        "hand out overwritten memory", "graph/passes/_donate.py", "{*donated, *into.values()}", "into.values()", GRAPH
    ),
    Mutant(
        "count a unit at each use",
        "graph/passes/_regather.py",
        "if other not in between:",
        "if True:",
        GRAPH,
    ),
    Mutant(
        "buckets across groups",
        "graph/passes/_bucket.py",
        "            and node.args[1:] == group[0].args[1:]\n",
        "",
        GRAPH,
    ),
    Mutant(
        "buckets without an end",
        "graph/passes/_bucket.py",
        "sum(map(full_bytes, [*group, node])) <= max_bytes",
        "full_bytes(node) <= max_bytes",
        GRAPH,
    ),
    Mutant(
        "buckets of what waits for itself",
        "graph/passes/_bucket.py",
        "lambda group, n: not _needs(n, group, index)",
        "lambda group, n: True",
        GRAPH,
    ),
    Mutant(
        "a bucket's first for all",
        "graph/passes/_bucket.py",
        "if is_gather(node) else i",
        "if is_gather(node) else 0",
        GRAPH,
    ),
    Mutant(
        "a collective holds nothing",
        "graph/plan/_liveness.py",
        "            held += lent.read_by(start_of(node))",
        "            pass",
        GRAPH,
    ),
    Mutant("free before use", "graph/run/_pieces.py", "for s in [*used, *(step", "for s in [*(step", GRAPH),
    Mutant(
        "random numbers are constants",
        "_torch/__init__.py",
        "_compiling(), _mode_of(fakes):",
        "_compiling():",
        JIT,
    ),
    Mutant(
        "one trace for all numbers",
        "graph/trace/_signature.py",
        "x.hex() if isinstance(x, float) else x))",
        "None))",
        JIT,
    ),
    Mutant(
        "donate the batch",
        "stages/_sharded_step.py",
        "i in self.params or (i < len(results) and _alike(x, results[i]))",
        "True",
        JIT,
    ),
    Mutant(
        "micro-batches cut inside", "graph/run/_pieces.py", "if len(nodes) > 1 for n", "if len(nodes) > 99 for n", JIT
    ),
    Mutant("keep the old tensors", "_donated.py", "    x.data = x.new_empty(0)\n", "", JIT),
    # random numbers
    Mutant("all ranks draw alike", "random/_seeded.py", "fold_in(key, index)", "fold_in(key, 0)", RANDOM),
    Mutant("micro-batches draw alike", "random/_seeded.py", "index), micro_batch()", "index), 0", RANDOM),
    Mutant(
        "ranks of all axes differ",
        "random/_seeded.py",
        "axis_index(tuple([a.name for a in data_axes()]))",
        "axis_index(axis_names())",
        RANDOM,
    ),
    Mutant("fold_in forgets the data", "random/_keys.py", "else _signed(data))", "else 0)", RANDOM),
    Mutant("all draws have one key", "random/_seeded.py", "self.drawn += 1", "pass", RANDOM),
    Mutant("what draws is not asked", "random/_seeded.py", "if torch.Tag", "if False and torch.Tag", RANDOM),
    Mutant("remat draws anew", "transforms/_remat/_tape.py", "nondeterministic_seeded in op.tags", "core in ()", REMAT),
    Mutant(
        "remat's gradient forgets an input",
        "transforms/_remat/_remat.py",
        "enumerate(ctx.needs_input_grad[skip:]) if needed]",
        "enumerate(ctx.needs_input_grad[skip:]) if needed][:1]",
        REMAT,
    ),
    Mutant(
        "remat drops the origin",
        "transforms/_remat/_block.py",
        "None if x.origin is None else tuple([self._number(y) for y in x.origin])",
        "None",
        REMAT,
    ),
    Mutant(
        "remat updates statistics twice",
        "nn/_blocks.py",
        "name: buffers[name].clone()",
        "name: buffers[name]",
        REMAT,
    ),
    Mutant(
        "remat takes all for batched",
        "transforms/_remat/_remat.py",
        "= [is_mapped_now(y) for y",
        "= [True for y",
        REMAT,
    ),
    Mutant("remat forgets autocast", "transforms/_remat/_block.py", "with self.casts():", "if True:", REMAT),
    Mutant("remat misses what is captured", "transforms/_remat/_block.py", "(is_foreign(y) or", "(False or", REMAT),
    Mutant(
        "remat keeps what was overwritten",
        "transforms/_remat/_tape.py",
        "self.kept[j] = self.kept[j].clone()",
        "pass",
        REMAT,
    ),
    Mutant("write into shared memory", "graph/trace/_signature.py", "if start < reach and", "if False and", JIT),
    Mutant(
        "a remat block runs in the first micro-batch",
        "transforms/_remat/_block.py",
        "return scope._replace(axes=",
        "return scope._replace(micro_batch=0, axes=",
        REMAT,
    ),
    # messages on gloo, and what runs again
    Mutant(
        "a message is another rank's",
        "collectives/gloo.py",
        "dist.isend(sends[to]",
        "dist.isend(sends[source]",
        ("tests/distributed/test_gloo.py", "-m", "slow or not slow", "-k", "core-4"),
    ),
    Mutant(
        "messages have the tags of a user's",
        "collectives/gloo.py",
        "FIRST_TAG, TAGS = 1 << 20",
        "FIRST_TAG, TAGS = 0",
        GLOO,
    ),
    Mutant("every reduction is a sum", "collectives/gloo.py", 'op != "sum" or not _applies', "not _applies", GLOO),
    Mutant("a wait for two messages", "collectives/gloo.py", "while sent.works:", "for _ in range(2):", GLOO),
    Mutant(
        "parts are not summed",
        "collectives/gloo.py",
        "lambda: _summed(rows, rank)",
        "lambda: rows[0]",
        GLOO,
    ),
    Mutant(
        "matrix products run again",
        "graph/passes/_recompute.py",
        "known and not moves and is_cheap(node)",
        "known and not moves",
        GRAPH,
    ),
    Mutant(
        "all ranks' parts of a leaf are the own one",
        "collectives/gloo.py",
        "at, r * k, r * k + k)",
        "at, rank * k, rank * k + k)",
        GLOO,
    ),
    Mutant("the own part of a leaf stays old", "collectives/gloo.py", "rows[rank].copy_(mine)", "pass", GLOO),
    Mutant(
        "leaves arrive while the old ones are read",
        "graph/passes/_schedule.py",
        "writes = [n for n in graph.nodes if is_write(n)]",
        "writes = [n for n in graph.nodes if n.target is COPY]",
        GRAPH,
    ),
    Mutant("leaves arrive in another layout", "graph/passes/_gather_into.py", "return dense and", "return", GRAPH),
    Mutant(
        "what is read otherwise arrives in leaves",
        "graph/passes/_gather_into.py",
        "users if good and",
        "users if",
        GRAPH,
    ),
    Mutant(
        "every leaf begins with the unit",
        "graph/passes/_gather_into.py",
        "_written(write)[1].storage_offset()",
        "0",
        GRAPH,
    ),
    Mutant(
        "padding is not sent", "graph/_wire.py", "sent * group_size(node) if is_gather(node) else max(", "max(", GRAPH
    ),
    Mutant(
        "a buffer that others read is summed in place",
        "graph/passes/_in_place.py",
        "readers[s] == [node] and ",
        "",
        GRAPH,
    ),
    Mutant(
        "an argument is summed in place",
        "graph/passes/_in_place.py",
        ' and lent.born[s].op == "call_function"',
        "",
        GRAPH,
    ),
    Mutant(
        "Inductor is given what overwrites",
        "graph/_jit.py",
        'self.backend == "inductor-whole"',
        "False",
        ("tests/distributed/test_gloo.py", "-k", "jit-2"),
    ),
    Mutant(
        "a sum is written over what is sent",
        "collectives/gloo.py",
        "out=rows[0 if rank else 1]",
        "out=rows[rank]",
        GLOO,
    ),
    Mutant("the key enters a draw once", "random/_keys.py", "second=_mixed(key + SECOND, 0)", "second=0", RANDOM),
    Mutant(
        "narrow gradients will do",
        "optim/_master.py",
        "given != torch.promote_types(given, expected)",
        "given != torch.promote_types(given, torch.float32)",
        HALF,
    ),
]


def caught(mutant: Mutant) -> tuple[bool, str]:
    """Apply the fault in a copy of the project, and tell whether a test fails there, and which."""
    with tempfile.TemporaryDirectory() as folder:
        return run_tests(mutant, pathlib.Path(folder))


def run_tests(mutant: Mutant, folder: pathlib.Path) -> tuple[bool, str]:
    """Copy the project into a folder, apply the fault there, and run its tests."""
    for name in ("fzero", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "fzero" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) < 1:
        raise SystemExit(f"mutant {mutant.name!r}: {mutant.old!r} is not in {mutant.file} any more")
    text = text.replace(mutant.old, mutant.new)
    if "_LAST" in mutant.new:  # a memory that no flattening clears
        text = text.replace("self.origin = origin\n", "self.origin = _LAST.setdefault(uid, origin)\n", 1)
        text = text.replace("class Shard(", "_LAST: dict = {}\n\n\nclass Shard(", 1)
    path.write_text(text)
    run = [sys.executable, "-m", "pytest", "-n0", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *mutant.tests]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutants"}
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1 and bool(failed), failed[0] if failed else done.stdout[-300:]


def main() -> None:
    """Try the mutants named on the command line, or all, and print a table."""
    console, table = Console(width=150), Table("fault", "caught by")
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    survivors = []
    for mutant, (ok, by) in zip(chosen, ThreadPoolExecutor(2).map(caught, chosen), strict=True):
        console.print(f"{'caught  ' if ok else 'SURVIVED'} {mutant.name}")
        table.add_row(mutant.name, by.split(" - ")[0].removeprefix("FAILED ") if ok else f"[red]nothing: {by}")
        survivors += [] if ok else [mutant.name]
    console.print(table)
    console.print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults caught")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
