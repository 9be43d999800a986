"""Run tools.report as a user does, and test its page in a browser: every plot has lines, hover and zoom work.

Nothing is fetched."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import plotly.graph_objects as go
import pytest

import tools.report.__main__ as report
from configs.command_line import exit_code_of
from tests.chromium import PROGRAM, Chromium
from tests.run_folders import write_run
from tools.report.figures import figures
from tools.report.runs import read_runs

ROOT = Path(__file__).parents[3]
in_browser = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
PLOTS = (
    *("loss", "bits", "gradients", "rates", "epochs", "core", "tasks", "noise", "coherence", "ratios", "updates"),
    *("snr", "unchanged", "blocks", "block-ratios", "speed", "mfu", "waiting", "memory", "goodput"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[str]:
    """Write two runs with every kind of figure."""
    folder = tmp_path_factory.mktemp("runs")
    memory = {"peak_memory_bytes": 7e10}
    return [
        str(write_run(folder / "d12", name="d12", line=memory, core=True)),
        str(write_run(folder / "large", name="large", batch=131_072, slope=1.3, line=memory, core=True)),
    ]


def run(monkeypatch, *arguments: str) -> int:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr(sys, "argv", ["tools.report", *arguments])
    return exit_code_of(report.main, "")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(runs, browser, tmp_path_factory):
    """Open the report of both runs in the browser."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, *runs, f"--out={out}") == 0
    browser.events.clear()  # events of other tests' pages
    browser.open(f"file://{out}")
    return browser


