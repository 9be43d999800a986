import json
import sys

import pytest

import bench.chaos


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["bench.chaos", f"--out={tmp_path}/chaos", "--kills=10"])
    assert bench.chaos.main() == 0, capfd.readouterr()
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert told["kills"] == 10 and told["differ"] == []
