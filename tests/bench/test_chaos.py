import json
import sys

import pytest

import bench.chaos
from bench.chaos import FAULTS, LONG, SHORT
from tests.commands import CONFIG, ROOT


@pytest.mark.slow
def test_faults_change_nothing(tmp_path, monkeypatch, capfd):
    """Inject each kind of fault once into two processes, and a long one once. With this seed no fault comes before the
    processes have met: that takes minutes. (tests/test_train.py kills one process.)"""
    for name, seconds in (("cut off", LONG), ("given errors", SHORT), ("stopped", SHORT)):
        monkeypatch.setitem(FAULTS, name, FAULTS[name]._replace(seconds=(seconds,)))
    (tmp_path / "tiny.py").write_text(CONFIG)
    short = "--steps=100 --model.depth=1 --eval.every_steps=100 --checkpoint.every_steps=10 --checkpoint.keep_every=50 "
    options = (f"--out={tmp_path}/chaos", f"--config={tmp_path}/tiny.py", "--faults=5", "--seed=332")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setattr(
        sys, "argv", ["bench.chaos", *options, "--processes=2", f"--options={short}--data.source={ROOT}/configs"]
    )
    assert bench.chaos.main() == 0, capfd.readouterr()
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["faults"] == 5 and result["differ"] == []
