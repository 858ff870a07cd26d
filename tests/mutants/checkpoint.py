"""Faults in fzero/checkpoint."""

from tests.mutants.changes import after, always, bare, becomes, before, dropped, elsewhere, never, returns, skipped
from tests.mutants.mutant import Fault, File

BLOCKS = ("tests/checkpoint/test_blocks.py",)
LAWS = ("tests/checkpoint/test_laws.py",)
CRASH = ("tests/checkpoint/test_crash.py",)
DAMAGE = ("tests/checkpoint/test_damage.py",)
FOLDER = ("tests/checkpoint/test_folder.py",)
INPUT = ("tests/checkpoint/test_input.py",)
ON_GLOO = ("tests/distributed/test_gloo.py", "-k", "checkpoint-2")
HF = ("tests/checkpoint/test_hf.py",)
SHARING = ("tests/checkpoint/test_sharing.py",)

MUTANTS = [
    *File("checkpoint/_local_tree.py", LAWS).faults(
        Fault("values change after a save", "_LocalTreeBuilder.add_value", bare("copy.deepcopy(A)"), FOLDER),
        Fault("paths in boxes need no check", "_LocalTreeBuilder._add_path", never("A in self.sources"), INPUT),
        Fault("a tied leaf is stored twice", "_LocalTreeBuilder.add_plain", never("id(A) in self.B")),
        Fault("a tied leaf of a unit is stored twice", "_LocalTreeBuilder._add_members", never("A.index in B")),
        Fault(
            "rows of a simulation are ranks",
            "BoxMemory.locate",
            becomes("A.index(self.B, C)", "C % len(self.pieces[0])"),
        ),
    ),
    *File("checkpoint/_folder.py", FOLDER).faults(
        Fault("what memory lost is a beginning", "Checkpoints.restore", skipped("A = A or str(B)")),
        Fault("steps have 16 digits", "Checkpoints._start", becomes("10 ** A", "10 ** 16"), INPUT),
        Fault("the next save does not wait", "Checkpoints._start", skipped("self.wait()")),
        Fault("the newest is found by its name", "Checkpoints._newest_on_disk", skipped("A(self._files.B(C(D)))")),
        Fault("one too many is let go", "Checkpoints._remove_old", becomes("-self.A", "-self.A + 1")),
        Fault("a damaged one ends the search", "Checkpoints.restore", becomes("DamagedError", "ZeroDivisionError")),
        Fault("another tree is taken for damage", "Checkpoints.restore", becomes("DamagedError", "CheckpointError")),
        Fault("nobody is told of newer steps", "Checkpoints._warn_of_newer", becomes("A > B", "A > 10 * B")),
        Fault("a copy of a run has its memory", "_run_of.run_id", bare("A + B.C.encode()")),
    ),
    *File("checkpoint/_files.py", CRASH).faults(
        Fault("a link's checkpoint goes with it", "LocalFolder.remove_all", never("os.A.islink(self.A)"), FOLDER),
        Fault("data is not made durable", "LocalFolder.write", skipped("os.fsync(A)")),
        Fault("a manifest is not made durable", "LocalFolder.put", skipped("os.fsync(A.fileno())")),
        Fault("a name is not made durable", "LocalFolder.sync", skipped("os.fsync(A)")),
        Fault("a manifest is written in place", "LocalFolder.put", bare("f'.{A}.tmp'", at="1 of 2")),
        Fault("a part of a write is all of it", "_finish", becomes("while views: ...", "if views: ...")),
        Fault("a lock outlives its save", "hold_lock", skipped("fcntl.flock(A, fcntl.LOCK_UN)"), FOLDER),
        Fault("folders have no lock", "hold_lock", becomes("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH"), FOLDER),
    ),
    *File("checkpoint/_load.py", INPUT).faults(
        Fault("a save disturbs who reads", "load_files", always("not A(B, C, D)"), FOLDER),
        Fault("sums are not compared", "read_blocks", never("A(B) != C.sum(D)"), DAMAGE),
        Fault("what is between leaves is not summed", "_views", becomes("A += B", "A += 0 * B"), DAMAGE),
        Fault(
            "untied leaves get the first one's bytes only",
            "_split_overlapping",
            becomes("(A if B.C >= D else E).append(B)", "A.append(B) if B.C >= D else None"),
            LAWS,
        ),
        Fault(
            "a like is written into before all is checked",
            "_load_files.prepare",
            before("A(B, C.D, E.D, F)", "[x.zero_() for m in E.memory for x in m.tensors()]"),
        ),
        Fault("what is in place of a value stays", "_load_files", bare("B.get(C, A)")),
        Fault("a load is no write", "_fill", skipped("A.increment_version(B)")),
        Fault(
            "ranks may read different things",
            "_load_files",
            becomes("A(f'loading {B.C!r}', D(E.F), G)", "print(f'loading {B.C!r}', D(E.F), G)"),
            ON_GLOO,
        ),
    ),
    *File("checkpoint/_blocks.py", SHARING).faults(
        Fault(
            "what is shared is read once",
            "materialize",
            becomes("{A: B for C, (A, D) in E if C in F}", "{A: B for A, D in ()}"),
        ),
        Fault("boxes may share memory", "materialize", dropped("A not in B")),
        Fault("columns of a matrix overlap", "_share_bytes", returns("True", at="2 of 2")),
        Fault("only neighbours overlap", "overlapping", becomes("A.append(B)", "A = [B]")),
        Fault(
            "an expanded leaf has a place for each",
            "overlapping",
            becomes("A = {B for *C, B in D if E(F[B])}", "A: set[int] = set()"),
        ),
        Fault(
            "a run is a row too long",
            "_common",
            becomes("A and B == source_shape[A] == C[A]", "A and B == source_shape[A]"),
            BLOCKS,
        ),
        Fault("a rectangle begins at its block", "_offset_in", returns("at"), BLOCKS),
        Fault("the rest of a row is left out", "rectangles", never("A * B < C"), BLOCKS),
        Fault(
            "chunks of a copy are the first one",
            "view_or_chunks",
            becomes("A(B, C, min(C + D, E))", "A(B, start, min(start + D, E))"),
            LAWS,
        ),
        Fault(
            "padding is what the memory held",
            "_zeros",
            becomes("torch.zeros", "torch.full"),
            ("tests/checkpoint/test_laws.py", "-k", "padding"),
        ),
    ),
    *File("checkpoint/_save.py", FOLDER).faults(
        Fault("meta leaves are saved", "start_save.prepare", skipped("A(B)"), INPUT),
        Fault(
            "rank 0 alone knows of the lock",
            "_SaveRun._lead",
            (
                before("return A.B.C(D(A.E, F), A.G)", "F.enter_context(A.files.exclusive())"),
                elsewhere("_SaveRun._lock_and_write", skipped("A.enter_context(B.C.D())")),
            ),
            ON_GLOO,
        ),
        Fault("plain leaves need no comparison", "start_save", skipped("A(B, mesh)"), ON_GLOO),
        Fault(
            "the manifest comes before the files",
            "_SaveRun._write",
            before(
                "return {A: B(C.D, C.E(A), F(C.G, A), H) for A, H in C.I.items()}",
                "C.D.put(MANIFEST, Manifest.of(C.channel.nonce, C.G, [File(9, '')] * C.G.ranks).encode())",
            ),
            CRASH,
        ),
        Fault("all saves have one nonce", "start_save", becomes("secrets.token_hex(8)", "'0' * 16"), CRASH),
        Fault("old files stay", "_SaveRun._tidy", bare("B.remove(A)"), CRASH),
        Fault("there is always room", "_check_room", becomes("A < B", "A < 0"), CRASH),
        Fault("nothing is staged", "start_save", never("background")),
        Fault(
            "what was saved is held on to", "SaveHandle.__init__", becomes("self.A = A", "self.A, self.held = (A, run)")
        ),
        Fault("an error in the background is forgotten", "SaveHandle._run_guarded", skipped("self._error = A")),
        Fault(
            "a thread ends with the script",
            "SaveHandle.__init__",
            before("self._thread.A()", "self._thread.daemon = True"),
        ),
        Fault("a failed save is silent", "SaveHandle._run_guarded", skipped("A(f'fzero: {B}')")),
        Fault(
            "a rank without memory leaves the others waiting", "start_save", bare("B('save', lambda: A, C)"), ON_GLOO
        ),
    ),
    *File("tree.py", INPUT).faults(
        Fault(
            "one node without names takes all names",
            "flatten_with_paths",
            (
                becomes("A, (B, C) = (D(E, F), G(E, F))", "leaves, C = G(E, F)"),
                after("leaves, A = B(C, D)", "pairs = [((pytree.SequenceKey(i),), x) for i, x in enumerate(leaves)]"),
            ),
        ),
    ),
    *File("checkpoint/_manifest.py", DAMAGE).faults(
        Fault("a dict of values is one or nothing", "paths_of", always("path in A or B or not C"), INPUT),
        Fault("a nonce may be any text", "_manifest", becomes("re.fullmatch('[0-9a-f]{16}', A)", "True")),
        Fault("a manifest's own sum is not compared", "parse", dropped("int(frame[1], 16) != A")),
        Fault("leaves may be larger than the files", "_manifest", always("A <= B(C.size for C in D)")),
    ),
    *File("checkpoint/_inspect.py", INPUT).faults(
        Fault("keys within a value are not found", "read", becomes("A in B.values", "A == name and A in B.values")),
        Fault("an export may replace the manifest", "export", skipped("A(files, B)")),
    ),
    *File("checkpoint/_ranges.py", LAWS).faults(
        Fault(
            "rank 0 writes what all hold, and all others too",
            "TreeLayout.owned_span",
            (bare("-(-A // self.size(B))"), bare("min(A + self.index(B, C) * D, E)")),
        ),
        Fault("padding is stored", "TreeLayout.local_span", becomes("min(A + B.C, D)", "A + B.C")),
        Fault("parts of split leaves are all the first", "TreeLayout.block", bare("A + self.index((B.axis,), C)")),
        Fault("small elements come first", "TreeLayout.order", bare("-A")),
        Fault(
            "a shard is the next rank's",
            "TreeLayout.local_span",
            becomes("self.index(A.B, C)", "(self.index(A.B, C) + 1) % self.size(A.B)"),
        ),
    ),
    *File("sharding/_flat.py", LAWS).faults(
        Fault(
            "strided leaves are written from their start",
            "put_elements",
            becomes("A[B:B + C.numel()]", "A[:C.numel()]"),
        ),
    ),
    *File("checkpoint/hf/_write.py", HF).faults(
        Fault("files of Hugging Face have no lock", "_reserve", skipped("A.enter_context(B(C, D.E))")),
    ),
    *File("checkpoint/_agree.py", ON_GLOO).faults(
        Fault("trees are not compared", "agree", never("A[0] != B[0][0]")),
        Fault("a rank that fails is silent", "StoreChannel.follow", always("A is None")),
        Fault("damage on one rank is another's other error", "_raise_together", never("max(A) == 1")),
        Fault("a rank's own error is enough", "all_or_none", never("any(A)")),
        Fault("keys have no nonce", "StoreChannel._key", returns("f'fzero/{topic}/{rank}'")),
    ),
    *File("checkpoint/hf/_read.py", ON_GLOO).faults(
        Fault("ranks may read different names", "read", becomes("A(B, C.encode(), D)", "print(B, C.encode(), D)")),
    ),
    *File("checkpoint/dcp.py", ON_GLOO).faults(
        Fault(
            "ranks may read different names of DCP",
            "load",
            becomes("A(B, repr(C).encode(), D)", "print(B, repr(C).encode(), D)"),
        ),
    ),
]
