"""Test that changes and rollbacks enter the run's metrics once each."""

import pytest

from run.events import Events
from run.hooks.history import History
from run.lines import read_metrics
from run.metrics import MetricsWriter
from tests.run.hooks.runs import config_of, progress


@pytest.mark.parametrize(
    ("changes", "rollbacks", "written", "expected"),
    [
        ([], [], 0, []),
        (["steps: 20 -> 40"], [], 0, [{"changes": ["steps: 20 -> 40"]}]),
        ([], [(10, 1), (20, 2)], 0, [{"rollback": {"position": 2}}]),  # the first leads to another checkpoint
        ([], [(20, 1), (20, 2)], 1, [{"rollback": {"position": 1}}, {"rollback": {"position": 2}}]),  # killed between
        ([], [(20, 1), (20, 2)], 2, [{"rollback": {"position": 1}}, {"rollback": {"position": 2}}]),
    ],
)
def test_each_change_and_each_rollback_is_written_once(tmp_path, changes, rollbacks, written, expected):
    run, events, writer = progress(config_of(tmp_path), step=20), Events(tmp_path), MetricsWriter(tmp_path, 20)
    for step, position in rollbacks:
        events.add("rollback", step, position=position)
    for _, position in rollbacks[:written]:
        writer.write({"step": 20, "rollback": {"position": position}})
    hook = History(type("Log", (), {"writer": writer}), changes.copy())  # pyright: ignore
    for _ in range(2):  # at a start, and after a rollback
        hook.begin(run)
    writer.close()
    lines = [{name: value for name, value in line.items() if name != "time"} for line in read_metrics(tmp_path)]
    assert lines == [{"step": 20, **line} for line in expected]
