"""Test a run's first state from another network."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from data.prepare.selection import train_tokenizer
from data.tokenizer import load_tokenizer
from options.schema import MeshConfig, with_options
from run.base import base_of_chat
from run.config_json import write_config_json
from run.folder import RunFolder
from run.init_from import initial_state, origin_of, require_moments, require_same_network, require_same_vocabulary
from system.errors import UserError
from tests.helpers import perturbed, tiny_config
from tests.run.written import TOKENIZER, write_run
from training.build import build
from training.mesh import resized

CONFIG = tiny_config(value_embeddings=True, resid_lambdas=True)
OTHER = train_tokenizer(["a vocabulary of other words entirely " * 20], 272)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Write a run. Return its folder, and its state on the host."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    state = jax.device_get(build(CONFIG, jax.devices()[:1]).create_state())
    state = state._replace(params=perturbed(state.params), opt_state=perturbed(state.opt_state, 1))
    write_run(folder, CONFIG, jax.device_put(state, jax.devices()[0]))
    return folder, state


@pytest.mark.medium
@pytest.mark.parametrize("moments", [True, False])
def test_the_first_state_is_the_network_s_with_or_without_its_moments(base, moments):
    folder, before = base
    config = replace(CONFIG, init_from=str(folder), init_optimizer=moments, mesh=MeshConfig(2, 2, 2))
    origin = RunFolder(folder)
    require_same_network(config, origin)
    require_same_vocabulary(origin, TOKENIZER)
    with pytest.raises(UserError, match="has another vocabulary than the data"):
        require_same_vocabulary(origin, OTHER)
    built = build(config)
    state = jax.device_get(initial_state(built))
    unpadded = lambda tree, like: jax.tree.map(lambda leaf, want: resized(leaf, want.shape), tree, like)
    jax.tree.map(np.testing.assert_array_equal, unpadded(state.params, before.params), before.params)
    wanted = before.opt_state if moments else jax.device_get(built.create_state()).opt_state
    jax.tree.map(np.testing.assert_array_equal, unpadded(state.opt_state, wanted), wanted)
    assert state.step == state.skipped_steps == 0
    with pytest.raises(UserError, match="vocab_size: 272, not 280"):
        require_same_network(with_options(config, {"model.vocab_size": 280}), origin)


def test_options_that_keep_the_function_may_differ_and_others_not(tmp_path):
    model = replace(CONFIG.model, depth=3, window_pattern="SL", short_window=5)  # blocks see 5, all, and all positions
    config = replace(CONFIG, model=model, init_from=str(tmp_path))
    origin = RunFolder(tmp_path)
    write_config_json(tmp_path / "config.json", config, "", [])
    for options in (
        *({"loss_chunks": 4}, {"dropout": 0.1}, {"remat": "block"}, {"dtype": "bfloat16"}),
        *({"window_pattern": "SLS"}, {"window_pattern": "SLLLL"}),
    ):
        require_same_network(replace(config, model=replace(model, **options)), origin)
    for options, message in (
        ({"softcap": 20.0}, "is of another network than the options ask for:\n  softcap: 15.0, not 20.0"),
        ({"heads": 2, "kv_heads": 1, "head_dim": 16}, "heads: 4, not 2"),
        ({"smear": True}, "smear: False, not True"),
        ({"rotary_base": 1234.0}, "rotary_base: 100000.0, not 1234.0"),
        ({"short_window": 6}, r"short_window\): \[5, None, None\], not \[6, None, None\]"),
        ({"short_window": 0}, r"\[5, None, None\], not \[128, None, None\]"),
        ({"window_pattern": "L"}, r"not \[None, None, None\]"),
    ):
        with pytest.raises(UserError, match=message):
            require_same_network(replace(config, model=replace(model, **options)), origin)


def test_a_start_copies_a_run_in_a_bucket_once(tmp_path, gcs, monkeypatch):
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    there = "gs://bucket/copied-once"
    written = RunFolder(there)
    write_config_json(written.config_json, CONFIG, "", [])
    TOKENIZER.save(written.tokenizer)
    written.upload()
    config = replace(CONFIG, init_from=there)
    gcs.asked.clear()
    tokenizer = load_tokenizer(base_of_chat(config).data.tokenizer)
    origin = origin_of(config, RunFolder(tmp_path))
    require_same_network(config, origin)
    require_moments(config, origin)
    require_same_vocabulary(origin, tokenizer)
    assert sum("tokenizer.json" in asked and "alt=media" in asked for asked in gcs.asked) == 1


def test_moments_are_a_run_s_with_the_same_optimizer(tmp_path):
    write_config_json(tmp_path / "run" / "config.json", CONFIG, "", [])
    config = replace(CONFIG, init_from=str(tmp_path / "run"), init_optimizer=True)
    origin = RunFolder(tmp_path / "run")
    require_moments(config, origin)
    with pytest.raises(UserError, match=r"trained with --optimizer.matrices.kind=adamw, not muon"):
        require_moments(with_options(config, {"optimizer.matrices.kind": "muon"}), origin)
