"""Faults in what lies on the host: moves, pieces, offload, spaces of graphs."""

from tests.mutants.mutant import REMAT, Mutant

MOVES, OFFLOAD = ("tests/collectives/test_moves.py",), ("tests/optim/test_offload.py",)
SPACES, ARRIVALS = ("tests/graph/test_spaces.py",), ("tests/graph/run/test_arrivals.py",)
ROOM, ARENA, COST = ("tests/zero/test_host_memory.py",), ("tests/optim/test_arena.py",), ("tests/graph/test_cost.py",)

MUTANTS = [
    # moves
    Mutant(
        "a move down is its own transpose",
        "collectives/_moves.py",
        '"to_host", "to_device", l',
        '"to_host", "to_host", l',
        MOVES,
    ),
    Mutant(
        "a move where it is there already is no copy",
        "collectives/_moves.py",
        "    return _below(x).copy_(x)",
        "    return x.view_as(x)",
        MOVES,
    ),
    Mutant(
        "the fake of a copy keeps the strides",
        "collectives/_moves.py",
        'return x.new_empty(x.shape, device="meta" if x.is_meta else "cpu")',
        'return torch.empty_like(x, device="meta" if x.is_meta else "cpu")',
        MOVES,
    ),
    Mutant(
        "moves count as collectives", "collectives/_moves.py", 'wire="", stacked', 'wire="all_gather", stacked', MOVES
    ),
    # cuts
    Mutant(
        "a cut off by one",
        "sharding/_spec.py",
        'return (Piece(0, at, "device"), Piece(at, k',
        'return (Piece(0, at - 1, "device"), Piece(at - 1, k',
        OFFLOAD,
    ),
    Mutant(
        "pieces overlap", "sharding/_pieces.py", "x.narrow(-1, piece.start, piece", "x.narrow(-1, 0, piece", OFFLOAD
    ),
    Mutant(
        "a cut at any element",
        "sharding/_spec.py",
        "-(-math.ceil(self.host * k) // ALIGN) * ALIGN",
        "math.ceil(self.host * k)",
        OFFLOAD,
    ),
    Mutant(
        "a share is rounded down",
        "sharding/_spec.py",
        "-(-math.ceil(self.host * k) // ALIGN)",
        "(math.ceil(self.host * k) // ALIGN)",
        OFFLOAD,
    ),
    Mutant(
        "0.1 is a little more than 1/10",
        "optim/_offload_plan.py",
        "Fraction(repr(float(share)))",
        "Fraction(share)",
        OFFLOAD,
    ),
    Mutant(
        "the first units lie on the host",
        "optim/_offload_plan.py",
        "for uid in units[::-1]:",
        "for uid in units:",
        OFFLOAD,
    ),
    Mutant("each unit takes the whole share", "optim/_offload_plan.py", "        wanted -= here\n", "", OFFLOAD),
    Mutant(
        "a rule's first leaf answers for its unit",
        "optim/_offload_plan.py",
        "shares = [rule(path) for path in spec.paths]",
        "shares = [rule(spec.paths[0]) for path in spec.paths]",
        OFFLOAD,
    ),
    Mutant(
        "a share of this mesh's elements",
        "optim/_offload_plan.py",
        "return facts(uid).numel * facts(uid).split_ranks",
        "return facts(uid).shard_numel",
        OFFLOAD + SPACES,
    ),
    Mutant(
        "a piece's offset is forgotten",
        "sharding/_segments.py",
        "(piece.start, piece.stop)",
        "(0, piece.stop - piece.start)",
        OFFLOAD,
    ),
    Mutant(
        "pieces are joined in the wrong order",
        "sharding/_pieces.py",
        "torch.cat(list(parts), -1)",
        "torch.cat(list(parts)[::-1], -1)",
        OFFLOAD,
    ),
    Mutant(
        "a plan keeps the cut of another world",
        "graph/_one_rank.py",
        "for p in spec_of(uid).pieces]",
        "for p in x.spec.pieces]",
        SPACES,
    ),
    # offload
    Mutant(
        "tied leaves of a state part when they go down",
        "optim/_offload_plan.py",
        'keys = facts(place.base).unit.split(".")',
        'keys = facts(place.base).unit.split(".") if place.first else []',
        OFFLOAD,
    ),
    Mutant(
        "tied leaves part when they come up",
        "optim/_offload_plan.py",
        "whole[base] if base in whole else Slot(base, x.index)",
        "Slot(base, x.index)",
        OFFLOAD,
    ),
    Mutant(
        "the update comes up, not the new parameter",
        "optim/_offload.py",
        "if pair.precision is None or params is None:",
        "if True:",
        SPACES,
    ),
    Mutant(
        "gradients go down widened",
        "optim/_offload.py",
        "_by_gradients(pair, lay, lay.cut(grads, to_host), state",
        "_by_gradients(pair, lay, lay.cut(grads, lambda x: to_host(x.float())), state",
        SPACES,
    ),
    Mutant(
        "parameters go down, too, for nothing",
        "optim/_offload.py",
        "narrow = lay.entries(lay.cut(params, lambda x: x))",
        "narrow = lay.entries(lay.cut(params, lambda x: to_device(to_host(x), x.device)))",
        SPACES,
    ),
    Mutant("a state of another ratio is not told", "optim/_offload.py", "        lay.check(state)\n", "", OFFLOAD),
    Mutant(
        "whole leaves are read in pieces",
        "optim/_offload.py",
        'if update == "host" and known.pointwise is False:',
        "if False:",
        OFFLOAD,
    ),
    Mutant("a loss scale goes inside", "optim/_offload.py", "if known.skips:", "if False:", OFFLOAD),
    Mutant("lamb does not say that it reads norms", "optim/_lamb.py", "pointwise=False", "pointwise=None", OFFLOAD),
    Mutant(
        "a skipped step is not skipped on the host",
        "optim/_loss_scale.py",
        'to_host(good) if space == "host" else good, new, old)',
        'good, new, old) if space == "device" else new',
        OFFLOAD,
    ),
    Mutant("a ratio may be true", "optim/_offload_plan.py", " or isinstance(ratio, bool)", "", OFFLOAD),
    Mutant(
        "a state of a unit of its own stays",
        "optim/_offload_plan.py",
        "Fraction(host, total) if total else Fraction(0)",
        "Fraction(0)",
        OFFLOAD,
    ),
    # checkpoints
    Mutant(
        "a host's piece is loaded from the wrong range",
        "checkpoint/_holdings.py",
        "BlockRange(block, start + a - piece.at, start + b - piece.at)",
        "BlockRange(block, start, start + b - a)",
        OFFLOAD,
    ),
    Mutant(
        "a host's piece begins where the shard does",
        "checkpoint/_holdings.py",
        "x[row], a - first)",
        "x[row], a if a - first + b - a <= x.shape[-1] and a < x.shape[-1] else 0)",
        OFFLOAD,
    ),
    Mutant(
        "pieces are filled from the shard's start",
        "zero/_build.py",
        "* k if self.spec.axes else 0) + piece.start",
        "* k if self.spec.axes else 0)",
        OFFLOAD,
    ),
    # graphs
    Mutant(
        "moves are made again",
        "graph/passes/_recompute.py",
        "is_collective(node) or is_move(node) or",
        "is_collective(node) or",
        SPACES,
    ),
    Mutant(
        "captured tables lie on the device",
        "graph/_storages.py",
        'found[n] = n.meta.get("space")',
        'found[n] = n.meta.get("space", "device")',
        SPACES,
    ),
    Mutant(
        "mixed operations pass",
        "graph/_storages.py",
        "if host and (is_collective(node) or device):",
        "if host and is_collective(node):",
        SPACES,
    ),
    Mutant(
        "collectives take the host's values",
        "graph/_storages.py",
        "if host and (is_collective(node) or device):",
        "if host and device:",
        SPACES,
    ),
    Mutant(
        "numbers of the device lie nowhere",
        "graph/_storages.py",
        'return "host" if host else "device" if device else None',
        'return "host" if host else "device" if device and _is_large(node) else None',
        SPACES,
    ),
    Mutant(
        "the host's results take the device's memory",
        "graph/trace/_donation.py",
        'by_path[place.path.split(".", 1)[1], place.space] = i',
        'by_path[place.path.split(".", 1)[1], "device"] = by_path[place.path.split(".", 1)[1], "host"] = i',
        SPACES,
    ),
    Mutant(
        "free results take either memory",
        "graph/trace/_donation.py",
        "if arguments.places[i].space == results[k].space",
        "if True",
        SPACES,
    ),
    Mutant(
        "the host's arguments count as the device's",
        "graph/_entry.py",
        'return {"space": place.space} if x.dim() or place.space == "host" else {}',
        "return {}",
        SPACES,
    ),
    Mutant(
        "what the host computes counts as the device's",
        "graph/planning/_liveness.py",
        '"host" if n in lent.on_host else "device")',
        '"device")',
        SPACES,
    ),
    Mutant(
        "a loop's transfers count once",
        "graph/planning/_plan.py",
        "nbytes(*values(n)), times) for",
        "nbytes(*values(n)), 1) for",
        SPACES,
    ),
    # copies on their way
    Mutant(
        "what comes is read at once",
        "graph/run/_program.py",
        "use.replace_input_with(old, made[old])",
        "use.replace_input_with(old, node if old is node else made[old])",
        ARRIVALS,
    ),
    Mutant(
        "a copy is waited for where it starts", "graph/run/_program.py", "node.target = on_its_way", "pass", ARRIVALS
    ),
    Mutant("a copy is waited for too late", "graph/run/_program.py", "min(users, key", "max(users, key", ARRIVALS),
    Mutant(
        "loops wait for no copy",
        "graph/run/_program.py",
        "with_body(node, arriving(loop.body, kinds))",
        "pass",
        ARRIVALS,
    ),
    Mutant("an arrival is not waited for", "collectives/_moves.py", "coming.event.synchronize()", "pass", ARRIVALS),
    # clocks
    Mutant("the host takes no time", "graph/planning/_cost.py", "return max(work, host.now)", "return work", COST),
    Mutant(
        "the host waits for nothing",
        "graph/planning/_cost.py",
        "max(self.now, self.arrival(node)) + takes",
        "self.now + takes",
        COST,
    ),
    Mutant(
        "the device does not wait for the host",
        "graph/planning/_cost.py",
        "max(work, host.arrival(node)) +",
        "work +",
        COST,
    ),
    Mutant("a view is there at once", "graph/planning/_cost.py", "            host.passes_on(node)\n", "", COST),
    # activations
    Mutant("leaves wait on the host", "transforms/_remat/_remat.py", " and not tensors[i].is_leaf", "", REMAT),
    Mutant("numbers wait on the host", "transforms/_remat/_remat.py", "tensors[i].dim() and ", "", REMAT),
    Mutant(
        "copies that wait are not tracked",
        "transforms/_remat/_remat.py",
        "torch.enable_grad()",
        "torch.no_grad()",
        REMAT,
    ),
    Mutant(
        "a slot alone is no box",
        "transforms/_remat/_call.py",
        "isinstance(x, _ShardStandIn | Slot)",
        "isinstance(x, _ShardStandIn)",
        REMAT,
    ),
    Mutant("boxes wait on the host", "transforms/_remat/_call.py", " - self.arguments.boxed()", "", REMAT),
    Mutant(
        "gathered parameters wait on the host",
        "graph/passes/_keep_on_host.py",
        "if all(u.target is UP",
        "if not all(u.target is UP",
        REMAT,
    ),
    Mutant(
        "loops' parameters wait on the host", "graph/_pass_manager.py", "moves=moves(loop.body))", "moves=False)", REMAT
    ),
    # delay
    Mutant("gradients do not wait", "optim/_offload.py", "lay.replaced(new, state.waiting)", "new", OFFLOAD),
    Mutant(
        "gradients wait for ever",
        "optim/_offload.py",
        "DelayedState(waiting, inner)",
        "DelayedState(state.waiting, inner)",
        OFFLOAD,
    ),
    Mutant("a delayed state fits any ratio", "optim/_offload.py", "(x is None) != (before is None)", "False", OFFLOAD),
    Mutant(
        "what waits at first are parameters",
        "optim/_offload.py",
        "return torch.zeros_like(x, dtype=dtype)",
        "return x.to(dtype)",
        OFFLOAD,
    ),
    # room
    Mutant("the host has always room", "zero/_bytes.py", "if needed > free:", "if False:", ROOM),
    Mutant(
        "one rank's share is the host's",
        "zero/_bytes.py",
        "needed = ranks * state_bytes",
        "needed = state_bytes",
        ROOM,
    ),
    Mutant("low parameters take no room", "zero/_bytes.py", "    if opt.lowers:", "    if False:", ROOM),
    Mutant("a group's limit is not read", "zero/_bytes.py", "min(free, int(most) - taken)", "free", ROOM),
    Mutant(
        "a chain does not offload",
        "optim/_base.py",
        "offloads=any(pair.offloads for pair in known)",
        "offloads=False",
        ROOM,
    ),
    # pieces
    Mutant("a piece keeps the whole shard", "sharding/_pieces.py", "part = part.clone()", "pass", ARENA),
    # parameters
    Mutant(
        "bytes of one memory are those of both",
        "zero/_bytes.py",
        "if space not in (None, memory):",
        "if False:",
        OFFLOAD,
    ),
    Mutant("parameters go up to stay", "zero/_sharded_step.py", 'getattr(opt, "lowers", 0)', "0", OFFLOAD),
    Mutant(
        "whole parameters go down",
        "optim/_offload_plan.py",
        "boxes_only and place.shape",
        "False and place.shape",
        OFFLOAD,
    ),
    Mutant(
        "updates of low parameters go up",
        "optim/_offload_plan.py",
        "leaves_only and place.shape",
        "False and place.shape",
        OFFLOAD,
    ),
    Mutant("a shard that came up stays", "graph/passes/_regather.py", "seen.intersection(chain)", "False", OFFLOAD),
    Mutant(
        "any ratio fits low parameters", "optim/_offload_plan.py", "not in (0, spec_of(uid).host)", "is None", OFFLOAD
    ),
    Mutant(
        "low parameters at any stage",
        "optim/_offload_plan.py",
        "    if not any(isinstance(x, Shard) and spec_of(x.uid).axes",
        "    if not any(isinstance(x, object)",
        OFFLOAD,
    ),
]
