import json
import sys

import pytest

import bench.chaos
from tests.test_train import CONFIG, ROOT

SHORT = {"steps=120": "steps=100", "Config(every_steps=20": "Config(every_steps=10, keep_every=50"}


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path, monkeypatch, capfd):
    config = CONFIG.replace('"text"', f'"{ROOT}/configs"')
    for long, short in SHORT.items():
        config = config.replace(long, short)
    (tmp_path / "tiny.py").write_text(config)
    options = (f"--out={tmp_path}/chaos", f"--config={tmp_path}/tiny.py", "--kills=10", "--options=")
    monkeypatch.setattr(sys, "argv", ["bench.chaos", *options])
    assert bench.chaos.main() == 0, capfd.readouterr()
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["kills"] == 10 and result["differ"] == []
