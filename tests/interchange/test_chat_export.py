"""Test that a network trained on conversations works in transformers: the template gives our tokens, and the model card
has code that gives our answers. Needs `make setup EXTRA=interop`."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.version import Version

jinja2 = pytest.importorskip("jinja2")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from data.conversation import PARTS, messages_of, render
from data.packing import learned
from data.prepare.selection import add_chat_tokens, train_tokenizer
from data.tokenizer import CHAT_TOKENS, TextTokenizer
from generation.engine import Engine
from interchange.card import model_card
from interchange.folders import beyond_hf, write_hf
from model.sampling import Sampling
from options.schema import BatchConfig
from options.validation import resolved
from run.network import Network
from tests.helpers import arrays_of, sharded
from tests.interchange.networks import ALL_EXPORTED, network

pytestmark = pytest.mark.usefixtures("modules_of_their_own")
LENGTH = 64
TEXTS = ["to be or not to be, that is the question. " * 8, "naïve 你好\n\n  x <|pad|> {{ x }} {% y %}"]
TOKENIZER = train_tokenizer(TEXTS, 272)
GROWN = add_chat_tokens(TextTokenizer(TOKENIZER.json.replace("_start|>", "_old|>")))


def written(folder: Path, tokenizer: TextTokenizer = TOKENIZER, packing: str = "whole", **features):
    """Write a network. Return its config, its parameters and the folder."""
    config, params = network(vocab_size=tokenizer.vocab_size, **features)
    config = resolved(replace(config, batch=BatchConfig(sequence_length=LENGTH)))
    config = replace(config, data=replace(config.data, packing=packing))
    head = params["lm_head"]
    head["kernel"] = head["kernel"].at[:, tokenizer.special_tokens["<|assistant_end|>"]].mul(2)  # some answers end
    card = model_card(config, 8, 4096, None, "", packing == "whole")
    write_hf(folder, [arrays_of(params)], config, tokenizer, card=card)
    return config, params, folder


@pytest.fixture(scope="module", params=[{}, ALL_EXPORTED], ids=["NanoChatForCausalLM", "the modeling file"])
def chat(request, tmp_path_factory):
    return written(tmp_path_factory.mktemp("chat") / "out", **request.param)


def conversations() -> list[list[dict]]:
    """Return conversations of one to six messages, half of the answers with calls."""
    rng = random.Random(0)
    words = [*" ".join(TEXTS).split(" "), " ", "\n", "\n\n", "'", "7"]
    text = lambda: rng.choice(["", " "]).join(rng.choices(words, k=rng.randint(1, 9))) + "x"
    # The template would join two texts in a row.
    kinds = lambda: [kind for _ in range(rng.randint(1, 3)) for kind in ("text", *rng.choices([*PARTS][1:], k=2))]
    answer = lambda: rng.choice([text(), [{"type": kind, "text": text()} for kind in kinds()]])
    turns = lambda: [{"role": role, "content": of()} for role, of in (("user", text), ("assistant", answer))]
    system = lambda i: [{"role": "system", "content": text()}] * (i % 3 == 0)
    return [system(i) + [*turns(), *turns(), *turns()][: 1 + i % 6] for i in range(150)]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, GROWN], ids=["reserved", "added"])
def test_the_template_gives_our_tokens_and_mask(tokenizer, tmp_path):
    folder = written(tmp_path / "out", tokenizer)[2]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    jinja = jinja2.Environment().from_string((folder / "chat_template.jinja").read_text())  # knows no tag of theirs
    for messages in conversations():
        for ask in (False, True):
            ours = render(tokenizer, messages_of(messages), ask)
            options = {"add_generation_prompt": ask, "return_assistant_tokens_mask": True}
            got = theirs.apply_chat_template(messages, chat_template="training", **options)
            assert got["input_ids"] == ours, messages
            assert got["assistant_masks"] == learned(np.array(ours), tokenizer.special_tokens).astype(int).tolist()
            assert theirs.apply_chat_template(messages, **options)["input_ids"] == ours
            text = jinja.render(messages=messages, add_generation_prompt=ask, bos_token=theirs.bos_token)
            assert theirs(text, add_special_tokens=False).input_ids == ours


@pytest.mark.medium
def test_the_card_s_code_asks_nothing_and_gives_our_greedy_answers(chat, monkeypatch):
    config, params, folder = chat
    questions = ["to be?", "what", "that is", "not?", "or", "question", "x", "7"]
    asked = [[{"role": "system", "content": "be"}, {"role": "user", "content": text}] for text in questions]
    card = (folder / "README.md").read_text()
    monkeypatch.setattr("builtins.input", pytest.fail)  # "Do you wish to run the custom code?"
    names = {"FOLDER": str(folder)}
    exec(re.findall(r"(?s)```python\n(.*?)```", card)[0], names)
    answers = [names["chat"](turns, do_sample=False, max_new_tokens=20)[0]["generated_text"][-1] for turns in asked]
    encode = names["chat"].tokenizer
    of_template = encode.apply_chat_template(asked[0], add_generation_prompt=True, return_dict=False)
    text = encode.apply_chat_template(asked[0], add_generation_prompt=True, tokenize=False)
    prompts = [render(TOKENIZER, messages_of(messages), ask=True) for messages in asked]
    network = Network(config, TOKENIZER, jax.tree.map(jnp.asarray, params), sharded(config.model))
    ours = [a for _, a in Engine(network).answers([(prompt, Sampling(temperature=0.0), 20) for prompt in prompts])]
    assert [answer["content"] for answer in answers] == [TOKENIZER.decode(answer.tokens) for answer in ours]
    assert {answer.finished for answer in ours} == {"stop", "length"}
    assert of_template == encode(text, add_special_tokens=False).input_ids == prompts[0]
    batch = names["chat"](asked, do_sample=False, max_new_tokens=20, batch_size=len(asked))  # padded on the left
    assert [answer[0]["generated_text"][-1] for answer in batch] == answers
    (oldest,) = re.findall(r"transformers ([\d.]+) or later", card)
    assert Version(oldest) <= Version(transformers.__version__)


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


@pytest.mark.parametrize("chat", [True, False])
def test_the_tokenizer_is_written_for_transformers_4_too(chat, tmp_path):
    """Version 4 fails on a list of extra_special_tokens. Its default adds token_type_ids, which generate() refuses."""
    folder = written(tmp_path / "out", packing="whole" if chat else "stream")[2]
    facts, ends = (json.loads((folder / f"{name}_config.json").read_text()) for name in ("tokenizer", "generation"))
    assert facts["model_input_names"] == ["input_ids", "attention_mask"] and "extra_special_tokens" not in facts
    assert facts.get("additional_special_tokens", []) == [*CHAT_TOKENS] * chat
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert set(theirs.all_special_tokens) == {"<|bos|>", *[*CHAT_TOKENS] * chat}
    assert (theirs.chat_template is not None) == chat and (theirs.eos_token_id == TOKENIZER.bos) != chat
    assert chat or ends["eos_token_id"] == TOKENIZER.bos
