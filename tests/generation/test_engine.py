"""Compare the engine's answers with draws after complete passes, whatever other requests run and a cache contains."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from data.tokenizer import CHAT_TOKENS
from generation.engine import Engine
from model.loss import softcap
from model.sampling import Sampling, draw
from system.errors import UserError
from tests.generation.networks import DRAWN, GREEDY, LENGTH, PROMPTS, SPECIAL, TOKENIZER, chain, network

ENDS = {TOKENIZER.bos, SPECIAL["<|assistant_end|>"]}


@cache
def expected(sampling: Sampling) -> list[list[int]]:
    """Return twelve tokens after each of PROMPTS up to the first end, each drawn after a pass over its whole row."""
    ours = network()
    model, rows = ours.sharded.with_params(ours.params), np.zeros((len(PROMPTS), LENGTH), np.int32)
    options = Sampling(*(np.full(len(PROMPTS), value) for value in sampling._replace(top_p=np.float32(1))))

    @jax.jit
    def following(rows, lengths):
        logits = model(rows)[0][np.arange(len(PROMPTS)), lengths - 1]
        return draw(softcap(logits, model.config.softcap), lengths, options)

    for row, prompt in zip(rows, PROMPTS):
        row[: len(prompt)] = prompt
    lengths = np.array([*map(len, PROMPTS)], np.int32)
    for _ in range(12):
        rows[np.arange(len(PROMPTS)), lengths] = following(rows, lengths)
        lengths += 1
    new = [row[len(prompt) :][:12].tolist() for row, prompt in zip(rows, PROMPTS)]
    return [next((ids[:i] for i, token in enumerate(ids) if token in ENDS), ids) for ids in new]


@cache
def engine_of_four(devices=1) -> Engine:
    return Engine(network(devices), 4)


def finish(engine, *answers):
    while not all(answer.finished for answer in answers):
        engine.step()
    return [answer.tokens for answer in answers]


@pytest.mark.medium
def test_tokens_equal_those_of_complete_passes_on_a_mesh_of_all_axes_whatever_other_requests_run():
    engine = engine_of_four(8)
    for sampling in DRAWN, GREEDY:
        answers = []
        for prompt in PROMPTS:
            answers.append(engine.begin(prompt, sampling, 12))
            engine.step()  # the others begin while it is generated
        assert finish(engine, *answers) == expected(sampling)


@pytest.mark.medium
def test_prompts_wait_for_slots():
    answers = dict(engine_of_four().answers([(prompt, DRAWN, 12) for prompt in PROMPTS * 2]))
    assert [answers[place].tokens for place in range(8)] == expected(DRAWN) * 2


@pytest.mark.medium
def test_a_shared_prefix_is_not_read_and_nothing_compiles_for_another_prompt():
    """Ask for turns of a conversation, another answer to one turn, and a conversation that stops inside it."""
    engine, fresh = Engine(network()), engine_of_four()
    engine.compile()
    first = engine.begin(PROMPTS[3], DRAWN, 10)
    assert first.read == len(PROMPTS[3])
    finish(engine, first)
    turn = [*PROMPTS[3], *first.tokens, 9, 10, 11]
    for prompt, read in (
        (turn, 3),
        (turn, 1),
        (turn[:40], 1),
        ([*turn[:39], 270, 271], 2),
        (PROMPTS[1], len(PROMPTS[1]) - 1),
    ):
        answer = engine.begin(prompt, DRAWN._replace(seed=read, top_k=read, top_p=0.9, temperature=0.5 * read), 10)
        assert read <= answer.read <= read + (read == 3)  # the first answer's last token may be unread
        for slot in fresh.slots:
            slot.cached = 0
        other = fresh.begin(prompt, answer.sampling, 10)
        assert finish(engine, answer) == finish(fresh, other)
    for one in engine, fresh:
        assert (one._read._cache_size(), one._write._cache_size()) == (2, 1)


@pytest.mark.medium
def test_slots_are_taken_and_freed_and_a_conversation_keeps_its_own():
    engine = engine_of_four()
    with pytest.raises(UserError, match="192 tokens; the network's sequence has 192, so at most 191"):
        engine.begin([0] * 192, GREEDY)
    answers = [engine.begin(prompt, GREEDY) for prompt in PROMPTS]
    assert engine.free == 0
    engine.step()
    for answer in answers:
        engine.drop(answer)
        assert len(answer.tokens) == 1
    assert engine.free == 4
    for i in (2, 3, 2):
        again = engine.begin([*PROMPTS[i], *answers[i].tokens, 9], GREEDY, 12)
        assert again.read <= 2
        engine.step()
        engine.drop(again)
    last = engine.begin([0] * 191, GREEDY)
    assert len(finish(engine, last)[0]) == 1 and last.finished == "length"


@pytest.mark.medium
def test_a_restarted_engine_answers_to_the_bit_as_a_new_one_with_those_parameters():
    other = jax.tree.map(lambda p: jax.device_put(1.1 * p, p.sharding), network().params)
    asked = [(prompt, DRAWN._replace(seed=seed), 12) for seed in range(2) for prompt in PROMPTS]
    used = engine_of_four()
    used.begin(PROMPTS[1], DRAWN)
    used.step()
    used.load(other)
    fresh = Engine(replace(network(), params=other), 4)
    tokens = [[answer.tokens for _, answer in engine.answers(asked)] for engine in (used, fresh)]
    assert tokens[0] == tokens[1] and used.free == 4
    assert (used._read._cache_size(), used._write._cache_size()) == (2, 1)
    used.load(network().params)


def test_it_stops_and_a_call_of_python_is_followed_by_its_output():
    encode = lambda text: [TOKENIZER.encode([letter])[0][0] for letter in text]
    start, end, output, output_end = (SPECIAL[name] for name in CHAT_TOKENS[4:])
    call, after = [start, *encode("6*7"), end], encode("!")
    prompt = [0, *encode("?")]
    engine = Engine(chain(prompt[1], *call, 0, output_end, *after, SPECIAL["<|assistant_end|>"]))
    answer = engine.begin(prompt, GREEDY)
    assert finish(engine, answer) == [[*call, output, *encode("42"), output_end, *after]]
    assert answer.finished == "stop" and answer.end == [SPECIAL["<|assistant_end|>"]]
    assert answer.drawn == [True] * len(call) + [False] * (2 + len(encode("42"))) + [True] * len(after)
    cut = engine.begin(prompt, GREEDY, len(call) + 1)
    assert finish(engine, cut) == [[*call, output]] and cut.drawn[: len(cut.tokens)] == [True] * len(call) + [False]
    engine = Engine(chain(prompt[1], start, *encode("6*"), end, *after, 0))  # an incomplete expression forces no result
    assert finish(engine, engine.begin(prompt, GREEDY, 12)) == [[start, *encode("6*"), end, *after]]
