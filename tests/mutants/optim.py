"""Faults in fzero/optim."""

from tests.mutants.mutant import HALF, OPTIM_LAWS, PAIRS, WHOLE, Mutant

MUTANTS = [
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
    Mutant("padding counts in leaf norms", "optim/_norms.py", ".sum(1)[:-1]", ".sum(1)[1:]", PAIRS),
    Mutant(
        "leaf norms of the own part",
        "optim/_norms.py",
        "totals = psum(torch.cat(list(own.values())), axes)",
        "totals = torch.cat(list(own.values()))",
        PAIRS,
    ),
    Mutant(
        "an owner gets another's matrix",
        "sharding/_owners.py",
        "for p in parts[rank]:\n            found",
        "for p in parts[0]:\n            found",
        WHOLE,
    ),
    Mutant(
        "pieces go back to the wrong place",
        "sharding/_owners.py",
        "narrow(-1, done[p.matrix], p.size)",
        "narrow(-1, 0, p.size)",
        WHOLE,
    ),
    Mutant("all matrices meet on rank 0", "sharding/_owners.py", "% self.ranks][s]", "* 0][s]", WHOLE),
    Mutant("padding of a shard is sent", "sharding/_owners.py", "if at > end:", "if False:", WHOLE),
    Mutant(
        "the state of a whole pair is kept whole",
        "optim/_wrappers.py",
        "known.unit if leaf.ndim else None",
        "None",
        WHOLE,
    ),
    Mutant(
        "a split matrix is taken for whole",
        "optim/_muon.py",
        "for axis, dim in reversed(kind):",
        "for axis, dim in ():",
        WHOLE,
    ),
    Mutant("Muon's rate is not scaled", "optim/_muon.py", "math.sqrt(max(1, rows / columns))", "1.0", WHOLE),
    Mutant(
        "tied leaves part at a table of numbers",
        "sharding/_segments.py",
        "out[position] = out[tied]",
        "pass",
        OPTIM_LAWS,
    ),
    Mutant("a trust ratio of zero", "optim/_lamb.py", "(norm == 0) | (step_norm == 0)", "step_norm == 0", PAIRS),
    Mutant("a mask of whole units", "optim/_wrappers.py", "return torch.where(mask != 0, x, y)", "return x", PAIRS),
    Mutant(
        "masked leaves count in norms",
        "optim/_wrappers.py",
        "chosen(grads, applies), state",
        "grads, state",
        OPTIM_LAWS,
    ),
    Mutant(
        "average the old parameters",
        "optim/_ema.py",
        "apply_updates(params, grads), state.ema",
        "params, state.ema",
        PAIRS,
    ),
    Mutant("an average shares memory", "optim/_ema.py", "copy=True", "copy=False", OPTIM_LAWS),
    Mutant(
        "hyperparameters in float32",
        "optim/_inject.py",
        "dtype=torch.float64, device",
        "dtype=torch.float32, device",
        PAIRS,
    ),
    Mutant(
        "columns of stacked matrices mix",
        "optim/_adafactor.py",
        "inner // area * width + inner % width",
        "inner % width",
        PAIRS,
    ),
    Mutant(
        "padding counts as a row",
        "optim/_adafactor.py",
        "_LeafPlace(0, 1, 1, end, end)",
        "_LeafPlace(0, 1, 1, 0, end)",
        OPTIM_LAWS,
    ),
    Mutant(
        "the master copy is dropped",
        "optim/_master.py",
        "masters = master_params(params, state)",
        "masters = tree.map(lambda p: p.to(master), params)",
        HALF,
    ),
    Mutant(
        "a rank skips alone",
        "optim/_loss_scale.py",
        "[psum(torch.stack(found).sum(), axes) for",
        "[torch.stack(found).sum() for",
        HALF,
    ),
    Mutant("a skipped step counts", "optim/_loss_scale.py", "good, new, old)\n", "good, new, new)\n", HALF),
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
        "narrow gradients will do",
        "optim/_master.py",
        "given != torch.promote_types(given, expected)",
        "given != torch.promote_types(given, torch.float32)",
        HALF,
    ),
]
