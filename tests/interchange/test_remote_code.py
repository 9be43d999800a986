"""Every network leaves for transformers and comes back: the modeling file that export.py writes computes what
model/gpt.py does.

Needs `make setup EXTRA=interop`, as test_transformers.py.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import export
from configs.schema import BatchConfig, Config, MeshConfig, UserError, resolved
from data.tokenizer import train_tokenizer
from evaluation.generation import make_generate
from interchange.init_from import config_of, read_params, require_same_network
from interchange.safetensors import arrays_of
from interchange.transformers import write_hf
from interchange.verify import largest_difference
from model.gpt import GPT
from tests.helpers import TINY, perturbed, together
from tests.interchange.test_interchange import EXPORTED
from training.mesh import make_mesh, resized
from training.state import abstract_params

TEXTS = ["to be or not to be, that is the question. " * 8, "whether it is nobler in the mind to suffer " * 8]
TOKENIZER = train_tokenizer(TEXTS, TINY.vocab_size)
ALL_EXPORTED = together(EXPORTED)
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 40), np.int32)


def network(**options):
    config = resolved(Config(name="one", model=replace(TINY, **options), batch=BatchConfig(sequence_length=64)))
    start = nnx.to_pure_dict(nnx.state(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0))))
    return config, jax.tree.map(np.asarray, perturbed(start))


@pytest.fixture(scope="module", autouse=True)
def modules_of_their_own(tmp_path_factory):
    """Where transformers keeps the modeling files that it has read."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All features: config, parameters, and the folder that was written, in several shards."""
    config, params = network(**ALL_EXPORTED)
    arrays = arrays_of(params)
    names = sorted(arrays)
    shards = [{name: arrays[name] for name in part} for part in (names[:7], names[7:9], names[9:])]
    folder = tmp_path_factory.mktemp("remote") / "out"
    write_hf(folder, shards, config, TOKENIZER)
    return config, params, folder


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_logits_with_all_features_are_equal(everything):
    config, params, folder = everything
    difference, size = largest_difference(folder, params, config.model, TOKENS)
    assert difference < 1e-4 and size > 0.1
    assert type(loaded(folder)).__name__ == "TokensumForCausalLM"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_logits_with_each_feature_are_equal(tmp_path, name):
    config, params = network(**EXPORTED[name])
    write_hf(tmp_path / "out", [arrays_of(params)], config, TOKENIZER)
    assert largest_difference(tmp_path / "out", params, config.model, TOKENS)[0] < 1e-4


def test_greedy_continuations_with_the_cache_are_equal(everything):
    config, params, folder = everything
    generate = make_generate(config.model, jnp.dtype("float32"), make_mesh(MeshConfig(), jax.devices()[:1]))
    prompts = TOKENS[:, :5]
    buffer = np.concatenate([prompts, np.zeros((2, 64), np.int32)], axis=1)
    lengths = np.array([5, 5], np.int32)
    ours = np.asarray(generate(params, buffer, lengths, np.zeros(2, np.int32), prefill=5, temperature=0.0, top_k=0))
    theirs = loaded(folder)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, ones = torch.tensor(prompts, dtype=torch.long), torch.ones(2, 5)
    with_cache = theirs.generate(ids, attention_mask=ones, max_new_tokens=64, **options)
    np.testing.assert_array_equal(ours, with_cache.numpy())
    options["max_new_tokens"] = 12
    without = theirs.generate(ids, attention_mask=ones, use_cache=False, **options)
    np.testing.assert_array_equal(ours[:, :17], without.numpy())
    # Padded on the left, beside a longer one.
    longer = torch.tensor(np.stack([np.concatenate([[0, 0, 0], prompts[0]]), TOKENS[1, :8]]), dtype=torch.long)
    padding = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    padded = theirs.generate(longer, attention_mask=padding, **options)
    np.testing.assert_array_equal(ours[0, 5:17], padded[0, 8:].numpy())
    beams = theirs.generate(ids, attention_mask=ones, num_beams=3, **options)
    same = theirs.generate(ids, attention_mask=ones, num_beams=3, use_cache=False, **options)
    np.testing.assert_array_equal(beams.numpy(), same.numpy())


def test_a_cache_without_the_token_before_is_refused(everything):
    theirs, ids = loaded(everything[2]), torch.tensor(TOKENS[:, :5], dtype=torch.long)
    cache = theirs(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="needs previous_ids"):
        theirs(ids[:, :1], past_key_values=cache)


