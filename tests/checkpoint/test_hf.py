"""A folder of Hugging Face is what other libraries take it for, and whatever is wrong with one is an error in words."""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fzero
from fzero import tree
from fzero.checkpoint import _files
from fzero.checkpoint._files import hold_lock
from fzero.checkpoint.hf import _read, _write
from fzero.checkpoint.hf._stored_tensors import INDEX, SINGLE
from tests.checkpoint.helpers import JSON
from tests.checkpoint.states import LAYOUTS, Layout, fill, params_of, same_bits, shard_step, state_in
from tests.helpers import examples


def params_in(layout: Layout, params: Any, seed: int = 0) -> tuple[fzero.zero.ShardedStep, Any, Any]:
    """A step, parameters of random bits in its layout, and these whole."""
    step, state = state_in(layout, params)
    state, whole = fill(step, state, seed)
    return step, state["params"], whole["params"]


def like_in(layout: Layout, params: Any) -> tuple[fzero.zero.ShardedStep, Any]:
    step, state = state_in(layout, params)
    return step, state["params"]


def folder_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


@pytest.mark.slow
@examples(6, 40)
@given(
    params=params_of(), source=LAYOUTS, target=LAYOUTS, max_file=st.sampled_from([1, 200, 1 << 30]), seed=st.integers()
)
def test_hugging_face_files_do_not_depend_on_the_layout_and_load_into_any(
    tmp_path_factory, params, source, target, max_file, seed
):
    path, plain = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("plain")
    step, shards, whole = params_in(source, params, seed % 99)
    fzero.checkpoint.hf.write(path, shards, step.mesh, max_file=max_file)
    fzero.checkpoint.hf.write(plain, whole, max_file=max_file)
    assert folder_of(path) == folder_of(plain)
    other, like = like_in(target, params)
    assert same_bits(other.gather(fzero.checkpoint.hf.read(path, like, other.mesh)), whole)
    theirs: dict[str, Any] = {}
    for name in os.listdir(path):
        if name != INDEX:
            result = safetensors.torch.load_file(path / name)
            assert not theirs.keys() & result.keys(), "a tensor is there twice"
            assert len(result) == 1 or sum(x.nbytes for x in result.values()) <= max_file
            theirs |= result
    paths, leaves, _ = tree.flatten_with_paths(whole)
    ours = {id(x): (p, x) for p, x in reversed(list(zip(paths, leaves, strict=True))) if isinstance(x, torch.Tensor)}
    assert same_bits(dict(sorted(theirs.items())), dict(sorted(ours.values())))
    if len(os.listdir(path)) > 1:
        index = json.loads((path / INDEX).read_bytes())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in theirs.values())
        assert index["weight_map"].keys() == theirs.keys()


@examples(6, 25)
@given(
    source=LAYOUTS,
    target=LAYOUTS,
    there=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    here=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_floating_leaves_are_cast_in_small_parts(tmp_path_factory, source, target, there, here):
    path, g = tmp_path_factory.mktemp("cast"), torch.Generator().manual_seed(0)
    whole: dict[str, Any] = {name: torch.randn(4, 3, 8, generator=g) for name in ("a", "tp")}
    whole |= {"n": torch.arange(7), "t": torch.randn(8, 5, generator=g).t(), "c": torch.ones(3, dtype=torch.complex64)}
    step = shard_step(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_read, "_CHUNK_BYTES", 24)
        patch.setattr(_write, "_CHUNK_BYTES", 24)
        fzero.checkpoint.hf.write(path, step.partition(whole), step.mesh, dtype=there)

        def cast(*dtypes: torch.dtype) -> Any:
            def one(x: torch.Tensor) -> torch.Tensor:
                for dtype in dtypes:
                    x = x.to(dtype) if x.is_floating_point() else x
                return x.contiguous()

            return tree.map(one, whole)

        stored = safetensors.torch.load_file(path / SINGLE)
        assert same_bits(dict(sorted(stored.items())), dict(sorted(cast(there).items())))
        other = shard_step(target)
        like = other.partition(tree.map(torch.zeros_like, cast(here)))
        assert same_bits(other.gather(fzero.checkpoint.hf.read(path, like, other.mesh)), cast(there, here))


def test_plain_leaves_of_any_strides_are_read_in_place(tmp_path):
    x = torch.randn(4, 6)
    fzero.checkpoint.hf.write(tmp_path, {"x": x})
    like = torch.zeros(6, 4).t()
    loaded = fzero.checkpoint.hf.read(tmp_path, {"x": like})["x"]
    assert loaded is like and torch.equal(like, x)
    wide = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64).t())
    version = wide._version
    assert torch.equal(fzero.checkpoint.hf.read(tmp_path, {"x": wide})["x"], x.double()) and wide._version > version


