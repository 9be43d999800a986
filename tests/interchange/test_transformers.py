"""Our network and transformers' NanoChatForCausalLM are one: the same logits, greedy continuations and gradients.

Needs `make setup EXTRA=interop`; .ci/run has it, the ordinary tests do without.
"""

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


import export
from configs.schema import BatchConfig, Config, MeshConfig, ModelConfig
from data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from evaluation.generation import make_generate
from interchange.init_from import read_params, require_same_network
from interchange.safetensors import arrays_of
from interchange.transformers import hf_name, turned, write_hf
from model.gpt import GPT
from model.loss import loss_sums, softcap
from run.lines import read_metrics
from tests.helpers import perturbed
from training.mesh import make_mesh, resized
from training.optimizer import path_name
from training.state import abstract_params

SIZES = {
    "plain": ModelConfig(depth=2, width=64, heads=4, kv_heads=4, head_dim=16, vocab_size=300),
    "grouped": ModelConfig(depth=3, width=96, heads=6, kv_heads=2, head_dim=16, vocab_size=300),
    "one key head": ModelConfig(depth=1, width=64, heads=2, kv_heads=1, head_dim=32, vocab_size=300),
    "wide heads": ModelConfig(depth=2, width=64, heads=4, kv_heads=2, head_dim=32, vocab_size=300),
    "other constants": ModelConfig(
        depth=2, width=64, heads=2, kv_heads=2, head_dim=32, vocab_size=300, softcap=9.0, rotary_base=1234.0
    ),
}
TEXTS = ["to be or not to be, that is the question. " * 8, "whether it is nobler in the mind to suffer " * 8]
TOKENIZER = train_tokenizer(TEXTS, 300)
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 40))


