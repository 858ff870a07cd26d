"""Faults in fzero/transforms."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, returns, skipped
from tests.mutants.mutant import AXES, HALF, LAWS, OWN, REMAT, WRITES, Fault, File

MUTANTS = [
    *File("transforms/_value_and_grad.py").faults(
        Fault(
            "a loss without parameters trains silently",
            "_Loss._check_dependence",
            becomes("A or not B or C.requires_grad", "A or True"),
            ("tests/transforms/test_independent_losses.py",),
        ),
        Fault(
            "each loss is told of",
            "_Loss._check_dependence",
            dropped("A.requires_grad"),
            ("tests/transforms/test_independent_losses.py",),
        ),
        Fault("sum for mean", "_Loss._of", becomes("A / self.divisor", "A / self.batch.count")),
        Fault("mean over ranks only", "value_and_grad.value_and_grads", bare("B * A")),
        Fault("scale a sum", "value_and_grad.value_and_grads", always("A == 'mean'")),
        Fault(
            "no version check", "_Loss._of", becomes("A[B] != [C(D) for D in E]", "False and A[B] != [C(D) for D in E]")
        ),
        Fault("keywords stay boxed", "_open_rest", becomes("kwargs, A = (B(kwargs), C)", "A = C")),
        Fault(
            "derivatives of gradients count copies",
            "value_and_grad.value_and_grads",
            never("is_invariant", at="2 of 2"),
            ("tests/transforms/test_derivatives_of_gradients.py",),
        ),
        Fault("the loss is not fenced", "_Loss._of", never("self.is_fenced", at="2 of 2"), ("tests/distributed",)),
        Fault(
            "weights of the own rank", "weighted_mean", becomes("A(B.sum(), C)", "(lambda x, _: x)(B.sum(), C)"), HALF
        ),
        Fault("micro-batches weigh alike", "weighted_mean", becomes("A.to(B).sum", "A.to(B).mean"), HALF),
    ),
    *File("transforms/_remat_tape.py", REMAT).faults(
        Fault("attention is taken to draw", "_draws", dropped("A(B, C, D, 'dropout_p') != 0")),
        Fault("remat draws anew", "_draws", becomes("A in B.tags", "torch.Tag.core in ()")),
        Fault("remat keeps what was overwritten", "RandomTape._copy_written", skipped("self.A[B] = self.A[B].clone()")),
    ),
    *File("transforms/_accumulate.py").faults(
        Fault("reduce only the last micro-batch", "accumulate", becomes("torch.add", "lambda x, y: y")),
        Fault("first micro-batch each time", "MicroBatches.part.narrow", becomes("A * self.size", "0")),
        Fault("accumulated in half precision", "accumulate", bare("A.to(dtype)"), HALF),
    ),
    *File("sharding/_flat.py").faults(
        Fault(
            "lose the remembered gradient",
            "_GatherFromOrigin.backward",
            becomes("(None, None, A, *B)", "(None, None, A * 0, *B)"),
        ),
    ),
    *File("transforms/_stage_transforms.py", WRITES).faults(
        Fault(
            "a write through .data is lost",
            "_origin_of",
            becomes("not A(B, C(D.data))", "False and not A(B, C(D.data))"),
        ),
    ),
    *File("transforms/_gradient_groups.py", OWN).faults(
        Fault("gradients of the own are summed", "_of_per_rank", dropped("box.A is not None and B")),
        Fault("copies of what is own are not summed", "_of_per_rank", never("box.A is not None and B")),
        Fault("a differentiated tensor may differ by rank", "open_argument", skipped("A(B, C, D, E)")),
        Fault(
            "copies of one value have gradients of their own",
            "_as_invariant",
            bare("[B('pvary', C, D(E.F), G()) for C in A]"),
            ("tests/transforms/test_derivatives_of_gradients.py",),
        ),
        Fault("forget leaves that no rule names", "_of_replicated", constant("replicated", None), LAWS),
        Fault(
            "copies keep their own gradients",
            "_of_shard",
            becomes("A = [B for B in C if D]", "A: list[Axis] = []"),
            AXES,
        ),
        Fault("experts are averaged", "_of_shard", becomes("A.name not in B(C).D", "A.name not in shard_axes"), AXES),
        Fault("gradients are rounded before the update", "_of_shard", bare("A.to(B)"), HALF),
    ),
    *File("transforms/_loss_scale.py", HALF).faults(
        Fault("the scale is not undone", "scaled_value_and_grad.unscale", becomes("A.to(B) / C", "A.to(B)")),
        Fault("the loss is scaled as well", "_ScaleGradient.forward", returns("x * scale")),
    ),
    *File("transforms/_remat.py", REMAT).faults(
        Fault(
            "remat's gradient forgets an input",
            "_Remat.backward",
            becomes("[A for A, B in C if B]", "[A for A, B in C if B][:1]"),
        ),
    ),
    *File("transforms/_remat_call.py", REMAT).faults(
        Fault("remat drops the origin", "_stand_in", always("A.B is None")),
        Fault("remat takes all for batched", "Map.of.one", becomes("A(y)", "True")),
        Fault("remat forgets autocast", "BlockCall.run", becomes("with self.autocast.A(): ...", "if True: ...")),
        Fault(
            "a remat block runs in the first micro-batch",
            "BlockCall._rebind",
            becomes("A.B(axes=C)", "A.B(micro_batch=0, axes=C)"),
        ),
    ),
    *File("transforms/_remat_guards.py", REMAT).faults(
        Fault("remat misses what is captured", "Guard.__torch_function__", never("A(B)", at="1 of 3")),
    ),
]
