"""Test which folders of other programs a run can start from, and what cannot be exported. test_transformers.py tests
that the networks are equal."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from bench.exactness import shipped
from configs.command_line import load_config
from configs.schema import Config, MeshConfig, UserError
from data.prepare.selection import train_tokenizer
from interchange.folders import IN_HF, REMOTE, beyond_hf, write_hf, write_safetensors
from interchange.init_from import read_params, require_same_network, require_same_vocabulary
from model.gpt import GPT
from tests.helpers import FEATURES, TINY, arrays_of, perturbed
from training.mesh import make_mesh, resized
from training.state import abstract_params

TOKENIZER = train_tokenizer(["to be or not to be " * 20, "that is the question " * 20], 272)
EXPORTED = {name: options for name, options in FEATURES.items() if options.keys() <= IN_HF | REMOTE}
"""The features that the modeling file computes, too."""
OTHER = train_tokenizer(["a vocabulary of other words entirely " * 20], 272)


def network(model=TINY, **options):
    """Return the config of a run, and parameters for it."""
    config = Config(name="one", model=replace(model, **options))
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


def require_refused(config, message: str, **options):
    """Require that the network with these options is another one than the folder's, with this reason."""
    with pytest.raises(UserError, match=message):
        require_same_network(replace(config, model=replace(config.model, **options)))


def test_another_network_is_refused_and_all_wrong_arrays_are_named(written):
    config, folder = written
    require_refused(config, "is of another network than the options ask for:\n  softcap: 15.0, not 20.0", softcap=20.0)
    require_refused(config, "heads: 4, not 2", heads=2, kv_heads=1, head_dim=16)
    require_refused(config, "smear: False, not True", smear=True)
    require_refused(config, "model.layers.2.mlp.fc1.weight: missing", depth=3)
    with pytest.raises(UserError, match="has another vocabulary than the data"):
        require_same_vocabulary(config, OTHER)
    arrays = load_file(folder / "model.safetensors")
    del arrays["lm_head.weight"]
    arrays["model.layers.7.mlp.fc1.weight"] = np.zeros((3, 3), np.float32)
    arrays["model.layers.1.mlp.fc2.weight"] = np.zeros((32, 99), np.float32)
    save_file(arrays, folder / "model.safetensors")
    require_refused(
        config,
        r"lm_head.weight: missing, not \(272, 32\)\n"
        r"  model.layers.1.mlp.fc2.weight: \(32, 99\), not \(32, 128\)\n"
        r"  model.layers.7.mlp.fc1.weight: \(3, 3\), not there",
    )
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    require_refused(config, "cannot be read")
    require_refused(replace(config, init_from=str(folder.parent)), r"no \*\.safetensors there")


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Write plain safetensors. Return a config that starts from them, whose blocks see 5, all, and all positions."""
    config, params = network(depth=3, window_pattern="SL", short_window=5)
    folder = tmp_path_factory.mktemp("plain") / "out"
    write_safetensors(folder, [arrays_of(params)], config, TOKENIZER)
    return replace(config, init_from=str(folder)), folder


def test_options_that_keep_the_function_may_differ_and_others_not(windows):
    config, _ = windows
    for options in (
        *({"loss_chunks": 4}, {"z_loss": 1e-4}, {"remat": "block"}, {"dtype": "bfloat16"}),
        *({"window_pattern": "SLS"}, {"window_pattern": "SLLLL"}),
    ):
        require_same_network(replace(config, model=replace(config.model, **options)))
    require_refused(config, "rotary_base: 100000.0, not 1234.0", rotary_base=1234.0)
    require_refused(config, r"short_window\): \[5, None, None\], not \[6, None, None\]", short_window=6)
    require_refused(config, r"\[5, None, None\], not \[512, None, None\]", short_window=0)
    require_refused(config, r"not \[None, None, None\]", window_pattern="L")
    require_refused(config, r"blocks\.0\.mlp\.up\.kernel: \(32, 128\), not \(64, 256\)", width=64, heads=8)


def test_every_shipped_config_s_network_can_be_exported():
    for name in shipped():
        assert set(beyond_hf(load_config(f"configs/{name}.py")[0].model)) <= REMOTE, name
    assert beyond_hf(replace(TINY, z_loss=1e-4, dropout=0.1, dtype="bfloat16")) == []  # of training only


def test_an_option_that_the_modeling_file_lacks_is_refused(tmp_path, monkeypatch):
    assert all(beyond_hf(replace(TINY, **options | {"depth": 3})) for options in EXPORTED.values())
    config, params = network(smear=True)
    monkeypatch.setattr("interchange.folders.REMOTE", set())
    with pytest.raises(UserError, match=r"modeling_tokensum.py has no model\.smear, which"):
        write_hf(tmp_path / "none", [arrays_of(params)], config, TOKENIZER)
    assert not (tmp_path / "none").exists()
