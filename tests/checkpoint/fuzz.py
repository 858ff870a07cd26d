"""Folders of checkpoints, mutated: each is refused in words, or read as the format's own library reads it.

`python -m tests.checkpoint.fuzz hf --seed 0 --cases 3500` prints the outcomes, and each bad case with its number. A
case depends only on the format, the seed and its number, so `--first 17 --cases 1` repeats one.
"""

import argparse
import collections
import contextlib
import copy
import faulthandler
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

import fzero
from fzero import optim, tree
from fzero.checkpoint.hf._stored_tensors import INDEX, SINGLE
from fzero.checkpoint.layout import MANIFEST
from tests.checkpoint.states import Layout, same_bits, shard_step

WORK, HANG = 10.0, 60.0  # seconds of a processor that one case may take, and of the clock, on a busy machine
MEMORY = 1 << 30  # bytes that a case may take
METADATA = ".metadata"

# What a folder may hold in the place of a file.


class Special(NamedTuple):
    """A file that is not plain: a folder, a pipe, a link to itself, or one with a hole of so many bytes."""

    kind: str
    size: int = 0


Folder = dict[str, Any]  # bytes, or `Special`, by name


def write_folder(folder: Folder, path: Path) -> None:
    """Write a folder anew."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, content in folder.items():
        if not isinstance(content, Special):
            (path / name).write_bytes(content)
        elif content.kind == "folder":
            (path / name).mkdir()
        elif content.kind == "pipe":
            os.mkfifo(path / name)
        elif content.kind == "link":
            (path / name).symlink_to(name)
        elif content.kind == "device":
            (path / name).symlink_to("/dev/zero")
        else:
            with open(path / name, "wb") as f:
                f.truncate(content.size)


# Mutations of bytes and of JSON.

SIZES = [
    0,
    1,
    7,
    255,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    1 << 47,
    1 << 48,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
INTS = [*SIZES, -1, -(1 << 31), -(1 << 63), 10**30, 10**400]
NAMES = ["../outside/secret", "/etc/passwd", "..", ".", "", "a/b", "x\0y", "\ud800", "n" * 300, "a\\b", "~", "\n", "é"]


BOMBS, BOMB = [10_000, 1_000_000], 1 << 24  # items of a list; bytes of it
DEEP = [f"deep {n}" for n in (30, 900, 1100)]  # stands for a value of that depth, which json would not write


def junk(r: random.Random) -> Any:
    """Draw a value that hardly belongs where it is put."""
    return r.choice(
        [
            lambda: r.choice(INTS),
            lambda: r.choice(INTS),
            lambda: r.choice(NAMES),
            lambda: r.choice(
                [None, True, False, [], {}, 0.5, -1.5, 1e300, float("nan"), float("inf"), "F32", "a", "I64"]
            ),
            lambda: [r.choice(INTS) for _ in range(r.choice([1, 2, 3, 70, 5000]))],
            lambda: {"a": r.choice(INTS)},
            lambda: r.choice(DEEP),
        ]
    )()


def bytes_of(r: random.Random, data: bytes) -> bytes:
    """Mutate bytes, one to three times."""
    for _ in range(r.choice([1, 1, 2, 3])):
        at, size = r.randint(0, len(data)), r.choice([1, 2, 8, 64, 300])
        stop = at + size
        kind = r.randrange(9)
        if kind == 0 and data:  # a bit
            at = r.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << r.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2:
            data = data[:at] + r.randbytes(size) + data[at:]
        elif kind == 3:
            data = data[:at] + bytes(len(data[at:stop])) + data[stop:]
        elif kind == 4:
            data = data[:at] + data[stop:]
        elif kind == 5:  # two ranges change places
            b = r.randint(stop, max(stop, len(data)))
            data = data[:at] + data[b : b + size] + data[stop:b] + data[at:stop] + data[b + size :]
        elif kind == 6:  # a length
            at = r.choice([0, at])
            data = data[:at] + (r.choice(SIZES)).to_bytes(8, r.choice(["little", "big"])) + data[at + 8 :]
        elif kind == 7:
            data = data[:stop] + data[at:stop] + data[stop:]
        else:
            data = data[:at] + r.randbytes(len(data[at:stop])) + data[stop:]
    return data


def places(body: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of a JSON value and each key in it."""
    for key in list(body) if isinstance(body, dict) else range(len(body)):
        yield body, key
        if isinstance(body[key], dict | list):
            yield from places(body[key])


