import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import run.metrics
from run.folder import RunFolder
from run.metrics import MetricsWriter, drop_metrics_after, open_metrics
from tests.helpers import tiny_config


def line(step: int, loss: float = 1.0) -> dict:
    return {"step": step, "tokens": 10 * step, "loss": loss}


def write(run_dir: Path, start: int, lines: list[dict]) -> None:
    """Write the lines of one start of a run that is killed after them."""
    folder = RunFolder(run_dir)
    writer = open_metrics(folder, drop_metrics_after(folder, start), tiny_config())
    for entry in lines:
        writer.write(entry)
    writer.close()


def lines_of(run_dir: Path) -> list[dict]:
    """Return every line of metrics.jsonl, without the times."""
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "time"} for entry in lines]


def shown(folder: Path) -> EventAccumulator:
    """Return what TensorBoard shows."""
    return EventAccumulator(str(folder)).Reload()


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    events = shown(run_dir / "tensorboard")
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_lines_are_json_in_the_order_they_were_written_with_their_time(tmp_path, monkeypatch):
    assert RunFolder(tmp_path).metrics() == []
    monkeypatch.setattr(run.metrics.time, "time", lambda: 123.5)
    lines = [line(0), {"step": 10, "val_loss": 2.0, "mfu": None, "samples": ["é\n\u2028"]}, line(20, float("inf"))]
    write(tmp_path, 0, lines)
    lines[2]["loss"] = None  # JSON has no infinity
    assert lines_of(tmp_path) == lines
    assert RunFolder(tmp_path).metrics() == [{**entry, "time": 123.5} for entry in lines]


@pytest.mark.parametrize("half", ["", '{"step": 6, "tokens": 60, "loss": 1.0'])
def test_continuing_drops_what_came_after_the_checkpoint_and_a_half_written_line(tmp_path, half):
    write(tmp_path, 0, [line(step) for step in range(6)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    write(tmp_path, 3, [line(step, 2.0) for step in range(4, 8)])
    assert lines_of(tmp_path) == [line(step) for step in range(4)] + [line(step, 2.0) for step in range(4, 8)]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


def test_tensorboard_shows_numbers_nested_numbers_and_texts_without_none(tmp_path):
    samples = ["def a():\n    pass", "a\n````\nb"]
    write(tmp_path, 0, [{"step": 5, "loss": 1.5, "norm": {"embed": 2.0, "head": 3}, "mfu": None, "samples": samples}])
    assert scalars(tmp_path) == {"loss": [(5, 1.5)], "norm/embed": [(5, 2.0)], "norm/head": [(5, 3.0)]}
    events = shown(tmp_path / "tensorboard")
    assert sorted(events.Tags()["tensors"]) == ["samples/0/text_summary", "samples/1/text_summary"]
    (sample,), (fenced,) = (events.Tensors(f"samples/{i}/text_summary") for i in (0, 1))
    assert sample.step == 5 and sample.tensor_proto.string_val[0] == b"```\ndef a():\n    pass\n```"
    assert fenced.tensor_proto.string_val[0] == b"`````\na\n````\nb\n`````"  # a fence stays inside its own


def test_options_are_hparams_of_the_one_run_from_its_start_on(tmp_path):
    options = {"steps": 3, "model.dtype": "auto", "eval.prompts": ("a", "b")}
    writer = MetricsWriter(RunFolder(tmp_path), hparams=options)
    writer.write({"step": 1, "val_loss": 2.5})
    assert lines_of(tmp_path) == [{"step": 1, "val_loss": 2.5}] and scalars(tmp_path) == {"val_loss": [(1, 2.5)]}
    events = shown(tmp_path / "tensorboard")
    content = str(events.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    assert all(text in content for text in ("steps", "model.dtype", "auto", "eval.prompts"))
    writer.close()
    assert len([path for path in (tmp_path / "tensorboard").rglob("*") if path.is_file()]) == 1


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_keeps_lines_waiting_and_loses_none(tmp_path, monkeypatch, capsys):
    wandb = SimpleNamespace(shown=[], close=lambda: None)
    wandb.show = wandb.shown.append
    writer = MetricsWriter(RunFolder(tmp_path), wandb)  # pyright: ignore
    writer.write(line(1))
    with monkeypatch.context() as patch:
        patch.setattr(run.metrics, "append_whole", full)
        writer.write(line(2))
        writer.write(line(3))
        assert "No space left on device" in writer.problem and len(lines_of(tmp_path)) == 1
    writer.write(line(4))
    assert writer.tensorboard
    writer.tensorboard.writer.flush()
    assert scalars(tmp_path)["loss"] == [(step, 1.0) for step in range(1, 5)]
    with monkeypatch.context() as patch:
        patch.setattr(run.metrics.TensorBoard, "add", full)
        writer.write(line(5))
        assert "TensorBoard" in writer.problem
    writer.write(line(6))
    writer.close()
    assert writer.problem == "" and lines_of(tmp_path) == [line(step) for step in range(1, 7)]
    assert scalars(tmp_path)["loss"] == [(step, 1.0) for step in range(1, 7)]
    assert [sent["step"] for sent in wandb.shown] == [*range(1, 7)]
    monkeypatch.setattr(run.metrics.TensorBoard, "close", full)  # full at the end
    writer.close()
    assert capsys.readouterr().err == "TensorBoard's file cannot be written: No space left on device\n"


def test_a_damaged_line_is_named_and_only_it_is_lost(tmp_path, capsys):
    write(tmp_path, 0, [line(step) for step in range(1, 4)])
    path = tmp_path / "metrics.jsonl"
    first, _, third = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n\xff\x00 garbage\n" + third + b"\n")
    assert [entry["step"] for entry in RunFolder(tmp_path).metrics()] == [1, 3]
    assert "line 2 is damaged" in capsys.readouterr().err
