"""Test a run's first state from another network."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.schema import CheckpointConfig, Config, MeshConfig, UserError, with_options
from data.tokenizer import BOS, CHAT_TOKENS, load_tokenizer
from data.tokenizer_formats import SPLIT, convert_tiktoken
from interchange.base import base_of_chat
from interchange.folders import write_safetensors
from interchange.init_from import initial_state, require_moments, require_same_network, require_same_vocabulary
from model.gpt import parameter_shapes
from run.folder import write_record
from run.record import local_path, upload
from run.saver import Saver
from tests.helpers import arrays_of, perturbed, tiny_config
from training.build import build
from training.mesh import resized
from training.state import TrainState

CONFIG = tiny_config(value_embeddings=True, resid_lambdas=True)
TOKENIZER = convert_tiktoken(
    {bytes([byte]): byte for byte in range(256)}, SPLIT, {name: 256 + i for i, name in enumerate((BOS, *CHAT_TOKENS))}
)


def write_run(folder: Path, config: Config, state: TrainState) -> None:
    """Write a run that has saved this state, on the devices, after one step."""
    write_record(folder / "config.json", config, "a text's", [])
    TOKENIZER.save(folder / "tokenizer")
    checkpoints = Saver(folder, CheckpointConfig())
    checkpoints.save(1, state, {"tokens": 1, "shapes": parameter_shapes(config.model)})
    checkpoints.wait()


def base(folder, as_run):
    """Write a network, as a run or as an export. Return its state, on the host."""
    built = build(CONFIG, jax.devices()[:1])
    state = jax.device_get(built.create_state())
    state = state._replace(params=perturbed(state.params), opt_state=perturbed(state.opt_state, 1))
    if as_run:
        write_run(folder, CONFIG, jax.device_put(state, jax.devices()[0]))
    else:
        write_safetensors(folder, [arrays_of(state.params)], CONFIG, TOKENIZER)
    return state


@pytest.mark.medium
@pytest.mark.parametrize("as_run", [True, False])
def test_the_first_state_is_the_network_s_with_a_run_s_moments(tmp_path, as_run):
    before = base(tmp_path / "base", as_run)
    config = replace(CONFIG, init_from=str(tmp_path / "base"), init_optimizer=as_run, mesh=MeshConfig(2, 2, 2))
    require_same_network(config)
    require_same_vocabulary(config, TOKENIZER)
    built = build(config)
    state = jax.device_get(initial_state(built))
    unpadded = lambda tree, like: jax.tree.map(lambda leaf, want: resized(leaf, want.shape), tree, like)
    jax.tree.map(np.testing.assert_array_equal, unpadded(state.params, before.params), before.params)
    moments = before.opt_state if as_run else jax.device_get(built.create_state()).opt_state
    jax.tree.map(np.testing.assert_array_equal, unpadded(state.opt_state, moments), moments)
    assert state.step == state.skipped_steps == 0
    with pytest.raises(UserError, match="vocab_size: 272, not 280"):
        require_same_network(with_options(config, {"model.vocab_size": 280}))


def test_a_start_copies_a_run_in_a_bucket_once(tmp_path, gcs, monkeypatch):
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    there = "gs://bucket/copied-once"
    write_record(local_path(there) / "config.json", CONFIG, "", [])
    TOKENIZER.save(local_path(there) / "tokenizer")
    upload(there)
    config = replace(CONFIG, init_from=there)
    gcs.asked.clear()
    tokenizer = load_tokenizer(base_of_chat(config).tokenizer)
    require_same_network(config)
    require_moments(config)
    require_same_vocabulary(config, tokenizer)
    assert sum("tokenizer.json" in asked and "alt=media" in asked for asked in gcs.asked) == 1


def test_moments_are_a_run_s_with_the_same_optimizer(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    write_record(tmp_path / "run" / "config.json", CONFIG, "", [])
    config = replace(CONFIG, init_from=str(tmp_path / "export"), init_optimizer=True)
    with pytest.raises(UserError, match=r"takes the moments of a run, and --init_from=.*export is none"):
        require_moments(config)
    config = replace(config, init_from=str(tmp_path / "run"))
    require_moments(config)
    with pytest.raises(UserError, match=r"trained with --optimizer.matrices.kind=adamw, not muon"):
        require_moments(with_options(config, {"optimizer.matrices.kind": "muon"}))
