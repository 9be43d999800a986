import json
import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import event_file_writer

import training.metrics
from training.metrics import Clock, MetricsWriter, plot_loss, read_metrics


def line(step: int, loss: float = 1.0) -> dict:
    return {"step": step, "tokens": 10 * step, "loss": loss}


def write(run_dir, start: int, lines: list[dict]) -> None:
    writer = MetricsWriter(run_dir, start)
    for each in lines:
        writer.write(each)
    writer.tensorboard.close()
    writer.file.close()


def told(run_dir) -> list[dict]:
    """The lines, without the time that each was written at."""
    return [{key: value for key, value in line.items() if key != "time"} for line in read_metrics(run_dir)]


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def clock(monkeypatch):
    """A clock for the names of TensorBoard's files, which hold whole seconds; `clock.seconds` may be set."""
    clock = SimpleNamespace(seconds=1_000_000_000.0)
    clock.time = lambda: clock.seconds
    monkeypatch.setattr(event_file_writer, "time", clock)
    return clock


def test_lines_are_json_in_the_order_they_were_written(tmp_path):
    lines = [line(0), {"step": 10, "val_loss": 2.0, "mfu": None}, {"step": 10, "changes": ["steps: 1 -> 2"]}]
    write(tmp_path, 0, lines)
    assert told(tmp_path) == lines
    assert all(json.loads(text)["time"] > 1e9 for text in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(line(1))
    assert told(tmp_path) == [line(1)]
    writer.tensorboard.close()
    writer.file.close()


def test_tensorboard_shows_a_line_soon_though_the_run_goes_on(tmp_path):
    """tensorboardX writes in a thread, whose queue its `flush` does not wait for."""
    writer = MetricsWriter(tmp_path, 0)
    writer.write(line(1))
    expected = {"loss": [(1, 1.0)], "tokens": [(1, 10.0)]}
    patience = (time.sleep(0.1) for _ in range(150))
    while (shown := scalars(tmp_path / "tensorboard")) != expected and next(patience, "over") is None:
        pass
    writer.tensorboard.close()
    writer.file.close()
    assert shown == expected


@pytest.mark.parametrize("half", ["", "{", '{"step": 3, "lo', '{"step": 6, "tokens": 60, "loss": 1.0'])
def test_continuing_drops_what_came_after_the_checkpoint_and_a_half_written_line(tmp_path, half):
    write(tmp_path, 0, [line(step) for step in range(6)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    write(tmp_path, 3, [line(step, 2.0) for step in range(4, 8)])
    expected = [line(step) for step in range(4)] + [line(step, 2.0) for step in range(4, 8)]
    assert told(tmp_path) == expected
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_run_that_starts_over_without_a_checkpoint_keeps_nothing(tmp_path):
    """Killed before its first checkpoint, a run evaluates step 0 again: that line too must stand there once."""
    write(tmp_path, 0, [line(0), line(10)])
    write(tmp_path, 0, [line(0, 2.0)])
    assert told(tmp_path) == [line(0, 2.0)]


def test_tensorboard_shows_numbers_and_nested_numbers_and_leaves_out_what_is_none(tmp_path):
    write(tmp_path, 0, [{"step": 5, "loss": 1.5, "norm": {"embed": 2.0, "lm_head": 3}, "mfu": None, "changes": ["x"]}])
    expected = {"loss": [(5, 1.5)], "norm/embed": [(5, 2.0)], "norm/lm_head": [(5, 3.0)]}
    assert scalars(tmp_path / "tensorboard") == expected


def test_tensorboard_shows_each_step_once_however_often_the_run_was_continued(tmp_path, clock):
    starts = [(0, range(0, 6), 1.0), (3, range(4, 9), 2.0), (8, range(9, 12), 3.0), (9, range(10, 13), 4.0)]
    for start, steps, loss in starts:
        write(tmp_path, start, [line(step, loss) for step in steps])
        clock.seconds += 60
    expected = [1.0] * 4 + [2.0] * 5 + [3.0] + [4.0] * 3
    assert scalars(tmp_path / "tensorboard")["loss"] == list(enumerate(expected))


def test_a_continuation_within_the_same_second_loses_no_point_of_tensorboard(tmp_path, clock):
    write(tmp_path, 0, [line(step) for step in range(4)])
    write(tmp_path, 3, [line(step) for step in range(4, 6)])
    assert scalars(tmp_path / "tensorboard")["loss"] == [(step, 1.0) for step in range(6)]


def test_samples_are_text_and_the_config_is_hparams(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write({"step": 10, "samples": ["def a():\n    pass", "two"]})
    writer.close({"steps": 3, "model.dtype": "auto", "eval.prompts": ("a", "b")}, {"val_loss": 2.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["tensors"] == ["samples/0/text_summary", "samples/1/text_summary"]
    (sample,) = events.Tensors("samples/0/text_summary")
    assert sample.step == 10
    assert b"def a():\n    pass" in sample.tensor_proto.string_val[0]
    hparams = EventAccumulator(str(tmp_path / "tensorboard/hparams"))
    hparams.Reload()
    assert [event.value for event in hparams.Scalars("val_loss")] == [2.5]
    recorded = str(hparams.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    for text in ("steps", "model.dtype", "auto", "eval.prompts"):
        assert text in recorded


def test_loss_is_drawn_from_the_lines(tmp_path):
    lines = [{"step": 0, "tokens": 0, "val_loss": 5.0}, *(line(step, 5 - step) for step in range(1, 4))]
    write(tmp_path, 0, [*lines, {"step": 3, "changes": ["x"]}, {"step": 3, "tokens": 30, "val_loss": 2.0}])
    path = plot_loss(tmp_path)
    assert path == tmp_path / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_clock_counts_training_alone_over_all_starts(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(training.metrics.time, "perf_counter", lambda: now)
    clock = Clock(seconds=100.0, step=50)
    clock.start()
    now += 4
    assert clock.seconds == 104
    assert clock.rate(58) == 8 / 4
    with clock.paused():
        now += 1000
    now += 1
    assert clock.seconds == 105
    assert clock.rate(60) == 2 / 1
