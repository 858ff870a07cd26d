"""Faults in what lies on the host: moves, pieces, offload, spaces of graphs."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, negated, never, returns, skipped, swapped
from tests.mutants.mutant import REMAT, REMAT_SHARDED, Fault, File

MOVES = ("tests/collectives/test_moves.py",)
REMAT_MEMORY = ("tests/transforms/test_remat_memory.py",)
OFFLOAD = ("tests/optim/wrappers/test_offload.py",)
SPACES = ("tests/graph/test_spaces.py",)
ARRIVALS = ("tests/graph/run/test_arrivals.py",)
HOST_MEMORY = ("tests/zero/test_host_memory.py",)
ARENA = ("tests/optim/test_arena.py",)
COST = ("tests/graph/planning/test_cost.py",)

OFFLOAD_PARAMS = ("tests/optim/wrappers/test_offload_params.py",)
OFFLOAD_PLAN = ("tests/optim/test_offload_plan.py",)
OFFLOAD_RATIO = ("tests/optim/wrappers/test_offload_ratio.py",)
OFFLOAD_DELAY = ("tests/optim/wrappers/test_delayed_offload.py",)


MUTANTS = [
    *File("collectives/_spaces.py", MOVES).faults(
        Fault("the transpose of to_host is to_host", "", constant("to_device", "to_host", at="2 of 5")),
        Fault("to_host of a host tensor is a view, not a copy", "_to_host", becomes("A(B).copy_", "B.view_as")),
        Fault(
            "the stand-in of a move keeps the strides",
            "",
            becomes("A.new_empty(B.shape, device=C)", "torch.empty_like(B, device=C)", at="1 of 2"),
        ),
        Fault("a move counts as an all_gather", "_per_tensor", constant("", "all_gather")),
        Fault(
            "a copy to the host is read before it has arrived",
            "wait_to_host",
            skipped("A.event.synchronize()"),
            ARRIVALS,
        ),
    ),
    *File("sharding/_spec.py", OFFLOAD).faults(
        Fault(
            "the device's piece is one element shorter",
            "Spec.pieces",
            (
                becomes("A(0, B, 'device')", "A(0, B - 1, 'device')"),
                becomes("A(boundary, ...)", "A(boundary - 1, ...)"),
            ),
        ),
        Fault("a piece may end at any element", "Spec.pieces", bare("-(-A // B) * B")),
        Fault(
            "a share is rounded down",
            "Spec.pieces",
            becomes("-(-math.ceil(self.A * B) // C)", "math.ceil(self.A * B) // C"),
        ),
    ),
    *File("sharding/_pieces.py", OFFLOAD).faults(
        Fault("pieces overlap", "split_shard", becomes("piece.A", "0", at="3 of 6")),
        Fault("the host's piece is joined before the device's", "join_pieces", becomes("list(A)", "list(A)[::-1]")),
        Fault("a piece is a view that keeps the whole shard's memory", "split_shard", skipped("A = A.clone()"), ARENA),
    ),
    *File("optim/_offload_plan.py", OFFLOAD).faults(
        Fault(
            "a ratio of 0.1 is taken in binary, a little more than 1/10",
            "_to_fraction",
            bare("repr(float(A))"),
            OFFLOAD_PLAN,
        ),
        Fault("the first units lie on the host", "_host_shares", bare("A[::-1]")),
        Fault("each unit takes the whole share", "_host_shares", skipped("A -= B")),
        Fault(
            "a ratio rule is asked for a unit's first leaf only",
            "_share_by_rule",
            becomes("A(path)", "A(spec.paths[0])"),
        ),
        Fault(
            "the share of a unit depends on the number of ranks",
            "_count_elements",
            returns("traced_spec(spec_id).shard_numel"),
            OFFLOAD + SPACES,
        ),
        Fault(
            "a state without a shard is not matched with its parameter",
            "OffloadPlan._parameter_unit",
            becomes("A(B.C).unit.split('.')", "A(B.C).unit.split('.') if B.has_shard else []"),
            OFFLOAD_RATIO,
        ),
        Fault(
            "tied leaves become two tensors when they move to the device",
            "OffloadPlan.state_to_device",
            never("A in B"),
        ),
        Fault("a ratio may be True", "check_ratio", dropped("isinstance(A, bool)"), OFFLOAD_RATIO),
        Fault(
            "a state with units of its own is not divided into pieces",
            "OffloadPlan._spec_id_in_pieces",
            never("total"),
            OFFLOAD_PLAN,
        ),
        Fault(
            "full parameters are divided although boxes_only is set",
            "OffloadPlan.to_pieces",
            never("boxes_only"),
            OFFLOAD_PLAN,
        ),
        Fault(
            "updates of offloaded parameters are moved to the device",
            "OffloadPlan.from_pieces",
            never("leaves_only"),
            OFFLOAD_DELAY,
        ),
        Fault(
            "offloaded parameters of another ratio are accepted",
            "OffloadPlan.to_pieces",
            (swapped("not in", "is"), becomes("(0, A(B).C)", "None")),
            OFFLOAD_PARAMS,
        ),
        Fault(
            "parameters may be offloaded at stages 0 to 2",
            "offload_params",
            becomes("isinstance(A, B) and C(A.spec_id).D", "isinstance(A, object)"),
            OFFLOAD_PARAMS,
        ),
    ),
    *File("sharding/elements/_leaf_ids.py", OFFLOAD).faults(
        Fault(
            "the leaf of an element ignores where its piece begins",
            "leaf_ids",
            becomes("(A.B, A.C)", "(0, A.C - A.B)"),
        ),
    ),
    *File("graph/_one_rank.py", SPACES).faults(
        Fault(
            "a plan for another world keeps this world's pieces", "one_rank_tree.convert", becomes("A(B).C", "x.spec.C")
        ),
    ),
    *File("optim/wrappers/_offload.py", OFFLOAD_DELAY).faults(
        Fault(
            "with master weights the update is moved to the device, not the new parameter",
            "_update_in_pieces",
            always("A.precision is None or B is None"),
            SPACES,
        ),
        Fault(
            "gradients are widened before they are moved to the host",
            "_update_on_host",
            becomes("A.B(C, D)", "A.B(C, lambda x: D(x.float()))"),
            SPACES,
        ),
        Fault(
            "parameters are moved to the host and back at each update",
            "_update_in_pieces",
            becomes("lambda A: A", "lambda A: to_device(to_host(A), A.device)"),
            SPACES,
        ),
        Fault("a state of another ratio is not refused", "offload.offload_update", skipped("A.B(C)"), OFFLOAD_RATIO),
        Fault(
            "an optimizer that reads full leaves may update on the host",
            "_check_optimizer",
            never("update_on == 'host' and A"),
            OFFLOAD,
        ),
        Fault("a loss scale may be inside offload", "_check_optimizer", never("A.skips_overflow"), OFFLOAD),
        Fault("a delayed update uses the new gradients", "_update_delayed", bare("B.C(A, D.E)")),
        Fault(
            "a delayed update never stores the new gradients",
            "_update_delayed",
            becomes("(A, B(C, D))", "(A, B(state.C, D))"),
        ),
        Fault(
            "a delayed state of an optimizer without delay is accepted",
            "_check_previous_grads",
            never("(A is None) != (B is None)"),
        ),
        Fault(
            "the first waiting gradients are the parameters, not zeros",
            "_zero_gradients.zeros",
            returns("x.to(dtype)", at="2 of 2"),
        ),
    ),
    *File("optim/_lamb.py", OFFLOAD).faults(
        Fault("lamb does not declare that it is not elementwise", "scale_by_trust_ratio", constant(False, None)),
    ),
    *File("optim/wrappers/_loss_scaling.py", OFFLOAD_PARAMS).faults(
        Fault(
            "an overflow does not skip the host's part of an update",
            "_select_if_good",
            returns("torch.where(is_finite, new_values, old_values) if space == 'device' else new_values", at="2 of 2"),
        ),
    ),
    *File("checkpoint/layout/_local_tree.py", OFFLOAD_DELAY).faults(
        Fault(
            "a host's piece is loaded from the wrong range",
            "_BoxMemory.locate",
            (bare("A + a - B.C"), becomes("A + B - C.D", "A + B - a")),
        ),
        Fault(
            "a host's piece begins where the shard does",
            "_BoxMemory.locate",
            becomes("a - A", "a if a - A + b - a <= x.shape[-1] and a < x.shape[-1] else 0"),
        ),
    ),
    *File("zero/_fill.py", OFFLOAD_RATIO).faults(
        Fault("init fills the host's piece from the shard's start", "_Destination.store", bare("A + B.C")),
    ),
    *File("graph/passes/_recompute.py", SPACES).faults(
        Fault("recompute repeats a move", "_is_repeatable", dropped("A(B)", at="4 of 5")),
    ),
    *File("graph/ir/_memory_spaces.py", SPACES).faults(
        Fault(
            "a captured tensor counts as lying on the device",
            "_node_spaces",
            becomes("A.meta.get('space')", "A.meta.get('space', 'device')"),
        ),
        Fault("an operation on tensors of both memories is accepted", "_result_space", dropped("device")),
        Fault("a collective of host values is accepted", "_result_space", becomes("A and (B(C) or D)", "A and D")),
        Fault(
            "a 0-d value on the device has no memory",
            "_result_space",
            becomes("A if device else None", "A if device and getattr(node.meta['val'], 'ndim', 1) else None"),
        ),
    ),
    *File("graph/trace/_donation.py", SPACES).faults(
        Fault(
            "a host result reuses a device argument's memory",
            "match_results",
            becomes("by_path[A, B.space] = C", "by_path[A, 'device'] = by_path[A, 'host'] = C"),
        ),
        Fault(
            "a result reuses a donated argument of the other memory",
            "match_results",
            always("A.B[C].space == D[E].space"),
        ),
    ),
    *File("graph/_entry.py", SPACES).faults(
        Fault("host arguments count in the device's memory", "_space_label", never("A.dim() or B.space == 'host'")),
    ),
    *File("graph/planning/memory/_live_ranges.py", SPACES).faults(
        Fault("results on the host count in the device's memory", "_unlabeled_ranges", never("A in B.C")),
    ),
    *File("graph/planning/_plan.py", SPACES).faults(
        Fault(
            "a loop's transfers count once", "make_plan", becomes("A(B, C(D), E(*F(D)), G)", "A(B, C(D), E(*F(D)), 1)")
        ),
    ),
    *File("graph/run/_program.py", ARRIVALS).faults(
        Fault(
            "a copied value is read before the copy's wait",
            "_wait_before_use",
            becomes("A[old]", "node if old is node else A[old]"),
        ),
        Fault("a copy blocks where it starts", "_wait_before_use", skipped("A.target = B")),
        Fault("a copy is waited for at its last use, not at its first", "_wait_before_use", becomes("min", "max")),
        Fault("copies within loops are not waited for", "make_copies_async", skipped("A(B, C(D.E, F))")),
    ),
    *File("graph/planning/_clocks.py", COST).faults(
        Fault("the host's work takes no time in the cost model", "estimate_seconds", returns("clocks.work")),
        Fault("the host starts before its inputs arrive", "_HostClock.compute", bare("max(A, self.B(C))")),
        Fault("the device does not wait for the host", "_Clocks._move", never("A > self.work")),
        Fault("a view is ready before its base", "_Clocks.run", skipped("A.pass_on(B)")),
        Fault("a timeline has no waits for collectives", "_Clocks._wait_until", skipped("A.note(B, C, D, E, F)")),
        Fault("a timeline shows one iteration of a loop", "_Clocks._note_iterations", becomes("A.iterations", "1")),
        Fault("iterations of a loop lie on one another", "_Clocks._note_iterations", becomes("A += B", "A += 0")),
    ),
    *File("graph/planning/_clocks.py", COST).faults(
        Fault(
            "values within a fused kernel are read",
            "_Kernels.estimate_work",
            becomes("A not in B._unstored and C", "C"),
        ),
        Fault("a fused kernel reads an operand anew in each operation", "_Kernels.estimate_work", skipped("A.add(B)")),
        Fault(
            "each operation of a fused kernel is launched",
            "_Kernels.estimate_work",
            becomes(
                "Work(0.0, A, 0.0)", "Work(0.0, memory_bytes / self._hardware.memory_bandwidth, work.launch_seconds)"
            ),
        ),
    ),
    *File("graph/planning/_cost.py", COST).faults(
        Fault("products of float8 take the time of half precision", "_compute_seconds", bare("A / B.float8_speedup")),
        Fault("products of float8 have one rate in any shape", "_PRODUCTS", dropped("A._scaled_mm: 0")),
        Fault("all operations count as bound by products", "Work.limit", always("A.seconds == A.product_seconds")),
    ),
    *File("transforms/_remat_runs.py", REMAT).faults(
        Fault("remat's offload moves parameters to the host", "_copy_to_host", dropped("not A[B].is_leaf")),
        Fault("remat's offload moves 0-d values to the host", "_copy_to_host", dropped("A[B].dim()")),
        Fault(
            "remat's offload copies without autograd", "_copy_to_host", becomes("torch.enable_grad", "torch.no_grad")
        ),
    ),
    *File("transforms/_block_call.py", REMAT).faults(
        Fault("remat's offload moves boxes to the host", "BlockCall.offload_indices", bare("A - self.arguments.B()")),
    ),
    *File("transforms/_indexed_tree.py", REMAT).faults(
        Fault(
            "a block whose only box is a Slot counts as without boxes",
            "IndexedTree.has_boxes",
            bare("A | B"),
            REMAT_SHARDED,
        ),
    ),
    *File("graph/passes/_host_copies.py", REMAT_MEMORY).faults(
        Fault("gathered parameters are kept on the host", "keep_on_host", negated("all(A.target is B for A in C)")),
    ),
    *File("graph/_pass_manager.py", REMAT_MEMORY).faults(
        Fault(
            "the parameters of a loop are kept on the host", "PassManager.body", becomes("A(B.C)", "False", at="1 of 2")
        ),
    ),
    *File("zero/_bytes.py", HOST_MEMORY).faults(
        Fault("the host's free memory is not compared with the need", "check_host_memory", never("A > B")),
        Fault("the need of the host counts one rank only", "check_host_memory", bare("B * A")),
        Fault("offloaded parameters are not in the host's need", "check_host_memory", never("A.param_offload_ratio")),
        Fault("the limit of a control group is ignored", "_free_bytes", bare("min(A, int(B) - C)")),
        Fault("state_bytes ignores space=", "state_bytes", never("A not in (None, B)"), OFFLOAD_PARAMS),
    ),
    *File("optim/_base.py", HOST_MEMORY).faults(
        Fault(
            "a chain does not say that a link offloads",
            "wrap_optimizers",
            becomes("any(A.offloads_state for A in B)", "False"),
        ),
    ),
    *File("optim/_base.py", OFFLOAD_PARAMS).faults(
        Fault(
            "init does not offload parameters", "Optimizer.cast_and_offload", becomes("self.param_offload_ratio", "0")
        ),
    ),
    *File("graph/passes/_regather.py", OFFLOAD_PARAMS).faults(
        Fault(
            "a shard that was moved to the device stays there until the backward pass",
            "_reload_from_host",
            never("A.intersection(B)"),
        ),
    ),
]
