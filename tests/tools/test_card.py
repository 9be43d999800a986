"""The card of tools.report: the figures of three stages, their times and dollars, and a picture of them."""

import base64
import json
import re
from pathlib import Path

import pytest

from system.errors import UserError
from tests.run_folders import write_run
from tools import card, report
from tools.recorded import Run, read_runs

HOUR = 3600.0


def write_stage(folder: Path, init_from: str, hours: float, line: dict | None = None) -> str:
    """Write a run that took some hours, from another run or from nothing."""
    write_run(folder, name=folder.name, diagnostics=False, line=line)
    record = json.loads((folder / "config.json").read_text())
    record["config"]["init_from"] = init_from
    (folder / "config.json").write_text(json.dumps(record))
    spent = {"steps": 0.75 * hours * HOUR, "evaluation": 0.25 * hours * HOUR}
    stop = {"event": "stop", "step": 400, "code": 0, "seconds": spent, "time": 1.8e9}
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps(stop) + "\n")
    return str(folder)


def write_core(run: str, name: str, core: float, items: int) -> None:
    folder = Path(run) / "core" / name
    folder.mkdir(parents=True)
    task = {"items": items, "accuracy": 0.5}
    result = {"step": 400, "tasks": {"copa": task}, "core": core, "core_interval": [core - 0.01, core + 0.01]}
    (folder / "core.json").write_text(json.dumps(result))


@pytest.fixture
def runs(tmp_path) -> list[Run]:
    """Return runs of pretraining, fine-tuning and reinforcement, on eight devices each."""
    base = write_stage(tmp_path / "d12", "", 2.5)
    write_core(base, "step_400_items_8", 0.9, 8)
    write_core(base, "step_400", 0.2, 500)
    chat = write_stage(
        tmp_path / "chat", base, 0.5, {"chatcore": 0.1, "chatcore_interval": {"low": 0.05, "high": 0.15}}
    )
    answers = {"reward": 0.3, "greedy_accuracy": 0.5, "pass_at_1": 0.25, "pass_at_2": 0.4, "pass_at_16": 0.75}
    reinforced = write_stage(
        tmp_path / "better", chat, 0.01, answers | {"pass_at_16_interval": {"low": 0.7, "high": 0.8}}
    )
    return read_runs([base, chat, reinforced])


def test_each_stage_has_its_figures(runs):
    of_base, of_chat, of_answers = (card.figures(run) | card.spent(run, price=3.0) for run in runs)
    assert [of["stage"] for of in (of_base, of_chat, of_answers)] == ["pretraining", "fine-tuning", "reinforcement"]
    assert of_base["tokens"] == f"{400 * 65_536:,}" and float(of_base["bits per byte, held out"]) > 1
    assert of_base["CORE"] == "0.2000 (0.1900 to 0.2100)"  # all items, not the first eight
    assert "CORE" not in of_chat and of_chat["ChatCORE"] == "0.1000 (0.0500 to 0.1500)"
    assert [name for name in of_answers if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@16"]
    assert of_answers["pass@16"] == "0.7500 (0.7000 to 0.8000)" and of_answers["greedy accuracy"] == "0.5000"
    assert of_base["time, with evaluations and saves"] == "2.5 h" and of_base["dollars"] == f"{2.5 * 8 * 3:.2f}"
    assert of_answers["time, with evaluations and saves"] == "36 s"
    assert "dollars" not in card.spent(runs[0], price=0.0)


def test_what_was_reached_stands_above_what_it_took(runs):
    shown = re.findall(r'<tr><td dir="auto">(.*?)</td>', card.card(runs, 3.0, {}))
    assert shown[1] == "stage" and shown[-2:] == ["time, with evaluations and saves", "dollars"]


def test_stages_of_several_starts_are_summed(runs, tmp_path):
    record = tmp_path / "stages.tsv"
    record.write_text("set-up\t60\t0\tmake setup\npretraining\t3600\t130\tloop\nset-up\t0\t0\tmake setup\n")
    with record.open("a") as file:
        file.write("pretraining\t7200\t0\tloop\n")
    seconds = card.read_stages(str(record))
    assert seconds == {"set-up": 60, "pretraining": 3 * HOUR}
    page = report.page(runs, 2.0, seconds)
    cells = [re.findall(r'<td dir="auto">(.*?)</td>', row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    assert ["pretraining", "3.0 h", f"{3 * 8 * 2:.2f}"] in cells and ["set-up", "60 s", "0.27"] in cells
    assert ["all", "3.0 h", "48.27"] in cells


def test_the_picture_has_a_panel_for_each_run(runs):
    encoded = re.search(r"data:image/png;base64,([^\"]+)", card.card(runs, 0.0, {}))
    assert encoded
    png = base64.b64decode(encoded[1])
    width, height = (int.from_bytes(png[16 + 4 * i : 20 + 4 * i]) for i in range(2))  # of the header
    assert width > 2.5 * height
    assert "<img" not in card.card(runs[:1], 0.0, {})  # the plots below show one run's loss


def test_the_newest_samples_are_shown(runs):
    shown = card.card(runs, 0.0, {})
    assert "The 400th sample &lt;b&gt;is&lt;/b&gt; text." in shown and "The 350th" not in shown


@pytest.mark.parametrize("text", ["pretraining\t1\npretraining 3600\n", "pretraining\tlong\t0\tloop\n", None])
def test_another_file_is_refused_by_name(tmp_path, text):
    if text is not None:
        (tmp_path / "stages.tsv").write_text(text)
    with pytest.raises(UserError, match=r"--stages=\S+stages\.tsv is not the record of stages"):
        card.read_stages(str(tmp_path / "stages.tsv"))