def test_memory_is_made_for_meta_tensors_and_each_rank_reads_its_own_bytes(tmp_path, monkeypatch):
    """Of what is replicated a simulation, which holds it once, reads it once."""
    read: list[tuple[str, int, int]] = []

    def count_bytes(files: Any, name: str, at: int, views: Any, original: Any = _files.LocalFolder.read_into) -> None:
        read.append((name, at, sum(len(v) for v in views)))
        original(files, name, at, views)

    whole = {f"w{i}": torch.randn(100) for i in range(3)}
    fzero.checkpoint.hf.write(tmp_path, whole, max_file=800)
    heads = {name: 8 + int.from_bytes(x[:8], "little") for name, x in folder_of(tmp_path).items() if name != INDEX}
    monkeypatch.setattr(_files.LocalFolder, "read_into", count_bytes)
    for layout in (Layout({"dp": 3}, 0), Layout({"dp": 3}, 3), Layout({"replica": 2, "shard": 3}, 3, "shard")):
        step = shard_step(layout)
        like = step.partition(tree.map(lambda x: torch.empty_like(x, device="meta"), whole))
        read.clear()
        loaded = fzero.checkpoint.hf.read(tmp_path, like, step.mesh)
        assert same_bits(step.gather(loaded), whole)
        data = [x for x in read if x[0] != INDEX and x[1] >= heads[x[0]]]
        assert sum(numel for _, _, numel in data) == sum(x.nbytes for x in whole.values())
        assert len(set(data)) == len(data) > (3 if layout.stage == 3 else 2)
        headers = [x for x in read if x[0] != INDEX and x[1] < heads[x[0]]]
        assert sum(numel for _, _, numel in headers) == sum(heads.values())


# Names and ties.


def test_tied_leaves_are_stored_once_and_load_from_either_name(tmp_path):
    w = torch.randn(8)
    step = shard_step(Layout({"dp": 3}, 3))
    fzero.checkpoint.hf.write(tmp_path, step.partition({"embed": w, "head": w}), step.mesh)
    assert list(safetensors.torch.load_file(tmp_path / SINGLE)) == ["embed"]
    for stored in ({"embed": w}, {"head": w}, {"embed": w, "head": w.clone()}):
        safetensors.torch.save_file(stored, tmp_path / SINGLE, {"format": "pt"})
        zeros = torch.zeros(8)
        loaded = fzero.checkpoint.hf.read(tmp_path, step.partition({"embed": zeros, "head": zeros}), step.mesh)
        assert same_bits(step.gather(loaded), {"embed": w, "head": w})
    safetensors.torch.save_file({"embed": w, "head": w + 1}, tmp_path / SINGLE)
    zeros = torch.zeros(8)
    with pytest.raises(
        fzero.errors.CheckpointError, match="different values for 'embed' and 'head', which are one tensor in"
    ):
        fzero.checkpoint.hf.read(tmp_path, {"embed": zeros, "head": zeros})
    untied = fzero.checkpoint.hf.read(tmp_path, {"embed": zeros.clone(), "head": zeros.clone()})
    assert same_bits(untied, {"embed": w, "head": w + 1})


