"""Test which folders of other programs a run can start from, and what cannot be exported. test_transformers.py tests
that the networks are equal."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bench.exactness import shipped
from configs.command_line import load_config
from configs.schema import Config, MeshConfig, UserError
from data.tokenizer import train_tokenizer
from interchange import safetensors
from interchange.init_from import read_params, require_same_network, require_same_vocabulary
from interchange.safetensors import arrays_of, write_safetensors
from interchange.transformers import IN_HF, REMOTE, beyond_hf, write_hf
from model.gpt import GPT
from tests.helpers import ALL_FEATURES, FEATURES, TINY, perturbed
from training.mesh import make_mesh, resized
from training.state import abstract_params

TOKENIZER = train_tokenizer(["to be or not to be " * 20, "that is the question " * 20], 272)
EXPORTED = {name: options for name, options in FEATURES.items() if options.keys() <= IN_HF | REMOTE}
"""The features that the modeling file computes, too."""
OTHER = train_tokenizer(["a vocabulary of other words entirely " * 20], 272)


def network(**options):
    config = Config(name="one", model=replace(TINY, **options))
    return config, perturbed(nnx.to_pure_dict(nnx.state(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0)))))


def require_params(config, expected):
    """Require exactly these parameters in `config.init_from`."""
    params = read_params(config, abstract_params(config.model, make_mesh(MeshConfig())))
    unpadded = lambda ours, theirs: np.testing.assert_array_equal(ours, resized(theirs, ours.shape))
    jax.tree.map(unpadded, expected, jax.device_get(params))


@pytest.fixture
def written(tmp_path):
    """Write a folder in transformers' format. Return a config that starts from it, and the folder."""
    config, params = network()
    write_hf(tmp_path / "hf", [arrays_of(params)], config, TOKENIZER)
    return replace(config, init_from=str(tmp_path / "hf")), tmp_path / "hf"


def change_arrays(folder, change):
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors")


@pytest.mark.parametrize("options", [{}, ALL_FEATURES], ids=["plain", "all"])
def test_plain_safetensors_are_read_back_exactly_on_a_mesh(tmp_path, options):
    config, params = network(**options)
    write_safetensors(tmp_path / "plain", [arrays_of(params)], config, TOKENIZER)
    config = replace(config, init_from=str(tmp_path / "plain"))
    require_same_network(config)
    require_params(config, params)