def test_it_comes_back_to_the_bit(everything):
    config, params, folder = everything
    config = replace(config, init_from=str(folder))
    require_same_network(config)
    back = read_params(config, abstract_params(config.model, make_mesh(MeshConfig())))
    unpadded = lambda ours, theirs: np.testing.assert_array_equal(ours, resized(theirs, ours.shape))
    jax.tree.map(unpadded, params, jax.device_get(back))


def test_what_transformers_saved_again_comes_back_to_the_bit(everything, tmp_path):
    """Of config.json alone, as after fine-tuning."""
    config, params, folder = everything
    loaded(folder).save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "tokensum.json").exists()
    again = config_of(tmp_path / "again")
    theirs, ours = (vars(of.model) | {"window_pattern": "", "short_window": ""} for of in (again, config))
    assert theirs == ours | {"dtype": theirs["dtype"]}
    config = replace(config, init_from=str(tmp_path / "again"))
    require_same_network(config)
    back = read_params(config, abstract_params(config.model, make_mesh(MeshConfig())))
    unpadded = lambda ours, theirs: np.testing.assert_array_equal(ours, resized(theirs, ours.shape))
    jax.tree.map(unpadded, params, jax.device_get(back))
    with pytest.raises(UserError, match=r"softcap: 15\.0, not 9\.0"):
        require_same_network(replace(config, model=replace(config.model, softcap=9.0)))


def test_more_tokens_find_room_in_every_table(everything):
    theirs = loaded(everything[2])
    before = theirs(torch.tensor(TOKENS)).logits
    size = TINY.vocab_size + 5
    theirs.resize_token_embeddings(size)
    tables = [module for module in theirs.modules() if isinstance(module, torch.nn.Embedding)]
    assert len(tables) > 1 and {table.num_embeddings for table in tables} == {size} == {theirs.config.vocab_size}
    after = theirs(torch.tensor(TOKENS)).logits
    torch.testing.assert_close(after[..., : TINY.vocab_size], before)
    theirs(torch.full((1, 3), size - 1))


def test_a_cache_of_a_fixed_size_gives_the_same_text(everything):
    theirs, ids = loaded(everything[2]), torch.tensor(TOKENS[:, :5], dtype=torch.long)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
    for mask in (torch.ones(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])):
        usual, fixed = (
            theirs.generate(ids, attention_mask=mask, cache_implementation=kind, **options) for kind in (None, "static")
        )
        np.testing.assert_array_equal(usual.numpy(), fixed.numpy())


def test_gradient_checkpointing_changes_no_gradient(everything):
    gradients = []
    for checkpointing in (False, True):
        theirs = loaded(everything[2]).train()
        if checkpointing:
            theirs.gradient_checkpointing_enable()
            assert theirs.is_gradient_checkpointing
        theirs(torch.tensor(TOKENS), labels=torch.tensor(TOKENS, dtype=torch.long)).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in theirs.named_parameters()})
    torch.testing.assert_close(*gradients)


def test_bfloat16_is_the_rounded_network(everything, tmp_path):
    config, params, _ = everything
    write_hf(tmp_path / "out", [arrays_of(params)], config, TOKENIZER, "bfloat16")
    assert loaded(tmp_path / "out").dtype == torch.bfloat16
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), params)
    assert largest_difference(tmp_path / "out", rounded, config.model, TOKENS)[0] < 1e-4
    assert largest_difference(tmp_path / "out", params, config.model, TOKENS)[0] > 1e-3


def test_a_run_with_all_features_is_exported_in_shards_and_verified(tmp_path, monkeypatch, capsys):
    """train.py, export.py --verify, train.py --init_from: the commands."""
    from tests.test_train import CONFIG, run

    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)
    Path("text").mkdir()
    for i in range(30):
        Path(f"text/{i}.txt").write_text(f"{i} " + TEXTS[i % 2])
    options = [f"--model.{name}" + f"={value}" * (value is not True) for name, value in ALL_EXPORTED.items()]
    options = ["--config=tiny.py", "--steps=4", "--batch.rows_per_device=2", *options]
    assert run("train", monkeypatch, *options, "--run_dir=first") == 0
    exported = lambda *more: monkeypatch.setattr(sys, "argv", ["export", "--run_dir=first", *more]) or export.main()
    assert exported("--out=hf", "--shard_gigabytes=0.00005", "--verify") == 0
    said = capsys.readouterr().out
    assert "logits of 64 tokens" in said and len(list(Path("hf").glob("*.safetensors"))) > 3
    assert run("train", monkeypatch, *options, "--run_dir=second", "--init_from=hf") == 0

    monkeypatch.setattr("export.BOUND", 0.0)
    with pytest.raises(RuntimeError, match=r"above 0\.0, so other was removed"):
        exported("--out=other", "--verify")
    assert not Path("other").exists()
