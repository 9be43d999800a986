"""Test the server with OpenAI's own client."""

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tokenizers import Tokenizer, decoders, models

import chat
from data.conversation import messages_of, render
from data.prepare.selection import add_chat_tokens
from data.tokenizer import TextTokenizer
from data.tokenizer_formats import convert_tiktoken
from interchange.convert import write_run
from model.sampling import Sampling
from serving.batcher import Batcher
from serving.server import Access, Service, listener, serve
from serving.text import AnswerText, shown
from system.errors import UserError
from tests.generation.networks import network
from tests.ports import free_ports
from tests.serving.served import (
    HELLO,
    MODEL,
    TOKENIZER,
    FakeEngine,
    ask,
    echo,
    endless,
    fetch,
    served,
    spell,
    wait_until,
)


def texts(stream) -> list[str]:
    return [part.choices[0].delta.content or "" for part in stream]


def load(client: openai.OpenAI) -> tuple[int, int]:
    """Return the numbers of running and waiting requests."""
    health = fetch(client, "/health")[1]
    return health["busy"], health["waiting"]


def test_an_answer_streamed_or_not_has_its_text_reason_and_counts():
    text, call = "naïve 😀 <b>text</b>", ("<|python_start|>", "2+2", "<|python_end|>", "<|output_start|>", "4")
    with served(FakeEngine(lambda prompt: spell(text, *call))) as client:
        answer = ask(
            client, user="someone", frequency_penalty=0, stop=None, top_logprobs=0, tool_choice="auto", max_tokens=-1
        )
        *parts, counts = ask(client, stream=True, stream_options={"include_usage": True})
        assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
        with pytest.raises(openai.NotFoundError, match="this server answers with 'tiny'"):
            client.models.retrieve("owner/other")
    assert answer.choices[0].message.content == "".join(texts(parts)) == text + "`2+2` = `4"
    assert "😀" in texts(parts) and len(parts) > len(text)  # a character of four tokens arrives complete
    assert answer.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "stop"
    prompt, new = len(render(TOKENIZER, messages_of(HELLO), ask=True)), len(spell(text, *call))
    for usage in (answer.usage, counts.usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, new, prompt + new)
        assert usage.prompt_tokens_details.cached_tokens == 1


def test_the_engine_s_options_follow_from_the_request():
    engine = FakeEngine(lambda prompt: spell("many words"))
    spelled = lambda *texts: [{"type": "text", "text": text} for text in texts]
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": spelled("he", "llo")}]
    with served(engine) as client:
        client.chat.completions.create(model="tiny", messages=turns, seed=5, temperature=0.5, top_p=0.9)
        client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": ""}, *HELLO], seed=5)
        answered = [{"role": "assistant", "content": spelled("no", "t")}, {"role": "user", "content": "more"}]
        client.chat.completions.create(model="tiny", messages=[*HELLO, *answered], seed=5)
        ask(client, top_p=0, extra_body={"top_k": -1})
        cut = [ask(client, **{name: 4}).choices[0] for name in ("max_tokens", "max_completion_tokens")]
    four = TOKENIZER.decode(spell("many words")[:4])
    assert [(choice.message.content, choice.finish_reason) for choice in cut] == [(four, "length")] * 2
    (tokens, sampling), (plain, _), (longer, _), (_, greedy), (_, one), (_, other) = engine.begun
    assert longer == render(TOKENIZER, messages_of([*HELLO, *answered]), ask=True)  # an assistant's parts as learned
    assert greedy[:3] == (0.0, 0, 1.0)
    assert plain == render(TOKENIZER, messages_of(HELLO), ask=True)
    assert tokens == render(TOKENIZER, messages_of([{"role": "user", "content": "s\n\nhello"}]), ask=True)
    assert sampling == (0.5, 40, 0.9, 5) and one[:3] == (0.8, 40, 1.0) and one.seed != other.seed


STOPS = [("cd", "ab"), (["zz", "f"], "abcde"), ("gh", "abcdefg"), ("a", ""), (["cdx", "e"], "abcd"), ("", "abcdefg")]


def test_a_text_ends_before_the_first_of_its_stops():
    engine = FakeEngine(lambda prompt: spell("abcdefg"))
    with served(engine) as client:
        for stop, expected in STOPS:
            choice = ask(client, stop=stop).choices[0]
            assert (choice.message.content, choice.finish_reason) == (expected, "stop")
            assert "".join(texts(ask(client, stop=stop, stream=True))) == expected
        wait_until(lambda: engine.free == 1)


def test_bytes_that_are_no_character_cost_no_text():
    library = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)} | {"b": 256}, [], byte_fallback=True))
    library.decoder = decoders.ByteFallback()  # pyright: ignore[reportAttributeAccessIssue]
    ranks = {bytes([i]): i for i in range(256)} | {b"b\xc3": 256}
    for tokenizer in TextTokenizer(library.to_str()), convert_tiktoken(ranks, r"\w+", {}):
        text, call = AnswerText(whole := add_chat_tokens(tokenizer)), whole.special_tokens["<|python_start|>"]
        pieces = [piece for token in (65, 255, 256, call, 65, 256, None) for piece in text.add(token)]
        assert shown(pieces) == "A\ufffdb`Ab"


