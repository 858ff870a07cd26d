"""fzero plan: one command says what fits, what to paste, and what was wrong."""

import contextlib
import html
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest

import fzero
from fzero.__main__ import main
from fzero.tuning import ConfigurationTable
from fzero.tuning._page import Case, html_page
from fzero.tuning.models import PRESETS, init
from tests.distributed.launch import python
from tests.helpers import either
from tests.tuning.helpers import TINY

TINY_ONE = replace(TINY["causal"], depth=1)
WORDS = ["plan", "tiny", "--world", "4", "--batch", "8", "--length", "16", "--machine", "h100", "--stages", "2,3"]
WORDS += ["--micro-batches", "2", "--remat", "no,yes", "--workers", "1"]


def data_of(page: str) -> Any:
    """Read the data within a page."""
    match = re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1].replace("<\\/", "</"))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY_ONE)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the files that a command writes."""
    folder = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", TINY_ONE)
        names = ("json", "csv", "html")
        wanted = [word for name in names for word in (f"--{name}", str(folder / f"t.{name}"))]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main([*WORDS, "--memory", "1GB", *wanted, "--plot", str(folder / "t.png")]) == 0
    (folder / "said.txt").write_text(said.getvalue())
    return folder


def test_the_command_prints_the_rows_that_fit_and_the_lines_to_paste(files):
    said = (files / "said.txt").read_text()
    assert "4 of 4 configurations fit 930.0 MB (1.0 GB less a margin)" in said and "\nbest: stage " in said
    assert "other estimators: DeepSpeed, ZeRO-3" in said and "note: peaks were not measured on a GPU" in said
    lines = said[said.index("precision = fzero") :]
    assert re.search(r"fzero.jit\(fzero.shard\(train_step, stage=[23], mesh=fzero.mesh\(dp=-1\)\)\)", lines)


@pytest.mark.slow
def test_a_chunked_loss_reaches_each_row_and_the_lines_to_paste(capsys):
    assert main([*WORDS, "--memory", "1GB", "--chunked-loss", "--stages", "3", "--micro-batches", "1"]) == 0
    said = capsys.readouterr().out
    assert "best: stage 3" in said and "chunked loss" in said and "fzero.nn.linear_cross_entropy(" in said


def test_the_lines_that_the_plan_command_prints_run(files):
    import torch

    from fzero.tuning._recipe import recipe

    for config in {r.config for r in ConfigurationTable.from_json((files / "t.json").read_text()).rows}:
        names = {"fzero": fzero, "torch": torch, "optim": fzero.optim, "block": lambda p, x: torch.tanh(x @ p["w"])}
        names["loss_fn"] = lambda p, x, names=names: names["block"](p, x).float().square().mean()
        text = recipe(config).replace("dp=-1", "dp=2")
        assert ("gather=False" in text) == ("fzero.remat" in text) == bool(config.remat)
        exec(text, names)
        step = names["step"]
        params, opt_state = step.init({"w": torch.ones(4, 4)}, names["opt"])
        assert fzero.plan(step, params, opt_state, step.mesh.split(torch.ones(8, 4).bfloat16())).peak_bytes


def test_the_command_writes_tables_and_a_page(files):
    table = ConfigurationTable.from_json((files / "t.json").read_text())
    assert len(table.rows) == 4 and (files / "t.csv").read_text() == table.to_csv()
    made = (files / "t.html").read_text()
    (said,) = data_of(made)["cases"]
    assert said["choices"] == {"model": "tiny", "ranks": 4, "batch": 8, "length": 16, "machine": "h100"}
    assert len(said["rows"]) == 4 and said["recipe"] and said["best"] == str(table.best())
    best = table.best().row
    most = max(sum(live) for live in zip(*said["timeline"]["kinds"].values(), strict=True))
    assert most == best.peak_bytes
    assert said["rows"][0]["limits"] == best.limits and sum(best.limits.values()) == pytest.approx(1)
    assert said["streams"]["seconds"] == pytest.approx(best.seconds)
    busy = said["streams"]["busy"]
    for shares in zip(*busy["compute"].values(), strict=True):  # compute fills the step, by waits if not by work
        assert sum(shares) == pytest.approx(1, abs=1e-3)
    share = {limit: sum(shares) / len(shares) for limit, shares in busy["compute"].items()}
    assert share == pytest.approx(best.limits, abs=1e-3)
    assert "http://" not in made.replace("http://www.w3.org/2000/svg", "") and "https://" not in made
    assert "{{" not in made and (files / "t.png").stat().st_size > 5000


def test_a_short_timeline_keeps_the_peak(files, monkeypatch):
    from fzero.tuning import _page, model_step

    monkeypatch.setattr(_page, "_MAX_POINTS", 7)
    table = ConfigurationTable.from_json((files / "t.json").read_text())
    drawn, _ = _page._plan_over_time(table, model_step("tiny", length=16))
    assert len(drawn["phases"]) == 7
    assert max(sum(live) for live in zip(*drawn["kinds"].values(), strict=True)) == table.best().row.peak_bytes


def test_the_page_of_a_plan_escapes_any_name(files):
    made = html_page([Case({"model": "a</script><b>"}, ConfigurationTable.from_json((files / "t.json").read_text()))])
    assert made.count("</script>") == 2 and "<b>" not in made.split('type="application/json"')[0]


SEVERAL = ["plan", "tiny", "--world", "2,4", "--batch", "8", "--length", "8,16", "--memory", "1GB", "--workers", "1"]
FEW = ["--stages", "3", "--micro-batches", either("1", "1,2"), "--remat", "no"]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The page and the text of a command for several sizes."""
    path = tmp_path_factory.mktemp("several") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", TINY_ONE)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert main([*SEVERAL, *FEW, "--html", str(path)]) == 0
    return path, said.getvalue()