def test_a_name_function_maps_paths_to_hugging_face_names(tmp_path):
    params = {"blocks": [{"w": torch.randn(2)}, {"w": torch.randn(2)}], "none": None, "nothing": {"a": []}}
    fzero.checkpoint.hf.write(tmp_path, params, name=lambda path: f"model.{path}")
    assert sorted(safetensors.torch.load_file(tmp_path / SINGLE)) == ["model.blocks.0.w", "model.blocks.1.w"]
    like = tree.map(lambda x: x * 0, params)
    assert same_bits(fzero.checkpoint.hf.read(tmp_path, like, name=lambda path: f"model.{path}"), params)
    with pytest.raises(
        fzero.errors.CheckpointError, match=r"it has no tensor 'm' for leaf 'blocks.0.w' \(float32 \[2\]\)"
    ):
        fzero.checkpoint.hf.read(tmp_path, like, name=lambda path: "m")
    both = fzero.checkpoint.hf.read(
        tmp_path, {"a": torch.zeros(2), "b": torch.zeros(2)}, name=lambda p: "model.blocks.0.w", partial=True
    )
    assert same_bits(both, {"a": params["blocks"][0]["w"], "b": params["blocks"][0]["w"]})


def test_a_tree_that_differs_from_the_index_is_refused_before_reading(tmp_path):
    fzero.checkpoint.hf.write(
        tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5), "n": torch.arange(3)}
    )

    def refused(text: str, like: Any, **options: Any) -> None:
        with pytest.raises(fzero.errors.CheckpointError, match=text):
            fzero.checkpoint.hf.read(tmp_path, like, **options)
        assert all(x.eq(0).all() for x in like.values())

    def zeros(**shapes: Any) -> Any:
        whole = {"a": (2, 3), "b": (4,), "c": (5,)} | shapes
        results = {name: torch.zeros(shape) for name, shape in whole.items() if shape is not None}
        return {"n": torch.zeros(3, dtype=torch.int64)} | results

    refused(r"tensor 'a' is float32 \[2, 3\] there, and leaf 'a' is float32 \[3, 2\]$", zeros(a=(3, 2)))
    refused(r"another tree: it has no tensor 'd' \(float32 \[1\]\)$", zeros(d=(1,)))
    refused(r"no leaf for its tensor 'b' \(float32 \[4\]\); give partial=True to leave", zeros(b=None))
    refused(r"tensor 'b'.*tensor 'c'.*no tensor 'd'.*; and 1 more$", zeros(b=(1,), c=(1,), d=(1,), e=(1,)))
    refused(r"tensor 'n' is int64 \[3\] there, and leaf 'n' is int32", zeros() | {"n": torch.zeros(3).int()})
    refused(r"tensor 'n' is int64 \[3\] there, and leaf 'n' is float32", zeros(n=(3,)))
    refused(r"it has no tensor 'd'", zeros(b=None, d=(1,)), partial=True)
    loaded = fzero.checkpoint.hf.read(tmp_path, zeros(b=None), partial=True)
    assert loaded["a"].eq(1).all() and list(loaded) == ["n", "a", "c"]


