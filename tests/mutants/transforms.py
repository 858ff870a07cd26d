"""Faults in fzero/transforms."""

from tests.mutants.mutant import AXES, HALF, REMAT, Mutant

MUTANTS = [
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
        "lose the remembered gradient",
        "transforms/_gather.py",
        "return (None, None, shard,",
        "return (None, None, shard * 0,",
    ),
    Mutant("forget leaves that no rule names", "transforms/gradients/_opened.py", 'rest="replicated"', "rest=None"),
    Mutant(
        "the loss is not fenced",
        "transforms/gradients/_value_and_grad.py",
        "(fence([loss], anchor)[0][0] if fenced else loss)",
        "loss",
        ("tests/distributed",),
    ),
    Mutant(
        "copies keep their own gradients",
        "transforms/gradients/_opened.py",
        "copies = [a for a in axes if a.name not in facts(uid).varies]",
        "copies: list[Axis] = []",
        AXES,
    ),
    Mutant(
        "experts are averaged",
        "transforms/gradients/_opened.py",
        "a.name not in facts(uid).varies]",
        "a.name not in own]",
        AXES,
    ),
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
        "gradients are rounded before the update",
        "transforms/gradients/_opened.py",
        "Shard(box.data.to(dtype), cast",
        "Shard(box.data, cast",
        HALF,
    ),
    Mutant(
        "accumulated in half precision", "transforms/gradients/_accumulate.py", "xs[i] = xs[i].to(dtype)", "pass", HALF
    ),
    Mutant(
        "weights of the own rank",
        "transforms/gradients/_returned.py",
        "weight = psum(weights",
        "weight = (lambda x, _: x)(weights",
        HALF,
    ),
    Mutant("micro-batches weigh alike", "transforms/gradients/_returned.py", ".sum(), axis)", ".mean(), axis)", HALF),
    Mutant("remat draws anew", "transforms/_remat/_tape.py", "nondeterministic_seeded in op.tags", "core in ()", REMAT),
    Mutant(
        "remat's gradient forgets an input",
        "transforms/_remat/_remat.py",
        "enumerate(ctx.needs_input_grad[ctx.before :]) if needed]",
        "enumerate(ctx.needs_input_grad[ctx.before :]) if needed][:1]",
        REMAT,
    ),
    Mutant(
        "remat drops the origin",
        "transforms/_remat/_stand_ins.py",
        "None if x.origin is None else tuple([distinct.number(y) for y in x.origin])",
        "None",
        REMAT,
    ),
    Mutant(
        "remat takes all for batched",
        "transforms/_remat/_steps.py",
        "tuple([is_mapped_now(y) for y",
        "tuple([True for y",
        REMAT,
    ),
    Mutant("remat forgets autocast", "transforms/_remat/_call.py", "with self.casts.again():", "if True:", REMAT),
    Mutant("remat misses what is captured", "transforms/_remat/_guards.py", "(is_foreign(y) or", "(False or", REMAT),
    Mutant(
        "remat keeps what was overwritten",
        "transforms/_remat/_tape.py",
        "self.kept[j] = self.kept[j].clone()",
        "pass",
        REMAT,
    ),
    Mutant(
        "a remat block runs in the first micro-batch",
        "transforms/_remat/_call.py",
        "return scope._replace(axes=",
        "return scope._replace(micro_batch=0, axes=",
        REMAT,
    ),
]
