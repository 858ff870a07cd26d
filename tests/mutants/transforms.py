"""Faults in fzero/transforms."""

from tests.mutants.mutant import AXES, HALF, OWN, REMAT, WRITES, Mutant

MUTANTS = [
    Mutant(
        "a loss without parameters trains silently",
        "transforms/gradients/_value_and_grad.py",
        "or not variables or loss.requires_grad:",
        "or True:",
        ("tests/transforms/test_independent_losses.py",),
    ),
    Mutant(
        "each loss is told of",
        "transforms/gradients/_value_and_grad.py",
        "or not variables or loss.requires_grad:",
        "or not variables:",
        ("tests/transforms/test_independent_losses.py",),
    ),
    Mutant(
        "attention is taken to draw",
        "transforms/_remat/_tape.py",
        ' and _given(op, args, kwargs, "dropout_p") != 0',
        "",
        REMAT,
    ),
    Mutant("sum for mean", "transforms/gradients/_value_and_grad.py", "loss / self.parts", "loss / self.batch.count"),
    Mutant("mean over ranks only", "transforms/gradients/_value_and_grad.py", "micro_batches * math.prod", "math.prod"),
    Mutant("scale a sum", "transforms/gradients/_value_and_grad.py", 'if reduce == "mean" else 1', ""),
    Mutant(
        "no version check", "transforms/gradients/_value_and_grad.py", "if before[i] != ", "if False and before[i] != "
    ),
    Mutant(
        "keywords stay boxed",
        "transforms/gradients/_value_and_grad.py",
        "kwargs, rest = gathered(kwargs), [",
        "rest = [",
    ),
    Mutant(
        "reduce only the last micro-batch",
        "transforms/gradients/_accumulate.py",
        "_in_place(gradients, torch.add, new)",
        "_in_place(gradients, lambda x, y: y, new)",
    ),
    Mutant(
        "first micro-batch each time",
        "transforms/gradients/_accumulate.py",
        "x.narrow(0, j * self.size, self.size)",
        "x.narrow(0, 0, self.size)",
    ),
    Mutant(
        "lose the remembered gradient",
        "sharding/_rows.py",
        "return (None, None, shard,",
        "return (None, None, shard * 0,",
    ),
    Mutant(
        "a write through .data is lost", "transforms/_gather.py", "if not same(own", "if False and not same(own", WRITES
    ),
    Mutant(
        "gradients of the own are summed",
        "transforms/gradients/_primals.py",
        "if box.axes is not None and a.name not in box.axes]",
        "]",
        OWN,
    ),
    Mutant(
        "copies of what is own are not summed",
        "transforms/gradients/_primals.py",
        "if box.axes is not None and a.name not in box.axes]",
        "if False]",
        OWN,
    ),
    Mutant(
        "a differentiated tensor may differ by rank",
        "transforms/gradients/_primals.py",
        "check_inputs_replicated(name, axes, paths, entries)",
        "pass",
        OWN,
    ),
    Mutant(
        "derivatives of gradients count copies",
        "transforms/gradients/_value_and_grad.py",
        "one_of_copies(value, joint(axes)) if one_value else value",
        "value",
        ("tests/transforms/test_derivatives_of_gradients.py",),
    ),
    Mutant(
        "copies of one value have gradients of their own",
        "transforms/gradients/_primals.py",
        'variables = [apply_along("pvary", x, joint(primal.copies), Whole()) for x in primal.variables]',
        "variables = primal.variables",
        ("tests/transforms/test_derivatives_of_gradients.py",),
    ),
    Mutant("forget leaves that no rule names", "transforms/gradients/_primals.py", 'rest="replicated"', "rest=None"),
    Mutant(
        "the loss is not fenced",
        "transforms/gradients/_value_and_grad.py",
        "(fence([loss], anchor)[0][0] if self.fenced else loss)",
        "loss",
        ("tests/distributed",),
    ),
    Mutant(
        "copies keep their own gradients",
        "transforms/gradients/_primals.py",
        "copies = [a for a in axes if a.name not in facts(uid).varies]",
        "copies: list[Axis] = []",
        AXES,
    ),
    Mutant(
        "experts are averaged",
        "transforms/gradients/_primals.py",
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
        "transforms/gradients/_primals.py",
        "[box.data.to(dtype)]",
        "[box.data]",
        HALF,
    ),
    Mutant(
        "accumulated in half precision", "transforms/gradients/_accumulate.py", "g.to(dtype), dtypes", "g, dtypes", HALF
    ),
    Mutant(
        "weights of the own rank",
        "transforms/gradients/_value_and_grad.py",
        "weight = psum(weights",
        "weight = (lambda x, _: x)(weights",
        HALF,
    ),
    Mutant(
        "micro-batches weigh alike", "transforms/gradients/_value_and_grad.py", ".sum(), axis)", ".mean(), axis)", HALF
    ),
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
        "transforms/_remat/_call.py",
        "None if x.origin is None else tuple([distinct.number(y) for y in x.origin])",
        "None",
        REMAT,
    ),
    Mutant(
        "remat takes all for batched",
        "transforms/_remat/_call.py",
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
