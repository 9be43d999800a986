"""Test the server's page in a browser."""

import pytest

from tests.chromium import PROGRAM, Chromium
from tests.serving.served import MODEL, TOKENIZER, FakeEngine, endless, served, spell, wait_until


@pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")
def test_a_conversation_on_the_page(tmp_path):
    first = "a <b>bold</b>\n```python\nif x:\n    y\n```\nend `os.path`\n>>> f(1)\n2\n\n    x"
    engine = FakeEngine(lambda prompt: spell(first) if TOKENIZER.decode(prompt).endswith("first") else endless(prompt))
    with served(engine) as client, Chromium(tmp_path) as browser:

        def press(key: str, **more: object) -> None:
            browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)

        def say(text: str) -> None:
            browser.call("Input.insertText", text=text)
            press("Enter")

        browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        browser.open(root := str(client.base_url.join("/")))
        browser.wait_for("document.getElementById('start') != null")
        assert browser.value("[...start.children].map((part) => part.textContent)") == [
            "tiny",
            MODEL.about,
            *MODEL.examples,
        ]
        browser.value("set.click(), system.value = 'Be brief.', temperature.value = 0.3")
        say("first")
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
        say("second")
        browser.wait_for("log.textContent.includes('word word word')")
        press("Escape")
        browser.wait_for("!running && messages.length == 4")
        browser.value("again.click()")
        browser.wait_for("log.textContent.includes('word word word')")
        browser.value("send.click()")
        browser.wait_for("!running && messages.length == 4")
        wait_until(lambda: engine.free == 1)
        say("third" + "x" * 200)
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
