"""Test what the server makes of requests: their fields, their conversations, and texts to continue."""

import json
import re
from collections.abc import Iterator

import openai
import pytest

from data.conversation import messages_of, render
from data.prepare.selection import train_tokenizer
from serving.fields import UNUSED
from serving.request import ChatRequest, Refused, TextRequest
from serving.text import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from tests.repository import ROOT
from tests.serving.served import HELLO, TOKENIZER, FakeEngine, ask, echo, fetch, served, spell

CALL = (PYTHON_START, "2+2", PYTHON_END, OUTPUT_START, "4", OUTPUT_END)
TOKENS = [TOKENIZER.bos, *spell("some words")]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with served(FakeEngine(echo)) as client:
        yield client


@pytest.mark.parametrize(
    "body, param, words",
    [
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"n": 2}, "n", "n is not supported here; give 1 or leave it out"),
        ({"colour": "red"}, "colour", "colour is not supported here; leave it out"),
        ({"reasoning_effort": "high"}, "reasoning_effort", 'give "none" or give "minimal" or leave it out'),
        ({"verbosity": "low"}, "verbosity", 'give "medium" or leave it out'),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", 'give {"type":"text"}'),
        ({"logprobs": True}, "logprobs", "give false"),
        ({"tools": [{"type": "function"}]}, "tools", "give []"),
        ({"prompt": "x"}, "prompt", "is not supported"),
        ({"messages": [*HELLO, *HELLO]}, "messages", "another message of user"),
        ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "messages", "the last one is the assistant's"),
        ({"messages": [{"role": "user", "content": "w" * 196}]}, "messages", "have 200 tokens"),
        ({"model": "gpt-4"}, "model", "this server answers with 'tiny'"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "no JSON object"),
        (b" " * (1 << 21), None, "more than 1,048,576 bytes"),
    ],
)
def test_an_invalid_request_gets_an_error_in_openai_s_form(client, body, param, words):
    body = body if isinstance(body, bytes) else json.dumps({"messages": HELLO} | body).encode()
    status, answer = fetch(client, "chat/completions", body)
    assert status == {"model": 404, None: 413 if "bytes" in words else 400}.get(param, 400)
    assert words in answer["error"]["message"] and answer["error"]["param"] == param


def test_fields_that_ask_for_nothing_change_nothing():
    for name, values in UNUSED.items():
        for value in values:
            given = {name: "anything" if value is ... else value}
            assert ChatRequest.read(json.dumps({"messages": HELLO} | given).encode()) == ChatRequest(messages=HELLO)
            assert TextRequest.read(json.dumps(given).encode()) == TextRequest()
    with pytest.raises(Refused, match="logprobs is not supported"):
        TextRequest.read(b'{"logprobs": 0}')  # asks for one


def test_the_page_has_the_table_of_fields():
    page = (ROOT / "docs/chat.md").read_text()
    rows = page.partition("| field that clients send |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])} == UNUSED.keys()


def test_an_address_that_does_not_exist_is_answered_with_those_that_do(client):
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses: Not Found; this server has GET /, GET /health"):
        client.responses.create(model="tiny", input="hello")
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions, POST /v1/completions") as refused:
        client.embeddings.create(model="tiny", input="hello")
    assert refused.value.code == "unknown_url" and refused.value.type == "invalid_request_error"
    assert fetch(client, "chat/completions")[0] == 405


def test_a_base_network_continues_texts():
    engine = FakeEngine(lambda prompt: spell(" and others"))
    with served(engine) as client:
        whole = client.completions.create(model="tiny", prompt="some words", seed=5, echo=False, best_of=1)
        for prompt in (["some words"], TOKENS, [TOKENS]):
            client.completions.create(model="tiny", prompt=prompt, seed=5)
        stream = client.completions.create(
            model="tiny", prompt="", max_tokens=4, stop="zz", stream=True, stream_options={"include_usage": True}
        )
        *parts, counts = stream
        for prompt in (["one", "two"], [TOKENIZER.vocab_size], "w" * 200):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model="tiny", prompt=prompt)
            assert refused.value.param == "prompt"
    (choice,) = whole.choices
    assert (whole.object, choice.text, choice.finish_reason, choice.logprobs) == (
        "text_completion",
        " and others",
        "stop",
        None,
    )
    assert [(prompt, sampling.seed) for prompt, sampling in engine.begun[:4]] == [(TOKENS, 5)] * 4
    assert engine.begun[4][0] == [TOKENIZER.bos]
    text = TOKENIZER.decode(spell(" and others")[:4])
    assert "".join(part.choices[0].text for part in parts) == text and parts[-1].choices[0].finish_reason == "length"
    assert (counts.usage.prompt_tokens, counts.usage.completion_tokens) == (1, 4)


