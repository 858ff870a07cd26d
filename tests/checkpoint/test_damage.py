"""Whatever is wrong with a checkpoint's files is an error that names a file or a leaf, and never other numbers."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero
from fzero.checkpoint import _files
from fzero.checkpoint.layout import SAFETENSORS_NAMES
from tests.checkpoint.helpers import JSON, body_of, write_manifest
from tests.checkpoint.states import Layout, fill, same_bits, state_in, whole_of
from tests.helpers import examples

LAYOUT = Layout({"dp": 2, "tp": 2}, 3, "dp", split=True)
PARAMS: dict[str, Any] = {"tp": torch.zeros(4, 3, 8), "b": torch.zeros(5), "n": torch.zeros(3, dtype=torch.int32)}
PARAMS["tied"] = PARAMS["b"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    step, state = state_in(LAYOUT, PARAMS)
    state, whole = fill(step, state)
    fzero.save(path, state, step.mesh)
    return path, whole


def load(path: Path, layout: Layout = LAYOUT) -> Any:
    step, like = state_in(layout, PARAMS)
    return whole_of(step, fzero.load(path, like=like, mesh=step.mesh))


def copy_folder(path: Path, to: Path) -> Path:
    for name in os.listdir(path):
        (to / name).write_bytes((path / name).read_bytes())
    return to


@examples(16, 120)
@given(data=st.data(), other=st.booleans())
def test_any_byte_that_changed_is_an_error(saved, tmp_path_factory, data, other):
    path, _ = saved
    name = data.draw(st.sampled_from(sorted(n for n in os.listdir(path) if n != ".lock")))
    damaged = copy_folder(path, tmp_path_factory.mktemp("damaged"))
    content = bytearray((damaged / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    (damaged / name).write_bytes(content)
    with pytest.raises(fzero.errors.CheckpointError, match=name):
        load(damaged, Layout({"dp": 3}, 1) if other else LAYOUT)
    with pytest.raises(fzero.errors.CheckpointError, match=name):
        fzero.checkpoint.verify(damaged)


@examples(15, 60)
@given(data=st.data())
def test_any_file_that_was_cut_or_is_missing_is_an_error(saved, tmp_path_factory, data):
    path, _ = saved
    name = data.draw(st.sampled_from(sorted(n for n in os.listdir(path) if n != ".lock")))
    damaged = copy_folder(path, tmp_path_factory.mktemp("damaged"))
    content = (damaged / name).read_bytes()
    size = data.draw(st.none() | st.integers(0, len(content) - 1))
    (damaged / name).unlink() if size is None else (damaged / name).write_bytes(content[:size])
    for use in (load, fzero.checkpoint.verify):
        with pytest.raises(fzero.errors.CheckpointError, match=name):
            use(damaged)


def test_a_damaged_page_names_the_leaves_that_it_holds(saved, tmp_path):
    path, _ = saved
    damaged = copy_folder(path, tmp_path)
    name = sorted(n for n in os.listdir(path) if "00001-of" in n)[0]
    content = bytearray((damaged / name).read_bytes())
    content[-1] ^= 1
    (damaged / name).write_bytes(content)
    with pytest.raises(fzero.errors.CheckpointError, match=r"are not what was written; they hold '.*' and others"):
        load(damaged)


KEYS = ["mesh", "leaves", "groups", "ties", "values", "files", "nonce", "written", "block"]


@examples(4, 80)
@given(junk=JSON, key=st.sampled_from(KEYS))
def test_any_json_in_the_place_of_a_manifest_or_of_a_part_of_it_is_an_error(saved, tmp_path_factory, junk, key):
    path, whole = saved
    damaged = copy_folder(path, tmp_path_factory.mktemp("damaged"))
    body = body_of(path)
    for forged in (junk, {**body, key: junk}, {k: v for k, v in body.items() if k != key}):
        write_manifest(damaged, forged)
        if (
            key == "written"
            and type(junk) in (int, float)
            and 0 <= junk < 1e12
            and forged is not junk
            and key in forged
        ):
            assert same_bits(load(damaged), whole)  # another date changes nothing
            continue
        with pytest.raises(fzero.errors.CheckpointError):
            load(damaged)


def deep(body: Any, data: Any) -> tuple[Any, Any]:
    """Choose a place in a JSON value: its container, and the key there."""
    while True:
        key = data.draw(st.sampled_from(sorted(body) if isinstance(body, dict) else range(len(body))))
        inner = body[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 4)) == 0:
            return body, key
        body = inner


@examples(24, 120)
@given(data=st.data(), junk=JSON)
def test_any_part_of_a_manifest_that_was_forged_reads_the_same_or_is_an_error(saved, tmp_path_factory, data, junk):
    """Its checksum may fit: nothing outside of the folder is read, and no other error comes."""
    path, whole = saved
    damaged = copy_folder(path, tmp_path_factory.mktemp("damaged"))
    body = body_of(path)
    container, key = deep(body, data)
    container[key] = junk
    write_manifest(damaged, body)
    try:
        loaded = load(damaged)
    except fzero.errors.CheckpointError:
        return
    values = {k: whole[k] if k in ("params", "opt_state", "key") else loaded[k] for k in whole}
    assert same_bits(loaded, values), "other numbers, and no error"


@pytest.mark.parametrize("nonce", ["../../../etc/pass", "/etc/passwd00000", "0123456789abcde/", "..", "", 3])
def test_paths_in_a_manifest_cannot_leave_its_folder(saved, tmp_path, nonce, monkeypatch):
    damaged = copy_folder(saved[0], tmp_path)
    write_manifest(damaged, {**body_of(damaged), "nonce": nonce})
    monkeypatch.setattr(_files.LocalFolder, "read_into", lambda *args: 1 / 0)
    with pytest.raises(fzero.errors.CheckpointError, match=r"manifest.json is damaged: .* is no"):
        load(damaged)


@pytest.mark.parametrize("use", [load, fzero.checkpoint.verify, lambda p: fzero.checkpoint.read(p, "params.b")])
def test_forged_sizes_in_a_manifest_allocate_no_memory(saved, tmp_path, use):
    damaged = copy_folder(saved[0], tmp_path)
    body = body_of(damaged)
    for leaf in body["leaves"]:
        leaf[2] = [10**4, 10**4, 10**5] if leaf[0] == "params.b" else leaf[2]
    for group in body["groups"]:
        group[2] = 10**13
    write_manifest(damaged, body)
    with pytest.raises(
        fzero.errors.CheckpointError, match=r"are too small for its leaves|cannot be split|is not a size"
    ):
        use(damaged)


def test_a_checkpoint_of_a_later_version_is_not_reported_as_damaged(saved, tmp_path):
    damaged = copy_folder(saved[0], tmp_path)
    write_manifest(damaged, {**body_of(damaged), "version": 3})
    with pytest.raises(fzero.errors.CheckpointError, match=r"it has version 3: this fzero reads versions up to 2"):
        load(damaged)


def test_a_checkpoint_uses_no_pickle(saved, monkeypatch):
    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, lambda *args, **options: 1 / 0)
    assert same_bits(load(saved[0]), saved[1])
    step, state = state_in(LAYOUT, PARAMS)
    fzero.save(saved[0].parent / "again", state, step.mesh)


def test_files_of_a_checkpoint_are_valid_safetensors(saved):
    """The format's own library reads them."""
    path, whole = saved
    names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
    ranges = [safetensors.torch.load_file(path / name) for name in names]
    numel = sum(x.numel() for rank in ranges for name, x in rank.items() if name == "params.tp")
    assert numel == whole["params"]["tp"].numel() and len(ranges) == 4


@pytest.mark.parametrize("dtype", list(SAFETENSORS_NAMES), ids=str)
def test_each_dtype_keeps_its_bits(dtype, tmp_path):
    bits = torch.arange(48, dtype=torch.uint8).view(3, 16) % (2 if dtype == torch.bool else 255)
    x = bits.view(dtype)
    fzero.save(tmp_path, {"x": x})
    loaded = fzero.load(tmp_path, like={"x": torch.empty_like(x)})["x"]
    assert torch.equal(loaded.view(torch.uint8), bits)
    (name,) = [n for n in os.listdir(tmp_path) if n.endswith(".safetensors")]
    assert safetensors.torch.load_file(tmp_path / name)["x"].nbytes == x.nbytes
