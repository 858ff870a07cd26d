"""A wheel has the programs that `python -m fzero.examples` copies."""

import pathlib
import subprocess
import sys
import zipfile

import pytest

from tests.distributed.launch import ROOT, environment


@pytest.mark.slow
def test_a_wheel_contains_the_example_programs(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        assert {pathlib.PurePath(name).parts[0].split("-")[0] for name in names} == {"fzero"}
        file.extractall(tmp_path / "site")
    command, folder = [sys.executable, "-m", "fzero.examples", "pretrain"], tmp_path / "work"
    folder.mkdir()
    variables = environment(PYTHONPATH=tmp_path / "site")
    subprocess.run(command, cwd=folder, env=variables, check=True, capture_output=True)
    assert (folder / "pretrain.py").read_bytes() == (ROOT / "examples" / "pretrain.py").read_bytes()
    assert sorted(pathlib.PurePath(n).stem for n in names if n.startswith("fzero/_programs/")) == sorted(
        path.stem for path in (ROOT / "examples").glob("*.py")
    )
