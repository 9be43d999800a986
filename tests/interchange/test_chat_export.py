"""Test that a network trained on conversations works in transformers: the template gives our tokens, the pipeline our
answer. Needs `make setup EXTRA=interop`."""

import json
import random
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from configs.schema import BatchConfig, MeshConfig
from configs.validation import resolved
from data.conversation import PARTS, messages_of, render
from data.packing import learned
from data.prepare.selection import train_tokenizer
from data.tokenizer import CHAT_TOKENS, TextTokenizer
from evaluation.engine import Engine
from evaluation.network import Network
from interchange.folders import beyond_hf, write_hf
from model.sampling import Sampling
from tests.helpers import arrays_of
from tests.interchange.test_interchange import network
from tests.interchange.test_transformers import ALL_EXPORTED, modules_of_their_own  # noqa: F401
from training.mesh import make_mesh

LENGTH = 64
TEXTS = ["to be or not to be, that is the question. " * 8, "naïve 你好\n\n  x <|pad|> {{ x }} {% y %}"]
TOKENIZER = train_tokenizer(TEXTS, 272)
GROWN = TextTokenizer(TOKENIZER.json.replace("_start|>", "_old|>")).with_chat_tokens


def written(folder: Path, tokenizer: TextTokenizer = TOKENIZER, packing: str = "whole", **features):
    """Write a network. Return its config, its parameters and the folder."""
    config, params = network(vocab_size=tokenizer.vocab_size, **features)
    config = resolved(replace(config, batch=BatchConfig(sequence_length=LENGTH)))
    config = replace(config, data=replace(config.data, packing=packing))
    head = params["lm_head"]
    head["kernel"] = head["kernel"].at[:, tokenizer.special_tokens["<|assistant_end|>"]].mul(2)  # some answers end
    write_hf(folder, [arrays_of(params)], config, tokenizer)
    return config, params, folder


@pytest.fixture(scope="module", params=[{}, ALL_EXPORTED], ids=["NanoChatForCausalLM", "the modeling file"])
def chat(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp("chat") / "out", **request.param)


def conversations(special: bool) -> list[list[dict]]:
    """Return conversations of one to six messages, half of the answers with calls. `special` adds special tokens."""
    rng = random.Random(0)
    words = [*" ".join(TEXTS).split(" "), " ", "\n", "\n\n", "'", "7", *[*CHAT_TOKENS, "<|bos|>"] * special]
    text = lambda: rng.choice(["", " "]).join(rng.choices(words, k=rng.randint(1, 9))) + "x"
    # The template would join two texts in a row.
    kinds = lambda: [kind for _ in range(rng.randint(1, 3)) for kind in ("text", *rng.choices([*PARTS][1:], k=2))]
    answer = lambda: rng.choice([text(), [{"type": kind, "text": text()} for kind in kinds()]])
    turns = lambda: [{"role": role, "content": of()} for role, of in (("user", text), ("assistant", answer))]
    system = lambda i: [{"role": "system", "content": text()}] * (i % 3 == 0)
    return [system(i) + [*turns(), *turns(), *turns()][: 1 + i % 6] for i in range(150)]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, GROWN], ids=["reserved", "added"])
def test_the_template_gives_our_tokens_and_mask(tokenizer, tmp_path):
    theirs = transformers.AutoTokenizer.from_pretrained(written(tmp_path / "out", tokenizer)[2])
    for messages in conversations(special=False):
        for ask in (False, True):
            ours = render(tokenizer, messages_of(messages), ask)
            got = theirs.apply_chat_template(messages, add_generation_prompt=ask, return_assistant_tokens_mask=True)
            assert got["input_ids"] == ours, messages
            assert got["assistant_masks"] == learned(np.array(ours), tokenizer.special_tokens).astype(int).tolist()


def test_special_tokens_in_a_text_are_letters_only_if_transformers_is_asked(chat):
    theirs = transformers.AutoTokenizer.from_pretrained(chat[2])
    options, differ = {"return_dict": False, "add_generation_prompt": True}, 0
    for messages in conversations(special=True):
        ours = render(TOKENIZER, messages_of(messages), ask=True)
        assert theirs.apply_chat_template(messages, sanitize_control_tokens=True, **options) == ours, messages
        differ += theirs.apply_chat_template(messages, **options) != ours
    assert differ > 100


@pytest.mark.medium
def test_the_pipeline_gives_our_greedy_answer(chat):
    config, params, folder = chat
    pipeline = transformers.pipeline("text-generation", model=str(folder), trust_remote_code=True)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    engine, ended = Engine(Network(config, TOKENIZER, jax.tree.map(jnp.asarray, params), mesh)), 0
    for question in ["to be?", "what", "that is", "not?", "or", "question", "x", "7"]:
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": question}]
        prompt = render(TOKENIZER, messages_of(messages), ask=True)
        ((_, answer),) = engine.answers([(prompt, Sampling(temperature=0.0), LENGTH)])
        ended += answer.finished == "stop"
        text = TOKENIZER.decode(answer.tokens)
        got = pipeline(messages, do_sample=False, max_new_tokens=LENGTH - len(prompt))[0]["generated_text"]
        assert got == [*messages, {"role": "assistant", "content": text}]
    assert 0 < ended < 8


def test_more_tokens_find_room_in_every_table(chat):
    config, _, folder = chat
    theirs, tokens = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), torch.arange(40)
    before, size = theirs(tokens[None]).logits, config.model.vocab_size + 5
    theirs.resize_token_embeddings(size)
    tables = [module for module in theirs.modules() if isinstance(module, torch.nn.Embedding)]
    assert (len(tables) > 1) == bool(beyond_hf(config.model))
    assert {table.num_embeddings for table in tables} == {size} == {theirs.config.vocab_size}
    torch.testing.assert_close(theirs(tokens[None]).logits[..., : size - 5], before)
    assert theirs(torch.full((1, 3), size - 1)).logits.shape[-1] == size


def test_a_network_without_conversations_has_no_template_and_ends_with_its_document(tmp_path):
    folder = written(tmp_path / "out", packing="stream")[2]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template is None and theirs.eos_token_id == TOKENIZER.bos
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == TOKENIZER.bos
