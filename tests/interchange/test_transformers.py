"""Export networks to transformers and read them back. Its NanoChatForCausalLM, or the modeling file that export.py
writes, gives our logits, greedy continuations and gradients.

Needs `make setup EXTRA=interop`; .ci/run has it, the ordinary tests do without.
"""

import json
import os
import re
import shutil
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

from run.folder import RunFolder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import CausalLMOutputWithPast

import export
from data.prepare.selection import train_tokenizer
from data.tokenizer import TextTokenizer
from data.tokenizer_formats import find_tokenizer
from interchange import convert
from interchange.folders import beyond_hf, json_with_bos, write_hf
from interchange.formats import MODELING, hf_name, own_name, turned
from interchange.verification import largest_difference, verify
from model.gpt import GPT
from model.loss import loss_sums
from options.schema import BatchConfig, ModelConfig
from options.validation import resolved
from tests.helpers import TINY, arrays_of, sharded
from tests.interchange.networks import ALL_EXPORTED, network, require_params
from training.optimizer import path_name

SIZES = {
    "plain": ModelConfig(depth=2, width=64, heads=4, kv_heads=4, head_dim=16, vocab_size=300),
    "other sizes and constants": ModelConfig(
        depth=3, width=64, heads=4, kv_heads=2, head_dim=32, vocab_size=300, softcap=9.0, rotary_base=1234.0
    ),
    "value embeddings of early 2026": replace(
        TINY,
        vocab_size=300,
        value_embeddings=True,
        value_embedding_every=1,
        value_gate_channels=32,
        value_gate_limit=2.0,
    ),
}
TEXTS = ["to be or not to be, that is the question. " * 8, "whether it is nobler in the mind to suffer " * 8]
TOKENIZER = train_tokenizer(TEXTS, 300)
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 40), np.int32)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
pytestmark = pytest.mark.usefixtures("modules_of_their_own")
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