def test_values_that_a_folder_cannot_hold_are_refused(tmp_path):
    mesh = fzero.mesh(dp=2)
    with pytest.raises(TypeError, match=r"params leaf 'step' is '7', but a folder of safetensors holds tensors only"):
        fzero.checkpoint.hf.write(tmp_path, {"w": torch.zeros(1), "step": 7})
    with pytest.raises(TypeError, match=r"like leaf 'step' is .*7.*, but a folder of safetensors"):
        fzero.checkpoint.hf.read(_write_one(tmp_path / "one"), {"w": torch.zeros(1), "step": {"a": 7}})
    with pytest.raises(TypeError, match=r"leaf 'x' is a PerRank value, but a folder of safetensors has one for all"):
        fzero.checkpoint.hf.write(tmp_path, {"x": fzero.PerRank(torch.zeros(2, 3))}, mesh)
    with pytest.raises(TypeError, match=r"params leaf 'x' is torch.complex128, a dtype that safetensors does not have"):
        fzero.checkpoint.hf.write(tmp_path, {"x": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match=r"leaves 'a' and 'b' have one name, 'w'"):
        fzero.checkpoint.hf.write(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, name=lambda path: "w")
    for result in (3, "", "__metadata__"):
        with pytest.raises(TypeError, match=rf"name\('a'\) returned {result!r}: expected a tensor's name"):
            fzero.checkpoint.hf.write(tmp_path, {"a": torch.zeros(1)}, name=lambda path, result=result: result)  # pyright: ignore
    with pytest.raises(ValueError, match=r"folder='s3://b/m' is a URL: expected a local folder"):
        fzero.checkpoint.hf.write("s3://b/m", {"a": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"dtype=torch.int8: expected a floating dtype"):
        fzero.checkpoint.hf.write(tmp_path, {"a": torch.zeros(1)}, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"max_file=0: expected a number of bytes"):
        fzero.checkpoint.hf.write(tmp_path, {"a": torch.zeros(1)}, max_file=0)
    assert [p.name for p in tmp_path.iterdir()] == ["one"]


def _write_one(path: Path) -> Path:
    fzero.checkpoint.hf.write(path, {"a": torch.zeros(1)})
    return path


# An earlier model in the folder.


WRITES = {"one": 1 << 30, "two": 8, "three": 4}  # the bytes of a file: so many files of 3 leaves of 4 bytes


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((1,), value) for name in "abc"}


def found_in(path: Path) -> float | None:
    """The value of the model in the folder, which is one; None if there is no model."""
    try:
        loaded = fzero.checkpoint.hf.read(path, {name: torch.zeros(1) for name in "abc"})
    except fzero.errors.CheckpointError as error:
        assert "has no file model.safetensors, and no model.safetensors.index.json" in str(error), str(error)
        return None
    values = {x.item() for x in loaded.values()}
    assert len(values) == 1, "parts of two models"
    return values.pop()


@pytest.mark.parametrize("before", WRITES)
@pytest.mark.parametrize("after", WRITES)
def test_a_reader_during_a_write_finds_the_old_model_or_the_new_one_or_none(before, after, tmp_path):
    """A write dies at each operation that changes names, and the next write leaves nothing behind."""
    n, own = 0, {"config.json": b"{}", "tokenizer.model": b"t", ".hidden": b"h", "model.bin": b"b"}
    while True:
        path = tmp_path / str(n)
        path.mkdir()
        for name, data in own.items():
            (path / name).write_bytes(data)
        fzero.checkpoint.hf.write(path, model(1.0), max_file=WRITES[before])
        left = n

        def dying(*args: Any, original: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(5, "planted")
            return original(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            for call in ("rename", "unlink", "pwrite"):
                patch.setattr(os, call, functools.partial(dying, original=getattr(os, call)))
            try:
                fzero.checkpoint.hf.write(path, model(2.0), max_file=WRITES[after])
                ended = left >= 0
            except OSError:
                ended = False
        value = found_in(path)
        assert value == 2.0 if ended else value in (1.0, 2.0, None)
        if before == "one" or after == "one" or before != after:
            assert value is not None, "only where files have the same names is there none for a moment"
        fzero.checkpoint.hf.write(path, model(3.0), max_file=WRITES[after])
        assert found_in(path) == 3.0
        mine = {name: data for name, data in folder_of(path).items() if name in own}
        assert mine == own and len(os.listdir(path)) == len(own) + {"one": 1, "two": 3, "three": 4}[after]
        if ended:
            return
        n += 1


def test_a_write_that_fails_leaves_the_old_model_and_no_file_of_its_own(tmp_path, monkeypatch):
    fzero.checkpoint.hf.write(tmp_path, model(1.0))
    before = folder_of(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_write.os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError(28, "planted")))
        with pytest.raises(OSError, match="planted"):
            fzero.checkpoint.hf.write(tmp_path, model(2.0))
    assert folder_of(tmp_path) == before
    monkeypatch.setattr(_files.LocalFolder, "free", lambda files: 100)
    with pytest.raises(fzero.errors.CheckpointError, match=r"the save needs \d+ bytes, and its disk has 100 free"):
        fzero.checkpoint.hf.write(tmp_path, model(2.0))
    assert folder_of(tmp_path) == before


LEAVES = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4), "c": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    path = tmp_path_factory.mktemp("several")
    fzero.checkpoint.hf.write(path, LEAVES, max_file=40)
    assert len(os.listdir(path)) == 3
    return path


def read_leaves(path: Path) -> Any:
    return fzero.checkpoint.hf.read(path, tree.map(torch.zeros_like, LEAVES))


def copy_folder(path: Path, to: Path) -> Path:
    for name, data in folder_of(path).items():
        (to / name).write_bytes(data)
    return to


@examples(75, 150)
@given(data=st.data())
def test_a_changed_header_or_index_is_an_error_or_changes_nothing(several, tmp_path_factory, data):
    path = copy_folder(several, tmp_path_factory.mktemp("damaged"))
    name = data.draw(st.sampled_from(sorted(os.listdir(path))))
    content = bytearray((path / name).read_bytes())
    size = len(content) if name == INDEX else 8 + int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, size - 1))
    content[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"[]{},:'))
    (path / name).write_bytes(content)
    try:
        loaded = read_leaves(path)
    except fzero.errors.CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert same_bits(loaded, LEAVES)


@settings(max_examples=40)
@given(data=st.data())
def test_a_file_that_was_cut_or_has_grown_or_is_missing_is_an_error(several, tmp_path_factory, data):
    path = copy_folder(several, tmp_path_factory.mktemp("damaged"))
    name = data.draw(st.sampled_from(sorted(os.listdir(path))))
    content = (path / name).read_bytes()
    size = data.draw(st.none() | st.integers(0, len(content) - 2))
    if size is None and name != INDEX:
        content += b"\0"
    (path / name).write_bytes(content[:size])
    if size is None and name == INDEX:
        (path / name).unlink()
    with pytest.raises(fzero.errors.CheckpointError, match=re.escape(name)):
        read_leaves(path)
    if name != INDEX:
        (path / name).unlink()
        with pytest.raises(fzero.errors.CheckpointError, match=f"{re.escape(name)} is missing"):
            read_leaves(path)


def write_header(path: Path, header: Any, data: bytes = b"\0" * 24) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@examples(60, 120)
@given(junk=JSON, key=st.sampled_from([*GOOD, "a", ""]), inner=st.none() | st.integers(0, 1))
def test_any_json_in_a_header_is_an_error(tmp_path_factory, junk, key, inner):
    path = tmp_path_factory.mktemp("junk")
    entry: Any = {**GOOD}
    if key in entry and inner is not None and key != "dtype":
        entry[key] = [junk if i == inner else n for i, n in enumerate(entry[key])]
    else:
        entry = {**entry, key: junk} if key in entry else junk
    header = junk if key == "" else {"a": entry}
    write_header(path / SINGLE, header)
    if header == {"a": GOOD} and type(entry["shape"][0]) is type(entry["data_offsets"][0]) is int:
        return
    with pytest.raises(fzero.errors.CheckpointError):
        fzero.checkpoint.hf.read(path, {"a": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    "entries,text",
    [
        ({"a": {**GOOD, "data_offsets": [8, 32]}}, "'a' begins at byte"),
        ({"a": GOOD, "b": GOOD}, "'b' begins at byte"),  # two tensors on the same bytes
        ({"a": {**GOOD, "shape": [2, 4]}}, "its header says of 'a'"),
        ({"a": {**GOOD, "shape": [-2, -3]}}, "its header says of 'a'"),
        ({"a": {**GOOD, "shape": [True, 6]}}, "its header says of 'a'"),
        ({"a": {**GOOD, "shape": [1 << 40, 1 << 40], "data_offsets": [0, 1 << 47]}}, "its header says of 'a'"),
        ({"a": {**GOOD, "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, "its header describes"),
        ({"a": {**GOOD, "data_offsets": [24, 0]}}, "its header says of 'a'"),
        ({"a": {**GOOD, "dtype": "F4", "shape": [6]}}, r"tensor 'a' is F4 \[6\] there, and leaf 'a' is float32"),
        ({"a": {**GOOD, "dtype": "C128", "shape": [1]}}, "it has 1|its header|C128"),
    ],
)
def test_forged_offsets_and_shapes_in_a_header_are_refused(entries, text, tmp_path):
    write_header(tmp_path / SINGLE, entries)
    with pytest.raises(fzero.errors.CheckpointError, match=text):
        fzero.checkpoint.hf.read(tmp_path, {"a": torch.zeros(2, 3)})


def test_a_header_is_as_long_as_its_file_at_most(tmp_path):
    for numel, size in ((1 << 62, 100), (93, 100), (100_000_001, 200_000_000)):
        with open(tmp_path / SINGLE, "wb") as f:
            f.write(numel.to_bytes(8, "little"))
            f.truncate(size)
        with pytest.raises(
            fzero.errors.CheckpointError, match=rf"it has {size:,} bytes, but its header claims to have {numel:,}"
        ):
            fzero.checkpoint.hf.read(tmp_path, {"a": torch.zeros(2, 3)})


@pytest.mark.parametrize("name", ["../out.safetensors", "/out", "sub/a", "..", ".", "", "a\\b", "a\0b", 3, None])
def test_file_names_in_an_index_cannot_leave_the_folder(name, tmp_path):
    (tmp_path / "model").mkdir()
    for place in (tmp_path / "out.safetensors", tmp_path / "model" / "a"):
        safetensors.torch.save_file({"a": torch.ones(1)}, place)
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(fzero.errors.CheckpointError, match=r"says that 'a' is in .*: expected a file of the folder"):
        fzero.checkpoint.hf.read(tmp_path / "model", {"a": torch.zeros(1)})


def test_an_index_that_contradicts_its_files_is_refused(several, tmp_path):
    path = copy_folder(several, tmp_path)
    weights = json.loads((path / INDEX).read_bytes())["weight_map"]
    weights["a"] = next(name for name in weights.values() if name != weights["a"])
    (path / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(fzero.errors.CheckpointError, match=f"says that {weights['a']} holds 'a', which it does not"):
        read_leaves(path)
    for body in ([], {}, {"weight_map": []}):
        (path / INDEX).write_text(json.dumps(body))
        with pytest.raises(fzero.errors.CheckpointError, match=f"{INDEX} is damaged"):
            read_leaves(path)


def test_a_model_comes_from_transformers_and_goes_back(tmp_path):
    """Tied weights and all; what it computes is the same to the last bit."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(os.listdir(tmp_path / "theirs")) > 5
    _, params, _ = fzero.nn.functional(model)
    step = shard_step(Layout({"dp": 3}, 3))
    like = step.partition(tree.map(lambda x: torch.empty_like(x, device="meta"), params))
    read = fzero.checkpoint.hf.read(tmp_path / "theirs", like, step.mesh)
    assert same_bits(step.gather(read), params)
    tokens = torch.arange(12)[None]
    for i, max_file in enumerate((1 << 30, 20_000)):
        ours = tmp_path / f"ours{i}"
        fzero.checkpoint.hf.write(ours, read, step.mesh, max_file=max_file)
        model.config.save_pretrained(ours)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(ours, local_files_only=True).eval()
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    fzero.checkpoint.hf.write(tmp_path, {"w": torch.zeros(2)})
    fd = os.open(tmp_path, os.O_RDONLY)
    with hold_lock(fd, str(tmp_path)), pytest.raises(fzero.errors.CheckpointError, match="another process saves here"):
        fzero.checkpoint.hf.write(tmp_path, {"w": torch.ones(2)})
    os.close(fd)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]
    fzero.checkpoint.hf.write(tmp_path, {"w": torch.ones(2)})


def test_leaves_that_share_memory_are_read_apart(tmp_path):
    fzero.checkpoint.hf.write(tmp_path, {"a": torch.zeros(4), "b": torch.ones(2, 2)})
    x = torch.zeros(4)
    result = fzero.checkpoint.hf.read(tmp_path, {"a": x, "b": x.view(2, 2)})
    assert result["a"].sum() == 0 and result["b"].sum() == 4
