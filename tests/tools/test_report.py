"""Run tools.report as a user does: in a browser its page fetches nothing, and every plot has its lines."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from system.errors import UserError
from system.exits import exit_code_of
from tests.chromium import PROGRAM, Chromium
from tests.helpers import tiny_config
from tests.run_folders import write_run
from tools import recorded, report
from training.build import build

ROOT = Path(__file__).parents[2]
PLOTS = [plot.id for plot in report.PLOTS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    """Write two runs with every kind of figure."""
    folder = tmp_path_factory.mktemp("runs")
    more = {
        "peak_memory_bytes": 7e10,
        "diagnostics": {"signal": {"all": 1.0}, "noise": {"all": 9000.0}},
    }
    return [
        str(write_run(folder / "d12", name="d12", line=more)),
        str(write_run(folder / "large", name="large", batch=131_072, slope=1.3, line=more)),
    ]


def run(monkeypatch, *arguments: str) -> int:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["tools.report", *arguments])
    return exit_code_of(report.main, "")


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
def test_the_page_fetches_nothing_and_every_plot_has_its_lines(runs, tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    assert run(monkeypatch, *runs, f"--out={out}") == 0
    read = report.read_runs(runs)
    report.page(read)  # adds the ratios
    with Chromium(tmp_path) as browser:
        browser.open(f"file://{out}")
        assert browser.value("[...document.querySelectorAll('.plot')].map((plot) => plot.id)") == PLOTS
        for plot in report.PLOTS:
            lines = f"[...document.querySelectorAll('#{plot.id} .scatterlayer .trace')]"
            drawn = browser.value(
                f"{lines}.map((line) => (line.querySelector('path')?.getAttribute('d') ?? '').length)"
            )
            assert len(drawn) == len(report.traces(plot, read)) and all(drawn), (plot.id, drawn)
            area = f"document.querySelector('#{plot.id} .nsewdrag').getBoundingClientRect().height"
            assert browser.value(area) > 120, plot.id
        axis = "document.getElementById('{}')._fullLayout.{}.range"
        assert len({tuple(browser.value(axis.format(plot, "xaxis"))) for plot in PLOTS}) == 1
        low, high = browser.value(axis.format("waiting", "yaxis"))
        assert low == 0 and high >= report.SMALL_SHARE  # 1% of waiting does not look large
        loss = "document.getElementById('loss')"
        assert browser.value(f"Math.max(...{loss}.data.flatMap((trace) => trace.x))") == 400 * 131_072
        browser.value("document.querySelector('input[value=step]').click()")
        browser.wait_for(f"{loss}._fullLayout.xaxis.title.text == 'steps'")
        assert browser.value(f"Math.max(...{loss}.data.flatMap((trace) => trace.x))") == 400
        browser.value("document.querySelectorAll('details').forEach((details) => { details.open = true })")
        text = browser.value("document.body.innerText")
        assert "The 400th sample <b>is</b> text." in text and "</script><script>alert(1)</script>" in text
        assert "batch.tokens_per_step" in text and "131072" in text and "NVIDIA H200" in text
        sample = "[...document.querySelectorAll('pre')].find((text) => text.innerText.includes('400th'))"
        assert browser.value(f"{sample}.dir") == "auto"  # Arabic runs from right to left
        asked = {request["request"]["url"].partition(":")[0] for request in browser.seen("Network.requestWillBeSent")}
        assert asked <= {"file", "data"} and not browser.seen("Runtime.exceptionThrown")


def test_a_plot_that_would_be_empty_is_left_out(tmp_path):
    """A run without diagnostics has the batch, but no noise scale to compare with it; microseconds of waiting are no
    line to see."""
    folder = write_run(tmp_path / "run", diagnostics=False, line={"data_wait": 2e-6})
    page = report.page([recorded.read_run(folder)])
    assert 'id="noise"' not in page and 'id="waiting"' not in page and 'id="loss"' in page
    others = [write_run(tmp_path / name, name=name, line={"data_wait": 0.02}) for name in ("one", "two")]
    page = report.page([recorded.read_run(other) for other in others])
    assert 'id="noise"' in page and 'id="waiting"' in page


def test_every_plot_of_diagnostics_draws_what_a_step_measures(tmp_path):
    """Use the names from the step and training/diagnostics.py."""
    built = build(tiny_config(rows=32), jax.devices()[:1])
    _, metrics = jax.eval_shape(built.measuring_step, built.abstract_state, built.abstract_batch())
    measured = jax.tree.map(lambda _: 1.0, metrics["diagnostics"])
    read = recorded.read_run(write_run(tmp_path / "run", diagnostics=False, line={"diagnostics": measured}))
    report.page([read])
    plots = [plot for plot in report.PLOTS if any(place.startswith("diagnostics") for place in plot.lines.values())]
    assert len(plots) == 4 and all(report.traces(plot, [read]) for plot in plots)


def test_a_run_that_has_logged_nothing_has_a_page(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", complete=False, logged=0)
    (folder / "metrics.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "run") == 0
    assert "0 of 400" in (folder / "report.html").read_text()  # the default place
    shutil.copytree("run", "second-run")
    assert run(monkeypatch, "run", "second-run") == 0  # a page of several runs leaves those of one
    assert "second-run" not in (folder / "report.html").read_text()
    assert "second-run" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not the record of a run that this version can read (JSONDecodeError: "),
        ('{"config": {"name": "x", "lr": 1}}', "make its report with the version that trained it"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_name(tmp_path, text, problem):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        recorded.read_run(tmp_path)
    assert problem in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("arguments", [(), ("nowhere",), ("{run}", "--out=gone/report.html")])
def test_a_mistake_is_one_message_and_code_2(runs, tmp_path, monkeypatch, capfd, arguments):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *(word.format(run=runs[0]) for word in arguments)) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and (arguments or ["run"])[-1] in error


def test_it_reads_without_jax():
    code = "import sys, tools.report; sys.exit(bool({'jax', 'tensorboardX', 'torch'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