def test_a_base_network_without_tokens_of_conversations_is_not_asked_for_answers():
    plain = train_tokenizer(["some words, and others"], 272)
    plain = type(plain)(plain.json.replace("<|assistant_end|>", "<|other|>"))
    with pytest.raises(Refused, match="POST /v1/completions continues a text"):
        ChatRequest(messages=HELLO).tokens(plain, 99)


def test_calls_of_the_calculator_stay_parts_of_the_conversation():
    """An assistant's message goes back as it came, whole or in events, and the network reads what it wrote."""
    wrote = [*spell("It is ", *CALL), *spell(" so. ", *CALL), *spell(PYTHON_START, "x", PYTHON_END, *CALL[:3])]
    engine = FakeEngine(lambda prompt: wrote)
    with served(engine) as client:
        message = ask(client).choices[0].message
        with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for answer in (message, streamed):
            messages = [*HELLO, answer, {"role": "user", "content": "more"}]
            client.chat.completions.create(model="tiny", messages=messages)
        cut = ask(client, stop="4").choices[0].message
    assert message.content == streamed.content == "It is `2+2` = `4`  so. `2+2` = `4` `x``2+2`"
    python, output = {"type": "python", "text": "2+2"}, {"type": "python_output", "text": "4"}
    bare = [{"type": part["type"], "text": part["text"]} for part in message.parts]
    texts = [{"type": "text", "text": text} for text in ("It is ", " so. ")]
    assert bare == [texts[0], python, output, texts[1], python, output, {"type": "python", "text": "x"}, python]
    assert message.parts == streamed.parts and [part["index"] for part in message.parts] == [*range(8)]
    prompt = render(TOKENIZER, messages_of(HELLO), ask=True)
    then = render(TOKENIZER, messages_of([{"role": "user", "content": "more"}]), ask=True)[1:]
    read = [*prompt, *wrote, TOKENIZER.special_tokens["<|assistant_end|>"], *then]
    assert [prompt for prompt, _ in engine.begun[2:4]] == [read, read]
    assert cut.content == "It is `2+2` = `" and [part["text"] for part in cut.parts] == ["It is ", "2+2", ""]
    assert not hasattr(ask_plainly(), "parts")


def ask_plainly() -> object:
    with served(FakeEngine(echo)) as client:
        return ask(client).choices[0].message


def test_an_empty_answer_stays_in_the_conversation():
    engine = FakeEngine(lambda prompt: [])
    with served(engine) as client:
        empty = ask(client).choices[0].message
        assert empty.content == ""
        for answer in (empty, {"role": "assistant"}, {"role": "assistant", "content": None}):
            client.chat.completions.create(model="tiny", messages=[*HELLO, answer, *HELLO])
    end = TOKENIZER.special_tokens["<|assistant_end|>"]
    asked = render(TOKENIZER, messages_of(HELLO), ask=True)
    assert [prompt for prompt, _ in engine.begun[1:]] == [[*asked, end, *asked[1:]]] * 3


def test_events_say_what_clients_expect():
    with served(FakeEngine(echo)) as client:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with client.chat.completions.with_streaming_response.create(model="tiny", messages=HELLO, **options) as raw:
            headers, lines = raw.headers, [line for line in raw.iter_lines() if line]
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    assert headers["content-type"].startswith("text/event-stream")
    *events, end = [line.removeprefix("data: ") for line in lines]
    *chunks, counts = map(json.loads, events)
    assert end == "[DONE]" and counts["choices"] == [] and counts["usage"]["completion_tokens"] == len(spell("HELLO"))
    assert all(chunk["usage"] is None and chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