def test_several_requests_are_answered_at_once_and_those_beyond_the_queue_refused():
    engine = FakeEngine(echo, slots=3)
    engine.gate.clear()
    questions = [f"question {i} of several" for i in range(5)]
    with served(engine, queue=2) as client, ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(lambda text: "".join(texts(ask(client, text, stream=True))), text) for text in questions]
        wait_until(lambda: load(client) == (3, 2))
        with pytest.raises(openai.RateLimitError, match="3 requests are being answered and 2 wait") as refused:
            ask(client)
        assert refused.value.response.headers["retry-after"] == "1"
        engine.gate.set()
        assert [answer.result() for answer in answers] == [text.upper() for text in questions]
        assert ask(client).choices[0].message.content == "HELLO"
    assert engine.together == 3


def test_others_are_answered_while_long_texts_become_tokens(monkeypatch):
    """There are more long texts than asyncio has threads, and as many as may wait."""
    engine, begun, finish = FakeEngine(endless), [], threading.Event()

    def slow(*arguments, **options):
        begun.append(1)
        assert finish.wait(60)
        return render(*arguments, **options)

    with served(engine, queue=40) as client, ThreadPoolExecutor(40) as pool:
        stream = ask(client, stream=True)
        monkeypatch.setattr("serving.request.render", slow)
        others = [pool.submit(ask, client, max_tokens=1) for _ in range(40)]
        wait_until(lambda: len(begun) == min(32, (os.cpu_count() or 1) + 4) and load(client) == (1, 40))
        with pytest.raises(openai.RateLimitError):
            ask(client)
        assert len(begun) == min(32, (os.cpu_count() or 1) + 4)  # the refused one's text was not read
        (answer,) = engine.active
        before = len(answer.tokens)
        wait_until(lambda: len(answer.tokens) > before + 100)
        stream.close()
        finish.set()
        assert {other.result().usage.completion_tokens for other in others} == {1}


def test_what_a_client_no_longer_waits_for_frees_its_slot_or_its_place():
    engine = FakeEngine(endless)
    with served(engine, queue=1) as client:
        stream = ask(client, stream=True)
        while not next(stream).choices[0].delta.content:
            pass
        with pytest.raises(openai.APITimeoutError):
            ask(client.with_options(timeout=0.5), "while it waits")
        wait_until(lambda: load(client) == (1, 0))
        stream.close()
        wait_until(lambda: engine.free == 1)
        with pytest.raises(openai.APITimeoutError):
            ask(client.with_options(timeout=0.5), "while it is answered")
        wait_until(lambda: engine.free == 1 and load(client) == (0, 0))
    assert [TOKENIZER.decode(prompt) for prompt, _ in engine.begun] == ["hello", "while it is answered"]


def test_a_failure_of_the_engine_reaches_the_client_and_ends_the_server():
    engine = FakeEngine(lambda prompt: (1 // 0 for _ in prompt))
    with pytest.raises(ZeroDivisionError), served(engine) as client, pytest.raises(openai.APIConnectionError):
        ask(client)


def test_a_notebook_s_cell_serves_until_it_is_interrupted(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.update({number: handler}))
    handlers, bound = {}, listener("127.0.0.1", 0)

    def interrupt() -> None:
        wait_until(lambda: signal.SIGTERM in handlers)
        handlers[signal.SIGTERM](signal.SIGTERM, None)

    interrupting = threading.Thread(target=interrupt)

    async def cell() -> None:
        interrupting.start()
        serve(Service(Batcher(FakeEngine(echo), 4), TOKENIZER, MODEL, Sampling()), Access(), bound)  # pyright: ignore

    asyncio.run(cell())


@pytest.fixture
def handlers():
    """Ignore SIGTERM, and put the handlers back that chat.py replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.medium
def test_chat_py_answers_several_at_once_as_each_alone_until_it_is_asked_to_stop(tmp_path, monkeypatch, handlers):
    ours, (port,) = network(), free_ports(1)
    write_run(tmp_path / "tiny", ours.config, 1, ours.tokenizer, ours.params)
    command = ["chat.py", f"--run_dir={tmp_path}/tiny", "--serve", f"--port={port}"]
    for option in "--prompt=x", "--seed=5":
        monkeypatch.setattr(sys, "argv", [*command, option])
        with pytest.raises(UserError, match="has its"):
            chat.main()

    def use() -> None:
        url, questions = f"http://127.0.0.1:{port}/v1", [f"question {'w' * i}" for i in range(6)]
        try:
            with openai.OpenAI(base_url=url, api_key="none", max_retries=9) as client, ThreadPoolExecutor(6) as pool:
                answer = lambda text: ask(client, text, seed=7, max_tokens=30).choices[0].message.content
                alone = [answer(text) for text in questions]
                assert list(pool.map(answer, questions)) == alone and len(set(alone)) > 1
                _, usage = [ask(client, max_tokens=1).usage for _ in range(2)]
                assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
            with pytest.raises(UserError, match="no server can"):
                listener("127.0.0.1", port)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "argv", command)
    with ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        assert chat.main() == 0
        using.result()