def json_of(r: random.Random, body: Any) -> bytes:
    """Mutate a JSON value, one to three times, and return its text."""
    body = copy.deepcopy(body)
    for _ in range(r.choice([1, 1, 2, 3])):
        actual = list(places(body)) if isinstance(body, dict | list) else []
        if not actual:
            break
        if r.random() < 0.4:  # the few places near the root as often as the many below
            actual = [(c, k) for c, k in actual if c is body]
        container, key = r.choice(actual)
        other, there = r.choice(actual)
        kind = r.randrange(6)
        if kind < 2:
            container[key] = junk(r)
        elif kind == 2:
            del container[key]
        elif kind == 3:
            container[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(container[key])
        elif kind == 4 and isinstance(container[key], int):
            container[key] += r.choice([1, -1, 4, -4, 64, 1 << 32])
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]) if r.random() < 0.5 else junk(r))
        else:
            container[r.choice(["a", *NAMES])] = junk(r)
    text = json.dumps(body, separators=(",", ":"))
    if r.random() < 0.08 and text[1:2] == '"':  # a key twice
        key = text[1 : text.index('"', 2) + 1]
        text = text[:-1] + f",{key}:{json.dumps(junk(r))}}}"
    if r.random() < 0.01 and isinstance(body, dict):  # a bomb: a list of a million, where a few are expected
        lists = [k for k, v in body.items() if isinstance(v, list) and v] or [*body]
        key = r.choice(lists)
        first = body[key][0] if isinstance(body[key], list) and body[key] else junk(r)
        item = json.dumps(first, separators=(",", ":"))
        text = json.dumps({**body, key: "bomb"}, separators=(",", ":"))
        text = text.replace('"bomb"', f"[{','.join([item] * min(r.choice(BOMBS), BOMB // len(item)))}]")
    if r.random() < 0.02:
        text = r.choice(["[" * 100_000, '{"a":' * 50_000, "9" * 5000, text + "}", " " + text, "\ufeff" + text])
    for name in DEEP:
        depth = int(name.split()[1])
        text = text.replace(f'"{name}"', "[" * depth + "]" * depth)
    return text.encode("utf-8", "surrogatepass")


def files_of(r: random.Random, folder: Folder) -> None:
    """Remove, exchange or replace a file."""
    name, other = r.choice(list(folder)), r.choice(list(folder))
    kind = r.randrange(9)
    if kind == 0:
        del folder[name]
    elif kind == 1:
        folder[name], folder[other] = folder[other], folder[name]
    elif kind == 2:
        folder[name] = folder[other]
    elif kind == 3:
        folder[name] = b""
    elif kind == 4:
        folder[name + r.choice(["~", ".tmp", " "])] = folder.pop(name)
    else:
        choices = [Special("folder"), Special("pipe"), Special("link"), Special("device"), Special("hole", 1 << 40)]
        folder[name] = choices[kind - 4]


# The formats.

WHOLE: dict[str, Any] = {
    "a": torch.arange(12.0).view(3, 4),
    "b": {"c": torch.arange(5) - 7, "d": torch.tensor(2.5, dtype=torch.float64)},
    "h": torch.arange(6).to(torch.bfloat16).view(2, 3),
}
VALUES = {"step": 7, "data": {"epoch": 1, "files": ["x"]}}


def like_of() -> Any:
    return tree.map(lambda x: torch.full_like(x, 99), WHOLE)


class Format(NamedTuple):
    """A format: how folders of it are made, mutated, and read by fzero and by its own library.

    Attributes:
        make: returns whole folders.
        mutate: changes the parts of a folder that a format gives a meaning; returns whether the values may be others.
        read: reads a folder with fzero.
        reference: reads a folder with the format's own library; raises if it refuses.
    """

    make: Callable[[Path], list[Folder]]
    mutate: Callable[[random.Random, Folder], None]
    read: Callable[[random.Random, Path], Any]
    reference: Callable[[Path], Any]


def files_in(path: Path) -> Folder:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.name != ".lock"}


