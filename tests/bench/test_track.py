"""Run the track at a miniature budget; test what it refuses, and its verdict on planted numbers."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import ttest_ind

from bench import track
from configs.schema import UserError
from tests.test_train import ROOT, write_folder

REFERENCE = [1.50, 1.51, 1.49, 1.52, 1.48]


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["track", *words])
    return track.main()


@pytest.mark.medium
def test_a_line_of_json_and_a_verdict_against_the_reference(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    config = write_folder(tmp_path) / "tiny.py"
    config.write_text(config.read_text().replace('"text"', f'"{tmp_path}/text"').replace("depth=2", "depth=1"))
    monkeypatch.setattr(track, "CONFIGS", {"tiny": str(config)})
    monkeypatch.setattr(track, "REFERENCE", tmp_path / "track.jsonl")
    out = f"--out={tmp_path}/runs"

    def line(*words):
        assert run(monkeypatch, out, *words) == 0
        return json.loads(capfd.readouterr().out)  # one line, and nothing else

    first = line("--seeds=2", "--write_reference")
    assert (first["size"], first["seeds"], first["changed"], first["joules"]) == ("tiny", 2, {}, None)
    bits = first["bits_per_byte_of_seeds"]
    assert bits[0] != bits[1] and first["bits_per_byte"] == pytest.approx(sum(bits) / 2)
    assert first["bits_per_byte_of_steps"].keys() == {"0", "40", "80", "120"}
    assert first["loss"] < 4 and first["seconds"] > 0 and first["device"].startswith("1 x cpu")
    assert (first["verdict"], first["difference"], first["reference"]) == ("cannot tell", 0, first["code_hash"])

    trained = sorted((tmp_path / "runs").rglob("summary.json"))
    again = line("--seeds=1")
    assert again["bits_per_byte_of_seeds"] == bits[:1] and again["text"] == first["text"]
    assert sorted((tmp_path / "runs").rglob("summary.json")) == trained  # nothing was repeated

    slow = line("--seeds=1", "--optimizer.rate_factor=0.01", "--batch.rows_per_device=16")
    assert slow["changed"] == {"optimizer.rate_factor": 0.01} and slow["recipe"] == first["recipe"]
    assert slow["verdict"] == "worse" and slow["interval"][0] > 0

    reference = json.loads((tmp_path / "track.jsonl").read_text())
    for name in ("text", "recipe", "size"):
        (tmp_path / "track.jsonl").write_text(json.dumps(reference | {name: "another"}))
        other = line("--seeds=1")
        assert other["verdict"] == "not comparable" and f"{name} another" in other["why"]


@pytest.mark.parametrize(
    "words",
    [
        ["--size=d12", "--steps=9"],
        ["--batch.sequence_length=128", "--batch.tokens_per_step=4096"],
        ["--config=configs/small.py"],
        ["--write_reference", "--model.softcap=20"],
        ["--write_reference", "--seeds=1"],
    ],
)
def test_what_makes_results_incomparable_is_refused(monkeypatch, tmp_path, words):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as refused:
        run(monkeypatch, f"--out={tmp_path}/runs", *words)
    named = words[:1] if words[0] == "--write_reference" else words
    assert all(word.split("=")[0] in str(refused.value) for word in named if "size" not in word)
    assert not (tmp_path / "runs").exists()


def test_ideas_are_named_speed_is_free_and_the_rest_is_fixed():
    ideas = ("model.depth", "model.dtype", "optimizer.muon.peak_rate", "optimizer.schedule.warmdown")
    speed = ("batch.rows_per_device", "mesh.fsdp", "model.remat", "model.loss_chunks", "deterministic")
    fixed = ("steps", "seed", "name", "run_dir", "init_from", "model.vocab_size", "stability.spike_factor")
    fixed += ("data.source", "data.tokenizer", "data.val_fraction", "eval.tokens", "eval.every_steps")
    kinds = lambda names: {(track.is_idea(name), track.is_fixed(name)) for name in names}
    assert (kinds(ideas), kinds(speed), kinds(fixed)) == ({(True, False)}, {(False, False)}, {(False, True)})


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([1.40, 1.41, 1.42], "better"), ([1.55, 1.56, 1.57], "worse"), ([1.46], "cannot tell"), ([1.44], "better")],
)
def test_the_verdict_on_planted_numbers(ours, verdict):
    result = track.compared(ours, REFERENCE)
    expected = ttest_ind(ours, REFERENCE)
    assert result["verdict"] == verdict and result["difference"] == pytest.approx(np.mean(ours) - np.mean(REFERENCE))
    assert result["interval"] == pytest.approx(expected.confidence_interval(0.95))
    assert result["difference"] == pytest.approx(result["standard_error"] * expected.statistic)


def test_joules_are_the_packages_that_rapl_counts(monkeypatch, tmp_path):
    """A counter starts again at its range; a zone that is not a package counts its parts twice."""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # is not installed
    monkeypatch.setattr(track, "POWERCAP", tmp_path)
    assert track.joules_between(track.energy(), track.energy()) is None

    def count(**joules):
        for i, (name, used) in enumerate(joules.items()):
            zone = tmp_path / f"intel-rapl:{i}"
            zone.mkdir(exist_ok=True)
            (zone / "name").write_text(f"{name}\n")
            (zone / "energy_uj").write_text(f"{used * 10**6}\n")
            (zone / "max_energy_range_uj").write_text("262143000000\n")
        return track.energy()

    before, after = count(package_0=100, package_1=262000, psys=0), count(package_0=150, package_1=57, psys=500)
    assert track.joules_between(before, after) == pytest.approx(50 + 200)


def test_joules_are_those_of_the_gpus_if_there_are_some(monkeypatch):
    used = [7_000, 9_000]  # in thousandths
    names = {"nvmlDeviceGetHandleByIndex": int, "nvmlDeviceGetTotalEnergyConsumption": used.__getitem__}
    names |= {"nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 2, "NVMLError": OSError}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**names))
    before = track.energy()
    used[:] = [8_000, 9_500]
    assert track.joules_between(before, track.energy()) == 1.5
