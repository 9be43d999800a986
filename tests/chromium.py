"""Drive a headless Chromium through a pipe by its devtools protocol (chromedevtools.github.io/devtools-protocol)."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1280,900"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Chromium:
    """A browser with one page, used as a context manager."""

    def __init__(self, folder: Path):
        """Start the browser with its profile in `folder`."""
        from_browser, to_us = os.pipe()
        from_us, to_browser = os.pipe()
        command = ["sh", "-c", f'exec "$@" 3</dev/fd/{from_us} 4>/dev/fd/{to_us}', "sh", str(PROGRAM), *OPTIONS]
        with (folder / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, f"--user-data-dir={folder}/profile"], pass_fds=(from_us, to_us), stdout=log, stderr=log
            )
        os.close(from_us)
        os.close(to_us)
        self.incoming, self.outgoing = os.fdopen(from_browser, "rb"), os.fdopen(to_browser, "wb")
        self.session, self.calls, self.rest = "", 0, b""
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Runtime", "Page"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self.outgoing.close()  # ends the browser
        self.process.wait(30)
        self.incoming.close()

    def call(self, method: str, **params: Any) -> dict:
        """Return the answer to a method, and keep the events that arrive before it."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.outgoing.write(json.dumps(message).encode() + b"\0")
        self.outgoing.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict:
        while b"\0" not in self.rest:
            part = os.read(self.incoming.fileno(), 1 << 20)
            assert part, "chromium has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Open a page, and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href != 'about:blank' && document.readyState == 'complete' && {json.dumps(url)} != ''")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression in the page is true."""
        until = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < until, f"in vain: {expression}"
            time.sleep(0.05)

    def seen(self, method: str) -> list[dict]:
        """Return the parameters of all events of one kind so far."""
        return [event["params"] for event in self.events if event.get("method") == method]