def written(folder: Path, model: ModelConfig):
    """Write a network in two shards. Return its config, its parameters and the folder."""
    config, params = network(model)
    config = resolved(replace(config, batch=BatchConfig(sequence_length=64)))
    arrays = list(arrays_of(params).items())
    write_hf(folder, [dict(arrays[:3]), dict(arrays[3:])], config, TOKENIZER)
    return config, params, folder


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Write a network with all features, which need the modeling file."""
    return written(tmp_path_factory.mktemp("own") / "out", replace(TINY, vocab_size=300, **ALL_EXPORTED))


@pytest.fixture(scope="module", params=[*SIZES, "all features"])
def pair(request, tmp_path_factory, everything):
    if request.param == "all features":
        return everything
    return written(tmp_path_factory.mktemp("hf") / "out", SIZES[request.param])


def greedy(config, params, tokens):
    """Return our greedy tokens after the first five tokens of each row."""
    full = jax.jit(sharded(config.model).with_params(params))
    buffer = np.concatenate([TOKENS[:, :5], np.zeros((2, tokens), np.int32)], axis=1)
    for position in range(5, buffer.shape[1]):
        buffer[:, position] = full(buffer)[0][:, position - 1].argmax(axis=-1)
    return buffer


@pytest.mark.medium
def test_continuations_are_the_same_with_any_cache_padded_and_with_beams(everything):
    config, params, folder = everything
    ours, theirs = greedy(config, params, 64), loaded(folder)
    ids, ones = torch.tensor(TOKENS[:, :5], dtype=torch.long), torch.ones(2, 5)
    options = GREEDY | {"max_new_tokens": 12}
    generate = lambda ids, mask, **more: theirs.generate(ids, attention_mask=mask, **options | more).numpy()
    np.testing.assert_array_equal(ours, generate(ids, ones, max_new_tokens=64))
    np.testing.assert_array_equal(ours[:, :17], generate(ids, ones, use_cache=False))
    # Pad on the left, to the length of a longer row.
    longer = torch.tensor(np.stack([np.concatenate([[0, 0, 0], TOKENS[0, :5]]), TOKENS[1, :8]]), dtype=torch.long)
    padding = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    for kind in None, "static":
        padded = generate(longer, padding, cache_implementation=kind)
        np.testing.assert_array_equal(ours[0, 5:17], padded[0, 8:])
    beams = [generate(ids, ones, num_beams=3, use_cache=use) for use in (True, False)]
    np.testing.assert_array_equal(*beams)


LONG = torch.tensor(TOKENS, dtype=torch.long)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_each_name_of_the_cache_gives_the_logits_of_one_pass(everything, name):
    """transformers 5.24 passes `cache`, earlier ones pass `past_key_values`. An unread name is a lost context."""
    theirs = loaded(everything[2])
    expected = theirs(LONG).logits
    output = theirs(LONG[:, :5], use_cache=True)
    found = [output.logits]
    for at in range(5, LONG.shape[1]):
        output = theirs(LONG[:, at, None], previous_ids=LONG[:, at - 1], **{name: output[CACHE]})
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_keywords_that_change_nothing_are_taken_and_others_refused(everything):
    theirs = loaded(everything[2])
    expected = theirs(LONG).logits
    padding = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    positions = torch.arange(40)[None]
    for nothing in (
        {"output_attentions": False, "output_hidden_states": None, "num_items_in_batch": 7},
        {"cache_position": positions[0]},
        {"position_ids": positions},
        {"position_ids": positions + 9},
        {"logits_to_keep": torch.arange(40)},
    ):
        assert torch.equal(theirs(LONG, **nothing).logits, expected), nothing
    theirs(LONG[:, :5], attention_mask=padding, position_ids=(padding.cumsum(-1) - 1).clamp(0))  # as generate() counts
    assert torch.equal(theirs(LONG, logits_to_keep=torch.tensor([2, 3])).logits, expected[:, 2:4])
    cache = theirs(LONG[:, :5], use_cache=True)[CACHE]
    for wrong, message in (
        ({"past_key_value": cache, "token_type_ids": LONG}, "does not know past_key_value, token_type_ids"),
        ({"inputs_embeds": torch.zeros(2, 40, 64)}, "does not know inputs_embeds"),
        ({"output_hidden_states": True}, "does not know output_hidden_states"),
        ({"position_ids": positions % 20}, "several documents in a row"),
        ({"cache": cache, "past_key_values": cache}, "two names of one thing"),
        ({"cache": cache}, "needs previous_ids"),
        ({"attention_mask": torch.ones(2, 1, 40, 40)}, r"must be \[batch, length\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            theirs(LONG, **wrong)
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        theirs.generate(LONG, prefill_chunk_size=7, max_new_tokens=2)


def test_training_with_gradient_checkpointing_writes_to_no_cache_and_draws_with_one(everything):
    """Blocks that are computed twice would write twice; and without gradients a dropped cache is a lost context."""
    theirs = loaded(everything[2])
    draw = lambda: theirs.generate(LONG[:, :5], attention_mask=torch.ones(2, 5), **GREEDY, max_new_tokens=8)
    drawn, cache = draw(), theirs(LONG[:, :5], use_cache=True)[CACHE]
    theirs.train()
    theirs.gradient_checkpointing_enable()
    assert torch.equal(draw(), drawn)
    assert CACHE not in theirs(LONG, use_cache=True)
    with pytest.raises(ValueError, match="write twice"):
        theirs(LONG[:, 5:], previous_ids=LONG[:, 4], cache=cache)


@pytest.mark.medium
def test_logits_and_gradients_of_the_mean_loss_are_equal(pair):
    config, params, folder = pair
    difference, size = largest_difference(folder, params, config.model, TOKENS)
    assert difference < 1e-4 and size > 0.1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    inputs, targets = jnp.asarray(TOKENS[:, :-1]), jnp.asarray(TOKENS[:, 1:])
    graphdef = nnx.graphdef(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0)))

    def mean(params):
        total, count = loss_sums(nnx.merge(graphdef, params), inputs, targets, jnp.ones(inputs.shape))
        return total / count

    loss, gradients = jax.value_and_grad(mean)(params)
    theirs, tokens = loaded(folder), torch.tensor(TOKENS, dtype=torch.long)
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    own = bool(beyond_hf(config.model))
    assert type(theirs).__name__ == ("TokensumForCausalLM" if own else "NanoChatForCausalLM")
    by_name, name_of = dict(theirs.named_parameters()), own_name if own else hf_name
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = path_name(path)
        other = by_name.pop(name_of(name)).grad.numpy()
        assert np.linalg.norm(turned(name, np.asarray(gradient)) - other) / np.linalg.norm(other) < 1e-4, name
    assert not by_name


@pytest.mark.medium
def test_transformers_trainer_takes_one_step_however_eight_rows_are_split(tmp_path, everything):
    """Rows have 3 to 39 targets each, so a mean of micro-batches' means differs. One step of SGD shows the gradient."""
    pytest.importorskip("accelerate")
    rows = torch.tensor(np.random.default_rng(1).integers(0, 300, (8, 40)))
    labels = torch.where(torch.arange(40) < torch.linspace(4, 40, 8).long()[:, None], rows, -100)
    examples = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels)]

    def step(width: int) -> tuple[float, torch.Tensor]:
        network = loaded(everything[2])
        before = torch.nn.utils.parameters_to_vector(network.parameters()).detach().clone()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            per_device_train_batch_size=width,
            gradient_accumulation_steps=8 // width,
            gradient_checkpointing=width == 1,  # changes nothing
            max_grad_norm=0,  # no clip, which would hide a factor
            **{"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "use_cpu": True},
            **{"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        )
        loss = transformers.Trainer(model=network, args=arguments, train_dataset=examples).train().training_loss
        return loss, before - torch.nn.utils.parameters_to_vector(network.parameters()).detach()

    loss, gradient = step(8)
    for width in 1, 2, 4:
        other_loss, other = step(width)
        assert other_loss == pytest.approx(loss, rel=1e-5), width
        assert torch.linalg.vector_norm(other - gradient) < 1e-4 * torch.linalg.vector_norm(gradient), width


def test_verification_notices_a_cache_that_is_not_read(everything, tmp_path):
    """Without its cache a network still gives one pass's logits; each drawn token follows from the last one alone."""
    config, params, folder = everything
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    code = (other / MODELING.name).read_text()
    broken = code.replace("cache = past_key_values if cache is None else cache", "cache = None")
    assert broken != code
    (other / MODELING.name).write_text(broken)
    torch.testing.assert_close(loaded(other)(LONG).logits, loaded(folder)(LONG).logits)
    assert largest_difference(folder, params, config.model, TOKENS)[0] < 1e-4
    with pytest.raises(RuntimeError, match=r"with transformers' cache, differ by .* so .*other was removed"):
        verify(other, params, config.model, "float32", TOKENS)


def test_a_network_saved_by_transformers_is_read_back_exactly(pair, tmp_path):
    config, params, folder = pair
    loaded(folder).save_pretrained(tmp_path, max_shard_size="40kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert require_params(tmp_path, params).model.window_pattern == config.model.window_pattern


def test_bfloat16_is_the_rounded_network_and_is_read(everything, tmp_path):
    config, params, _ = everything
    write_hf(tmp_path / "out", [arrays_of(params)], config, TOKENIZER, "bfloat16")
    assert loaded(tmp_path / "out").dtype == torch.bfloat16
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), params)
    assert largest_difference(tmp_path / "out", rounded, config.model, TOKENS)[0] < 1e-4
    assert largest_difference(tmp_path / "out", params, config.model, TOKENS)[0] > 1e-3
    require_params(tmp_path / "out", rounded)


def test_vllm_s_transformers_backend_takes_a_plain_network_and_refuses_others(tmp_path, everything):
    """It runs what AutoModel makes of config.json with its own attention, and caps the logits as config.json says."""
    whole = loaded(written(tmp_path / "out", SIZES["other sizes and constants"])[2])
    assert type(whole).is_backend_compatible() and whole.base_model_prefix == "model"
    assert type(transformers.AutoModel.from_config(whole.config)) is type(whole.model)
    assert whole.config.final_logit_softcapping == 9.0
    assert not type(loaded(everything[2])).is_backend_compatible()


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.medium
def test_a_run_is_exported_verified_and_continued_as_another(tmp_path, monkeypatch, capsys):
    """Run export.py --verify, transformers, interchange.convert and train.py with a network for the modeling file."""
    from tests.commands import CONFIG, run

    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)
    Path("text").mkdir()
    for i in range(30):
        Path(f"text/{i}.txt").write_text(f"{i} " + TEXTS[i % 2])
    options = ["--config=tiny.py", "--steps=8", "--batch.rows_per_device=2", "--model.smear"]
    assert run("train", monkeypatch, *options, "--run_dir=first") == 0
    exported = lambda *more: monkeypatch.setattr(sys, "argv", ["export", "--run_dir=first", *more]) or export.main()
    assert exported("--out=hf", "--license=mit", "--shard_gigabytes=0.00004", "--verify") == 0
    assert "logits of 64 tokens" in capsys.readouterr().out and len(list(Path("hf").glob("*.safetensors"))) > 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in Path("hf").iterdir()} == {0o666 & ~umask()}
    card, bits = Path("hf/README.md").read_text(), RunFolder("first").metrics()[-1]["val_bpb"]
    facts = ["license: mit", "trust_remote_code=True", "4,096 tokens, 8 steps", "text | text |", f"{bits:.4f}"]
    for fact in [*facts, "tokenizer('the ', return"]:
        assert fact in card, fact
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", questions.append)  # "Do you wish to run the custom code?"
    exec(re.findall(r"(?s)```python\n(.*?)```", card)[0], {"FOLDER": "hf"})
    assert capsys.readouterr().out.startswith("<|bos|>the ") and not questions

    monkeypatch.setattr(sys, "argv", ["convert", "--source=hf", "--out=converted"])
    assert convert.main() == 0
    assert run("train", monkeypatch, *options, "--run_dir=second", "--init_from=converted") == 0
    first, second = (RunFolder(name).metrics() for name in ("first", "second"))
    assert second[0]["val_loss"] == pytest.approx(first[-1]["val_loss"], rel=1e-6)
    assert second[-1]["val_loss"] < first[-1]["val_loss"]

    monkeypatch.setattr("interchange.verification.BOUND", 0.0)
    with pytest.raises(RuntimeError, match=r"above 0\.0, so other was removed"):
        exported("--out=other", "--verify")
    assert not Path("other").exists()


