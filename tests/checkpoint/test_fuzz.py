"""Mutated folders are refused in words, or read as their format says: `tests/checkpoint/fuzz.py` draws them."""

import json
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

import fzero
from fzero.checkpoint import _files
from fzero.checkpoint.layout import _bounded_json, _manifest
from tests.checkpoint.fuzz import FORMATS
from tests.checkpoint.helpers import body_of, write_manifest
from tests.helpers import cases

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "number"), cases([([*FORMATS], 40)], [([name], 3500) for name in FORMATS]))
def test_a_mutated_folder_is_refused_or_read_right(names, number):
    """It is read in a process of its own, which may crash: it meets no other error, hang, memory, file or values."""
    command = [sys.executable, "-m", "tests.checkpoint.fuzz", *names, "--cases", str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, actual in json.loads(done.stdout).items():
        assert sum(map(len, actual.values())) == number and len(actual["refused"]) > number // 2 and actual["the same"]
        assert {kind: numbers for kind, numbers in actual.items() if kind.startswith("BAD")} == {}, name


def assert_refused(text: str, f: Any, *args: Any) -> None:
    with pytest.raises(fzero.errors.CheckpointError, match=text):
        f(*args)


def save_own(path: Path) -> Path:
    fzero.save(path, {"w": torch.ones(3)}).wait()
    return path / _manifest.MANIFEST


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a link to itself"])
def test_a_load_does_not_hang_on_pipes_and_devices(kind, tmp_path):
    file = save_own(tmp_path)
    file.unlink()
    os.mkfifo(file) if kind == "a pipe" else file.symlink_to("/dev/zero" if kind == "a device" else file.name)
    assert_refused("is not a checkpoint: it has no file manifest.json", fzero.checkpoint.verify, tmp_path)
    with pytest.raises(FileNotFoundError):
        _files.LocalFolder(str(tmp_path)).get(file.name)


def test_a_manifest_above_its_size_limit_is_not_read(tmp_path):
    file = save_own(tmp_path)
    os.truncate(file, 1 << 40)
    assert_refused(r"manifest.json has 1,099,511,627,776 bytes: expected at most", fzero.checkpoint.verify, tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", "[0"])
def test_a_manifest_of_many_lists_is_not_parsed(text, tmp_path, monkeypatch):
    """A few MB of empty lists take thirty times as much memory."""
    file = save_own(tmp_path)
    monkeypatch.setattr(_bounded_json, "_MAX_CONTAINERS", 1000)
    body = f'{{"format":"x","bomb":[{",".join([text] * 1000)}]}}'.encode()
    file.write_bytes(b'{"crc32":"%08x","checkpoint":%s}\n' % (zlib.crc32(body), body))
    assert_refused(r"it has 1,002 lists and objects: expected at most 1,000", fzero.checkpoint.verify, tmp_path)
    fzero.checkpoint.hf.write(tmp_path / "hf", {"w": torch.ones(3)})
    (weights,) = (tmp_path / "hf").glob("*.safetensors")
    weights.write_bytes(len(body).to_bytes(8, "little") + body)
    assert_refused(r"it has 1,002 lists", fzero.checkpoint.hf.read, tmp_path / "hf", {"w": torch.zeros(3)})


def test_no_manifest_is_written_that_a_load_would_refuse(tmp_path, monkeypatch):
    monkeypatch.setattr(_manifest, "MAX_MANIFEST_BYTES", 1 << 10)
    assert_refused(r"manifest.json would have .* make long values tensors", save_long, tmp_path)
    monkeypatch.setattr(_bounded_json, "_MAX_CONTAINERS", 10)
    assert_refused(r"a load would refuse manifest.json: it has .* lists and objects", save_own, tmp_path)
    assert not (tmp_path / _manifest.MANIFEST).exists()


def save_long(path: Path) -> None:
    fzero.save(path, {"w": torch.ones(3), "long": "x" * 2000}).wait()


def test_a_leaf_has_no_more_dimensions_than_a_tensor(tmp_path):
    """The product of a million sizes would take hours."""
    save_own(tmp_path)
    body = body_of(tmp_path)
    body["leaves"][0][2] = [3, *[1] * 64]
    write_manifest(tmp_path, body)
    assert_refused("manifest.json is damaged: a leaf has 65 dimensions", fzero.checkpoint.leaves, tmp_path)


def test_a_manifest_that_says_a_stored_leaf_is_empty_is_refused(tmp_path):
    save_own(tmp_path)
    body = body_of(tmp_path)
    body["leaves"][0][2] = [3, 0]
    write_manifest(tmp_path, body)
    assert_refused("the size of .* does not match its leaves", fzero.checkpoint.read, tmp_path, "w")


def save_dcp(path: Path) -> tuple[Path, Any]:
    fzero.checkpoint.dcp.save(path, {"w": torch.ones(3)})
    return path / ".metadata", FileSystemReader(path).read_metadata()


def load_dcp(path: Path) -> Any:
    return fzero.checkpoint.dcp.load(path, {"w": torch.zeros(3)})


def test_damaged_keys_in_metadata_of_dcp_rename_nothing(tmp_path):
    fzero.checkpoint.dcp.save(tmp_path, {"data": {"epoch": 1}})
    metadata = FileSystemReader(tmp_path).read_metadata()
    for keys in (("data", "fpoch"), 7):
        metadata.planner_data = {"data.epoch": keys}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        assert fzero.checkpoint.dcp.load(tmp_path, {"data": {"epoch": 0}}) == {"data": {"epoch": 1}}


@pytest.mark.parametrize("name", ["../b/__0_0.distcp", "{}/b/__0_0.distcp", "..", ""])
def test_metadata_of_dcp_cannot_lead_out_of_its_folder(name, tmp_path):
    file, metadata = save_dcp(tmp_path / "a")
    save_dcp(tmp_path / "b")
    for info in metadata.storage_data.values():
        info.relative_path = name.format(tmp_path)
    file.write_bytes(pickle.dumps(metadata))
    assert_refused(r".metadata is damaged, or not DCP's: 'w' is in '.*': expected a file of", load_dcp, tmp_path / "a")


def test_sizes_in_metadata_of_dcp_allocate_nothing(tmp_path):
    file, metadata = save_dcp(tmp_path)
    for info in metadata.storage_data.values():
        info.length = 1 << 45
    file.write_bytes(pickle.dumps(metadata))
    assert_refused(r"__0_0.distcp has [\d,]+ bytes of 35,184,372,088,832; it holds 'w'", load_dcp, tmp_path)


def test_metadata_of_dcp_changes_no_class(tmp_path):
    """A pickle can set attributes of the classes that it names, for all of the process."""
    file, _ = save_dcp(tmp_path)
    where = b"ctorch.distributed.checkpoint.metadata\n"
    file.write_bytes(where + b"Metadata\n(N(dVplanted\nI1\nstb.")
    assert_refused(r"not DCP's: it sets attributes of a type", load_dcp, tmp_path)
    assert not hasattr(Metadata, "planted")
    file.write_bytes(where + b"_MEM_FORMAT_ENCODING\n(I0\ntR(dVplanted\nI1\nsb.")
    assert_refused(r"not DCP's: it sets attributes of a _MEM_FORMAT_ENCODING", load_dcp, tmp_path)


def test_paths_in_metadata_of_dcp_do_not_grow(tmp_path):
    """Each call of a path may double it: 20 calls make 8 MiB, and 40 a terabyte."""
    file, _ = save_dcp(tmp_path)
    double = b"p1\n0cpathlib\nPosixPath\n(g1\ng1\ntR"
    file.write_bytes(b"Vaaaaaaaa\n" + double * 20 + b".")
    assert_refused(r"not DCP's: it holds a path that is too long", load_dcp, tmp_path)
