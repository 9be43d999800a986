"""Test the server's page in a browser."""

import pytest

from data.conversation import messages_of, render
from serving.model import Model
from serving.server import Access
from serving.text import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from tests.chromium import PROGRAM, Chromium
from tests.serving.served import MODEL, TOKENIZER, FakeEngine, endless, served, spell, wait_until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")


def press(browser: Chromium, key: str) -> None:
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)


def say(browser: Chromium, text: str) -> None:
    browser.call("Input.insertText", text=text)
    press(browser, "Enter")


def test_a_conversation_on_the_page(tmp_path):
    first = "a <b>bold</b>\n```python\nif x:\n    y\n```\nend `os.path`\n>>> f(1)\n2\n\n    x"
    engine = FakeEngine(lambda prompt: spell(first) if TOKENIZER.decode(prompt).endswith("first") else endless(prompt))
    with served(engine) as client, Chromium(tmp_path) as browser:
        browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        browser.open(root := str(client.base_url.join("/")))
        browser.wait_for("document.getElementById('start') != null")
        assert browser.value("[...start.children].map((part) => part.textContent)") == [
            "tiny",
            MODEL.about,
            *MODEL.examples,
        ]
        browser.value("set.click(), system.value = 'Be brief.', temperature.value = 0.3")
        say(browser, "first")
        browser.wait_for("messages.length == 2")
        assert browser.value("log.querySelector('pre').textContent") == "if x:\n    y"
        code = browser.value("[...log.querySelectorAll('code, pre')].map((code) => code.textContent)")
        assert code == ["if x:\n    y", "os.path", ">>> f(1)\n2", "    x"]
        fonts = "[...log.querySelectorAll('code, pre')].map((code) => getComputedStyle(code).fontFamily)"
        assert all("monospace" in font for font in browser.value(fonts))
        assert browser.value("log.querySelector('p').dir == 'auto' && text.dir == 'auto'")
        assert browser.value("log.querySelector('b') == null && log.textContent.includes('<b>bold</b>')")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        (tokens, sampling), *_ = engine.begun
        assert TOKENIZER.decode(tokens) == "Be brief.\n\nfirst" and sampling.temperature == 0.3
        browser.value("again.click()")
        browser.wait_for("!running && messages.length == 2")
        assert engine.begun[1][0] == tokens
        say(browser, "second")
        browser.wait_for("log.textContent.includes('word word word')")
        press(browser, "Escape")
        browser.wait_for("!running && messages.length == 4")
        browser.value("again.click()")
        browser.wait_for("log.textContent.includes('word word word')")
        browser.value("send.click()")
        browser.wait_for("!running && messages.length == 4")
        wait_until(lambda: engine.free == 1)
        say(browser, "third" + "x" * 200)
        browser.wait_for("document.getElementById('status').textContent.includes('leave room for an answer')")
        assert browser.value("messages.length == 4 && text.value.startsWith('third')")
        browser.value("document.getElementById('new').click()")
        assert browser.value("messages.length == 0 && start.querySelectorAll('button').length == 3")
        browser.value("start.querySelector('button').click()")
        browser.wait_for("log.textContent.includes('word word word')")
        assert browser.value("log.querySelector('.user').textContent") == MODEL.examples[0]
        browser.value("send.click()")
        browser.wait_for("!running")
        urls = {event["request"]["url"] for event in browser.seen("Network.requestWillBeSent")}
        assert urls == {root, f"{root}v1/models", f"{root}v1/chat/completions"}


def test_chats_calls_and_settings_outlast_a_reload(tmp_path):
    """The network reads the calls that it wrote, also after a reload."""
    calls = spell("It is ", PYTHON_START, "2+2", PYTHON_END, OUTPUT_START, "4", OUTPUT_END, " so.")
    engine = FakeEngine(lambda prompt: calls)
    with served(engine) as client, Chromium(tmp_path) as browser:
        browser.open(root := str(client.base_url.join("/")))
        browser.wait_for("document.getElementById('start') != null")
        change = "top_p.value = 0.9, seed.value = 5, settings.dispatchEvent(new Event('change'))"
        browser.value(f"{change}, document.getElementById('text').focus()")
        say(browser, "first")
        browser.wait_for("!running && messages.length == 2")
        assert browser.value("log.querySelector('.assistant p').innerHTML") == (
            'It is <span class="call"><code>2+2</code> = <code>4</code></span> so.'
        )
        browser.open(root)
        browser.wait_for("!running && messages.length == 2")
        assert browser.value("log.querySelector('.call').textContent") == "2+2 = 4"
        browser.value("document.getElementById('text').focus()")
        say(browser, "more")
        browser.wait_for("!running && messages.length == 4")
        browser.value("again.click()")
        browser.wait_for("!running && messages.length == 4")
        browser.value("document.getElementById('new').click()")
        say(browser, "other")
        browser.wait_for("!running && messages.length == 2")
        titles = "[...document.getElementById('chats').options].map((one) => one.text)"
        assert browser.value(titles) == ["2 chats", "other", "first"]
        browser.value("chats_select = document.getElementById('chats'), chats_select.selectedIndex = 2")
        browser.value("chats_select.dispatchEvent(new Event('change'))")
        assert browser.value("messages.length == 4 && log.querySelectorAll('.call').length == 2")
        browser.value("document.getElementById('delete').click()")
        assert browser.value(titles) == ["1 chat", "other"] and browser.value("messages.length") == 0
    asked = render(TOKENIZER, messages_of([{"role": "user", "content": "first"}]), ask=True)
    more = render(TOKENIZER, messages_of([{"role": "user", "content": "more"}]), ask=True)[1:]
    second = [*asked, *calls, TOKENIZER.special_tokens["<|assistant_end|>"], *more]
    assert [prompt for prompt, _ in engine.begun[:3]] == [asked, second, second]
    assert [(sampling.top_p, sampling.seed) for _, sampling in engine.begun[:3]] == [(0.9, 5), (0.9, 5), (0.9, 6)]


def test_a_base_network_continues_texts_for_who_has_the_key(tmp_path):
    engine = FakeEngine(lambda prompt: spell(" and others"))
    model = Model("base", "It continues texts.", ("some words",), converses=False)
    with served(engine, access=Access(key="secret"), model=model) as client, Chromium(tmp_path) as browser:
        browser.open(str(client.base_url.join("/")))
        browser.wait_for("document.getElementById('status').textContent.includes('asks for an API key')")
        assert browser.value("!settings.hidden && document.getElementById('status').className == 'bad'")
        browser.value("key.value = 'secret', key.dispatchEvent(new Event('change', { bubbles: true }))")
        browser.wait_for("document.getElementById('start') != null")
        for count in (2, 4):
            browser.value("document.getElementById('text').focus()")
            say(browser, "some words")
            browser.wait_for(f"!running && messages.length == {count}")
        assert browser.value("log.querySelector('.assistant').textContent") == " and others"
    assert [prompt for prompt, _ in engine.begun] == [[TOKENIZER.bos, *spell("some words")]] * 2