def make_own(path: Path) -> list[Folder]:
    for i, layout in enumerate([Layout({"dp": 1}, 0), Layout({"dp": 3}, 3), Layout({"a": 2, "b": 2}, 2)]):
        step = shard_step(layout)
        params, _ = step.init(tree.map(torch.clone, WHOLE), optim.sgd(0.1))
        fzero.save(path / str(i), {"p": params, **VALUES}, step.mesh).wait()
    return [files_in(path / str(i)) for i in range(3)]


def mutate_own(r: random.Random, folder: Folder) -> None:
    text = json_of(r, json.loads(folder[MANIFEST])["checkpoint"])
    folder[MANIFEST] = b'{"crc32":"%08x","checkpoint":%s}\n' % (zlib.crc32(text), text)


def read_own(r: random.Random, path: Path | str) -> Any:
    use = r.randrange(4)
    if use == 1:
        fzero.checkpoint.verify(path)
    elif use == 2:
        fzero.checkpoint.leaves(path)
        fzero.checkpoint.verify(path)  # a read of one leaf checks its own files alone
        return {"a": fzero.checkpoint.read(path, "p.a")}
    layout = Layout({"dp": 2}, 3)
    step = shard_step(layout)
    if use == 3:
        params, _ = step.init(like_of(), optim.sgd(0.1))
        loaded = fzero.load(path, {"p": params, **VALUES}, step.mesh)
        return step.gather(loaded["p"]) | {k: loaded[k] for k in VALUES}
    loaded = fzero.load(path, {"p": like_of(), **VALUES})
    return loaded["p"] | {k: loaded[k] for k in VALUES}


def reference_own(path: Path) -> Any:
    """The tensors are those that were saved; the values are what a manifest with a right checksum says.

    It may also say a smaller shape, which leaves a rest of the shards unused, as padding is.
    """
    body = json.loads((path / MANIFEST).read_bytes())["checkpoint"]
    shapes = {name: shape for name, _, shape, *_ in body["leaves"]}
    paths, leaves, structure = tree.flatten_with_paths(WHOLE)
    shards = [
        x.reshape(-1)[: math.prod(shapes[f"p.{p}"])].view(shapes[f"p.{p}"]) for p, x in zip(paths, leaves, strict=True)
    ]
    return tree.unflatten(structure, shards) | {k: body["values"][k] for k in VALUES}


REMOTE = "memory://fuzz"


def read_remote(r: random.Random, path: Path) -> Any:
    """Read a folder as it is in an object store: files that are not plain have no place there."""
    store = fsspec.filesystem("memory")
    if store.exists("/fuzz"):
        store.rm("/fuzz", recursive=True)
    for file in path.iterdir():
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 30:
            with contextlib.suppress(UnicodeEncodeError):
                store.pipe_file(f"/fuzz/{file.name}", file.read_bytes())
    store.pipe_file("/outside/secret", b"secret")
    return read_own(r, REMOTE)


def make_hf(path: Path) -> list[Folder]:
    for i, size in enumerate([1 << 20, 1]):
        fzero.checkpoint.hf.write(path / str(i), WHOLE, max_file=size)
    return [files_in(path / str(i)) for i in range(2)]


def mutate_hf(r: random.Random, folder: Folder) -> None:
    if INDEX in folder and r.random() < 0.5:
        folder[INDEX] = json_of(r, json.loads(folder[INDEX]))
        return
    name = r.choice([n for n in folder if n.endswith(".safetensors")])
    data = folder[name]
    size = int.from_bytes(data[:8], "little")
    text = json_of(r, json.loads(data[8 : 8 + size]))
    text += b" " * (-len(text) % 8)
    folder[name] = len(text).to_bytes(8, "little") + text + data[8 + size :]


def read_hf(r: random.Random, path: Path) -> Any:
    if r.random() < 0.5:
        return fzero.checkpoint.hf.read(path, like_of(), partial=r.random() < 0.3)
    step = shard_step(Layout({"dp": 2}, 3))
    params, _ = step.init(like_of(), optim.sgd(0.1))
    return step.gather(fzero.checkpoint.hf.read(path, params, step.mesh))


