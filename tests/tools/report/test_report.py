"""Test what a report reads from run folders, and its sentences."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from configs.schema import DataConfig, UserError
from run.diagnosis import BLOCKS, Diagnosis
from tests.helpers import tiny_config
from tests.run_folders import BEGAN, write_run
from tools.report.comparison import compared, differences
from tools.report.figures import MEASURED, figures
from tools.report.runs import read_run, read_runs
from tools.report.sentences import sentences
from training.build import build

ROOT = Path(__file__).parents[3]
LATER = BEGAN + 100_000


def marks(folder: Path, now: float = LATER) -> dict[str, bool]:
    """Return the sentences of a run, each with its mark."""
    return {sentence.text: sentence.heed for sentence in sentences(read_run(folder), now)}


def scale(noise: float | None, low: float | None, high: float | None) -> dict:
    return {"diagnostics": {"noise_scale": noise, "noise_scale_low": low, "noise_scale_high": high}}


@pytest.mark.parametrize(
    ("changes", "expected", "heeded"),
    [
        (
            {"core": True, "data": DataConfig(source="web")},
            [
                "Complete: 400 steps, 26.2 M tokens in 6.67 min of training.",
                "The network has 135,266,304 parameters, depth 12 and width 768; a step has 65,536 tokens of web.",
                "Validation loss is 3.243 nats a token (1.318 bits per byte) after 26.2 M tokens; it began at 8.330.",
                "CORE is 0.2000 +- 0.0100 at step 400, where guessing gives 0; it was 0.0250 at step 50.",
                "Steps took 84% of 7.17 min of wall time; the rest is mostly evaluation 5.6%",
                "A step's update over the size of its parameters, by group (medians): ",
                "lm_head 1.6%",
                "In 25% of the parameters of embed a step changes nothing",
            ],
            ["The loss jumped at 1 step (205); the text of each is below."],
        ),
        (
            {"complete": False, "logged": 100, "code": 143, "diagnostics": False},
            [
                "Stopped after step 100 of 400 with exit code 143 (preempted); the same command continues it.",
                "sizes of updates were not measured: --diagnostics.every_steps=10 turns them on.",
            ],
            [],
        ),
        ({"complete": False, "code": 1}, [], ["Stopped after step 400 of 400 with exit code 1 (failed)."]),
        (
            {"complete": False, "logged": 100},
            [],
            ["Nothing was written for 27.7 h, after step 100 of 400: it was killed, or hangs."],
        ),
        ({"slope": 0.0}, ["In the newest tenth of the steps the training loss changed by less than its noise"], []),
        (
            {"line": {"tokens_per_second": 3000.0, "peak_memory_bytes": 2**36, "grad_norm": 7.0}},
            [
                "It trains on 3,000 tokens a second, an MFU of 41%.",
                "A device used at most 64.0 GiB.",
                "The gradient was clipped to a norm of 1 at 100% of the logged steps.",
            ],
            [],
        ),
        (
            {
                "line": {"loss": 2.0, "skipped_steps": 2, "mfu": None, "data_wait": 0.12, "epochs": {"web": 0.5}},
                "data": DataConfig(workers=3),
            },
            ["the device's peak is not known, so there is no MFU", "It read web 0.5 times."],
            [
                "Validation loss is 1.24 nats above training loss",
                "2 steps changed nothing: no finite gradient",
                "Waiting for data took 12% of the time: more --data.workers (3 now), or text on a faster disk, would "
                "help.",
            ],
        ),
        (
            {"batch": 65_536, "line": scale(16_384, 12_000, 20_000)},
            [],
            [
                "The batch of 65,536 tokens is 4 times the noise scale (16,384, between 12,000 and 20,000): half the "
                "batch would lose little: by arXiv:1812.06162, 20% more steps and 40% fewer tokens for the same loss.",
            ],
        ),
        (
            {"line": scale(262_144, 2e5, 3e5)},
            [
                "is 0.25 times the noise scale (262,144, between 200,000 and 300,000): twice the batch would take, by "
                "arXiv:1812.06162, 40% fewer steps for 20% more tokens."
            ],
            [],
        ),
        (
            {"line": scale(None, 1e6, None)},
            ["The noise scale is at least 1 M tokens; the batch, 65,536, is smaller."],
            [],
        ),
        ({"line": scale(1e5, 1e4, None)}, ["at least 10,000 tokens; the batch, 65,536, is larger: whether it"], []),
        ({"line": scale(-5.0, -10.0, None)}, ["What was measured so far does not give the noise scale."], []),
        (
            {"line": {"diagnostics": {"noise_scale_moments": 16_384, "coherence_running": 0.993}}},
            [],
            ["4 times the noise scale (16,384, roughly, from AdamW's moments)", "is 0.99: they say nearly the same"],
        ),
    ],
)
def test_sentences(tmp_path, changes, expected, heeded):
    diagnostics = changes.pop("diagnostics", "diagnostics" not in changes.get("line", {}))
    sentences = marks(write_run(tmp_path / "run", diagnostics=diagnostics, **changes))
    for sentence, heed in [*((text, False) for text in expected), *((text, True) for text in heeded)]:
        assert [mark for text, mark in sentences.items() if sentence in text] == [heed], "\n".join(sentences)


def test_a_running_run_shows_its_progress_and_the_time_left(tmp_path):
    running = write_run(tmp_path / "run", complete=False, logged=100)
    expected = r"Running: step 100 of 400 \(25%\); 5(\.\d+)? min of training are left at its present rate\."
    text = next(iter(marks(running, now=BEGAN + 140)))
    assert re.fullmatch(expected, text), text


def test_a_run_that_has_logged_nothing_says_so(tmp_path):
    started = write_run(tmp_path / "run", complete=False, logged=0)
    # The evaluation before the first step has one line.
    assert next(iter(marks(started, now=BEGAN + 60))).startswith("Running: step 0 of 400 (")
    (started / "metrics.jsonl").unlink()
    assert next(iter(marks(started))) == "Nothing has been logged yet."
    assert not [figure for figure in figures([read_run(started)]) if figure.traces and figure.id != "goodput"]


def test_repeated_steps_and_time_without_a_process_are_reported(tmp_path):
    run = write_run(tmp_path / "run", complete=False, logged=100)
    seconds = {"start": 10.0, "steps": 1.0}
    start = {"event": "start", "step": 50, "began": BEGAN + 1000, "seconds": seconds, "time": BEGAN + 1010}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")
    (lost,) = (text for text, heed in marks(run).items() if "repeated steps" in text and heed)
    assert lost.startswith("4.5% of the wall time went to repeated steps, 86% to no process")


def test_several_runs_are_compared(tmp_path):
    slow = write_run(tmp_path / "slow", name="slow", steps=200, spike=False)
    fast = write_run(tmp_path / "fast", name="fast", steps=200, slope=2.0, line={"tokens_per_second": 99.0})
    runs = read_runs([str(slow), str(fast)])
    assert differences(runs) == {}  # names are not compared
    texts = [sentence.text for sentence in compared(runs)]
    assert texts[0] == "No option differs."
    assert "At 13.1 M tokens" in texts[1]
    assert "fast has the lowest validation loss, 3.230; slow at 3.243 (+0.013)" in texts[1]
    assert texts[2].startswith("fast reaches the last validation loss of slow after ")
    assert texts[3].startswith("slow trains on 65,") and texts[3].endswith(" tokens a second, fast on 99.")


def test_differences_are_listed_and_losses_on_different_texts_not_compared(tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", batch=32_768)]
    record = json.loads((folders[1] / "config.json").read_text())
    record["dataset"], record["versions"]["jax"] = "another", "0.99"
    (folders[1] / "config.json").write_text(json.dumps(record))
    runs = read_runs([str(folder) for folder in folders])
    assert [run.name for run in runs] == [str(folder) for folder in folders]  # both have the same name
    assert differences(runs) == {
        "batch.tokens_per_step": ["65536", "32768"],
        "dataset (fingerprint)": ["5220a8abef52476f", "another"],
        "version of jax": ["0.12.0.1", "0.99"],
    }
    first, second, *rest = compared(runs)
    assert first.text == "They differ in 1 option: batch.tokens_per_step."
    assert second.heed and "different texts" in second.text
    assert not any("lowest" in sentence.text for sentence in rest)


def test_curves_are_plotted_over_every_axis(tmp_path):
    run, *others = read_runs([str(write_run(tmp_path / "run", batch=32_768)), f"{tmp_path}/./run"])
    assert not others  # one folder is one run
    assert run.along("tokens", [0, 10, 205, 400]) == [0, 327_680, 205 * 32_768, 400 * 32_768]
    assert run.along("seconds", [0, 10, 205, 400]) == [0, 10, 205, 400]
    assert run.course("grad_norms", "embed").steps == run.course("loss").steps == list(range(10, 401, 10))
    assert run.names("diagnostics", "blocks")[-1] == "11" and run.names("nothing") == []


@pytest.mark.parametrize("hurt", [None, [], "much", {"groups": {"embed": None}}, {"noise_scale": "x"}])
def test_incomplete_diagnostics_are_read(tmp_path, hurt):
    run = read_run(write_run(tmp_path / "run", diagnostics=False, line={"diagnostics": hurt, "grad_norms": hurt}))
    assert list(sentences(run, LATER)) and figures([run])


def test_every_plot_of_diagnostics_draws_what_a_step_measures(tmp_path):
    """Use the names from the step and run/diagnosis.py."""
    built = build(tiny_config(rows=32), jax.devices()[:1])
    _, metrics = jax.eval_shape(built.measuring_step, built.abstract_state, built.abstract_batch())
    measured, diagnosis = jax.tree.map(lambda _: 1.0, metrics["diagnostics"]), Diagnosis([], built.config.optimizer)
    line = [diagnosis.line(measured, 512) for _ in range(BLOCKS)][-1]
    run = read_run(write_run(tmp_path / "run", diagnostics=False, line={"diagnostics": line}))
    traces = {figure.id: len(figure.traces) for figure in figures([run]) if figure.missing == MEASURED}
    assert len(traces) == 8 and all(traces.values()), traces


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "holds no run (no config.json)"),
        ("{", "is not the record of a run that this version can read (JSONDecodeError: "),
        ('{"config": {"name": "x", "lr": 1}}', "make its report with the version that trained it"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path, text, problem):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError) as error:
        read_run(tmp_path)
    assert problem in str(error.value) and str(tmp_path) in str(error.value)


def test_it_reads_without_jax_and_the_run_s_code():
    unwanted = "{'jax', 'tensorboardX', 'torch'}"
    code = f"import sys, tools.report.__main__; sys.exit(bool({unwanted} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_each_plot_has_a_unit_and_explains_only_what_it_draws(tmp_path):
    drawn = {figure.id: figure for figure in figures([read_run(write_run(tmp_path / "run", line={"data_wait": 0.0}))])}
    assert all(figure.layout["yaxis"].get("title") for figure in drawn.values() if figure.id != "goodput")
    assert "0 throughout" in drawn["waiting"].about and "0 throughout" not in drawn["loss"].about
    names = {trace["name"] for trace in drawn["noise"].traces}
    assert ("triangles" in drawn["noise"].about) == ("at least" in names)


def test_few_points_are_marked_and_an_interval_from_0_reaches_the_lower_end(tmp_path):
    few = read_run(write_run(tmp_path / "run", logged=20, diagnostics=False, line=scale(100.0, 0.0, 500.0)))
    drawn = {figure.id: figure for figure in figures([few])}
    assert drawn["speed"].traces[0]["mode"] == "lines+markers"
    low = next(trace for trace in drawn["noise"].traces if trace["line"]["width"] == 0)
    assert 0 < min(low["y"]) < 100
