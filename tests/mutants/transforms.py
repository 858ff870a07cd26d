"""Faults in fzero/transforms."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped
from tests.mutants.mutant import AXES, HALF, LAWS, OWN, REMAT, REMAT_SHARDED, WRITES, Fault, File

REMAT_DRAWS = ("tests/transforms/test_remat_draws.py",)

LOSS_SCALING = ("tests/optim/wrappers/test_loss_scaling.py",)
WEIGHTED_MEANS = ("tests/transforms/test_weighted_means.py",)

MUTANTS = [
    *File("transforms/_value_and_grad.py").faults(
        Fault(
            "a rank without examples is refused",
            "_report_unreached",
            never("any(A) and not B()"),
            ("tests/transforms/test_independent_losses.py",),
        ),
        Fault("gradients are not divided by the number of micro-batches", "_make_loss", bare("B * A")),
        Fault("a sum is divided like a mean", "_make_loss", always("A == 'mean'")),
        Fault("keyword arguments stay in their boxes", "_open_boxes", becomes("kwargs, A = (B(kwargs), C)", "A = C")),
        Fault(
            "derivatives of gradients count each rank's copy",
            "_reduce_over_ranks",
            never("A.is_invariant"),
            ("tests/transforms/test_derivatives_of_gradients.py",),
        ),
    ),
    *File("transforms/_loss.py").faults(
        Fault(
            "a loss that depends on no parameter is not reported",
            "LossOfGroups._micro_batch_loss",
            becomes("A.requires_grad or not B", "True"),
            ("tests/transforms/test_independent_losses.py",),
        ),
        Fault(
            "a loss that depends on its parameters is reported",
            "LossOfGroups._micro_batch_loss",
            dropped("A.requires_grad"),
            ("tests/transforms/test_independent_losses.py",),
        ),
        Fault(
            "a micro-batch without examples is refused",
            "LossOfGroups.is_reached",
            becomes("any(A)", "all(A)"),
            ("tests/transforms/test_independent_losses.py",),
        ),
        Fault(
            "the loss is summed over the ranks, not averaged",
            "LossOfGroups._micro_batch_loss",
            becomes("A / self.divisor", "A / self.batch.count"),
        ),
        Fault(
            "an in-place write during the loss is not refused",
            "LossOfGroups._check_not_written",
            never("A != [B(C) for C in D[E]]"),
        ),
        Fault(
            "the loss is not fenced", "LossOfGroups._micro_batch_loss", never("self.is_fenced"), ("tests/distributed",)
        ),
    ),
    *File("transforms/_loss_results.py", WEIGHTED_MEANS).faults(
        Fault(
            "a weighted mean divides by the rank's own weights",
            "weighted_mean",
            becomes("A(B.sum(), C)", "(lambda x, _: x)(B.sum(), C)"),
        ),
        Fault(
            "a weighted mean ignores the weights of micro-batches",
            "weighted_mean",
            becomes("A.to(B).sum", "A.to(B).mean"),
        ),
    ),
    *File("transforms/_remat_tape.py", REMAT).faults(
        Fault("attention without dropout counts as random", "_draws_random", dropped("A(B, C, D, 'dropout_p') != 0")),
        Fault(
            "remat draws other random numbers in the backward pass",
            "_draws_random",
            becomes("A in B.tags", "torch.Tag.core in ()"),
            REMAT_DRAWS,
        ),
        Fault(
            "remat reads a value that was overwritten since",
            "RandomTape._copy_written",
            skipped("self.A[B] = self.A[B].clone()"),
        ),
    ),
    *File("transforms/_accumulate.py").faults(
        Fault(
            "the gradients of the last micro-batch only are kept", "accumulate", becomes("torch.add", "lambda x, y: y")
        ),
        Fault("every micro-batch is the first one", "MicroBatches.part.narrow", becomes("A * self.size", "0")),
        Fault("accumulated in half precision", "accumulate", bare("A.to(dtype)"), HALF),
    ),
    *File("sharding/maps/_unit_maps.py").faults(
        Fault(
            "the gradient of a shard that was not changed is lost",
            "_WithRowDerivatives.backward",
            becomes("(*A, *B, *C)", "(*A, *[x * 0 for x in B], *C)"),
        ),
    ),
    *File("transforms/_stage_transforms.py", WRITES).faults(
        Fault(
            "a write through .data is lost",
            "_box_origin",
            becomes("not A(B, C(D.data))", "False and not A(B, C(D.data))"),
        ),
    ),
    *File("transforms/_gradient_groups.py", OWN).faults(
        Fault(
            "gradients of PerRank values are summed over the ranks",
            "_per_rank_group",
            dropped("box.A is not None and B"),
        ),
        Fault(
            "gradients of a PerRank value's copies are not summed",
            "_per_rank_group",
            never("box.A is not None and B"),
        ),
        Fault("a differentiated tensor may differ by rank", "open_argument", skipped("A(B, C, D, E)")),
        Fault(
            "each copy of one value has its own gradient",
            "_as_invariant",
            bare("[B('pvary', C, D(E.F), G()) for C in A]"),
            ("tests/transforms/test_derivatives_of_gradients.py",),
        ),
        Fault("replicated leaves get no gradient", "_replicated_groups", constant("replicated", None), LAWS),
        Fault(
            "the replicas of a shard keep different gradients",
            "_shard_group",
            becomes("A = [B for B in C if D]", "A: list[Axis] = []"),
            AXES,
        ),
        Fault(
            "gradients of experts are averaged over the experts' axis",
            "_shard_group",
            becomes("A.name not in B(C).D", "A.name not in shard_axes"),
            AXES,
        ),
        Fault("gradients are rounded before the update", "_shard_group", bare("A.to(B)"), HALF),
    ),
    *File("transforms/_loss_scale.py", LOSS_SCALING).faults(
        Fault(
            "the scale is not undone",
            "scaled_value_and_grad.unscale",
            becomes("at_least_float32(A) / B", "at_least_float32(A)"),
        ),
        Fault("the loss is scaled as well", "_ScaleGradient.forward", returns("x * scale")),
    ),
    *File("transforms/_remat_runs.py", REMAT).faults(
        Fault(
            "remat's gradient forgets an input",
            "RematFunction.backward",
            becomes("[A for A, B in C if B]", "[A for A, B in C if B][:1]"),
        ),
    ),
    *File("transforms/_block_call.py", REMAT).faults(
        Fault("remat forgets autocast", "BlockCall.run", becomes("with self.autocast.A(): ...", "if True: ...")),
        Fault(
            "a remat block sees micro-batch 0 only",
            "BlockCall._rebind",
            becomes("A.B(axes=C)", "A.B(micro_batch=0, axes=C)"),
            REMAT_DRAWS,
        ),
    ),
    *File("transforms/_derivation_steps.py", REMAT).faults(
        Fault(
            "remat maps values that no vmap batches",
            "Map.derive.run_and_note_batch",
            becomes("A(y)", "True"),
            REMAT_SHARDED,
        ),
    ),
    *File("transforms/_indexed_tree.py", REMAT).faults(
        Fault("remat drops the origin", "_argument_indices", always("A.B is None"), REMAT_SHARDED),
    ),
    *File("transforms/_remat_guards.py", ("tests/transforms/test_remat_guards.py",)).faults(
        Fault("remat does not detect captured tensors", "Guard.__torch_function__", never("A(B)", at="1 of 3")),
        Fault("a tensor that a block stores is let through", "_are_stored", becomes("isinstance(A, B)", "True")),
        Fault("a nested remat collects garbage each time", "Guard.check_escapes", dropped("_are_stored(A, B)"), REMAT),
    ),
]