def reference_hf(path: Path) -> Any:
    if (path / SINGLE).is_file():
        result = safetensors.torch.load_file(path / SINGLE)
    else:
        weights = json.loads((path / INDEX).read_bytes())["weight_map"]
        result = {k: safetensors.torch.load_file(path / name)[k] for k, name in weights.items()}
    paths, like, structure = tree.flatten_with_paths(WHOLE)
    return tree.unflatten(structure, [result[p].to(x.dtype) for p, x in zip(paths, like, strict=True)])


def make_dcp(path: Path) -> list[Folder]:
    for i, layout in enumerate([Layout({"dp": 1}, 0), Layout({"dp": 3}, 3)]):
        step = shard_step(layout)
        params, _ = step.init(tree.map(torch.clone, WHOLE), optim.sgd(0.1))
        fzero.checkpoint.dcp.save(path / str(i), {"p": params, **VALUES}, step.mesh)
    return [files_in(path / str(i)) for i in range(2)]


def fields(x: Any) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yield each field of DCP's metadata: a function that sets it, and its value."""
    items: Any = ()
    if isinstance(x, dict):
        items = [(lambda v, k=k: x.__setitem__(k, v), y) for k, y in x.items()]
    elif isinstance(x, list):
        items = [(lambda v, i=i: x.__setitem__(i, v), y) for i, y in enumerate(x)]
    elif hasattr(x, "__dict__") and type(x).__module__.startswith("torch.distributed.checkpoint"):
        items = [(lambda v, k=k: object.__setattr__(x, k, v), y) for k, y in list(vars(x).items())]
    for put, y in items:
        yield put, y
        yield from fields(y)


def mutate_dcp(r: random.Random, folder: Folder) -> None:
    metadata = pickle.loads(folder[METADATA])
    for _ in range(r.choice([1, 1, 2])):
        results = list(fields(metadata))
        if r.random() < 0.5:  # what says where in which file each part lies
            results = list(fields(metadata.storage_data))
        put, old = r.choice(results)
        if isinstance(old, torch.Size):
            sizes = list(old) or [1]
            sizes[r.randrange(len(sizes))] = r.choice([0, 1, 2, 5, 1 << 31, 1 << 62, -1])
            put(torch.Size(sizes))
        elif isinstance(old, int) and r.random() < 0.7:
            put(r.choice([*INTS, old + 1, old - 1]))
        elif isinstance(old, str) and r.random() < 0.7:
            put(r.choice([*NAMES, *folder, str(Path("..") / "outside" / old)]))
        else:
            put(copy.deepcopy(r.choice([junk(r), r.choice(results)[1]])))
    with contextlib.suppress(Exception):  # not all that a field may be can be pickled
        folder[METADATA] = pickle.dumps(metadata)


def read_dcp(r: random.Random, path: Path) -> Any:
    if r.random() < 0.5:
        loaded = fzero.checkpoint.dcp.load(path, {"p": like_of(), **VALUES})
        return loaded["p"] | {k: loaded[k] for k in VALUES}
    step = shard_step(Layout({"dp": 2}, 3))
    params, _ = step.init(like_of(), optim.sgd(0.1))
    loaded = fzero.checkpoint.dcp.load(path, {"p": params, **VALUES}, step.mesh)
    return step.gather(loaded["p"]) | {k: loaded[k] for k in VALUES}


def reference_dcp(path: Path) -> Any:
    """Only folders that fzero's unpickler accepted are read with torch's bare one."""
    values = {"p": like_of(), "step": 0, "data": {"epoch": 0, "files": [""]}}
    torch_load(values, checkpoint_id=path, no_dist=True)
    return values["p"] | {k: values[k] for k in VALUES}


FORMATS = {
    "own": Format(make_own, mutate_own, read_own, reference_own),
    "remote": Format(make_own, mutate_own, read_remote, reference_own),
    "hf": Format(make_hf, mutate_hf, read_hf, reference_hf),
    "dcp": Format(make_dcp, mutate_dcp, read_dcp, reference_dcp),
}

# Running cases.


class Hang(BaseException):
    """A case takes too long."""


def on_alarm(*args: Any) -> None:
    raise Hang