def test_the_tokenizer_is_the_same(everything):
    folder = everything[2]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "naïve 你好\n\n  x"]:
        ids = TOKENIZER.encode([text])[0]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids and theirs.decode(ids) == text
        assert theirs(text)["input_ids"] == [TOKENIZER.bos, *ids]  # like each training document
    assert theirs.bos_token_id == TOKENIZER.bos
    assert find_tokenizer(folder).sha256 == TOKENIZER.sha256


def test_a_tokenizer_that_transformers_saved_is_the_same(everything, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(everything[2])
    theirs(TEXTS, padding=True, truncation=True, max_length=16)  # transformers keeps such settings in tokenizer.json
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() != (everything[2] / "tokenizer.json").read_bytes()
    found = find_tokenizer(tmp_path)
    assert found.is_same_as(TOKENIZER) and not found.library.post_processor


def test_a_tokenizer_that_has_a_post_processor_keeps_it_and_writes_the_bos(tmp_path):
    content = json.loads(TOKENIZER.json)
    theirs = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    other = TextTokenizer(json.dumps(content | {"post_processor": theirs}, indent=2))
    written = Tokenizer.from_str(json_with_bos(other))
    assert written.encode("a", "b").ids.count(other.bos) == 1
    assert written.encode("to be").ids == [other.bos, *other.encode(["to be"])[0]]
    again = TextTokenizer(json_with_bos(other))
    assert json_with_bos(again) == again.json
    (tmp_path / "tokenizer.json").write_text(again.json)
    found = find_tokenizer(tmp_path)
    assert found.is_same_as(other) and json.loads(found.json)["post_processor"] == theirs
