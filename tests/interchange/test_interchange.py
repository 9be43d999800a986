"""Test which folders of other programs become a run, and what cannot be exported. test_transformers.py tests that the
networks are equal."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench.exactness import shipped
from data.prepare.selection import train_tokenizer
from interchange.convert import read_network
from interchange.folders import REMOTE, beyond_hf, write_hf, write_safetensors
from options.files import load_config
from system.errors import UserError
from tests.helpers import TINY, arrays_of
from tests.interchange.networks import EXPORTED, network, require_params

TOKENIZER = train_tokenizer(["to be or not to be " * 20, "that is the question " * 20], 272)


def test_all_wrong_arrays_are_named_and_other_networks_refused(tmp_path):
    config, params = network()
    folder = tmp_path / "hf"
    write_hf(folder, [arrays_of(params)], config, TOKENIZER)
    assert require_params(folder, params).model.kv_heads == TINY.kv_heads
    arrays = load_file(folder / "model.safetensors")
    del arrays["lm_head.weight"]
    arrays["model.layers.7.mlp.fc1.weight"] = np.zeros((3, 3), np.float32)
    arrays["model.layers.1.mlp.fc2.weight"] = np.zeros((32, 99), np.float32)
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(
        UserError,
        match=r"lm_head.weight: missing, not \(272, 32\)\n"
        r"  model.layers.1.mlp.fc2.weight: \(32, 99\), not \(32, 128\)\n"
        r"  model.layers.7.mlp.fc1.weight: \(3, 3\), not there",
    ):
        read_network(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        read_network(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors there"):
        read_network(folder)
    theirs = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"model_type": "llama"}, r"architecture llama, not one of ours \(nanochat, tokensum\)"),
        ({"hidden_act": "silu"}, "hidden_act is silu, and our network has relu2"),
        ({"hidden_size": None}, "describes another network than ours"),
    ):
        (folder / "config.json").write_text(json.dumps(theirs | changes))
        with pytest.raises(UserError, match=message):
            read_network(folder)


def test_plain_safetensors_are_read_back_with_all_options(tmp_path):
    config, params = network(depth=3, window_pattern="SL", short_window=5, smear=True, dropout=0.1)
    write_safetensors(tmp_path / "out", [arrays_of(params)], config, TOKENIZER)
    assert require_params(tmp_path / "out", params).model == replace(config.model, dropout=0.0, dtype="auto")


def test_every_shipped_config_s_network_can_be_exported():
    for name in shipped():
        assert set(beyond_hf(load_config(f"configs/{name}.py")[0].model)) <= REMOTE, name
    assert beyond_hf(replace(TINY, dropout=0.1, dtype="bfloat16")) == []  # of training only


def test_an_option_that_the_modeling_file_lacks_is_refused(tmp_path, monkeypatch):
    assert all(beyond_hf(replace(TINY, **options | {"depth": 3})) for options in EXPORTED.values())
    config, params = network(smear=True)
    monkeypatch.setattr("interchange.folders.REMOTE", set())
    with pytest.raises(UserError, match=r"modeling_tokensum.py has no model\.smear, which"):
        write_hf(tmp_path / "none", [arrays_of(params)], config, TOKENIZER)
    assert not (tmp_path / "none").exists()