def test_arrays_that_are_missing_extra_or_misshapen_are_all_named(written):
    config, folder = written

    def change(arrays):
        del arrays["lm_head.weight"]
        arrays["model.layers.7.mlp.fc1.weight"] = np.zeros((3, 3), np.float32)
        arrays["model.layers.1.mlp.fc2.weight"] = np.zeros((32, 99), np.float32)

    change_arrays(folder, change)
    with pytest.raises(UserError) as error:
        require_same_network(config)
    for line in (
        "lm_head.weight: missing, not (272, 32)",
        "model.layers.7.mlp.fc1.weight: (3, 3), not there",
        "model.layers.1.mlp.fc2.weight: (32, 99), not (32, 128)",
    ):
        assert line in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 20.0}, "softcap: 15.0, not 20.0"),
        ({"heads": 2, "kv_heads": 1, "head_dim": 16}, "heads: 4, not 2"),
        ({"rotary_base": 10_000.0}, "rotary_base: 100000.0, not 10000.0"),
        ({"smear": True}, "smear: False, not True"),
        ({"vocab_size": 400}, "vocab_size: 272, not 400"),
        ({"depth": 3}, "model.layers.2.mlp.fc1.weight: missing"),
    ],
)
def test_another_network_is_refused(written, options, message):
    config, _ = written
    with pytest.raises(UserError, match="is of another network than the options ask for") as error:
        require_same_network(replace(config, model=replace(config.model, **options)))
    assert message in str(error.value)


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Write plain safetensors. Return a config that starts from them, whose blocks see 5, all, and all positions."""
    config, params = network(depth=3, window_pattern="SL", short_window=5)
    folder = tmp_path_factory.mktemp("plain") / "out"
    write_safetensors(folder, [arrays_of(params)], config, TOKENIZER)
    return replace(config, init_from=str(folder)), folder


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_chunks": 4}, {"z_loss": 1e-4}, {"remat": "block"}, {"dtype": "bfloat16"}, {"window_pattern": "SLS"}),
        *({"window_pattern": "SLL"}, {"window_pattern": "SLLLL"}),
    ],
    ids=str,
)
def test_options_that_keep_the_function_may_differ(windows, options):
    config, _ = windows
    require_same_network(replace(config, model=replace(config.model, **options)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_base": 1234.0}, "rotary_base: 100000.0, not 1234.0"),
        ({"qk_scale": 1.1}, "qk_scale: 1.0, not 1.1"),
        ({"short_window": 6}, r"short_window\): \[5, None, None\], not \[6, None, None\]"),
        ({"short_window": 0}, r"\[5, None, None\], not \[512, None, None\]"),
        ({"window_pattern": "L"}, r"not \[None, None, None\]"),
        ({"width": 64, "heads": 8}, r"blocks\.0\.mlp\.up\.kernel: \(32, 128\), not \(64, 256\)"),
    ],
)
def test_another_function_or_shape_is_refused(windows, options, message):
    config, _ = windows
    with pytest.raises(UserError, match=message):
        require_same_network(replace(config, model=replace(config.model, **options)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "cannot be read: ") for content in ("", "{", "[1]", '"x"', "\xff")),
        ({"depth": "deep"}, "describes another network than ours: --model."),
        ({"window_pattern": 3}, "describes another network than ours: --model."),
        ({"short_window": -1}, "describes another network than ours: --model."),
        ({"softcap": None}, "describes another network than ours: --model."),
    ],
    ids=str,
)
def test_a_broken_description_is_one_message(windows, content, message):
    config, folder = windows
    path = folder / "config.json"
    before = path.read_bytes()
    if isinstance(content, dict):
        facts = json.loads(before)
        content = json.dumps(facts | {"options": facts["options"] | content})
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(UserError, match=re.escape(f"{path} {message}")):
        require_same_network(config)
    path.write_bytes(before)


def test_an_unsupported_constant_is_named(written):
    config, folder = written
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-2}))
    with pytest.raises(UserError, match=r"rms_norm_eps is 0\.01, and our network has 1e-06"):
        require_same_network(config)


def test_another_vocabulary_is_refused(written):
    with pytest.raises(UserError, match="has another vocabulary than the data"):
        require_same_vocabulary(written[0], OTHER)


def test_a_folder_without_arrays_or_with_a_broken_file_is_refused(written, tmp_path):
    config, folder = written
    with pytest.raises(UserError, match=r"no \*\.safetensors there"):
        require_same_network(replace(config, init_from=str(tmp_path)))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        require_same_network(config)


def test_every_shipped_config_s_network_can_be_exported():
    for name in shipped():
        assert set(beyond_hf(load_config(f"configs/{name}.py")[0].model)) <= REMOTE, name


@pytest.mark.parametrize("name", EXPORTED)
def test_a_network_that_transformers_cannot_express_comes_with_its_code(tmp_path, name):
    """test_transformers.py tests that this code computes what the network does."""
    config, params = network(**EXPORTED[name] | {"depth": 3})
    write_hf(tmp_path / "hf", [arrays_of(params)], config, TOKENIZER)
    facts = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert facts["model_type"] == "tokensum" and (tmp_path / "hf" / "modeling_tokensum.py").exists()
    config = replace(config, init_from=str(tmp_path / "hf"))
    require_same_network(config)
    with pytest.raises(UserError, match="is of another network"):
        require_same_network(replace(config, model=replace(TINY, depth=3)))


def test_an_option_that_the_code_does_not_know_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("interchange.transformers.REMOTE", set())
    config, params = network(smear=True)
    with pytest.raises(UserError, match=r"modeling_tokensum.py has no model\.smear, which"):
        write_hf(tmp_path / "hf", [arrays_of(params)], config, TOKENIZER)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("fails", ["write_text", "save_file"])
def test_an_export_to_a_full_disk_leaves_nothing_in_the_way(tmp_path, monkeypatch, fails):
    config, params = network()

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left") if fails == "save_file" else OSError(28, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path if fails == "write_text" else safetensors, fails, full)
        with pytest.raises(UserError, match=r"--out=.*out cannot be written: .*No space left"):
            write_safetensors(tmp_path / "out", [arrays_of(params)], config, TOKENIZER)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.partial").mkdir()  # left by a killed export
    write_safetensors(tmp_path / "out", [arrays_of(params)], config, TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    config, params = network()
    with pytest.raises(UserError, match="cannot be written"):
        write_safetensors(tmp_path / "file" / "out", [arrays_of(params)], config, TOKENIZER)
