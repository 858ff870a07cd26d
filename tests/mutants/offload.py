"""Faults in what lies on the host: moves, pieces, offload, spaces of graphs."""

from tests.mutants.changes import always, bare, becomes, constant, dropped, negated, never, returns, skipped, swapped
from tests.mutants.mutant import REMAT, Fault, File

MOVES = ("tests/collectives/test_moves.py",)
OFFLOAD = ("tests/optim/test_offload.py",)
SPACES = ("tests/graph/test_spaces.py",)
ARRIVALS = ("tests/graph/run/test_arrivals.py",)
HOST_MEMORY = ("tests/zero/test_host_memory.py",)
ARENA = ("tests/optim/test_arena.py",)
COST = ("tests/graph/test_cost.py",)

MUTANTS = [
    *File("collectives/_moves.py", MOVES).faults(
        Fault("a move down is its own transpose", "", constant("to_device", "to_host", at="2 of 4")),
        Fault("a move where it is there already is no copy", "_to_host", becomes("A(B).copy_", "B.view_as")),
        Fault(
            "the fake of a copy keeps the strides",
            "",
            becomes("A.new_empty(B.shape, device=C)", "torch.empty_like(B, device=C)", at="1 of 2"),
        ),
        Fault("moves count as collectives", "_per_tensor", constant("", "all_gather")),
        Fault("an arrival is not waited for", "wait_to_host", skipped("A.event.synchronize()"), ARRIVALS),
    ),
    *File("sharding/_spec.py", OFFLOAD).faults(
        Fault(
            "a cut off by one",
            "Spec.pieces",
            (becomes("A(0, B, 'device')", "A(0, B - 1, 'device')"), becomes("A(at, ...)", "A(at - 1, ...)")),
        ),
        Fault("a cut at any element", "Spec.pieces", bare("-(-A // B) * B")),
        Fault(
            "a share is rounded down",
            "Spec.pieces",
            becomes("-(-math.ceil(self.A * B) // C)", "math.ceil(self.A * B) // C"),
        ),
    ),
    *File("sharding/_boxes.py", OFFLOAD).faults(
        Fault("pieces overlap", "split_shard", becomes("piece.A", "0", at="3 of 6")),
        Fault("pieces are joined in the wrong order", "join_pieces", becomes("list(A)", "list(A)[::-1]")),
        Fault("a piece keeps the whole shard", "split_shard", skipped("A = A.clone()"), ARENA),
    ),
    *File("optim/_offload_plan.py", OFFLOAD).faults(
        Fault("0.1 is a little more than 1/10", "_to_fraction", bare("repr(float(A))")),
        Fault("the first units lie on the host", "_host_shares", bare("A[::-1]")),
        Fault("each unit takes the whole share", "_host_shares", skipped("A -= B")),
        Fault("a rule's first leaf answers for its unit", "_share_by_rule", becomes("A(path)", "A(spec.paths[0])")),
        Fault(
            "a share of this mesh's elements", "_weight", returns("traced_spec(spec_id).shard_numel"), OFFLOAD + SPACES
        ),
        Fault(
            "tied leaves of a state part when they go down",
            "OffloadPlan._parameter_of",
            becomes("A(B.C).unit.split('.')", "A(B.C).unit.split('.') if B.has_shard else []"),
        ),
        Fault("tied leaves part when they come up", "OffloadPlan.state_to_device", never("A in B")),
        Fault("a ratio may be true", "check_ratio", dropped("isinstance(A, bool)")),
        Fault("a state of a unit of its own stays", "OffloadPlan._spec_id_in_pieces", never("total")),
        Fault("whole parameters go down", "OffloadPlan.to_pieces", never("boxes_only")),
        Fault("updates of low parameters go up", "OffloadPlan.from_pieces", never("leaves_only")),
        Fault(
            "any ratio fits low parameters",
            "OffloadPlan.to_pieces",
            (swapped("not in", "is"), becomes("(0, A(B).C)", "None")),
        ),
        Fault(
            "low parameters at any stage",
            "offload_params",
            becomes("isinstance(A, B) and C(A.spec_id).D", "isinstance(A, object)"),
        ),
    ),
    *File("sharding/_segments.py", OFFLOAD).faults(
        Fault("a piece's offset is forgotten", "segment_ids", becomes("(A.B, A.C)", "(0, A.C - A.B)")),
    ),
    *File("graph/_one_rank.py", SPACES).faults(
        Fault("a plan keeps the cut of another world", "one_rank_tree.convert", becomes("A(B).C", "x.spec.C")),
    ),
    *File("optim/_offload.py", OFFLOAD).faults(
        Fault(
            "the update comes up, not the new parameter",
            "_update_in_pieces",
            always("A.precision is None or B is None"),
            SPACES,
        ),
        Fault(
            "gradients go down widened",
            "_update_on_host",
            becomes("A.B(C, D)", "A.B(C, lambda x: D(x.float()))"),
            SPACES,
        ),
        Fault(
            "parameters go down, too, for nothing",
            "_update_in_pieces",
            becomes("lambda A: A", "lambda A: to_device(to_host(A), A.device)"),
            SPACES,
        ),
        Fault("a state of another ratio is not told", "offload.offload_update", skipped("A.B(C)")),
        Fault("whole leaves are read in pieces", "offload", never("update == 'host' and A")),
        Fault("a loss scale goes inside", "offload", never("A.skips_overflow")),
        Fault("gradients do not wait", "_update_delayed", bare("B.C(A, D.E)")),
        Fault("gradients wait for ever", "_update_delayed", becomes("(A, B(C, D))", "(A, B(state.C, D))")),
        Fault("a delayed state fits any ratio", "_check_previous_grads", never("(A is None) != (B is None)")),
        Fault("what waits at first are parameters", "_zero_gradients.zeros", returns("x.to(dtype)", at="2 of 2")),
    ),
    *File("optim/_adam.py", OFFLOAD).faults(
        Fault("lamb does not say that it reads norms", "scale_by_trust_ratio", constant(False, None)),
    ),
    *File("optim/_half_precision.py", OFFLOAD).faults(
        Fault(
            "a skipped step is not skipped on the host",
            "_select",
            returns("torch.where(good, new, old) if space == 'device' else new", at="2 of 2"),
        ),
    ),
    *File("checkpoint/_local_tree.py", OFFLOAD).faults(
        Fault(
            "a host's piece is loaded from the wrong range",
            "BoxMemory.locate",
            (bare("A + a - B.C"), becomes("A + B - C.D", "A + B - a")),
        ),
        Fault(
            "a host's piece begins where the shard does",
            "BoxMemory.locate",
            becomes("a - A", "a if a - A + b - a <= x.shape[-1] and a < x.shape[-1] else 0"),
        ),
    ),
    *File("zero/_build.py", OFFLOAD).faults(
        Fault("pieces are filled from the shard's start", "_Destination.store", bare("A + B.C")),
    ),
    *File("graph/passes/_rematerialize.py", SPACES).faults(
        Fault("moves are made again", "_repeats", dropped("A(B)", at="4 of 5")),
    ),
    *File("graph/_storages.py", SPACES).faults(
        Fault(
            "captured tables lie on the device",
            "_spaces",
            becomes("A.meta.get('space')", "A.meta.get('space', 'device')"),
        ),
        Fault("mixed operations pass", "_space_of_result", dropped("device")),
        Fault("collectives take the host's values", "_space_of_result", becomes("A and (B(C) or D)", "A and D")),
        Fault(
            "numbers of the device lie nowhere",
            "_space_of_result",
            becomes("A if device else None", "A if device and getattr(node.meta['val'], 'ndim', 1) else None"),
        ),
    ),
    *File("graph/trace/_donation.py", SPACES).faults(
        Fault(
            "the host's results take the device's memory",
            "match_results",
            becomes("by_path[A, B.space] = C", "by_path[A, 'device'] = by_path[A, 'host'] = C"),
        ),
        Fault("free results take either memory", "match_results", always("A.B[C].space == D[E].space")),
    ),
    *File("graph/_entry.py", SPACES).faults(
        Fault("the host's arguments count as the device's", "_space", never("A.dim() or B.space == 'host'")),
    ),
    *File("graph/planning/_liveness.py", SPACES).faults(
        Fault("what the host computes counts as the device's", "_unlabeled_ranges", never("A in B.C")),
    ),
    *File("graph/planning/_plan.py", SPACES).faults(
        Fault(
            "a loop's transfers count once", "plan_of", becomes("A(B, C(D), E(*F(D)), G)", "A(B, C(D), E(*F(D)), 1)")
        ),
    ),
    *File("graph/run/_program.py", ARRIVALS).faults(
        Fault("what comes is read at once", "_wait_before_use", becomes("A[old]", "node if old is node else A[old]")),
        Fault("a copy is waited for where it starts", "_wait_before_use", skipped("A.target = B")),
        Fault("a copy is waited for too late", "_wait_before_use", becomes("min", "max")),
        Fault("loops wait for no copy", "make_copies_async", skipped("A(B, C(D.E, F))")),
    ),
    *File("graph/planning/_cost.py", COST).faults(
        Fault("the host takes no time", "seconds", returns("work")),
        Fault("the host waits for nothing", "_HostClock.computes", bare("max(A, self.B(C))")),
        Fault("the device does not wait for the host", "seconds", bare("max(A, B.C(D))")),
        Fault("a view is there at once", "seconds", skipped("A.B(C)")),
    ),
    *File("transforms/_remat.py", REMAT).faults(
        Fault("leaves wait on the host", "offload", dropped("not A[B].is_leaf")),
        Fault("numbers wait on the host", "offload", dropped("A[B].dim()")),
        Fault("copies that wait are not tracked", "offload", becomes("torch.enable_grad", "torch.no_grad")),
    ),
    *File("transforms/_remat_call.py", REMAT).faults(
        Fault("a slot alone is no box", "StandIns.has_boxes", bare("A | B")),
        Fault("boxes wait on the host", "BlockCall.offload_numbers", bare("A - self.arguments.B()")),
    ),
    *File("graph/passes/_offload.py", REMAT).faults(
        Fault("gathered parameters wait on the host", "keep_on_host", negated("all(A.target is B for A in C)")),
    ),
    *File("graph/_pass_manager.py", REMAT).faults(
        Fault("loops' parameters wait on the host", "PassManager.body", becomes("A(B.C)", "False", at="1 of 2")),
    ),
    *File("zero/_bytes.py", HOST_MEMORY).faults(
        Fault("the host has always room", "check_host_memory", never("A > B")),
        Fault("one rank's share is the host's", "check_host_memory", bare("B * A")),
        Fault("low parameters take no room", "check_host_memory", never("A.param_offload_ratio")),
        Fault("a group's limit is not read", "free_bytes", bare("min(A, int(B) - C)")),
        Fault("bytes of one memory are those of both", "state_bytes", never("A not in (None, B)"), OFFLOAD),
    ),
    *File("optim/_base.py", HOST_MEMORY).faults(
        Fault("a chain does not offload", "wrap_pairs", becomes("any(A.offloads_state for A in B)", "False")),
    ),
    *File("optim/_base.py", OFFLOAD).faults(
        Fault("parameters go up to stay", "Optimizer.cast_and_offload", becomes("self.param_offload_ratio", "0")),
    ),
    *File("graph/passes/_rematerialize.py", OFFLOAD).faults(
        Fault("a shard that came up stays", "_reload_from_host", never("A.intersection(B)")),
    ),
]