@pytest.fixture(scope="module", params=SIZES.values(), ids=SIZES)
def pair(request, tmp_path_factory):
    """Our network, and transformers' as it loads what we write."""
    config = Config(name="pair", model=request.param, batch=BatchConfig(sequence_length=64))
    graphdef, state = nnx.split(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    params = perturbed(nnx.to_pure_dict(state))
    folder = tmp_path_factory.mktemp("hf") / "out"
    write_hf(folder, [arrays_of(params)], config, TOKENIZER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == "NanoChatForCausalLM"
    return config, graphdef, params, theirs, folder


def test_logits_are_equal(pair):
    config, graphdef, params, theirs, _ = pair
    ours = softcap(nnx.merge(graphdef, params)(jnp.asarray(TOKENS))[0], config.model.softcap)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert np.std(expected) > 0.1


def test_greedy_continuations_are_equal(pair):
    config, _, params, theirs, _ = pair
    generate = make_generate(config.model, jnp.dtype("float32"), make_mesh(MeshConfig(), jax.devices()[:1]))
    prompts = TOKENS[:, :5]
    buffer = np.concatenate([prompts, np.zeros((2, 64), int)], axis=1).astype(np.int32)
    lengths = np.array([5, 5], np.int32)
    ours = generate(params, buffer, lengths, np.zeros(2, np.int32), prefill=5, temperature=0.0, top_k=0)
    expected = theirs.generate(
        torch.tensor(prompts), attention_mask=torch.ones(2, 5), max_new_tokens=64, do_sample=False, eos_token_id=None
    )
    np.testing.assert_array_equal(ours, expected.numpy())


def test_gradients_of_the_mean_loss_are_equal_parameter_by_parameter(pair):
    _, graphdef, params, theirs, _ = pair
    inputs, targets = jnp.asarray(TOKENS[:, :-1], jnp.int32), jnp.asarray(TOKENS[:, 1:], jnp.int32)
    weights = jnp.ones(inputs.shape)

    def mean(params):
        objective, (_, count) = loss_sums(nnx.merge(graphdef, params), inputs, targets, weights)
        return objective / count

    loss, gradients = jax.value_and_grad(mean)(params)
    theirs.zero_grad()
    expected = theirs(torch.tensor(TOKENS), labels=torch.tensor(TOKENS)).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    by_name = dict(theirs.named_parameters())
    compared = 0
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = path_name(path)
        theirs_is = by_name[hf_name(name)].grad.numpy()
        difference = np.linalg.norm(turned(name, np.asarray(gradient)) - theirs_is) / np.linalg.norm(theirs_is)
        assert difference < 1e-4, name
        compared += 1
    assert compared == len(by_name)


def test_a_round_trip_changes_no_bit(pair, tmp_path):
    """To transformers, out of it again, and back."""
    config, _, params, theirs, _ = pair
    theirs.save_pretrained(tmp_path / "again", max_shard_size="40kB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    config = replace(config, init_from=str(tmp_path / "again"))
    require_same_network(config)
    back = read_params(config, abstract_params(config.model, make_mesh(MeshConfig())))
    unpadded = lambda ours, theirs: np.testing.assert_array_equal(ours, resized(theirs, ours.shape))
    jax.tree.map(unpadded, params, jax.device_get(back))


def test_the_tokenizer_is_the_same(pair):
    *_, folder = pair
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "naïve 你好\n\n  x"]:
        ids = TOKENIZER.encode([text])[0]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids and theirs.decode(ids) == text
        assert theirs(text)["input_ids"] == [TOKENIZER.bos, *ids]  # as each document of training
    assert theirs.bos_token_id == TOKENIZER.bos
    assert load_tokenizer(folder).sha256 == TOKENIZER.sha256


def test_a_tokenizer_that_has_a_post_processor_keeps_it_and_writes_the_bos():
    content = json.loads(TOKENIZER.json)
    theirs = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    other = TextTokenizer(json.dumps(content | {"post_processor": theirs}))
    written = Tokenizer.from_str(other.json_with_bos)
    assert written.encode("to be").ids == [other.bos, *other.encode(["to be"])[0]]
    again = TextTokenizer(other.json_with_bos)
    assert again.json_with_bos == again.json


def test_bfloat16_of_others_is_read(pair, tmp_path):
    config, _, params, _, _ = pair
    transformers.AutoModelForCausalLM.from_pretrained(pair[4], dtype=torch.bfloat16).save_pretrained(tmp_path)
    config = replace(config, init_from=str(tmp_path))
    back = read_params(config, abstract_params(config.model, make_mesh(MeshConfig())))
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
    unpadded = lambda ours, theirs: np.testing.assert_array_equal(ours, resized(theirs, ours.shape))
    jax.tree.map(unpadded, rounded, jax.device_get(back))


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_a_run_is_exported_loaded_and_continued_as_another(tmp_path, monkeypatch, capsys):
    """train.py, export.py, transformers, train.py --init_from: the commands."""
    from tests.test_train import CONFIG, run

    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)
    Path("text").mkdir()
    words = (Path(__file__).parents[2] / "train.py").read_text().split()
    for i in range(30):
        Path(f"text/{i}.txt").write_text(" ".join(words[i:] + words[:i]))
    short = ["--steps=40", "--batch.rows_per_device=2"]
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=first", *short) == 0
    monkeypatch.setattr(sys, "argv", ["export", "--run_dir=first", "--out=hf", "--license=mit"])
    assert export.main() == 0
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path("hf").iterdir()} == {0o666 & ~umask()}
    card = Path("hf/README.md").read_text()
    bits = read_metrics("first")[-1]["val_bpb"]
    for said in ("license: mit", "AutoModelForCausalLM", "20,480 tokens, 40 steps", "text |", f"{bits:.4f}"):
        assert said in card, said
    theirs = transformers.AutoModelForCausalLM.from_pretrained("hf")
    tokens = torch.tensor([[load_tokenizer("hf").bos, 5, 6]])
    assert theirs.generate(tokens, max_new_tokens=5, do_sample=False).shape == (1, 8)
    assert run("train", monkeypatch, "--config=tiny.py", "--run_dir=second", "--init_from=hf", *short) == 0
    first, second = (read_metrics(name) for name in ("first", "second"))
    assert second[0]["val_loss"] == pytest.approx(first[-1]["val_loss"], rel=1e-6)
    assert second[-1]["val_loss"] < first[-1]["val_loss"]
