"""Faults in fzero/parallel/context, and in the kernels of attention."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, never, skipped, swapped
from tests.mutants.mutant import Fault, File

ATTENTION = ("tests/parallel/context/test_attention.py",)
LAYOUT = ("tests/parallel/context/test_layout.py",)
TRAINING = ("tests/parallel/context/test_training.py",)
HALO = ("tests/parallel/context/test_halo.py",)
MODELS = ("tests/parallel/context/test_transformers.py",)
MEMORY = ("tests/parallel/context/test_memory.py",)
TOGETHER = ("tests/parallel/context/test_together.py",)
KERNELS = ("tests/_torch/test_attention.py",)

MUTANTS = [
    *File("parallel/context/_layout.py", LAYOUT).faults(
        Fault("a rank's late part is one too early", "compute_positions", becomes("2 * A - 1 - B", "2 * A - 2 - B")),
        Fault("a rank gets its neighbour's late part", "_rank_part", becomes("2 * A - 1 - B", "2 * A - 2 - B")),
        Fault(
            "the last token of a document learns the next document",
            "shift_labels",
            becomes("A[..., 1:] != B", "A[..., 1:] < B"),
        ),
        Fault(
            "sequences are padded at their beginning",
            "_pad_tokens",
            becomes("[0, padding]", "[padding, 0]"),
            LAYOUT + ATTENTION,
        ),
    ),
    *File("parallel/context/_layout.py", LAYOUT).faults(
        Fault("one padding passes for tokens and labels", "_check_pad", never("len(A) > 1 and not B")),
        Fault("a batch of samples passes for one of tokens", "check_tokens_split", never("splits and all(A)")),
        Fault("whole sequences pass for parts", "check_tokens_split", never("is_whole and A and B")),
        Fault(
            "tokens that another axis splits pass for whole ones",
            "check_tokens_split",
            becomes("A.tokens is not None", "ranks > 1 and split.tokens is not None", at="1 of 1"),
        ),
        Fault("labels are shifted within parts", "shift_labels", never("A and B and C > 1")),
        Fault(
            "a batch for another number of ranks passes",
            "check_tokens_split",
            becomes("A.tokens != (B, C)", "A.tokens[0] != axis"),
        ),
    ),
    *File("parallel/experts/_load_balance.py", TOGETHER).faults(
        Fault("a part of a sequence is balanced by itself", "balance_loss", bare("pmean(A, tokens)")),
    ),
    *File("parallel/experts/_dispatch.py", TOGETHER).faults(
        Fault("a part of a sequence has a capacity of its own", "assign_positions", never("A and B is not None")),
    ),
    *File("graph/_entry.py", LAYOUT).faults(
        Fault(
            "a graph serves batches that are split otherwise",
            "Entry.check_splits",
            never("splits not in self.splits"),
        ),
    ),
    *File("sharding/_boxes.py", LAYOUT).faults(
        Fault("a box forgets how it was split", "PerRank.__init__", becomes("self.split = split", "self.split = None")),
    ),
    *File("ranks/_spmd.py", LAYOUT).faults(
        Fault("whole sequences without a box pass for parts", "Spmd._call", becomes("boxes or plain_tensors", "boxes")),
    ),
    *File("parallel/context/_layout.py", LAYOUT + TRAINING).faults(
        Fault("gathered tokens are in the order of ranks", "all_gather", bare("from_rank_order(A, B, C)")),
    ),
    *File("parallel/context/_halo.py", HALO).faults(
        Fault("edges in the middle of a sequence are zeros", "halo", becomes("A == n - 1", "A == n", at="1 of 1")),
        Fault(
            "late parts get the edges of early ones",
            "halo",
            becomes("[tail(late), head(early)]", "[tail(early), head(late)]"),
        ),
        Fault("neighbours in other documents count", "neighbours", becomes("A == documents", "documents == documents")),
        Fault(
            "all documents of a convolution are one",
            "causal_conv1d",
            becomes("neighbours(A, ..., documents=documents, axis=B)", "neighbours(A, width - 1, axis=B, dim=2)"),
        ),
    ),
    *File("parallel/context/_ring_pattern.py", ATTENTION).faults(
        Fault("a token does not attend to itself", "AttentionOptions.keep", swapped(">=", ">")),
        Fault("a window is one token too wide", "AttentionOptions.keep", swapped("A.abs() < B", "<=")),
        Fault("late queries do not meet early keys", "RingPattern.pairs", dropped("HalfPair(_LATE, _EARLY)")),
        Fault("keys of later ranks count as earlier", "RingPattern.pairs", swapped("self.A.B(step) < self.A.C", ">")),
        Fault(
            "on processes keys of later ranks count as earlier",
            "RingPattern.pairs",
            becomes("_EARLY if A < rank else _LATE", "_LATE if A < rank else _EARLY"),
        ),
        Fault("documents stay where they are", "Ring.shift", bare("self._shift(A)", at="1 of 2")),
        Fault("the ring turns the other way", "Ring._shift", becomes("(A + 1) % B", "(A - 1) % B")),
        Fault(
            "capped scores are in memory as a whole",
            "Mask.tiles",
            becomes("max(_SCORE_ROWS, A)", "t"),
            MEMORY,
        ),
        Fault("a tile misses its last keys", "Mask.tiles", becomes("min(s, A + B - 1)", "min(s, b)")),
    ),
    *File("parallel/context/_ring.py", ATTENTION).faults(
        Fault(
            "results of two parts are added without a new scale",
            "_combine_attention",
            bare("A * B.exp().unsqueeze(-1)", at="1 of 2"),
        ),
        Fault(
            "a sink counts at each step of the ring",
            "attend",
            becomes("sinks.unsqueeze(-1)", "sinks.unsqueeze(-1) + math.log(pattern.ring.size)"),
        ),
        Fault("a sink takes no weight from the tokens", "attend", bare("out * A.exp().unsqueeze(-1)", at="1 of 1")),
        Fault("the sink's gradient has the other sign", "_sink_grad", becomes("-A.sum(-1)", "A.sum(-1)")),
        Fault("gradients of keys do not come home", "attend_grad", becomes("x + y", "x + 0 * y")),
    ),
    *File("parallel/context/_ring_autograd.py", ATTENTION).faults(
        Fault(
            "attention keeps two copies of its result",
            "_Attention.setup_context",
            becomes("A(*inputs[3:], *output)", "A(*inputs[3:], *[x.sort(-1)[0] for x in output])"),
            MEMORY,
        ),
        Fault(
            "each rank drops the weights of the first tokens",
            "_attend_by_definition",
            becomes("A + queries.unsqueeze(-1)", "A + torch.arange(t).unsqueeze(-1)"),
        ),
        Fault(
            "documents are ignored in derivatives of the second order",
            "_attend_by_definition",
            never("documents is not None"),
        ),
    ),
    *File("parallel/context/_attention.py", ATTENTION).faults(
        Fault(
            "each rank has the sinks of the first heads", "_attend_by_heads", becomes("A == index_on(...)", "A == 0")
        ),
        Fault("heads come back in the order of positions", "_attend_by_heads", bare("to_rank_order(A, B, C)")),
        Fault(
            "documents are gathered in the order of ranks",
            "_attend_by_heads",
            becomes("from_rank_order(all_gather(A, ...), n, -1)", "all_gather(documents, axis, dim=-1)"),
        ),
        Fault("ranks may attend for the same tokens", "_check_differs", never("not may_differ(...)")),
        Fault("a step need not average over the axis", "_check_average", never("A and B"), TRAINING),
    ),
    *File("parallel/context/_short_convolution.py", MODELS).faults(
        Fault(
            "a short convolution of split tokens reads no neighbours",
            "replace_convolutions",
            skipped("module.forward = A"),
        ),
        Fault(
            "a short convolution reads other documents",
            "_convolve",
            becomes("causal_conv1d(A, ..., documents=documents, axis=B)", "causal_conv1d(A, weight, bias, axis=axis)"),
        ),
    ),
    *File("parallel/context/_models.py", MODELS).faults(
        Fault(
            "each part begins at position 0",
            "_with_positions",
            becomes("positions(A, B, device=C)", "torch.arange(A, device=C)"),
        ),
        Fault("a model's shifted labels are split", "_check_inputs", never("A and B and C and D")),
        Fault("a model's ranks may have the same tokens", "_check_inputs", never("is_split and not may_differ(...)")),
        Fault("a model attends within parts in silence", "notice_split_tokens", skipped("warn_once(A)")),
        Fault("a model's sinks are left out", "_attend", dropped("sinks=s_aux")),
        Fault("a model's cap is left out", "_attend", dropped("softcap=softcap")),
        Fault(
            "a window that only masks have is left out",
            "_layer_window",
            becomes("A.sliding_window if B else None", "None"),
        ),
        Fault(
            "a window without causality is one token too narrow",
            "_layer_window",
            becomes("A.sliding_window + 1", "A.sliding_window"),
        ),
        Fault("rotary angles may follow from one rank's tokens", "check_model", never("'dynamic' in A")),
        Fault("a mask of heads is ignored", "_check_call", never("(other := A)")),
    ),
    *File("parallel/context/_models.py", MODELS).faults(
        Fault(
            "documents that do not reach attention are ignored",
            "_with_positions",
            never("A is not None and B is False"),
        ),
    ),
    *File("parallel/context/_token_check.py", MODELS).faults(
        Fault(
            "a model's operations along tokens are not looked for", "_AlongTokens.__torch_dispatch__", never("any(A)")
        ),
        Fault("a model that was not checked is silent", "check_tokens", skipped("warn_once(A)")),
        Fault("the probe attends", "_own_value", becomes("value.repeat_interleave(A, 1)", "(query @ key.mT) @ value")),
    ),
    *File("nn/_module_pipeline.py", MODELS).faults(
        Fault("a pipeline attends to the rank's tokens alone", "pipeline", becomes("with_context(A, B)", "A")),
    ),
    *File("zero/_evaluate.py", TRAINING).faults(
        Fault(
            "an evaluation counts parts as examples",
            "evaluate",
            becomes("axis_index(axes, device=A)", "axis_index(step.data_axes, device=A)"),
        ),
        Fault(
            "predictions are gathered over the axis of tokens too",
            "predict.gathered_outputs",
            becomes("all_gather_invariant(A, axes)", "all_gather_invariant(A, step.data_axes)"),
        ),
    ),
    *File("_torch/attention.py", ATTENTION).faults(
        Fault("a cap is applied twice", "_scores", becomes("torch.tanh(A)", "torch.tanh(torch.tanh(A))")),
        Fault("a cap has the slope 1", "_grad_by_definition", never("softcap is not None")),
    ),
    *File("_torch/attention.py", KERNELS).faults(
        Fault("a query without keys counts", "partial_attention", always("A is None", at="1 of 1")),
        Fault(
            "the definition's gradient misses its mean",
            "_grad_by_definition",
            becomes("A - B.sum(-1, keepdim=True)", "A"),
        ),
        Fault("groups of heads are interleaved", "_attend_by_definition", constant(2, 1, at="1 of 3")),
    ),
]
