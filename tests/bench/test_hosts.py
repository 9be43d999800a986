import json
import sys

import pytest

import bench.hosts
from tests.commands import CONFIG, ROOT


@pytest.mark.slow
def test_the_phases_of_two_processes_are_timed(tmp_path, monkeypatch, capfd):
    (tmp_path / "tiny.py").write_text(CONFIG)
    options = f"{bench.hosts.OPTIONS} --data.source={ROOT}/configs --steps=10 --eval.every_steps=5 --eval.tokens=2048"
    words = (f"--out={tmp_path}/hosts", f"--config={tmp_path}/tiny.py", f"--options={options}", "--processes", "2")
    monkeypatch.setattr(sys, "argv", ["bench.hosts", *words])
    assert bench.hosts.main() == 0, capfd.readouterr()
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result.pop("processes") == 2 and len(result) == 8
    assert all(seconds > 0 for name, seconds in result.items() if name != "a restore")
