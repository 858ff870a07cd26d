"""Faults in fzero/checkpoint."""

from tests.mutants.changes import after, always, bare, becomes, before, dropped, in_symbol, never, returns, skipped
from tests.mutants.mutant import Fault, File, on_processes

CHUNKS = ("tests/checkpoint/layout/test_chunks.py",)
LAWS = ("tests/checkpoint/test_laws.py",)
CRASH = ("tests/checkpoint/test_crash.py",)
DAMAGE = ("tests/checkpoint/test_damage.py",)
FUZZ = ("tests/checkpoint/test_fuzz.py", "-k", "not mutated")
FOLDER = ("tests/checkpoint/test_folder.py",)
INPUT = ("tests/checkpoint/test_input.py",)
ON_GLOO = on_processes("checkpoint")
HF = ("tests/checkpoint/test_hf.py",)
SHARING = ("tests/checkpoint/test_sharing.py",)
COPIES = ("tests/checkpoint/test_copies.py",)

MUTANTS = [
    *File("checkpoint/_shared_memory.py", COPIES).faults(
        Fault("a copy lies on the host of its rank", "_copy_holders", becomes("range(1, A)", "range(A)")),
        Fault("all ranks of a host send to one rank", "_copy_holders", becomes("ranks[A][B]", "ranks[A][0]")),
        Fault("spares keep what only they remember", "SharedMemory.move_to", skipped("self.fetch(A, B)")),
        Fault("an older step is taken than the newest whole one", "SharedMemory.newest", dropped("reverse=True")),
        Fault(
            "a step counts as whole where its last file is missing",
            "SharedMemory.manifest",
            becomes("all(A)", "all(A[:-1])"),
        ),
        Fault(
            "a rank says that it has written before the copies of others are there",
            "SharedMemory._send_copies",
            becomes("self.hosts.senders()", "self.hosts.senders()[:0]"),
        ),
        Fault(
            "the first manifest decides, though it may be that of a host that was away",
            "SharedMemory.manifest",
            becomes("first_ranks.values()", "[*first_ranks.values()][:1]"),
        ),
    ),
    *File("checkpoint/_agree.py", COPIES).faults(
        Fault("a step is committed though a rank did not write", "StoreChannel.save_as_leader", never("A and (not B)")),
    ),
    *File("checkpoint/_folder.py", COPIES).faults(
        Fault(
            "a folder that is mistyped is made on the disk, and called memory",
            "checkpoints",
            never("A and (not os.path.isdir(memory))"),
            FOLDER,
        ),
        Fault(
            "the old step is removed before the new one is whole",
            "Checkpoints.save_in_memory",
            before("return self._start_save(A, B, C, D, E)", "remove_old()"),
        ),
    ),
    *File("checkpoint/layout/_local_tree.py", LAWS).faults(
        Fault(
            "a saved value is not copied, so it may change before it is written",
            "_LocalTreeBuilder.add_value",
            bare("copy.deepcopy(A)"),
            FOLDER,
        ),
        Fault(
            "two leaves may have one path if one lies in a box",
            "_LocalTreeBuilder._add_path",
            never("A in self.sources"),
            INPUT,
        ),
        Fault("a tied leaf is stored twice", "_LocalTreeBuilder.add_plain", never("id(A) in self.B")),
        Fault("a tied leaf of a unit is stored twice", "_LocalTreeBuilder._add_members", never("A.index in B")),
        Fault(
            "a simulated rank reads the row of its number, not of its coordinate on the axis",
            "_BoxMemory.locate",
            becomes("A.index(self.B, C)", "C % len(self.pieces[0])"),
        ),
    ),
    *File("checkpoint/_folder.py", (*FOLDER, "-k", "does_not_create_it")).faults(
        Fault("a folder that is only read is made", "_run_id.run_id", never("not make")),
    ),
    *File("checkpoint/_folder.py", FOLDER).faults(
        Fault("a run that is nan saves over its good checkpoints", "Checkpoints.save", skipped("A(step, finite)")),
        Fault("a flag that says what is not finite saves", "_check_finite", dropped("A is False")),
        Fault(
            "a run whose checkpoint in memory is lost starts anew, not from disk",
            "Checkpoints.restore",
            skipped("A = A or str(B)"),
        ),
        Fault("a step may have 16 digits", "Checkpoints._start_save", becomes("10 ** A", "10 ** 16"), INPUT),
        Fault("the next save does not wait", "Checkpoints._start_save", skipped("self.wait()")),
        Fault(
            "the newest checkpoint on disk is found without reading its manifest",
            "Checkpoints._newest_on_disk",
            skipped("A(self._files.B(C(D)))"),
        ),
        Fault("one checkpoint too many is removed", "Checkpoints._remove_old", becomes("-self.A", "-self.A + 1")),
        Fault(
            "a damaged checkpoint ends the search for an older one",
            "Checkpoints.restore",
            becomes("DamagedError", "ZeroDivisionError"),
        ),
        Fault(
            "a checkpoint of another tree is taken for a damaged one",
            "Checkpoints.restore",
            becomes("DamagedError", "CheckpointError"),
        ),
        Fault("no warning tells of newer steps on disk", "Checkpoints._warn_of_newer", becomes("A > B", "A > 10 * B")),
        Fault(
            "a copy of a run's folder shares the run's checkpoint in memory", "_run_id.run_id", bare("A + B.C.encode()")
        ),
    ),
    *File("checkpoint/_files.py", CRASH).faults(
        Fault(
            "removing a link removes the checkpoint that it leads to",
            "LocalFolder.remove_all",
            never("os.A.islink(self.A)"),
            FOLDER,
        ),
        Fault("the data of a file is not flushed to the disk", "LocalFolder.write", skipped("os.fsync(A)")),
        Fault("a manifest is not flushed to the disk", "LocalFolder.put", skipped("os.fsync(A.fileno())")),
        Fault("a file's name is not flushed to the disk", "LocalFolder.sync", skipped("os.fsync(A)")),
        Fault("a manifest is written in place", "LocalFolder.put", bare("f'.{A}.tmp'", at="1 of 2")),
        Fault(
            "a write that stops midway is not continued",
            "_repeat_until_moved",
            becomes("while views: ...", "if views: ..."),
        ),
        Fault("a lock outlives its save", "hold_lock", skipped("fcntl.flock(A, fcntl.LOCK_UN)"), FOLDER),
        Fault("folders have no lock", "hold_lock", becomes("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH"), FOLDER),
    ),
    *File("checkpoint/_load.py", INPUT).faults(
        Fault(
            "a value by rank along one axis is read as one of another",
            "_list_problems",
            never("saved_axes != local_axes"),
        ),
        Fault("axes of one rank count among those of a value by rank", "_varying_axes", dropped("A.size(B) > 1")),
        Fault("a value of all ranks is read only on axes of its names", "_varying_axes", never("A.size(B) == A.ranks")),
        Fault("a load does not notice that a save replaced its files", "load_files", always("not A(B, C, D)"), FOLDER),
        Fault("checksums of pages are not compared", "read_pages", never("A(B) != C.page_checksum(D)"), DAMAGE),
        Fault(
            "the bytes between leaves are not in the checksum", "_page_buffers", becomes("A += B", "A += 0 * B"), DAMAGE
        ),
        Fault(
            "of two leaves that share bytes in the file only one is loaded",
            "_split_overlapping",
            becomes("(A if B.C >= D else E).append(B)", "A.append(B) if B.C >= D else None"),
            LAWS,
        ),
        Fault(
            "a load writes into `like` before all ranks have checked it",
            "_load_files.prepare",
            before("A(B, C.D, E.D, F)", "[x.zero_() for m in E.memory for x in m.tensors()]"),
        ),
        Fault("a load keeps the value of `like` instead of the loaded value", "_load_files", bare("B.get(C, A)")),
        Fault(
            "autograd does not see that a load writes into a tensor", "_read_ranges", skipped("A.increment_version(B)")
        ),
        Fault(
            "ranks may load different leaves",
            "_load_files",
            becomes("A(f'loading {B.C!r}', D(E.F), G)", "print(f'loading {B.C!r}', D(E.F), G)"),
            ON_GLOO,
        ),
    ),
    *File("checkpoint/_read_memory.py", SHARING).faults(
        Fault(
            "tensors that share memory are not separated before a load",
            "materialize",
            becomes("{A: B for C, (A, D) in E if C in F}", "{A: B for A, D in ()}"),
        ),
        Fault("a box that shares memory is loaded without memory of its own", "materialize", dropped("A not in B")),
        Fault("columns of one matrix count as overlapping memory", "_share_bytes", returns("True", at="2 of 2")),
        Fault(
            "overlapping memory is found between neighbours only",
            "_overlapping_indices",
            becomes("A.append(B)", "A = [B]"),
        ),
        Fault(
            "an expanded leaf, whose elements share memory, is not found to overlap",
            "_overlapping_indices",
            becomes("A = {B for *C, B in D if E(F[B])}", "A: set[int] = set()"),
        ),
        Fault(
            "padding in a file is uninitialised memory",
            "_zeros_on_device",
            becomes("torch.zeros", "torch.full"),
            ("tests/checkpoint/test_laws.py", "-k", "padding"),
        ),
    ),
    *File("checkpoint/layout/_chunks.py", SHARING).faults(
        Fault(
            "contiguous runs of a chunk cover dimensions in which the chunk is narrower",
            "_common_runs",
            becomes("A and B == source_shape[A] == C[A]", "A and B == source_shape[A]"),
            CHUNKS,
        ),
        Fault("the offset within a chunk is ignored", "_offset_in", returns("offset"), CHUNKS),
        Fault("the rest of a row is not copied", "rectangles", never("A * B < C"), CHUNKS),
    ),
    *File("checkpoint/_tensor_bytes.py", SHARING).faults(
        Fault(
            "each part of a copy is the first part",
            "view_or_parts",
            becomes("A(B, C, min(C + D, E))", "A(B, start, min(start + D, E))"),
            LAWS,
        ),
    ),
    *File("checkpoint/_save.py", FOLDER).faults(
        Fault("leaves on the meta device are saved", "start_save.prepare", skipped("A(B)"), INPUT),
        Fault(
            "only rank 0 raises if the folder is locked",
            "_SaveRun._save_as_leader",
            (
                before("return A.B.C(D(A.E, F), A.G)", "F.enter_context(A.files.exclusive())"),
                in_symbol("_SaveRun._lock_and_write", skipped("A.enter_context(B.C.D())")),
            ),
            ON_GLOO,
        ),
        Fault("plain leaves are not compared between the ranks", "start_save", skipped("A(B, mesh)"), ON_GLOO),
        Fault(
            "the manifest comes before the files",
            "_SaveRun._write_files",
            before(
                "return {A: B(C.D, C.E(A), F(C.G, A), H) for A, H in C.I.items()}",
                "C.D.put(MANIFEST, Manifest.of(C.channel.nonce, C.G, [File(9, '')] * C.G.ranks).encode())",
            ),
            CRASH,
        ),
        Fault("all saves have the same nonce", "start_save", becomes("secrets.token_hex(8)", "'0' * 16"), CRASH),
        Fault("files of older saves are not removed", "_SaveRun._remove_leftovers", bare("B.remove(A)"), CRASH),
        Fault("the free bytes of the disk are not checked", "_check_room", becomes("A < B", "A < 0"), CRASH),
        Fault("a save in the background does not copy the tree first", "start_save", never("background")),
        Fault(
            "a handle keeps the saved tensors alive",
            "SaveHandle.__init__",
            becomes("self.A = A", "self.A, self.held = (A, run)"),
        ),
        Fault("an error in the background is forgotten", "SaveHandle._run_guarded", skipped("self._error = A")),
        Fault(
            "a save in the background is killed when the script ends",
            "SaveHandle.__init__",
            before("self._thread.A()", "self._thread.daemon = True"),
        ),
        Fault("a failed save is silent", "SaveHandle._run_guarded", skipped("A(f'fzero: {B}')")),
        Fault(
            "if one rank has no memory for the copy, the other ranks wait",
            "start_save",
            bare("B('save', lambda: A, C)"),
            ON_GLOO,
        ),
    ),
    *File("tree.py", INPUT).faults(
        Fault(
            "a pytree node without names deletes the path names of all leaves",
            "flatten_with_paths",
            (
                becomes("A, (B, C) = (D(E, F), G(E, F))", "leaves, C = G(E, F)"),
                after("leaves, A = B(C, D)", "pairs = [((pytree.SequenceKey(i),), x) for i, x in enumerate(leaves)]"),
            ),
        ),
    ),
    *File("checkpoint/layout/_json_values.py", DAMAGE).faults(
        Fault(
            "the parts of a dict value are not looked up in a checkpoint",
            "possible_paths",
            always("path in A or B or not C"),
            INPUT,
        ),
    ),
    *File("checkpoint/layout/_parse_manifest.py", DAMAGE).faults(
        Fault(
            "a manifest's nonce is not checked", "_build_manifest", becomes("re.fullmatch('[0-9a-f]{16}', A)", "True")
        ),
        Fault("a manifest's checksum is not compared", "parse_manifest", dropped("int(frame[1], 16) != A")),
        Fault("leaves larger than their files are accepted", "_check_files", always("A <= B(C.size for C in D)")),
    ),
    *File("checkpoint/layout/_parse_manifest.py", FUZZ).faults(
        Fault("a manifest of any length is read", "read_manifest", never("A > B")),
        Fault("a leaf may have a million dimensions", "_parse_leaf", always("len(A) <= B")),
    ),
    *File("checkpoint/layout/_manifest.py", FUZZ).faults(
        Fault("a manifest is written that no load reads", "Manifest.encode", never("len(A) > B")),
        Fault("a manifest of many lists is written", "Manifest.encode", skipped("check_containers(A)")),
    ),
    *File("checkpoint/layout/_bounded_json.py", FUZZ).faults(
        Fault("a small text takes all memory", "check_containers", never("count > _MAX_CONTAINERS")),
    ),
    *File("checkpoint/_files.py", FUZZ).faults(
        Fault("a device is read for ever", "LocalFolder._open_file", always("stat.S_ISREG(A)")),
    ),
    *File("checkpoint/_inspect.py", FUZZ).faults(
        Fault("a manifest may say that a leaf is empty", "fill_leaf", never("not A.B()")),
    ),
    *File("checkpoint/_inspect.py", INPUT).faults(
        Fault(
            "a key within a dict value cannot be inspected",
            "read",
            becomes("A in B.values", "A == name and A in B.values"),
        ),
    ),
    *File("checkpoint/_export_file.py", INPUT).faults(
        Fault("an export may overwrite the manifest", "export", skipped("A(files, B)")),
    ),
    *File("checkpoint/layout/_ranges.py", LAWS).faults(
        Fault(
            "replicated elements are written by every rank",
            "TreeLayout.owned_span",
            (bare("-(-A // self.size(B))"), bare("min(A + self.index(B, C) * D, E)")),
        ),
        Fault("the padding of a shard is written", "TreeLayout.local_span", becomes("min(A + B.C, D)", "A + B.C")),
        Fault(
            "every part of a split leaf is read as the first part",
            "TreeLayout.chunk",
            bare("A + self.index((B.axis,), C)"),
        ),
        Fault("leaves with small elements come first in a file", "TreeLayout.order", bare("-A")),
        Fault(
            "each rank reads the next rank's shard",
            "TreeLayout.local_span",
            becomes("self.index(A.B, C)", "(self.index(A.B, C) + 1) % self.size(A.B)"),
        ),
    ),
    *File("sharding/elements/_element_ranges.py", LAWS).faults(
        Fault(
            "a write into a strided leaf ignores the offset",
            "put_elements",
            becomes("A[B:B + C.numel()]", "A[:C.numel()]"),
        ),
    ),
    *File("checkpoint/hf/_write.py", HF).faults(
        Fault(
            "a folder of Hugging Face is written without a lock",
            "_reserve_files",
            skipped("A.enter_context(B(C, D.E))"),
        ),
    ),
    *File("checkpoint/_agree.py", ON_GLOO).faults(
        Fault("the trees of the ranks are not compared", "agree", never("A[0] != B[0][0]")),
        Fault("a rank does not report its failure", "StoreChannel.save_as_follower", always("A is None")),
        Fault("if one rank finds damage, the other ranks raise another error", "_raise_together", never("max(A) == 1")),
        Fault("a rank raises its own error only, and not the other ranks' errors", "all_or_none", never("any(A)")),
        Fault("keys in the store are the same for every save", "StoreChannel._key", returns("f'fzero/{topic}/{rank}'")),
    ),
    *File("checkpoint/hf/_read.py", ON_GLOO).faults(
        Fault(
            "ranks may read different names of Hugging Face",
            "read",
            becomes("A(B, C.encode(), D)", "print(B, C.encode(), D)"),
        ),
    ),
    *File("checkpoint/dcp/_save_load.py", ON_GLOO).faults(
        Fault(
            "ranks may read different names of DCP",
            "load",
            becomes("A(B, repr(C).encode(), D)", "print(B, repr(C).encode(), D)"),
        ),
    ),
]
