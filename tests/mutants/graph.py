"""Faults in fzero/graph."""

from tests.mutants.mutant import GRAPH, JIT, OPS, PIPELINE, WRITES, Mutant

MUTANTS = [
    Mutant(
        "prefetch one more",
        "graph/passes/_schedule/_ahead.py",
        "[i + 1 : i + 1 + prefetch]",
        "[i + 1 : i + 2 + prefetch]",
        GRAPH,
    ),
    Mutant(
        "writes into lists are not seen",
        "graph/trace/_trace.py",
        "(x if isinstance(x, list | tuple) else [x])",
        "[x]",
        WRITES,
    ),
    Mutant(
        "other memory is not seen",
        "graph/trace/_trace.py",
        "if _torch.storage_id(x) != storage:",
        "if False:",
        WRITES,
    ),
    Mutant(
        "gathers start ahead without room", "graph/passes/_schedule/_ahead.py", "+ size <= limit:", "<= limit:", GRAPH
    ),
    Mutant(
        "what starts ahead is forgotten",
        "graph/passes/_schedule/_ahead.py",
        "live[start:until] = [x + size for x in live[start:until]]",
        "pass",
        GRAPH,
    ),
    Mutant(
        "nothing starts ahead",
        "graph/passes/_schedule/_ahead.py",
        "found.setdefault(order[start], []).append(g)",
        "pass",
        GRAPH,
    ),
    Mutant(
        "schedules in another order are taken for the same",
        "graph/_agree.py",
        "[n.name for n in graph.nodes if is_collective(n)]",
        "[]",
        GRAPH,
    ),
    Mutant(
        "updates wait for the end",
        "graph/passes/_schedule/_listing.py",
        "            _run_ready(rules, state)\n        _require",
        "            pass\n        _require",
        GRAPH,
    ),
    Mutant(
        "overwrite under a gather",
        "graph/passes/_schedule/_listing.py",
        "if is_wait(n) else []",
        "if False else []",
        GRAPH,
    ),
    Mutant(
        "more in flight than asked",
        "graph/passes/_schedule/_listing.py",
        "if len(starts) > rules.in_flight else",
        "if False else",
        GRAPH,
    ),
    Mutant(
        "hand on what is about to be overwritten",
        "graph/passes/_donate.py",
        "if not given & set(lent.of[value]):",
        "if True:",
        GRAPH,
    ),
    Mutant(
        "hand out overwritten memory", "graph/passes/_donate.py", "{*donated, *into.values()}", "into.values()", GRAPH
    ),
    Mutant(
        "count a unit at each use",
        "graph/passes/_regather.py",
        "if other not in between:",
        "if True:",
        GRAPH,
    ),
    Mutant(
        "buckets across groups",
        "graph/passes/_bucket.py",
        " and one.args[1:] == other.args[1:]",
        "",
        GRAPH,
    ),
    Mutant(
        "buckets without an end",
        "graph/passes/_bucket.py",
        "sum(map(full_bytes, [*groups[-1], node])) <= max_bytes",
        "full_bytes(node) <= max_bytes",
        GRAPH,
    ),
    Mutant(
        "buckets of what waits for itself",
        "graph/passes/_bucket.py",
        "lambda group, n: not _needs(n, group, index)",
        "lambda group, n: True",
        GRAPH,
    ),
    Mutant(
        "a bucket's first for all",
        "graph/passes/_bucket.py",
        "if is_gather(node) else i",
        "if is_gather(node) else 0",
        GRAPH,
    ),
    Mutant(
        "a collective holds nothing",
        "graph/plan/_liveness.py",
        "            held += lent.read_by(start_of(node))",
        "            pass",
        GRAPH,
    ),
    Mutant(
        "free before use", "graph/run/_program.py", "[*instruction.ins, *instruction.outs]", "instruction.outs", GRAPH
    ),
    Mutant(
        "one trace for all numbers",
        "graph/trace/_signature.py",
        "x.hex() if isinstance(x, float) else x))",
        "None))",
        JIT,
    ),
    Mutant("micro-batches cut inside", "graph/run/_cut.py", "if len(nodes) > 1 for n", "if len(nodes) > 99 for n", JIT),
    Mutant("write into shared memory", "graph/trace/_signature.py", "if start < reach and", "if False and", JIT),
    Mutant(
        "matrix products run again",
        "graph/passes/_recompute.py",
        "isinstance(node.target, OpOverload) and is_cheap(node)",
        "isinstance(node.target, OpOverload)",
        GRAPH,
    ),
    Mutant(
        "leaves arrive while the old ones are read",
        "graph/passes/_schedule/_listing.py",
        "writes = [n for n in graph.nodes if is_write(n)]",
        "writes = [n for n in graph.nodes if n.target is COPY]",
        GRAPH,
    ),
    Mutant("leaves arrive in another layout", "graph/passes/_gather_into.py", "return dense and", "return", GRAPH),
    Mutant(
        "what is read otherwise arrives in leaves",
        "graph/passes/_gather_into.py",
        "users if good and",
        "users if",
        GRAPH,
    ),
    Mutant(
        "every leaf begins with the unit",
        "graph/passes/_gather_into.py",
        "_write(node).part.storage_offset()",
        "0",
        GRAPH,
    ),
    Mutant(
        "padding is not sent", "graph/_wire.py", "sent * group_size(node) if is_gather(node) else max(", "max(", GRAPH
    ),
    Mutant(
        "a buffer that others read is summed in place",
        "graph/passes/_in_place.py",
        "readers[s] == [node] and ",
        "",
        GRAPH,
    ),
    Mutant(
        "an argument is summed in place",
        "graph/passes/_in_place.py",
        ' and lent.born[s].op == "call_function"',
        "",
        GRAPH,
    ),
    Mutant(
        "Inductor is given what overwrites",
        "graph/_jit.py",
        'self.backend == "inductor-whole"',
        "False",
        ("tests/distributed/test_gloo.py", "-k", "jit-2"),
    ),
    # the table of operations
    Mutant("an empty buffer is made twice", "graph/ops.py", '"empty_like": CHEAP | EMPTY', '"empty_like": CHEAP', OPS),
    Mutant("a maximum is called linear", "graph/ops.py", '"amax": CHEAP', '"amax": CHEAP | LINEAR', OPS),
    Mutant(
        "to pad a shard is another step",
        "graph/ops.py",
        '"constant_pad_nd": CHEAP | BY_RANK',
        '"constant_pad_nd": CHEAP',
        OPS,
    ),
    Mutant("constants are made early", "graph/ops.py", '"full": CHEAP | FACTORY', '"full": CHEAP', OPS),
    Mutant("a row is no operation", "graph/ops.py", '"bucketize": ', '"bucketise": ', OPS),
    # the list of passes
    Mutant(
        "a pass is left out",
        "graph/_pipeline.py",
        '    Pass("in_place", in_place, lambda choice, given: None if given.functional else ()),\n',
        "",
        PIPELINE,
    ),
    Mutant(
        "leaves are gathered into before they are donated",
        "graph/_pipeline.py",
        """    Pass("donate", donate, lambda choice, given: (given.pairs, given.donated)),
    Pass("in_place", in_place, lambda choice, given: None if given.functional else ()),
    Pass("gather_into", gather_into, lambda choice, given: None if given.functional else ()),
""",
        """    Pass("in_place", in_place, lambda choice, given: None if given.functional else ()),
    Pass("gather_into", gather_into, lambda choice, given: None if given.functional else ()),
    Pass("donate", donate, lambda choice, given: (given.pairs, given.donated)),
""",
        PIPELINE,
    ),
    Mutant("every choice runs every pass", "graph/_pipeline.py", "if key not in self._made:", "if True:", PIPELINE),
    Mutant(
        "choices share what differs",
        "graph/_pipeline.py",
        "key = (*key, arguments)",
        "key = (*key, row.name)",
        PIPELINE,
    ),
    Mutant(
        "a dump of another schedule", "graph/_dump.py", "passes.run(choice)", "passes.run(Choice(True, 0, 0))", PIPELINE
    ),
    Mutant(
        "a second trace is dumped over the first", "graph/_dump.py", "if traces else []", "if False else []", PIPELINE
    ),
]