def test_several_models_are_rows_of_one_table_and_cases_of_one_page(several):
    path, said = several
    head, *lines = [line for line in said.splitlines() if line.strip()]
    assert head.split()[:3] == ["ranks", "length", "best"] and "model" not in head  # only what differs has a column
    assert [tuple(line.split()[:2]) for line in lines] == [("2", "8"), ("2", "16"), ("4", "8"), ("4", "16")]
    assert all("stage 3" in line and "tokens" in line for line in lines)
    cases = data_of(path.read_text())["cases"]
    assert [(c["choices"]["ranks"], c["choices"]["length"]) for c in cases] == [(2, 8), (2, 16), (4, 8), (4, 16)]
    with contextlib.redirect_stdout(io.StringIO()):  # each case is what its own command plans
        assert main([*WORDS, *FEW, "--memory", "1GB", "--json", str(path.with_name("one.json"))]) == 0
    (row, *_) = ConfigurationTable.from_json(path.with_name("one.json").read_text()).fitting
    assert cases[-1]["rows"][0]["peak"] == row.peak_bytes and cases[-1]["rows"][0]["seconds"] == row.seconds


@pytest.mark.slow
def test_the_page_of_a_plan_chooses_sorts_and_filters_in_a_browser(several):
    """A script within the page does what a reader does, and headless Chromium shows what the page then holds."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    path, _ = several
    script = """<script>
      const batches = () => [...$("body").rows].map(r => r.cells[1].textContent);
      const polygons = () => $("streams").querySelectorAll("polygon").length;
      const seen = () => [$("name").textContent, batches(), $("best").textContent, polygons()];
      const turn = (name, value) => {
        const s = document.querySelector(`select[name="${name}"]`);
        s.value = value; s.dispatchEvent(new Event("change"));
      };
      const states = [seen()]; turn("ranks", "4"); turn("length", "16"); states.push(seen());
      const batch = () => [...$("head").querySelectorAll("button")].find(b => b.textContent === "batch");
      batch().click(); states.push(seen()); batch().click(); states.push(seen());
      turn("micro", "2"); states.push(seen());
      const result = document.createElement("pre"); result.textContent = JSON.stringify(states);
      document.body.replaceChildren(result);
    </script>"""
    turned = path.with_name("turned.html")
    turned.write_text(path.read_text().replace("</body>", f"{script}</body>"))
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", turned.as_uri()]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    assert match, dom[-2000:]
    first, choice, up, down, filtered = json.loads(html.unescape(match[1]))
    assert first[0].startswith("tiny, ranks 2, batch 8, length 8") and choice[0].startswith("tiny, ranks 4")
    assert choice[2].startswith("best: stage 3") and choice[3] >= 2 and len(choice[1]) == 2
    assert up[1] == ["1 x 2", "2 x 1"] and down[1] == up[1][::-1] and filtered[1] == ["2 x 1"]


def test_a_combination_that_cannot_be_planned_leaves_the_other_rows(capsys):
    words = [*SEVERAL[:3], "4,3", *SEVERAL[4:6], *FEW, "--length", "8", "--memory", "1GB", "--workers", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("stage 3") == 1 and "not planned: model tiny, ranks 3, batch 8, length 8" in said
    assert main([*words[:3], "3,5", *words[4:]]) == 2  # all fail: the first error
    assert "fzero plan: " in capsys.readouterr().err
    assert main([*words, "--machine", "h100,h1000"]) == 2
    result = capsys.readouterr()
    assert "machine='h1000' is unknown" in result.err and not result.out


def test_options_of_a_single_plan_are_refused_for_several_models(capsys):
    assert main([*SEVERAL, *FEW, "--json", "t.json"]) == 2
    assert "--json is for one model and size, and these are 4; --html has all" in capsys.readouterr().err
    assert main(["plan", "tiny,nothing", *SEVERAL[2:], *FEW]) == 2
    assert "model 'nothing' of 'tiny,nothing': several models are models by name" in capsys.readouterr().err


def test_the_command_compares_two_tables(files, capsys):
    path = str(files / "t.json")
    assert main(["plan", "--compare", path, path]) == 0
    assert capsys.readouterr().out.count("+0.0%") == 8


def test_the_plan_command_says_by_how_much_nothing_fits(capsys):
    assert main([*WORDS, "--memory", "10kB"]) == 1
    assert re.search(r"no configuration fits 9.3 kB: .* too much: .*Try ", capsys.readouterr().err)


def test_a_slow_network_calls_for_an_axis_of_hosts(capsys):
    words = ["plan", "tiny", "--world", "16", "--batch", "16", "--length", "16", "--stages", "3", "--remat", "no"]
    words += ["--micro-batches", "1", "--workers", "1", "--network-bandwidth", "1MB", "--no-cache"]
    hint = "--host auto, also plans units that pass the link between hosts once a step"
    assert main(words) == 0
    assert hint in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert main([*words, "--host", "auto"]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert hint not in said and re.search("best: stage 3, .* host 2:", said) and 'axis=("dp", "host")' in said
    assert main([*words[:3], "12", "--batch", "12", *words[6:], "--host", "auto"]) == 2
    assert "--world 12 fills no number of hosts of 8 ranks: give sizes" in capsys.readouterr().err


def test_local_sgd_is_planned_beside_data_parallelism(capsys):
    words = ["plan", "tiny", "--world", "16", "--batch", "16", "--length", "16", "--stages", "3", "--remat", "no"]
    words += ["--micro-batches", "1", "--workers", "1", "--no-cache"]
    assert main([*words, "--local-steps", "10", "--axis-bandwidths", "replica=1MB"]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    elements = sum(x.numel() for x in fzero.tree.tensors(init(TINY_ONE, 1)))
    milliseconds = 2 * 0.5 * 4 * elements / 8 / 1e6 / 10 * 1000  # an all_reduce of a shard over two, in ten steps
    share = re.search(r"local SGD, 2 replicas that average every 10 steps: .* a step, ([\d.]+) (ms|us) of it for", said)
    assert share and float(share[1]) * {"ms": 1, "us": 1e-3}[share[2]] == pytest.approx(milliseconds, rel=0.01)
    assert "replica" not in said[: said.index("local SGD")]  # no row has the axis, and none is told that it is unused
    assert main([*words, "--axis-bandwidths", "replica=1MB"]) == 0
    assert "links: no collective runs along replica" in capsys.readouterr().out
    for more, text in (
        (["--replicas", "2"], "--replicas needs --local-steps"),
        (["--local-steps", "10", "--replicas", "3"], "on 3 replicas: expected at least 2, which divide --world 16"),
    ):
        assert main([*words, *more]) == 2
        assert text in capsys.readouterr().err
    assert main(["plan", "tests.tuning.steps:maker", *words[2:], "--local-steps", "10"]) == 2
    assert "--local-steps counts the parameters of models by name" in capsys.readouterr().err


def test_the_plan_command_takes_a_users_function(capsys):
    words = ["plan", "tests.tuning.spaces:make_step", "--world", "4", "--batch", "32", "--machine", "cpu"]
    assert main([*words, "--memory", "1GiB", "--stages", "2", "--remat", "no", "--micro-batches", "8"]) == 0
    assert "1 of 1 configurations fit 1.1 GB of two cores, gloo" in capsys.readouterr().out


BAD = {
    "an unknown model": (
        ["plan", "llama-9", "--world", "4", "--batch", "8", "--length", "16"],
        "model 'llama-9' is unknown",
    ),
    "no world": (["plan", "gpt2", "--batch", "8"], "--world, --length missing"),
    "an unknown machine": ([*WORDS, "--machine", "tpu"], "machine='tpu' is unknown"),
    "a batch that does not divide": ([*WORDS, "--batch", "9"], "global_batch=9 does not divide over world_size=4"),
    "an unknown function": (["plan", "json:nothing", "--world", "4", "--batch", "8"], "expected module:function"),
    "no table": (["plan", "--compare", "pyproject.toml", "pyproject.toml"], "expected the JSON of a table"),
    "no file": (["plan", "--compare", "nowhere.json", "nowhere.json"], "No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_of_the_plan_command_are_refused(name, capsys):
    words, message = BAD[name]
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", (["--memory", "80 parsecs"], ["--remat", "maybe"], ["--stages", "one"]))
def test_unknown_options_of_the_plan_command_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main([*WORDS, *words])
    assert words[0] in capsys.readouterr().err


def test_byte_sizes_are_parsed_with_their_units():
    from fzero.tuning._command_options import _parse_bytes

    assert [_parse_bytes(x) for x in ("80GB", "1.5 GiB", "8e10", "512mb")] == [80e9, 1.5 * 2**30, 8e10, 512e6]


def test_the_plan_command_runs_as_a_module():
    done = python("-m", "fzero", "plan", "--help")
    assert done.returncode == 0 and "llama-3-8b" in done.stdout and "--memory" in done.stdout