class Watch:
    """Notes each file that is opened, and each change of the file system, outside of a folder while one is set."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: Any) -> None:
        if self.folder is None or event not in ("open", "os.mkdir", "os.remove", "os.rename", "os.system", "exec"):
            return
        path = args[0] if args else ""
        if event == "exec" or isinstance(path, int) or str(path).endswith((".py", ".pyc", ".so")):
            return
        real = os.path.realpath(os.fsdecode(path))  # a device is opened to see that it is one
        if not real.startswith(self.folder) and real != "/dev/zero":
            self.outside.append(f"{event} {path!r}")


def is_same(actual: Any, expected: Any) -> bool:
    """Return whether what was read has the bits of the same keys of another tree; a value may be deep."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * limit)
    try:
        return same_bits(actual, {k: x for k, x in expected.items() if k in actual})
    except (AssertionError, AttributeError):  # another structure, or a tensor in the place of a number
        return False
    finally:
        sys.setrecursionlimit(limit)


def mutate_folder(r: random.Random, form: Format, folders: list[Folder]) -> Folder:
    folder = dict(r.choice(folders))
    kind = r.random()
    if kind < 0.55:
        form.mutate(r, folder)
    elif kind < 0.9:
        name = r.choice([*folder, *[n for n in (MANIFEST, METADATA, INDEX) if n in folder] * 2])
        folder[name] = bytes_of(r, folder[name])
    else:
        files_of(r, folder)
    return folder


def outcome(r: random.Random, form: Format, path: Path, watch: Watch, names: list[str]) -> str:
    """Read a folder; return what came of it."""
    start, used, watch.outside = time.monotonic(), time.process_time(), []
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch.folder = os.path.realpath(path)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    result: Any = None
    error: BaseException | None = None
    try:
        result = form.read(r, path)
    except BaseException as e:
        error = e
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        watch.folder = None
    if time.monotonic() - start > 0.9 * HANG or time.process_time() - used > WORK:
        return "BAD: it hangs"
    if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 > MEMORY // 4:
        return "BAD: it takes memory"
    if watch.outside:
        return f"BAD: outside of the folder: {watch.outside[0]}"
    if isinstance(error, fzero.errors.CheckpointError):
        text = str(error)
        if "MemoryError" in text:
            return f"BAD: {text[:200]}"
        return (
            "refused"
            if str(path) in text or REMOTE in text or any(n in text for n in names)
            else f"BAD: no name in: {text[:200]}"
        )
    if error is not None:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where is not None else ""
        return f"BAD: {type(error).__name__}: {str(error)[:150]} at {line}"
    if is_same(result, WHOLE | VALUES):
        return "the same"
    try:
        same = is_same(result, form.reference(path))
    except Exception as e:
        return f"BAD: read, and the format's own library says {type(e).__name__}: {str(e)[:150]}"
    return "as the format says" if same else "BAD: other values"


def run(name: str, seed: int, cases: int, first: int = 0) -> dict[str, list[int]]:
    """Run cases of a format; return the numbers of the cases of each outcome."""
    form = FORMATS[name]
    watch = Watch()
    signal.signal(signal.SIGALRM, on_alarm)
    warnings.simplefilter("ignore")
    result: dict[str, list[int]] = collections.defaultdict(list)
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=root) as top:
        folders = form.make(Path(top) / "made")
        path, outside = Path(top) / "case", Path(top) / "outside"
        outside.mkdir()
        for folder in folders:  # so that a path that climbs finds what it asks for
            for file, content in folder.items():
                (outside / file).write_bytes(content)
        (outside / "secret").write_bytes(b"secret")
        for folder in folders:
            write_folder(folder, path)
            form.read(random.Random(0), path)  # imports what it needs
            assert (found_first := outcome(random.Random(0), form, path, watch, [])) == "the same", found_first
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for i in range(first, first + cases):
            r = random.Random(f"{name} {seed} {i}")
            folder = mutate_folder(r, form, folders)
            write_folder(folder, path)
            print(i, file=sys.stderr, end="\r", flush=True)
            result[outcome(r, form, path, watch, [*folder])].append(i)
    return dict(result)


if __name__ == "__main__":
    faulthandler.enable()
    parser = argparse.ArgumentParser()
    parser.add_argument("format", choices=FORMATS, nargs="+")
    for option, default in (("seed", 0), ("cases", 3500), ("first", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({f: run(f, options.seed, options.cases, options.first) for f in options.format}))
