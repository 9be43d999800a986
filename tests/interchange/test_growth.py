"""Test a run's first state from a network whose tokenizer lacks the tokens of conversations."""

import math
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from configs.schema import CheckpointConfig, MeshConfig, UserError, with_options
from data.tokenizer import CHAT_TOKENS, SPLIT, convert_tiktoken, load_tokenizer
from interchange.base import base_of_chat
from interchange.folders import write_safetensors
from interchange.growth import describe_growth, initial_state, new_tokens, require_moments
from interchange.init_from import require_same_network, require_same_vocabulary
from model.gpt import parameter_shapes
from run.folder import write_record
from run.record import Record
from run.saver import Saver
from tests.helpers import arrays_of, perturbed, tiny_config
from training.build import build
from training.mesh import resized
from training.optimizer import path_name

CONFIG = tiny_config(value_embeddings=True)  # 272 tokens
ALPHABET = "abcdefghijklmnop"
BYTES = {bytes([byte]): byte for byte in range(256)}
PAIRS = {(a + b).encode(): 256 + i for i, (a, b) in enumerate(pairwise(ALPHABET))}
OLD = {
    "fits": convert_tiktoken(BYTES, SPLIT, {"<|bos|>": 256}),  # 15 rows of the network are untrained
    "grows": convert_tiktoken(BYTES | PAIRS, SPLIT, {"<|bos|>": 271}),
}
SIZES = {"fits": 272, "grows": 280}


def base(folder, kind, as_run):
    """Write a network with an old tokenizer, as a run or as an export. Return its state, on the host."""
    built = build(CONFIG, jax.devices()[:1])
    state = jax.device_get(built.create_state())
    state = state._replace(params=perturbed(state.params), opt_state=perturbed(state.opt_state, 1))
    if as_run:
        write_record(folder / "config.json", CONFIG, "", [])
        OLD[kind].save(folder / "tokenizer")
        checkpoints = Saver(folder, CheckpointConfig())
        facts = {"shapes": parameter_shapes(CONFIG.model)}
        checkpoints.save(3, jax.device_put(state, jax.devices()[0]), facts)
        checkpoints.close()
    else:
        write_safetensors(folder, [arrays_of(state.params)], CONFIG, OLD[kind])
    return state


@pytest.mark.parametrize(
    "kind, as_run, mesh", [("fits", True, (1, 1, 1)), ("grows", True, (2, 2, 2)), ("grows", False, (1, 1, 1))]
)
def test_rows_are_added_for_the_tokens_of_conversations_and_nothing_else_changes(tmp_path, kind, as_run, mesh):
    old, folder, size = OLD[kind], tmp_path / "base", SIZES[kind]
    before, tokenizer = base(folder, kind, as_run), old.with_chat_tokens
    values = {"model.vocab_size": size, "init_from": str(folder), "init_optimizer": as_run}
    config = replace(with_options(CONFIG, values), mesh=MeshConfig(*mesh))
    require_same_network(config)
    require_same_vocabulary(config, tokenizer)
    assert new_tokens(config, tokenizer) == {name: old.vocab_size + i for i, name in enumerate(CHAT_TOKENS)}
    assert ("model.vocab_size: 272 -> 280" in describe_growth(config, tokenizer)) == (kind == "grows")

    built = build(config, jax.devices()[: math.prod(mesh)])
    state = jax.device_get(initial_state(built, tokenizer))
    new, used = np.arange(old.vocab_size, tokenizer.vocab_size), np.arange(old.vocab_size)
    kept = np.setdiff1d(np.arange(size), new)

    def compare(tree, expected, mean):
        count = 0
        for (path, leaf), want in zip(
            jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(expected), strict=True
        ):
            name = path_name(path)
            axis = 1 if name.endswith("lm_head.kernel") else 0
            if not name.endswith(("lm_head.kernel", ".table")):
                np.testing.assert_array_equal(resized(leaf, want.shape), want)
                continue
            leaf, want, count = np.moveaxis(leaf, axis, 0), np.moveaxis(want, axis, 0), count + 1
            np.testing.assert_array_equal(leaf[kept], want[kept])
            rows = want[used].mean(0) if mean else 0 * want[0]
            np.testing.assert_allclose(leaf[new], np.broadcast_to(rows, leaf[new].shape), rtol=1e-5, atol=1e-7)
            assert not leaf[size:].any()  # padding
        return count

    assert compare(state.params, before.params, mean=True) == 3  # the embedding, the head and a value embedding
    assert state.step == state.skipped_steps == 0
    moments = before.opt_state if as_run else jax.device_get(built.create_state()).opt_state
    compare(state.opt_state, moments, mean=False)


def test_a_network_with_the_tokens_stays_unchanged(tmp_path):
    before = base(tmp_path / "base", "fits", False)
    config = replace(CONFIG, init_from=str(tmp_path / "base"))
    state = initial_state(build(config, jax.devices()[:1]), OLD["fits"])
    assert describe_growth(config, OLD["fits"]) == ""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before.params)
    with pytest.raises(UserError, match="vocab_size: 272, not 280"):  # it needs no more rows
        require_same_network(with_options(config, {"model.vocab_size": 280}))


def test_a_start_copies_a_run_in_a_bucket_once(tmp_path, gcs, monkeypatch):
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    write_record(tmp_path / "run/config.json", CONFIG, "", [])
    OLD["fits"].save(tmp_path / "run/tokenizer")
    Record(tmp_path / "run", "gs://bucket/copied-once").copy()
    config = replace(CONFIG, init_from="gs://bucket/copied-once")
    gcs.asked.clear()
    tokenizer = load_tokenizer(base_of_chat(config).tokenizer)
    require_same_network(config)
    require_moments(config)
    require_same_vocabulary(config, tokenizer)
    assert describe_growth(config, tokenizer)
    assert sum("tokenizer.json" in asked and "alt=media" in asked for asked in gcs.asked) == 1


def test_moments_are_a_run_s_with_the_same_optimizer(tmp_path):
    base(tmp_path / "export", "fits", False)
    base(tmp_path / "run", "fits", True)
    config = replace(CONFIG, init_from=str(tmp_path / "export"), init_optimizer=True)
    with pytest.raises(UserError, match=r"takes the moments of a run, and --init_from=.*export is none"):
        require_moments(config)
    config = replace(config, init_from=str(tmp_path / "run"))
    require_moments(config)
    with pytest.raises(UserError, match=r"trained with --optimizer.matrices.kind=adamw, not muon"):
        require_moments(with_options(config, {"optimizer.matrices.kind": "muon"}))
