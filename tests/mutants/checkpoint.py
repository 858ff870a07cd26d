"""Faults in fzero/checkpoint."""

from tests.mutants.mutant import Mutant

BLOCKS, LAWS = ("tests/checkpoint/test_blocks.py",), ("tests/checkpoint/test_laws.py",)
CRASH, DAMAGE = ("tests/checkpoint/test_crash.py",), ("tests/checkpoint/test_damage.py",)
FOLDER, INPUT = ("tests/checkpoint/test_folder.py",), ("tests/checkpoint/test_input.py",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "checkpoint-2")
HF = ("tests/checkpoint/test_hf.py",)
SHARING = ("tests/checkpoint/test_sharing.py",)

MUTANTS = [
    # what is shared, and what changes meanwhile
    Mutant("values change after a save", "checkpoint/_holdings.py", "copy.deepcopy(value)", "value", FOLDER),
    Mutant("what memory lost is a beginning", "checkpoint/_folder.py", "unread = unread or str(error)", "pass", FOLDER),
    Mutant(
        "a link's checkpoint goes with it", "checkpoint/_files.py", "if os.path.islink(self.path):", "if False:", FOLDER
    ),
    Mutant(
        "a save disturbs who reads",
        "checkpoint/_load.py",
        "            if not _replaced(files, seen, mesh):\n                raise",
        "            raise",
        FOLDER,
    ),
    Mutant("steps have 16 digits", "checkpoint/_folder.py", "step < 10**_DIGITS", "step < 10**16", INPUT),
    Mutant(
        "what is shared is read once",
        "checkpoint/_blocks.py",
        "for i, (key, x) in enumerate(plain.items()) if i in shared",
        "for key, x in ()",
        SHARING,
    ),
    Mutant(
        "boxes may share memory",
        "checkpoint/_blocks.py",
        "not x.is_meta and i not in shared for",
        "not x.is_meta for",
        SHARING,
    ),
    Mutant(
        "columns of a matrix overlap",
        "checkpoint/_blocks.py",
        "return bool(_bytes_in(taken, y, b - first).any())",
        "return True",
        SHARING,
    ),
    Mutant("only neighbours overlap", "checkpoint/_blocks.py", "active.append(span)", "active = [span]", SHARING),
    Mutant(
        "an expanded leaf has a place for each",
        "checkpoint/_blocks.py",
        "found = {i for *_, i in spans if _repeats(tensors[i])}",
        "found: set[int] = set()",
        SHARING,
    ),
    Mutant("meta leaves are saved", "checkpoint/_save.py", "_check_values(held[0])", "pass", INPUT),
    Mutant("paths in boxes need no check", "checkpoint/_holdings.py", "if path in self.origins:", "if False:", INPUT),
    Mutant(
        "one node without names takes all names",
        "tree.py",
        "pairs, (_, structure) = _numbered(tree, is_leaf), flatten(tree, is_leaf)",
        "leaves, structure = flatten(tree, is_leaf)\n"
        "        pairs = [((pytree.SequenceKey(i),), x) for i, x in enumerate(leaves)]",
        INPUT,
    ),
    Mutant(
        "a dict of values is one or nothing",
        "checkpoint/_manifest.py",
        "if path in saved or type(value) is not dict or not value:",
        "if True:",
        INPUT,
    ),
    Mutant(
        "keys within a value are not found",
        "checkpoint/_look.py",
        "if path in cut.values else ABSENT",
        "if path == name and path in cut.values else ABSENT",
        INPUT,
    ),
    Mutant(
        "an export may replace the manifest",
        "checkpoint/_look.py",
        "_check_apart(files, target)\n    if",
        "pass\n    if",
        INPUT,
    ),
    Mutant(
        "rank 0 alone knows of the lock",
        "checkpoint/_save.py",
        "                failed = reports.lead(write_alone, commit)",
        "                stack.enter_context(files.alone())\n                failed = reports.lead(write, commit)",
        ON_GLOO,
    ),
    Mutant("plain leaves need no comparison", "checkpoint/_save.py", "    _check_equal(mine, mesh)\n", "", ON_GLOO),
    # what is written and when
    Mutant(
        "the manifest comes before the files",
        "checkpoint/_save.py",
        "        return {rank: _write(",
        "        files.put(MANIFEST, Manifest.of(reports.nonce, cut, [File(9, '')] * cut.ranks).encoded())\n"
        "        return {rank: _write(",
        CRASH,
    ),
    Mutant(
        "data is not made durable",
        "checkpoint/_files.py",
        "            os.fsync(fd)\n        self",
        "        self",
        CRASH,
    ),
    Mutant("a manifest is not made durable", "checkpoint/_files.py", "            os.fsync(f.fileno())\n", "", CRASH),
    Mutant(
        "a name is not made durable",
        "checkpoint/_files.py",
        "            os.fsync(fd)\n        finally",
        "            pass\n        finally",
        CRASH,
    ),
    Mutant("a manifest is written in place", "checkpoint/_files.py", 'f".{name}.tmp"), "wb"', 'name), "wb"', CRASH),
    Mutant("all saves have one nonce", "checkpoint/_save.py", "secrets.token_hex(8)", '"0" * 16', CRASH),
    Mutant(
        "a part of a write is all of it",
        "checkpoint/_files.py",
        "    while views:\n        moved",
        "    if views:\n        moved",
        CRASH,
    ),
    Mutant(
        "old files stay", "checkpoint/_save.py", "            files.remove([n for n", "            ([n for n", CRASH
    ),
    Mutant("there is always room", "checkpoint/_save.py", "free < needed", "free < 0", CRASH),
    # who writes what
    Mutant(
        "rank 0 writes what all hold, and all others too",
        "checkpoint/_cut.py",
        "k = -(-(stop - start) // self.size(others))\n        first = min(start + self.index(others, rank) * k, stop)",
        "k = stop - start\n        first = start",
        LAWS,
    ),
    Mutant("padding is stored", "checkpoint/_cut.py", "min(start + group.shard, end)", "start + group.shard", LAWS),
    Mutant("a tied leaf is stored twice", "checkpoint/_holdings.py", "if id(x) in self.own:", "if False:", LAWS),
    Mutant("a tied leaf of a unit is stored twice", "checkpoint/_holdings.py", "if m.index in at:", "if False:", LAWS),
    Mutant(
        "parts of split leaves are all the first",
        "checkpoint/_cut.py",
        "(offset * s.size + self.index((s.axis,), rank), size)",
        "(offset * s.size, size)",
        LAWS,
    ),
    Mutant("small elements come first", "checkpoint/_cut.py", "-self.itemsize(g))", "self.itemsize(g))", LAWS),
    Mutant(
        "a shard is the next rank's",
        "checkpoint/_cut.py",
        "start = self.index(group.axes, rank) * group.shard",
        "start = (self.index(group.axes, rank) + 1) % self.size(group.axes) * group.shard",
        LAWS,
    ),
    Mutant(
        "rows of a simulation are ranks",
        "checkpoint/_holdings.py",
        "row = cut.index(self.axes, rank)",
        "row = rank % len(self.parts[0])",
        LAWS,
    ),
    # ranges
    Mutant("a run is a row too long", "checkpoint/_blocks.py", "== mine[d] == theirs[d]", "== mine[d]", BLOCKS),
    Mutant(
        "a rectangle begins at its block",
        "checkpoint/_blocks.py",
        "    return at - within.start",
        "    return at",
        BLOCKS,
    ),
    Mutant(
        "the rest of a row is left out",
        "checkpoint/_blocks.py",
        "    if last * row < stop:\n        yield from _in_row(shape, last, 0",
        "    if False:\n        yield from _in_row(shape, last, 0",
        BLOCKS,
    ),
    Mutant(
        "strided leaves are written from their start",
        "sharding/_flat.py",
        "values[at : at + part.numel()]",
        "values[: part.numel()]",
        LAWS,
    ),
    Mutant(
        "chunks of a copy are the first one",
        "checkpoint/_blocks.py",
        "elements(x, at, min(at + step, stop))",
        "elements(x, start, min(start + step, stop))",
        LAWS,
    ),
    # reading
    Mutant("sums are not compared", "checkpoint/_load.py", "if sum_of(views) != file.sum(block):", "if False:", DAMAGE),
    Mutant(
        "what is between leaves is not summed",
        "checkpoint/_load.py",
        "            used += gap\n",
        "            used += 0 * gap\n",
        DAMAGE,
    ),
    Mutant("a nonce may be any text", "checkpoint/_manifest.py", 're.fullmatch("[0-9a-f]{16}", nonce)', "True", DAMAGE),
    Mutant(
        "a manifest's own sum is not compared",
        "checkpoint/_manifest.py",
        "if not frame or int(frame[1], 16) != zlib.crc32(frame[2]):",
        "if not frame:",
        DAMAGE,
    ),
    Mutant(
        "leaves may be larger than the files",
        "checkpoint/_manifest.py",
        "    _check(sum(x.nbytes for x in leaves) <= sum(f.size for f in files)",
        "    _check(True",
        DAMAGE,
    ),
    Mutant(
        "untied leaves get the first one's bytes only",
        "checkpoint/_load.py",
        "(some if w.at >= end else rest).append(w)",
        "some.append(w) if w.at >= end else None",
        LAWS,
    ),
    Mutant(
        "a like is written into before all is checked",
        "checkpoint/_load.py",
        "        check_alike(files, manifest.cut, mine.cut, partial)\n",
        "        [x.zero_() for m in mine.memory for x in m.tensors()]\n"
        "        check_alike(files, manifest.cut, mine.cut, partial)\n",
        INPUT,
    ),
    Mutant("what is in place of a value stays", "checkpoint/_load.py", "values.get(p, x)", "x", INPUT),
    Mutant("a load is no write", "checkpoint/_load.py", "torch.autograd.graph.increment_version(x)", "pass", INPUT),
    Mutant(
        "padding is what the memory held",
        "checkpoint/_blocks.py",
        "return torch.zeros(",
        "return torch.full(",
        ("tests/checkpoint/test_laws.py", "-k", "padding"),
    ),
    # beside the training
    Mutant(
        "nothing is staged",
        "checkpoint/_save.py",
        "    if background:  # a rank",
        "    if False:  # a rank",
        FOLDER,
    ),
    Mutant(
        "what was saved is held on to",
        "checkpoint/_save.py",
        "        self.path = path\n",
        "        self.path, self.held = path, run\n",
        FOLDER,
    ),
    Mutant(
        "the next save does not wait",
        "checkpoint/_folder.py",
        "        self.wait()\n        if files",
        "        if files",
        FOLDER,
    ),
    Mutant(
        "an error in the background is forgotten",
        "checkpoint/_save.py",
        "            self._error = error",
        "            pass",
        FOLDER,
    ),
    Mutant(
        "a thread ends with the script",
        "checkpoint/_save.py",
        "            self._thread.start()",
        "            self._thread.daemon = True\n            self._thread.start()",
        FOLDER,
    ),
    Mutant(
        "the newest is found by its name",
        "checkpoint/_folder.py",
        "                read_whole(self._files.at(step_name(step)))\n",
        "                pass\n",
        FOLDER,
    ),
    Mutant(
        "one too many is let go", "checkpoint/_folder.py", "whole[-self._keep :]", "whole[-self._keep + 1 :]", FOLDER
    ),
    Mutant(
        "a damaged one ends the search",
        "checkpoint/_folder.py",
        "except DamagedError as error:",
        "except ZeroDivisionError as error:",
        FOLDER,
    ),
    Mutant(
        "another tree is taken for damage",
        "checkpoint/_folder.py",
        "except DamagedError as error:",
        "except CheckpointError as error:",
        FOLDER,
    ),
    Mutant("nobody is told of newer steps", "checkpoint/_folder.py", "if n > step]", "if n > 10 * step]", FOLDER),
    Mutant("a failed save is silent", "checkpoint/_save.py", 'notice(f"fzero: {error}")', "pass", FOLDER),
    Mutant("a copy of a run has its memory", "checkpoint/_folder.py", " + files.path.encode()", "", FOLDER),
    Mutant(
        "a lock outlives its save",
        "checkpoint/_files.py",
        "            fcntl.flock(fd, fcntl.LOCK_UN)",
        "            pass",
        FOLDER,
    ),
    Mutant(
        "files of Hugging Face have no lock",
        "checkpoint/hf/_write.py",
        "    stack.enter_context(locked(fd, files.path))\n",
        "",
        HF,
    ),
    Mutant("folders have no lock", "checkpoint/_files.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH", FOLDER),
    # between ranks
    Mutant("trees are not compared", "checkpoint/_agree.py", "if numbers[0] != everyones[0][0]]", "if False]", ON_GLOO),
    Mutant(
        "a rank that fails is silent",
        "checkpoint/_agree.py",
        '"" if error is None else _line(error), "files"',
        '"", "files"',
        ON_GLOO,
    ),
    Mutant(
        "damage on one rank is another's other error",
        "checkpoint/_agree.py",
        "kind = DamagedError if max(kinds) == 1 else CheckpointError",
        "kind = CheckpointError",
        ON_GLOO,
    ),
    Mutant(
        "a rank's own error is enough",
        "checkpoint/_agree.py",
        "        if any(kinds):\n",
        "        if False:\n",
        ON_GLOO,
    ),
    Mutant("ranks may read different things", "checkpoint/_load.py", "    check_same(", "    print(", ON_GLOO),
    Mutant("ranks may read different names", "checkpoint/hf/_read.py", "    check_same(", "    print(", ON_GLOO),
    Mutant("ranks may read different names of DCP", "checkpoint/dcp.py", "    check_same(", "    print(", ON_GLOO),
    Mutant(
        "a rank without memory leaves the others waiting",
        "checkpoint/_save.py",
        'all_or_none("save", lambda: _staged(pieces, staging), mesh)',
        "_staged(pieces, staging)",
        ON_GLOO,
    ),
    Mutant("keys have no nonce", "checkpoint/_agree.py", 'f"fzero/{self.nonce}/{topic}/', 'f"fzero/{topic}/', ON_GLOO),
]
