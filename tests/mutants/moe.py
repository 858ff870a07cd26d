"""Faults in fzero/moe."""

from tests.mutants.mutant import Mutant

ROUTE = ("tests/parallel/experts/test_route.py",)
SEATS = ("tests/parallel/experts/test_seats.py",)
GROUPED = ("tests/parallel/experts/test_grouped.py",)
LAYER = ("tests/parallel/experts/test_layer.py",)
TRAINING = ("tests/parallel/experts/test_training.py",)
TRANSFORMERS = ("tests/parallel/experts/test_transformers.py",)
PLAN = ("tests/graph/test_plan.py", "-k", "axes or another_size")
CLIP = ("tests/optim/test_experts.py",)
AXES = ("tests/parallel/experts/test_axes.py",)
BY_HAND = ("tests/parallel/experts/test_by_hand.py",)
INPUT = ("tests/parallel/experts/test_input.py",)

MUTANTS = [
    # routing
    Mutant(
        "the bias is in the gates",
        "parallel/experts/_route.py",
        "gates = probs.gather(-1",
        "gates = scores.gather(-1",
        ROUTE,
    ),
    Mutant(
        "gates are not detached from the choice",
        "parallel/experts/_route.py",
        "else probs.detach() + bias.detach()",
        "else probs.detach() + bias",
        ROUTE,
        (("gates = probs.gather(-1, experts)", "gates = scores.gather(-1, experts) - bias[experts]"),),
    ),
    Mutant("gates are not scaled", "parallel/experts/_route.py", "gates * scale", "gates", ROUTE),
    Mutant(
        "a group is as good as its best",
        "parallel/experts/_route.py",
        "topk(min(2, of_groups",
        "topk(min(1, of_groups",
        ROUTE,
    ),
    Mutant(
        "a nan takes a seat",
        "parallel/experts/_route.py",
        "torch.where(nowhere, logits.shape[-1], experts)",
        "experts",
        ROUTE,
    ),
    Mutant(
        "routing in half precision",
        "parallel/experts/_route.py",
        "logits.dtype, torch.float32)",
        "logits.dtype, logits.dtype)",
        ROUTE,
    ),
    Mutant(
        "all ranks jitter alike", "parallel/experts/_route.py", "to(x.device) * x.shape[0]", "to(x.device) * 0", ROUTE
    ),
    Mutant("k is not checked", "parallel/experts/_route.py", "not 1 <= k <= choices", "not 1 <= k", INPUT),
    Mutant("gates are divided by zero", "parallel/experts/_route.py", ".clamp(min=_TINY)", "", ROUTE),
    # seats
    Mutant(
        "capacity is counted per rank",
        "parallel/experts/_dispatch.py",
        'queue = rearrange(experts, "s t k -> s (k t)").contiguous()\n    place = _places(queue, count)',
        'queue = rearrange(experts, "s t k -> s (k t)").contiguous()\n'
        '    place = _places(rearrange(queue, "s q -> 1 (s q)"), count).view(queue.shape)',
        TRAINING,
        (("(place < c)", "(place < c * len(queue))"), ("queue * c + place", "queue * c + place % c")),
    ),
    Mutant(
        "drops depend on the rest of the batch",
        "parallel/experts/_dispatch.py",
        "    place = _places(queue, count)",
        '    place = _places(rearrange(queue, "s q -> 1 (s q)"), count).view(queue.shape)',
        LAYER,
    ),
    Mutant(
        "second choices are seated with the first",
        "parallel/experts/_dispatch.py",
        '"s t k -> s (k t)"',
        '"s t k -> s (t k)"',
        SEATS,
        (('"s (k t) -> s t k"', '"s (t k) -> s t k"'),),
    ),
    Mutant("one seat too many", "parallel/experts/_dispatch.py", "(place < c)", "(place <= c)", SEATS),
    Mutant("seats are rounded down", "parallel/experts/_dispatch.py", "math.ceil(round(", "math.floor(round(", SEATS),
    Mutant(
        "choices queue in any order",
        "parallel/experts/_dispatch.py",
        "stable=True",
        "stable=True, descending=True",
        SEATS,
    ),
    Mutant(
        "the way back has its dimensions swapped",
        "parallel/experts/_dispatch.py",
        "split_dim=1, concat_dim=0",
        "split_dim=0, concat_dim=1",
        SEATS,
    ),
    Mutant(
        "the way back goes nowhere",
        "parallel/experts/_dispatch.py",
        "all_to_all(y, where_bound(axis)",
        "all_to_all(y, ()",
        SEATS,
    ),
    Mutant(
        "an empty seat holds the last token",
        "parallel/experts/_dispatch.py",
        "x.new_zeros((1, x.shape[1]))",
        "x[-1:]",
        LAYER,
    ),
    Mutant(
        "rows are not copied back",
        "parallel/experts/_dispatch.py",
        "moved(grad, back, at)",
        "moved(grad, back * 0, at)",
        SEATS,
    ),
    Mutant("sequences share their seats", "parallel/experts/_dispatch.py", "at + first", "at", SEATS),
    Mutant(
        "seats are counted in binary",
        "parallel/experts/_dispatch.py",
        "round(capacity * tokens * k / count, 9)",
        "capacity * tokens * k / count",
        SEATS,
    ),
    Mutant(
        "one gate passes for all", "parallel/experts/_dispatch.py", "if gates.shape != (s, t, k):", "if False:", INPUT
    ),
    # sorted rows
    Mutant(
        "rows arrive in the senders' order",
        "parallel/experts/_dispatch.py",
        "_by_expert(got_counts, room) if ep",
        "torch.arange(len(got)) if ep",
        SEATS,
    ),
    Mutant("counts stay at home", "parallel/experts/_dispatch.py", "all_to_all(counts, ep)", "counts", SEATS),
    Mutant("there is room for one choice", "parallel/experts/_dispatch.py", "min(k, count // n)", "1", SEATS),
    Mutant(
        "places count from the own expert and not the rank's first",
        "parallel/experts/_dispatch.py",
        "first[rank * (count // n)]",
        "first[ordered]",
        SEATS,
    ),
    Mutant(
        "sorted rows go back as they lie",
        "parallel/experts/_dispatch.py",
        "inverse(order.order, order.order.shape[0])",
        "order.order",
        SEATS,
    ),
    # grouped products
    Mutant(
        "ends count the padding",
        "parallel/experts/_grouped.py",
        "enumerate(ends.tolist())",
        "enumerate([*ends.tolist()[:-1], len(x)])",
        GROUPED,
    ),
    Mutant(
        "rows behind the last are not masked",
        "parallel/experts/_grouped.py",
        "real.unsqueeze(-1), y, 0)",
        "real.unsqueeze(-1), y, 1)",
        GROUPED,
    ),
    Mutant(
        "the gradient's matrices are not transposed",
        "parallel/experts/_grouped.py",
        "apply_mm(y, grad.mT",
        "apply_mm(y, grad",
        GROUPED,
    ),
    Mutant(
        "a leaf may begin anywhere",
        "parallel/experts/_grouped.py",
        "return x if tight and whole else",
        "return x if True else",
        LAYER,
    ),
    Mutant(
        "a plan counts the padding", "parallel/experts/_grouped.py", "2 * likely * x[1]", "2 * x[0] * x[1]", GROUPED
    ),
    Mutant(
        "no columns go to the kernel", "parallel/experts/_grouped.py", "all(size and size % 8", "all(size % 8", BY_HAND
    ),
    # balance
    Mutant(
        "the loss is of the rank's own means",
        "parallel/experts/_losses.py",
        "share, score = pmean((share.mean(0), score.mean(0)), axis)",
        "share, score = share.mean(0), score.mean(0)",
        TRAINING,
    ),
    Mutant(
        "the share is divided by k twice",
        "parallel/experts/_losses.py",
        "max(routing.experts.shape[1:].numel(), 1)",
        "max(routing.experts.shape[1:].numel() * routing.experts.shape[-1], 1)",
        ROUTE,
    ),
    Mutant(
        "the load is the rank's own",
        "parallel/experts/_losses.py",
        "pmean(_shares(routing).mean(0), axis)",
        "_shares(routing).mean(0)",
        ROUTE,
    ),
    Mutant(
        "the bias favours the busy", "parallel/experts/_losses.py", "mean.mean() - mean", "mean - mean.mean()", ROUTE
    ),
    Mutant(
        "sequences are balanced together",
        "parallel/experts/_losses.py",
        '    elif over != "sequence":',
        '    elif over == "sequence":\n        share, score = share.mean(0), score.mean(0)\n    else:',
        TRAINING,
    ),
    Mutant(
        "nobody learns to balance",
        "parallel/experts/_losses.py",
        "routing.probs.mean(1)",
        "routing.probs.detach().mean(1)",
        BY_HAND,
    ),
    Mutant(
        "the entropy is of what sums to no one",
        "parallel/experts/_losses.py",
        "probs / probs.sum(-1, keepdim=True)",
        "probs",
        BY_HAND,
    ),
    Mutant(
        "micro-batches jitter alike",
        "parallel/experts/_route.py",
        "fold_in(key, micro_batch())",
        "fold_in(key, 0)",
        BY_HAND,
    ),
    Mutant(
        "gates do not learn",
        "parallel/experts/_dispatch.py",
        "gates.to(rows.dtype)",
        "gates.detach().to(rows.dtype)",
        BY_HAND,
    ),
    Mutant(
        "rows' tangents double",
        "parallel/experts/_dispatch.py",
        "moved(tangent, *ctx",
        "moved(2 * tangent, *ctx",
        BY_HAND,
    ),
    Mutant(
        "rows come back along ep, whatever the axis",
        "parallel/experts/_layer.py",
        "combine(done, seated, routing.gates, axis)",
        "combine(done, seated, routing.gates)",
        BY_HAND,
    ),
    # the layer
    Mutant(
        "one matrix passes for all experts",
        "parallel/experts/_layer.py",
        "weight.shape[:2] != (count, rows.shape[-1])",
        "weight.shape[-2] not in (1, rows.shape[-1])",
        INPUT,
    ),
    Mutant(
        "a bias is not added",
        "parallel/experts/_layer.py",
        "return y if bias is None else",
        "return y if True else",
        LAYER,
    ),
    Mutant(
        "every rank has all experts", "parallel/experts/_layer.py", "return {self.axis: 0}", "return None", TRAINING
    ),
    Mutant(
        "experts that are not split pass", "parallel/experts/_layer.py", "if size == count // n:", "if True:", INPUT
    ),
    Mutant(
        "shared experts are split too",
        "parallel/experts/_layer.py",
        "if part in self.names]",
        "if part.endswith(self.names)]",
        INPUT,
    ),
    Mutant(
        "experts are split over another axis than tokens travel along",
        "parallel/experts/_layer.py",
        "if over and axis not in over:",
        "False",
        AXES,
    ),
    Mutant(
        "the axis of the experts is none of the data's",
        "parallel/experts/_layer.py",
        "if axis not in data:",
        "if False:",
        AXES,
    ),
    Mutant(
        "all ranks along ep have the same experts",
        "_torch/levels.py",
        "        x = functorch.get_unwrapped(x)\n    return False",
        "        x = functorch.get_unwrapped(x)\n    return True",
        AXES,
    ),
    # transformers
    Mutant(
        "weights are taken as they are stored",
        "parallel/experts/transformers.py",
        "weight if module.is_transposed else weight.mT",
        "weight.mT if module.is_transposed else weight",
        TRANSFORMERS,
    ),
    Mutant(
        "biases are left out",
        "parallel/experts/transformers.py",
        "if module.has_bias else None\n    h = linear",
        "if False else None\n    h = linear",
        TRANSFORMERS,
    ),
    Mutant(
        "a part of the experts passes for all",
        "parallel/experts/transformers.py",
        'getattr(module, "num_experts", len(weight) * n)',
        "len(weight) * n",
        TRANSFORMERS,
    ),
    Mutant(
        "an exchange is called by what comes before it",
        "graph/planning/_plan.py",
        "after = [m for n in after for m in n.users if m not in seen]",
        "after = []",
        ("tests/parallel/experts/test_plan.py",),
    ),
    Mutant(
        "in a loop nobody knows the layers",
        "graph/planning/_plan.py",
        "layers(loop.body, held)",
        "layers(loop.body)",
        ("tests/parallel/experts/test_plan.py",),
    ),
    # plans of other worlds, and names
    Mutant(
        "what gathers new experts has no name",
        "sharding/_rows.py",
        'transpose="reduce_scatter_flat",\n        replicated=True,\n        unit=_unit,',
        'transpose="reduce_scatter_flat",\n        replicated=True,',
        ("tests/parallel/experts/test_plan.py",),
    ),
    Mutant("a plan keeps the parts of experts", "graph/_one_rank.py", "shape[dim] = whole // n", "pass", PLAN),
    Mutant("experts are planned in unequal parts", "graph/_one_rank.py", "if whole % n:", "if False:", PLAN),
    # clipping by expert
    Mutant("an expert is not summed over tp", "optim/_clip.py", "if s.dims[i] != 0]", "if False]", CLIP),
    Mutant("a wrong name clips nothing", "optim/_clip.py", "if paths and not any(layers):", "if False:", CLIP),
    Mutant(
        "a list of experts is clipped row by row",
        "optim/_clip.py",
        "part.isdigit() for part in parts[found",
        "False for part in parts[found",
        CLIP,
    ),
    Mutant("experts are summed over ep", "optim/_clip.py", "if s.dims[i] != 0]", "if True]", CLIP),
    Mutant(
        "each leaf of an expert is clipped alone", "optim/_clip.py", '".".join(parts[: found[0] + 1])', "path", CLIP
    ),
    Mutant(
        "a rank's rows begin at 0", "optim/_clip.py", "unit_index(c.unit.uid).to(device) * known", "0 * known", CLIP
    ),
    Mutant(
        "experts of any implementation are split",
        "parallel/experts/transformers.py",
        "if not isinstance(f, partial) or f.func is not _experts:",
        "if not callable(f):",
        TRANSFORMERS,
    ),
    Mutant(
        "what experts share is split",
        "parallel/experts/transformers.py",
        "p.ndim and len(p) == count",
        "p.ndim",
        TRANSFORMERS,
    ),
    Mutant(
        "experts over no axis were cut",
        "zero/_checks.py",
        "if x.origin is None and facts(x.uid).axes:",
        "if x.origin is None:",
        ("tests/parallel/experts/test_training.py",),
    ),
    Mutant(
        "experts that were chosen are replaced",
        "parallel/experts/transformers.py",
        'config._experts_implementation == "grouped_mm"',
        "True",
        ("tests/parallel/experts/test_transformers.py",),
    ),
]
