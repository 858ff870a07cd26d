"""`python -m fzero.examples` copies programs."""

from fzero import examples
from tests.distributed.launch import ROOT

NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def test_the_examples_command_copies_a_program_unchanged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert examples.main(["pretrain", "zero_by_hand.py"]) == 0
    for name in ("pretrain.py", "zero_by_hand.py"):
        assert (tmp_path / name).read_bytes() == (ROOT / "examples" / name).read_bytes()
    assert capsys.readouterr().out.startswith("pretrain.py: Pre-train a language model")


def test_the_examples_command_lists_all_programs(capsys):
    assert examples.main([]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [name for name, _ in rows] == NAMES and all(text.endswith(".") for _, text in rows)


def test_the_examples_command_overwrites_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero_by_hand.py").write_text("mine")
    assert examples.main(["pretrain", "zero_by_hand"]) == 1
    assert [p.read_text() for p in tmp_path.iterdir()] == ["mine"]
    assert "zero_by_hand.py exists here" in capsys.readouterr().err


def test_the_error_for_an_unknown_example_lists_all_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert examples.main(["pretrian"]) == 2
    assert capsys.readouterr().err == f"there is no program 'pretrian': expected one of {', '.join(NAMES)}\n"