def middle(browser: Chromium, plot: str) -> dict:
    """Scroll to a plot, and return the position of its area on the screen."""
    browser.value(f"document.getElementById({plot!r}).scrollIntoView({{block: 'center'}})")
    box = f"document.querySelector('#{plot} .nsewdrag').getBoundingClientRect()"
    return browser.value(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({box})")


def drag_to_zoom(browser: Chromium, plot: str) -> None:
    """Drag over the middle half of a plot."""
    area = middle(browser, plot)
    y = area["y"] + area["height"] / 2
    left, right = (area["x"] + share * area["width"] for share in (0.25, 0.75))
    browser.mouse("mouseMoved", left, y)
    browser.mouse("mousePressed", left, y, 1)
    for x in (left + 30, right - 30, right):
        browser.mouse("mouseMoved", x, y, 1)
    browser.mouse("mouseReleased", right, y, 1)


def range_of(browser: Chromium, plot: str) -> list[float]:
    return browser.value(f"document.getElementById('{plot}')._fullLayout.xaxis.range.map(Number)")


def test_every_plot_is_one_that_plotly_knows(runs):
    drawn = figures(read_runs(runs))
    assert tuple(figure.id for figure in drawn if figure.traces) == PLOTS
    for figure in drawn:
        go.Figure({"data": figure.traces, "layout": figure.layout})  # raises an error for unknown names and values


@in_browser
def test_every_plot_has_its_lines(page, runs):
    expected = {figure.id: len(figure.traces) for figure in figures(read_runs(runs))}
    assert tuple(page.value("[...document.querySelectorAll('.plot')].map((plot) => plot.id)")) == PLOTS
    for plot in PLOTS:
        kind, shape = (".barlayer .trace", ".point path") if plot == "goodput" else (".scatterlayer .trace", "path")
        lines = f"[...document.querySelectorAll('#{plot} {kind}')]"
        drawn = page.value(f"{lines}.map((line) => (line.querySelector('{shape}')?.getAttribute('d') ?? '').length)")
        assert len(drawn) == expected[plot] and all(drawn), (plot, drawn)
        assert page.value(f"document.getElementById('{plot}').getBoundingClientRect().height") > 200


@in_browser
def test_it_shows_the_sentences_and_escapes_text_of_a_run(page):
    text = page.value("document.body.innerText")
    assert "The batch of 65,536 tokens is 2.3 times the noise scale" in text
    assert "They differ in 1 option: batch.tokens_per_step." in text and "131072" in text
    assert "The 400th sample <b>is</b> text." in text
    page.value("document.querySelectorAll('details').forEach((details) => { details.open = true })")
    text = page.value("document.body.innerText")
    assert "</script><script>alert(1)</script>" in text and "optimizer.clip_norm" in text and "tools.dataset" in text
    assert page.value("document.querySelectorAll('li.heed').length") > 2


@in_browser
def test_hover_shows_values_and_a_drag_zooms_until_a_double_click(page):
    area = middle(page, "ratios")
    page.mouse("mouseMoved", area["x"] + area["width"] / 3, area["y"] + area["height"] / 2)
    page.wait_for("document.querySelectorAll('#ratios .hoverlayer text').length > 0")
    text = page.value("document.querySelector('#ratios .hoverlayer').textContent")
    assert "lm_head, d12" in text and "0.0" in text
    before = range_of(page, "loss")
    drag_to_zoom(page, "loss")
    page.wait_for(f"document.getElementById('loss')._fullLayout.xaxis.range[0] > {before[0] + 1e6}")
    zoomed = range_of(page, "loss")
    assert zoomed[1] - zoomed[0] == pytest.approx((before[1] - before[0]) / 2, rel=0.1)
    area = middle(page, "loss")
    x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
    # All four events in one task: a slow machine would make two clicks of them.
    event = f"new MouseEvent(kind, {{bubbles: true, clientX: {x}, clientY: {y}, buttons: 1}})"
    page.value(
        "for (const kind of ['mousedown', 'mouseup', 'mousedown', 'mouseup'])"
        f"(kind == 'mousedown' ? document.querySelector('#loss .nsewdrag') : document).dispatchEvent({event})"
    )
    page.wait_for(f"Math.abs(document.getElementById('loss')._fullLayout.xaxis.range[0] - {before[0]}) < 1")


@in_browser
def test_against_steps(page):
    page.value("document.querySelector('input[value=step]').click()")
    loss = "document.getElementById('loss')"
    page.wait_for(f"{loss}._fullLayout.xaxis.title.text == 'steps'")
    assert page.value(f"Math.max(...{loss}.data.flatMap((trace) => trace.x))") == 400
    page.value("document.querySelector('input[value=tokens]').click()")
    page.wait_for(f"Math.max(...{loss}.data.flatMap((trace) => trace.x)) == {400 * 131_072}")


@in_browser
def test_a_legend_leaves_the_plot_its_room_on_a_narrow_page_and_nothing_is_fetched(page):
    page.call("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    areas = "[...document.querySelectorAll('.nsewdrag')].map((area) => area.getBoundingClientRect())"
    page.wait_for(f"{areas}.every((area) => area.width < 400)")  # plotly redraws the plots
    heights = page.value(f"{areas}.map((area) => area.height)")
    page.call("Emulation.clearDeviceMetricsOverride")
    assert len(heights) == len(PLOTS) and min(heights) > 180
    asked = {request["request"]["url"].partition(":")[0] for request in page.seen("Network.requestWillBeSent")}
    assert asked <= {"file", "data"} and not page.seen("Runtime.exceptionThrown")


@pytest.fixture
def followed(tmp_path):
    """Show a run that is still training. Return its folder and the address of the page."""
    folder = write_run(tmp_path / "run", complete=False, logged=100)
    command = [sys.executable, "-m", "tools.report", str(folder), "--follow", "--port=0", "--every_seconds=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield folder, process.stdout.readline().split()[0], process
        process.kill()


def test_follow_serves_the_page_alone_and_to_this_machine(followed):
    folder, address, process = followed
    assert address.startswith("http://localhost:")
    assert urllib.request.urlopen(address).read().startswith(b"<!DOCTYPE html>")
    assert json.load(urllib.request.urlopen(f"{address}/report.json"))["figures"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/config.json")
    (folder / "config.json").rename(folder / "moved")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{address}/report.json")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


@in_browser
def test_a_followed_page_grows_and_keeps_its_zoom(followed, browser):
    folder, address, process = followed
    browser.open(address)
    browser.wait_for("document.getElementById('loss').data[1].x.length == 10")
    drag_to_zoom(browser, "loss")
    zoomed = range_of(browser, "loss")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 110, "tokens": 110 * 65_536, "loss": 4.5, "seconds": 110.0, "time": 1.0}) + "\n")
    browser.wait_for("document.getElementById('loss').data[1].x.length == 11")
    assert range_of(browser, "loss") == pytest.approx(zoomed)
    assert "step 110 of 400" in browser.value("document.body.innerText")
    process.send_signal(signal.SIGINT)
    browser.wait_for("document.body.innerText.includes('tools.report has ended')")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "name at least one run's folder"),
        (("nowhere",), "nowhere holds no run (no config.json)"),
        (("{run}", "--out=gone/report.html"), "--out=gone/report.html cannot be written"),
        (("{run}", "--follow", "--port=99999"), "--port=99999 cannot be served"),
        (("{run}", "--port=-1"), "--port=-1 cannot work"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(runs, tmp_path, monkeypatch, capfd, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *(word.format(run=runs[0]) for word in arguments)) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and problem in error and error.count("\n") == 1


def test_without_out_the_page_is_in_the_first_run_s_folder(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *runs) == 0
    assert (Path(runs[0]) / "report.html").is_file() and not list(tmp_path.iterdir())
