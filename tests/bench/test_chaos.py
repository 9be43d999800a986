import json
import sys

import pytest

import bench.chaos
from bench.chaos import FAULTS, LONG, SHORT
from tests.test_train import CONFIG, ROOT

SMALLER = {"steps=120": "steps=100", "depth=2": "depth=1"}
SMALLER |= {"Config(every_steps=20": "Config(every_steps=10, keep_every=50"}


@pytest.mark.slow
def test_faults_change_nothing(tmp_path, monkeypatch, capfd):
    """Inject each kind of fault once into two processes, and a long one once. With this seed no fault comes before the
    processes have met: that takes minutes. (tests/test_train.py kills one process.)"""
    for name, seconds in (("cut off", LONG), ("given errors", SHORT), ("stopped", SHORT)):
        monkeypatch.setitem(FAULTS, name, FAULTS[name]._replace(seconds=(seconds,)))
    config = CONFIG.replace('"text"', f'"{ROOT}/configs"')
    for long, short in SMALLER.items():
        config = config.replace(long, short)
    (tmp_path / "tiny.py").write_text(config)
    options = (f"--out={tmp_path}/chaos", f"--config={tmp_path}/tiny.py", "--faults=5", "--seed=332", "--options=")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setattr(sys, "argv", ["bench.chaos", *options, "--processes=2"])
    assert bench.chaos.main() == 0, capfd.readouterr()
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["faults"] == 5 and result["differ"] == []
